"""The domain of a sample as an input of the model: the ablation of FedDAR."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import make, serve, train

from perfed.data.domain_input import with_domain_input
from perfed.data.federation import Federation
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.model.chain import Model
from perfed.model.presets import linear

OPTIONS = {"clients": 4, "samples_low": 8, "samples_high": 12}


def federation(shape: tuple[int, ...], **more) -> Federation:
    rng = np.random.default_rng(0)
    arrays = {}
    for split in ("train", "test"):
        arrays |= {f"x_{split}": rng.normal(size=(5, *shape)), f"y_{split}": rng.integers(0, 2, 5)}
        arrays[f"domain_{split}"] = np.array([2, 0, 1, 0, 2])
    return Federation.from_arrays([{**arrays, **more}], num_classes=2)


def test_vectors_get_a_feature_for_each_domain_in_every_split():
    options = {**OPTIONS, "validation_fraction": 0.25}
    plain = load("linear-domains", options, seed=1)
    wider = load("linear-domains", {**options, "domain_input": True}, seed=1)
    for one, other in zip(plain, wider, strict=True):
        for split in ("train", "validation", "test"):
            before, after = one.split(split), other.split(split)
            assert torch.equal(after.x[:, : before.x.shape[1]], before.x) and torch.equal(after.y, before.y)
            assert after.x.shape[1] == before.x.shape[1] + plain.num_domains
            added = after.x[:, before.x.shape[1] :]
            assert torch.equal(added.argmax(1), before.domain) and torch.equal(added.sum(1), torch.ones(len(before)))
            assert after.x.dtype == before.x.dtype


def test_features_get_names():
    found = with_domain_input(federation((2,), feature_names=["age", "bmi"]))
    assert found.clients[0].feature_names == ("age", "bmi", "domain 0", "domain 1", "domain 2")
    named = replace(federation((2,), feature_names=["age", "bmi"]), domain_names=("a", "b", "c"))
    assert with_domain_input(named).clients[0].feature_names[2:] == ("domain a", "domain b", "domain c")


def test_images_get_a_constant_channel_for_each_domain():
    x = with_domain_input(federation((2, 3, 4))).clients[0].train.x
    assert x.shape == (5, 5, 3, 4)
    for row, domain in enumerate([2, 0, 1, 0, 2]):
        for m in range(3):
            assert torch.equal(x[row, 2 + m], torch.full((3, 4), float(m == domain), dtype=torch.float64))


@pytest.mark.long
def test_one_linear_model_then_has_an_offset_for_each_domain():
    """Targets that are the domain's own constant: the ablation can learn them, the plain model cannot."""
    rng, clients = np.random.default_rng(0), {}
    for i in range(3):
        domain = rng.permutation(np.arange(12) % 3)
        offsets = np.array([-1.0, 0.5, 2.0])[domain]
        clients[f"c{i}"] = {"x_train": rng.normal(size=(12, 2)), "y_train": offsets, "domain_train": domain}
    plain = Federation.from_arrays(clients)
    settings = {"optimizer": "sgd", "lr": 0.2, "batch_size": 12, "local_epochs": 1}
    error = []
    for data in (plain, with_domain_input(plain)):
        server = train(serve(make("fedavg", **settings), data, model=Model(head=linear(1))), 300)
        error.append(max(values["mse"] for values in server.evaluate("train").values()))
    assert error[0] > 0.5 and error[1] < 1e-3


@pytest.mark.parametrize("value", [1, "yes"])
def test_it_is_true_or_false(value):
    with pytest.raises(PerfedError, match=r"data\.domain_input = .* is not allowed; it must be: true or false"):
        load("linear-domains", {"domain_input": value}, seed=0)


def test_data_without_domains_are_refused_in_one_line():
    with pytest.raises(
        PerfedError, match=r"data\.domain_input = true needs domains, but .*'toy-noisy-features'"
    ) as error:
        load("toy-noisy-features", {"clients": 2, "domain_input": True}, seed=0)
    assert "\n" not in str(error.value)
