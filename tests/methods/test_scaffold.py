"""SCAFFOLD: federated averaging while the controls are zero, and no drift once they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import blobs, make, serve, train
from planes import LINEAR, flat, planes, quadratic
from torch import nn

from perfed.errors import PerfedError
from perfed.methods.build import build_method
from perfed.methods.flic.anchors import Anchors
from perfed.methods.scaffold import Scaffold
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear


def optimum(federation):
    """Minimiser of the plain mean of the clients' losses, the bias last."""
    parts = [quadratic(client) for client in federation]
    return torch.linalg.solve(sum(a for a, _ in parts), sum(b for _, b in parts))


def distance(server, target):
    shared = server.state.shared
    return float((flat(shared) - target).norm() / target.norm())


SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.5, "lr": 0.1},
    "a learning rate per stage": {"lr": {"head": 0.2}},
    "a smaller server step": {"server_lr": 0.5},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_it_converges_where_federated_averaging_is_biased(name):
    federation = planes(first=0.5, more=0.5, seed=4)
    settings = {"optimizer": "sgd", "lr": 0.2, "batch_size": 100, "local_epochs": 5, **SETTINGS[name]}
    scaffold = train(serve(make("scaffold", **settings), federation, model=LINEAR), 60)
    settings.pop("server_lr", None)
    averaged = train(serve(make("fedavg", **settings), federation, model=LINEAR), 60)
    target = optimum(federation)
    assert distance(scaffold, target) < 1e-6
    assert distance(averaged, target) > 1e-2
    assert all(float(c.abs().max()) < 1e-5 for c in scaffold.state.control.values())  # the mean gradient at x*


@pytest.mark.long
def test_unequal_numbers_of_steps():
    """Mini-batches, 12 to 4 steps per round: up to the noise of the mini-batches."""
    federation, gaps = planes((24, 12, 8, 16), first=0.5, more=0.5, seed=4), {}
    for name in ("scaffold", "fedavg"):
        method = make(name, optimizer="sgd", lr=0.05, batch_size=4, local_epochs=2)
        server = train(serve(method, federation, model=LINEAR), 40)
        gaps[name] = []
        for number in range(41, 61):
            server.round(number)
            gaps[name].append(distance(server, optimum(federation)))
    assert sum(gaps["scaffold"]) / 20 < 0.15 and sum(gaps["fedavg"]) / 20 > 0.3


@pytest.mark.long
def test_partial_participation():
    federation = planes((24, 12, 8, 16), first=0.5, more=0.5, seed=4)
    method = make("scaffold", lr=0.1, batch_size=100, local_epochs=5)
    server = train(serve(method, federation, model=LINEAR, rate=0.5), 80)
    assert distance(server, optimum(federation)) < 1e-5


@pytest.mark.long
def test_zero_controls_are_federated_averaging():
    """The first round, where all controls are zero."""
    for settings in ({}, {"momentum": 0.5}, {"lr": {"embedding": 0.1, "body": 0.02, "head": 0.05}}):
        settings = {"optimizer": "sgd", "lr": 0.1, **settings}
        scaffold = train(serve(make("scaffold", **settings), blobs((8, 8, 8))), 1)
        averaged = train(serve(make("fedavg", **settings), blobs((8, 8, 8))), 1)
        for name, tensor in averaged.state.shared.items():
            torch.testing.assert_close(scaffold.state.shared[name], tensor, rtol=1e-12, atol=1e-13)
        assert any(float(c.abs().max()) > 0 for c in scaffold.state.control.values())


def test_a_clients_control_is_the_mean_of_its_gradients():
    """One full-batch step: c_i is the gradient at x, whatever the learning rate of the stage and the momentum."""
    for settings in ({"lr": 0.1}, {"lr": {"embedding": 0.1, "body": 0.02, "head": 0.05}}, {"lr": 0.1, "momentum": 0.9}):
        method = make("scaffold", batch_size=100, local_epochs=1, **settings)
        server = serve(method, blobs((8, 5)))
        start = {name: t.clone().requires_grad_() for name, t in server.state.shared.items()}
        train(server, 1)
        for client in server.engine.federation:
            logits = torch.func.functional_call(server.initialiser.chain((4,)), start, (client.train.x,))
            loss = nn.functional.cross_entropy(logits, client.train.y)
            for (name, _), g in zip(start.items(), torch.autograd.grad(loss, start.values()), strict=True):
                found = server.engine.states[client.id]["own_control"][name]
                torch.testing.assert_close(found, g, rtol=1e-8, atol=1e-10)


