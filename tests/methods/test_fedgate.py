"""FedGATE: the paper's corrections, by a loop that follows its algorithm line by line, alone and under FLANP."""

from __future__ import annotations

import pytest
import torch
from engines import make, serve, train
from planes import LINEAR, flat, planes, quadratic
from test_scaffold import distance, optimum

from perfed.errors import PerfedError
from perfed.methods.build import build_method
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation

FLANP = Participation(policy="flanp", flanp={"first": 2, "rule": "fixed", "stage_rounds": 2})
SGD = {"optimizer": "sgd", "lr": 0.1, "batch_size": 100}


@pytest.mark.parametrize("policy", [Participation(), FLANP], ids=["everybody", "FLANP"])
def test_rounds_are_those_of_the_algorithm(policy):
    federation = planes((24, 12, 8, 16), first=0.5, more=0.3, seed=4)
    method = make("fedgate", **SGD, local_epochs=3, server_lr=0.8)
    server = serve(method, federation, model=LINEAR, participation=policy, clock=Clock(speeds="fixed"))
    w, eta, steps = flat(server.state.shared), 0.1, 3
    delta = {client.id: torch.zeros_like(w) for client in federation}
    losses = {client.id: quadratic(client) for client in federation}
    server.prepare()
    sizes = []
    for number in range(1, 7):
        used = server.round(number).participants
        sizes.append(len(used))
        change = {}
        for client in used:
            (a, b), own = losses[client], w
            for _ in range(steps):
                own = own - eta * (a @ own - b - delta[client])
            change[client] = w - own
        mean = sum(change.values()) / len(used)
        for client in used:
            delta[client] = delta[client] + (change[client] - mean) / (eta * steps)
        w = w - 0.8 * mean
        torch.testing.assert_close(flat(server.state.shared), w, rtol=1e-11, atol=1e-12)
    assert sizes == ([4] * 6 if policy is not FLANP else [2, 2, 4, 4, 4, 4])


@pytest.mark.long
def test_it_comes_to_the_optimum_under_flanp_where_federated_averaging_does_not():
    federation = planes((24, 12, 8, 16), first=0.5, more=0.5, seed=4)
    gaps = {}
    for name in ("fedgate", "fedavg"):
        method = make(name, **SGD, local_epochs=5)
        server = serve(method, federation, model=LINEAR, participation=FLANP, clock=Clock(speeds="fixed"))
        gaps[name] = distance(train(server, 80), optimum(federation))
    assert gaps["fedgate"] < 1e-6 and gaps["fedavg"] > 1e-2


def test_other_optimisers_are_refused():
    with pytest.raises(
        PerfedError, match=r"fedgate needs plain gradient steps, not optimizer = 'adam'.*methods\.fedgate"
    ):
        serve(build_method("fedgate", {"optimizer": "adam"}), planes(), model=LINEAR)
