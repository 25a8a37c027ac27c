"""Forests over messages where every site has columns of its own: the bits of a simulation, and no unknown entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import make, serve, train
from in_process_sites import Sites
from test_parity import same

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.engine.initial import Initialiser
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.participation.settings import Participation
from perfed.sites.flower.dry_run import ExchangeSettings, derive_allow_list

COLUMNS = {"east": ("age", "dose", "smokes"), "north": ("weight", "smokes", "age", "dose"), "west": ("dose", "age")}


def sites_with_columns(survival: bool = False) -> Federation:
    generator, clients = np.random.default_rng(0), []
    for number, (site, names) in enumerate(COLUMNS.items()):
        x = generator.normal(size=(40 + 10 * number, len(names)))
        risk = x[:, names.index("age")] + x[:, names.index("dose")]
        time = generator.exponential(size=len(x)) / np.exp(risk) if survival else risk
        y = np.stack([time, generator.uniform(size=len(x)) < 0.7], 1) if survival else (risk > 0).astype(np.int64)
        parts = (Split(torch.from_numpy(x[s]), torch.from_numpy(y[s])) for s in (slice(0, 25), slice(25, None)))
        clients.append(Client(site, *parts, feature_names=names))
    return Federation(tuple(clients), None if survival else 2, survival=survival)


@pytest.mark.long
@pytest.mark.parametrize(("name", "survival"), [("forest", False), ("boost", False), ("boost", True)])
def test_sites_with_other_columns_end_with_the_same_bits(name, survival, tmp_path):
    federation, model = sites_with_columns(survival), Model(head=linear(1 if survival else 2))
    simulated = serve(make(name), federation, model=model, engine="sequential", plan=None, rounds=2)
    train(simulated, 2)
    sites = Sites(tmp_path, make(name), federation, rounds=2, model=model)
    train(sites.server, 2)
    same(sites, simulated)
    assert sites.server.evaluate("test", round_=2) == simulated.evaluate("test", round_=2)
    assert int(sites.server.state.forests["north"]["columns"]) == 2


@pytest.mark.parametrize("survival", [False, True])
def test_what_leaves_a_site_is_its_trees_and_nothing_else(survival):
    federation = sites_with_columns(survival)
    (east, *_) = federation
    initialiser = Initialiser(make("forest"), Model(head=linear(1 if survival else 2)), 0, torch.float64)
    allowed = derive_allow_list(
        east, initialiser.info(federation), initialiser, ExchangeSettings(2, 3, 0, Participation())
    )
    entries = ("feature", "left", "right", "threshold", "value")
    assert set(allowed.entry_names) == {f"forest/{entry}" for entry in entries}
