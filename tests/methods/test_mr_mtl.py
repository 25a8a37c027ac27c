"""MR-MTL between its two ends, local training (lambda = 0) and the mean of all (lambda -> infinity), and its steps."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, make, serve, train
from torch import nn
from torch.func import functional_call

from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear

NO_EMBEDDING = Model(body=hidden_layer(5), head=linear(3))
FULL = {"optimizer": "sgd", "lr": 0.2, "batch_size": 100, "local_epochs": 3}


def run(name, rounds, model=NO_EMBEDDING, **settings):
    return train(serve(make(name, **{**FULL, **settings}), blobs((12, 7, 5)), model=model), rounds)


def test_without_pull_it_is_local_training():
    own, local = run("mr-mtl", 3, lam=0.0), run("local", 3)
    for client, state in local.engine.states.items():
        for name, tensor in state["model"].items():
            torch.testing.assert_close(own.engine.states[client]["own"][name], tensor, rtol=1e-9, atol=1e-11)
    for client, values in local.evaluate("test").items():
        assert own.evaluate("test")[client] == pytest.approx(values, rel=1e-9)


def test_the_server_has_the_mean_of_the_clients_models():
    server = run("mr-mtl", 2, lam=1.0)
    for name, mean in server.state.shared.items():
        models = [state["own"][name] for state in server.engine.states.values()]
        torch.testing.assert_close(torch.stack(models).mean(0), mean, rtol=1e-12, atol=1e-14)


def test_an_infinite_pull_gives_the_mean_of_the_round_before():
    """lr * lambda is far above 2, where an explicit step would diverge; the gap falls like 1 / lambda."""
    gaps = []
    for lam in (1e2, 1e4, 1e8):
        server = run("mr-mtl", 1, lam=0.0)
        received = {name: t.clone() for name, t in server.state.shared.items()}
        server.initialiser.method = server.method.model_copy(update={"lam": lam})
        server.round(2)
        states = server.engine.states.values()
        gaps.append(max(float((s["own"][n] - t).abs().max()) for s in states for n, t in received.items()))
    assert gaps[0] > 30 * gaps[1] > 0 and gaps[2] < 1e-7


def test_it_is_neither_of_its_ends_and_ends_at_the_minimiser_of_the_pulled_loss():
    """grad f_i(w) + lambda (w - w_bar) = 0, from the client's own model."""
    lam = 3.0
    server = run("mr-mtl", 2, Model(head=linear(3)), lam=lam)  # smooth: no step stops at a kink
    w_bar = {name: t.clone() for name, t in server.state.shared.items()}
    server.initialiser.method = server.method.model_copy(update={"local_epochs": 400})
    server.round(3)
    for client in server.engine.federation:
        w = {name: t.clone().requires_grad_() for name, t in server.engine.states[client.id]["own"].items()}
        out = functional_call(server.initialiser.chain((4,)), w, (client.train.x,))
        grads = torch.autograd.grad(nn.functional.cross_entropy(out, client.train.y), [*w.values()])
        for (name, value), g in zip(w.items(), grads, strict=True):
            torch.testing.assert_close(g, lam * (w_bar[name] - value.detach()), rtol=1e-6, atol=1e-8)
    assert max(float((w[n] - t).abs().max()) for n, t in w_bar.items()) > 1e-3  # of the last client


def test_a_round_begins_at_the_client_s_own_model_and_not_at_the_mean():
    server = run("mr-mtl", 2, lam=1.0, lr=0.1)
    before = {i: {n: t.clone() for n, t in s["own"].items()} for i, s in server.engine.states.items()}
    server.initialiser.method = server.method.model_copy(update={"lr": 0.0})
    server.round(3)
    for client, own in before.items():
        for name, tensor in own.items():
            assert torch.equal(server.engine.states[client]["own"][name], tensor)
            assert not torch.equal(server.state.shared[name], tensor)
