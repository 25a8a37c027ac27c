"""Sites over messages end where a simulation ends, bit for bit."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, leaves, make, serve, train
from in_process_sites import Sites

from perfed.aggregation import Aggregation
from perfed.method.registry import known_names


def same(sites: Sites, server) -> None:
    for path, tensor in leaves(server.state.tree()):
        found = dict(leaves(sites.server.state.tree()))[path]
        assert torch.equal(found, tensor), path
    assert sites.server.engine.states.keys() == server.engine.states.keys()
    for client, state in server.engine.states.items():
        found = dict(leaves(sites.state(client)))
        for path, tensor in leaves(state):
            assert torch.equal(found[path], tensor), (client, path)


PROJECTS = "fedrep-tsne"  # the data of all clients together, which no site has


@pytest.mark.long
@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", [name for name in known_names() if name != PROJECTS])
def test_every_method_ends_with_the_same_bits(name, tmp_path):
    federation = blobs((12, 7, 5), dims=(4,))
    method = make(name)
    simulated = train(serve(make(name), federation, engine="sequential", plan=None, rounds=2), 2)
    sites = Sites(tmp_path, method, federation, rounds=2)
    train(sites.server, 2)
    same(sites, simulated)
    a, b = simulated.evaluate("test", round_=2), sites.server.evaluate("test", round_=2)
    assert a == b


@pytest.mark.long
@pytest.mark.parametrize("kind", ["median", "trimmed-mean", "norm-bound"])
def test_robust_aggregation_is_the_same_as_in_a_simulation(kind, tmp_path):
    federation, aggregation = blobs((12, 7, 5), dims=(4,)), Aggregation(kind=kind)
    options = {"engine": "sequential", "plan": None, "rounds": 2}
    simulated = train(serve(make("ditto"), federation, aggregation=aggregation, **options), 2)
    mean = train(serve(make("ditto"), federation, **options), 2)
    sites = Sites(tmp_path, make("ditto"), federation, rounds=2, aggregation=aggregation)
    train(sites.server, 2)
    same(sites, simulated)
    differs = kind != "norm-bound"  # honest updates are shorter than 1
    assert differs == any(not torch.equal(t, mean.state.shared[n]) for n, t in simulated.state.shared.items())


@pytest.mark.long
def test_factors_of_pulls_reach_the_sites(tmp_path):
    federation, settings = blobs((12, 7, 5), dims=(4,)), {"site_pull": "both"}
    simulated = train(serve(make("mixed", **settings), federation, engine="sequential", plan=None, rounds=2), 2)
    sites = Sites(tmp_path, make("mixed", **settings), federation, rounds=2)
    train(sites.server, 2)
    same(sites, simulated)
    assert simulated.evaluate("test", round_=2) == sites.server.evaluate("test", round_=2)
