"""Ditto between its two ends: local training (lambda = 0) and the received global model (lambda -> infinity)."""

from __future__ import annotations

import pytest
import torch
from engines import assert_same_metrics, blobs, cohort, make, serve, train
from torch import nn
from torch.func import functional_call

from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear

NO_EMBEDDING = Model(body=hidden_layer(5), head=linear(3))
# Whole-data batches: the second fit of a round draws other mini-batches than the only one of local training.
FULL = {"optimizer": "sgd", "lr": 0.2, "batch_size": 100, "local_epochs": 3}


def run(name, rounds, **settings):
    return train(serve(make(name, **{**FULL, **settings}), blobs((12, 7, 5)), model=NO_EMBEDDING), rounds)


def test_without_pull_it_is_local_training():
    ditto, local = run("ditto", 3, lam=0.0), run("local", 3)
    for client, state in local.engine.states.items():
        for name, tensor in state["model"].items():
            torch.testing.assert_close(ditto.engine.states[client]["local"][name], tensor, rtol=1e-9, atol=1e-11)
    for client, values in local.evaluate("test").items():
        assert ditto.evaluate("test")[client] == pytest.approx(values, rel=1e-9)


def test_the_global_model_is_that_of_federated_averaging():
    ditto, averaged = run("ditto", 3, lam=5.0), run("fedavg", 3)
    for name, tensor in averaged.state.shared.items():
        torch.testing.assert_close(ditto.state.shared[name], tensor, rtol=1e-10, atol=1e-12)


def test_an_infinite_pull_gives_the_received_global_model():
    """lr * lambda is far above 2, where an explicit step would diverge; the gap falls like 1 / lambda."""
    received = run("fedavg", 2).state.shared
    gaps = []
    for lam in (1e2, 1e4, 1e8):
        states = run("ditto", 3, lam=lam).engine.states.values()
        gaps.append(max(float((s["local"][n] - t).abs().max()) for s in states for n, t in received.items()))
    assert gaps[0] > 30 * gaps[1] > 0 and gaps[2] < 1e-7


@pytest.mark.long
def test_long_training_ends_at_the_minimiser_of_the_pulled_loss():
    """grad f(v) + lambda (v - w) = 0 with the received w, not with the one trained in the same round."""
    lam = 3.0
    method = make("ditto", lam=lam, **{**FULL, "local_epochs": 400})
    server = serve(method, blobs((12,)), model=NO_EMBEDDING)
    w = {name: t.clone() for name, t in server.state.shared.items()}
    train(server, 1)
    v = {name: t.clone().requires_grad_() for name, t in server.engine.states["c0"]["local"].items()}
    data = server.engine.federation.clients[0].train
    loss = nn.functional.cross_entropy(functional_call(server.initialiser.chain((4,)), v, (data.x,)), data.y)
    for (name, value), g in zip(v.items(), torch.autograd.grad(loss, v.values()), strict=True):
        torch.testing.assert_close(g, lam * (w[name] - value.detach()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("proximal", "momentum"), [("explicit", 0.0), ("explicit", 0.5), ("implicit", 0.0)])
def test_every_step_of_the_personal_model_is_that_of_a_plain_loop(proximal, momentum):
    lam, lr, steps = 3.0, FULL["lr"], FULL["local_epochs"]
    method = make("ditto", lam=lam, momentum=momentum, proximal=proximal, **FULL)
    server = serve(method, blobs((12,)), model=NO_EMBEDDING)
    w = {name: t.clone() for name, t in server.state.shared.items()}
    start = server.initialiser.client_state(server.engine.clients["c0"], server.engine.info)
    v = {name: (t + 0.1).requires_grad_() for name, t in start["local"].items()}
    server.engine.states["c0"] = {**start, "local": {name: t.detach().clone() for name, t in v.items()}}
    train(server, 1)
    data, optimizer = server.engine.federation.clients[0].train, torch.optim.SGD(list(v.values()), lr, momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(functional_call(server.initialiser.chain((4,)), v, (data.x,)), data.y)
        if proximal == "explicit":
            loss = loss + sum(lam / 2 * (t - w[name]).square().sum() for name, t in v.items())
        loss.backward()
        optimizer.step()
        if proximal == "implicit":
            with torch.no_grad():
                for name, t in v.items():
                    t.copy_((t + lr * lam * w[name]) / (1 + lr * lam))
    for name, t in v.items():
        torch.testing.assert_close(server.engine.states["c0"]["local"][name], t.detach(), rtol=1e-11, atol=1e-12)


def test_what_is_evaluated_is_the_clients_own_model():
    server = run("ditto", 2, lam=0.1)
    (first, *_) = server.engine.cohorts(server.engine.federation.ids, {})
    for row, client in enumerate(first.ids):
        for name, tensor in server.engine.states[client]["local"].items():
            assert torch.equal(first.model[name][row], tensor)
    record = server.round(3, measure="test")
    assert_same_metrics(record.after, server.evaluate("test"))  # v is also what a client has right after training


def test_personal_parameters_are_trained_with_the_global_model():
    method = make("ditto", placement={"head": "personal"})
    group = cohort(method, blobs((6, 4)), model=NO_EMBEDDING)
    shared = {
        name: t.expand(2, *t.shape) for name, t in serve(method, blobs((6, 4)), model=NO_EMBEDDING).state.shared.items()
    }
    before = group.model["head.weight"].clone()
    assert set(group.state["local"]) == set(shared)
    method.train(group, shared)
    assert not torch.equal(group.model["head.weight"], before)


@pytest.mark.long
def test_with_personal_embeddings_and_anchors_and_for_regression():
    anchors = Anchors(pretrain_epochs=1, pretrain_batch_size=4)
    method = make("ditto", placement={"embedding": "personal"}, more_extensions=(anchors,))
    assert len(train(serve(method, blobs((8, 6, 1), dims=(3, 5))), 2).evaluate("test")) == 3
    assert len(train(serve(make("ditto"), blobs((8, 6), regression=True)), 2).evaluate("test")) == 2