def test_the_control_of_a_domains_head_is_the_mean_over_the_mini_batches_with_the_domain():
    """One sample of the second domain, in batches of one: the gradient of that sample; none where there is none."""
    rates = {"embedding": 0.0, "body": 0.0, "head": 0.1}
    method = make("scaffold", batch_size=1, local_epochs=1, lr=rates, placement={"head": "per-domain"})
    domains = ([0, 0, 0, 0, 1, 0], [0] * 4)
    clients = zip(blobs((6, 4)), domains, strict=True)
    data = tuple(replace(c, train=replace(c.train, domain=torch.tensor(d))) for c, d in clients)
    server = serve(method, replace(blobs((6, 4)), clients=data))
    start = {n: (t[1] if n.startswith("head") else t).requires_grad_() for n, t in server.state.shared.items()}
    x, y = data[0].train.x[4:5].double(), data[0].train.y[4:5]
    loss = nn.functional.cross_entropy(torch.func.functional_call(server.initialiser.chain((4,)), start, (x,)), y)
    expected = dict(zip(start, torch.autograd.grad(loss, start.values()), strict=True))
    train(server, 1)
    for name in ("head.weight", "head.bias"):
        first, second = (server.engine.states[c]["own_control"][name] for c in ("c0", "c1"))
        torch.testing.assert_close(first[1], expected[name])
        assert not second[1].any() and second[0].any()


def test_the_servers_control_changes_by_the_share_of_clients_that_take_part():
    server = serve(make("scaffold"), blobs((6, 5, 4, 3)), rate=0.5)
    server.prepare()
    for number in (1, 2, 3):
        server.round(number)
        owns = [state["own_control"] for state in server.engine.states.values()]
        for name, c in server.state.control.items():
            torch.testing.assert_close(c, torch.stack([own[name] for own in owns]).sum(0) / 4)


def test_weights_with_momentum_are_those_of_the_steps_they_make():
    """Constant gradient 1: K steps of SGD with momentum move as far as the total weight says."""
    method = Scaffold(momentum=0.7)
    for steps in (1, 2, 5):
        w = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.7)
        for _ in range(steps):
            w.grad = torch.ones(1)
            optimizer.step()
        expected = method.total_weight(torch.tensor([float(steps)]))
        torch.testing.assert_close(-w.detach(), expected)
    assert Scaffold().total_weight(torch.tensor([0.0, 7.0])).tolist() == [0.0, 7.0]


def test_a_stage_that_does_not_move_keeps_its_controls():
    method = make("scaffold", lr={"embedding": 0.0, "body": 0.1, "head": 0.1})
    server = train(serve(method, blobs((6, 5))), 2)
    for name, c in server.state.control.items():
        assert bool(torch.isfinite(c).all()) and bool(c.any()) == (not name.startswith("embedding"))
    server = train(serve(make("scaffold", local_epochs=0), blobs((6, 5))), 1)
    assert not any(bool(c.any()) for c in server.state.control.values())


def test_adam_is_an_error_and_momentum_is_not():
    common = {"optimizer": "sgd", "momentum": 0.5, "lr": 0.01}
    assert build_method("scaffold", {}, common).momentum == 0.5
    assert build_method("scaffold", {}).optimizer == "sgd"
    method = build_method("scaffold", {}, {"optimizer": "adam", "lr": 1e-3})
    with pytest.raises(PerfedError, match=r"scaffold needs plain gradient steps, not optimizer = 'adam'"):
        serve(method, blobs())
    own = build_method("scaffold", {"optimizer": "sgd", "lr": 0.05}, {"optimizer": "adam", "lr": 1e-3})
    assert serve(own, blobs()).initialiser.method.lr == 0.05


def test_with_personal_embeddings_and_anchors_and_for_regression():
    anchors = Anchors(pretrain_epochs=1, pretrain_batch_size=4)
    method = make("scaffold", placement={"embedding": "personal"}, more_extensions=(anchors,))
    server = train(serve(method, blobs((8, 6, 1), dims=(3, 5))), 2)
    assert not any(name.startswith("embedding") for name in server.state.control)
    model = Model(body=hidden_layer(4), head=linear(1))
    assert len(train(serve(make("scaffold"), blobs((8, 6), regression=True), model=model), 2).evaluate("test")) == 2
