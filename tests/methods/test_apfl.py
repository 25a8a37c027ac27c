"""APFL between its two ends: local training (alpha = 1) and federated averaging (alpha = 0)."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, make, network, serve, train
from torch import nn
from torch.func import functional_call

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.methods.apfl import APFL
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear

PLAIN = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5}
NO_EMBEDDING = Model(body=hidden_layer(5), head=linear(3))


def accuracies(server):
    return {client: values["loss"] for client, values in server.evaluate("test").items()}


def test_alpha_one_is_local_training():
    own = train(serve(make("apfl", alpha=1.0, **PLAIN), blobs(), model=NO_EMBEDDING), 3)
    local = train(serve(make("local", **PLAIN), blobs(), model=NO_EMBEDDING), 3)
    for client, state in local.engine.states.items():
        for name, tensor in state["model"].items():
            torch.testing.assert_close(own.engine.states[client]["local"][name], tensor, rtol=1e-10, atol=1e-12)
    assert accuracies(own) == pytest.approx(accuracies(local), rel=1e-10)


def test_alpha_zero_is_federated_averaging():
    own = train(serve(make("apfl", alpha=0.0, **PLAIN), blobs((8, 8, 8)), model=NO_EMBEDDING), 3)
    averaged = train(serve(make("fedavg", **PLAIN), blobs((8, 8, 8)), model=NO_EMBEDDING), 3)
    for name, tensor in averaged.state.shared.items():
        torch.testing.assert_close(own.state.shared[name], tensor, rtol=1e-10, atol=1e-12)
    assert accuracies(own) == pytest.approx(accuracies(averaged), rel=1e-10)


def test_the_global_model_does_not_depend_on_alpha():
    runs = [train(serve(make("apfl", alpha=alpha, **PLAIN), blobs()), 2) for alpha in (0.1, 0.9)]
    for name, tensor in runs[0].state.shared.items():
        torch.testing.assert_close(runs[1].state.shared[name], tensor, rtol=1e-12, atol=1e-13)


def test_one_step_of_both_models_is_the_papers():
    """``v - lr alpha grad f(alpha v + (1 - alpha) w)`` with the w from before its own step, on the same batch."""
    alpha, lr = 0.25, 0.1
    method = make("apfl", alpha=alpha, optimizer="sgd", lr=lr, batch_size=100, local_epochs=1)
    server = serve(method, blobs((12,)))
    client = server.engine.federation.clients[0]
    chain = server.initialiser.chain((4,))
    w = {name: t.clone() for name, t in server.state.shared.items()}
    v = {name: 0.5 * t for name, t in w.items()}
    group = cohort(method, blobs((12,)))
    group.state["local"] = {name: t[None].clone() for name, t in v.items()}
    reply = method.train(group, {name: t[None] for name, t in w.items()})

    def gradient(values):
        leaves = {name: t.clone().requires_grad_() for name, t in values.items()}
        loss = nn.functional.cross_entropy(functional_call(chain, leaves, (client.train.x,)), client.train.y)
        return dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))

    at_w, at_mixture = gradient(w), gradient({name: alpha * v[name] + (1 - alpha) * w[name] for name in w})
    for name in w:
        new_w, new_v = w[name] - lr * at_w[name], v[name] - lr * alpha * at_mixture[name]
        torch.testing.assert_close(reply["shared"][name][0], new_w)
        torch.testing.assert_close(group.state["local"][name][0], new_v)
        torch.testing.assert_close(group.model[name][0], alpha * new_v + (1 - alpha) * new_w)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(
    "placement", [{}, {"*running*": "personal", "*tracked": "personal"}], ids=["shared", "personal"]
)
def test_the_global_model_and_the_mixture_have_batch_norm_statistics_of_their_own(engine, placement):
    """A loop of FedAvg that never sees the mixture, and the mixture's forward passes in a module of its own."""
    alpha, lr, epochs, rounds = 0.25, 0.1, 3, 2
    method = make("apfl", alpha=alpha, optimizer="sgd", lr=lr, batch_size=100, local_epochs=epochs, placement=placement)
    server = serve(method, blobs((9,)), model=network(batch_norm=True), engine=engine)
    data = server.engine.federation.clients[0].train
    plain, mixed = (network(batch_norm=True).build((4,)).double().train() for _ in range(2))
    start = server.initialiser.client_state(server.engine.clients["c0"], server.engine.info)
    plain.load_state_dict({**start["model"], **server.state.shared})
    mixed.load_state_dict({**start["model"], **start["local"]})
    v = {name: p.detach().clone() for name, p in mixed.named_parameters()}
    train(server, rounds)
    for _ in range(rounds * epochs):
        w = dict(plain.named_parameters())
        with torch.no_grad():
            for name, p in mixed.named_parameters():
                p.copy_(alpha * v[name] + (1 - alpha) * w[name])
        for module in (plain, mixed):
            module.zero_grad()
            nn.functional.cross_entropy(module(data.x), data.y).backward()
        with torch.no_grad():
            for name, p in mixed.named_parameters():
                v[name] -= lr * alpha * p.grad
                w[name] -= lr * w[name].grad
    state = server.engine.states["c0"]
    statistics = {name for name, _ in plain.named_buffers()}
    assert len(statistics) == 3 and statistics == (state["model"] if placement else state["local"]).keys() & statistics
    assert placement or statistics <= server.state.shared.keys()
    for name, tensor in plain.state_dict().items():
        if name in server.state.shared:
            torch.testing.assert_close(server.state.shared[name], tensor, rtol=1e-9, atol=1e-11)
    ((group,), own) = server.engine.cohorts(["c0"], {"shared": server.state.shared}), mixed.state_dict()
    for name in statistics:
        torch.testing.assert_close((state["model"] if placement else state["local"])[name], own[name])
        torch.testing.assert_close(group.model[name][0], own[name])
    for name in v:
        torch.testing.assert_close(state["local"][name], v[name], rtol=1e-9, atol=1e-11)


def opposite_labels() -> Federation:
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i in range(4):
        x = torch.randn(40, 2, generator=generator)
        y = ((x[:, 0] > 0) ^ bool(i % 2)).long()
        arrays[f"c{i}"] = {"x_train": x[:24], "y_train": y[:24], "x_test": x[24:], "y_test": y[24:]}
    return Federation.from_arrays(arrays, num_classes=2)


@pytest.mark.long
def test_the_mixture_serves_clients_that_no_single_model_can_serve():
    scores = {}
    for alpha in (0.0, 0.5):
        method = make("apfl", alpha=alpha, lr=0.03)
        server = train(serve(method, opposite_labels(), model=Model(body=hidden_layer(8), head=linear(2))), 10)
        metrics = server.evaluate("test")
        scores[alpha] = sum(values["accuracy"] for values in metrics.values()) / len(metrics)
    assert scores[0.0] < 0.7 and scores[0.5] > 0.85


@pytest.mark.long
def test_with_personal_embeddings_and_anchors_and_for_regression():
    anchors = Anchors(pretrain_epochs=1, pretrain_batch_size=4)
    method = make("apfl", placement={"embedding": "personal"}, more_extensions=(anchors,))
    server = train(serve(method, blobs((8, 6, 1), dims=(3, 5))), 2)
    assert set(server.state.shared) == {n for n in network().build((3,)).tensors() if not n.startswith("embedding")}
    assert len(train(serve(make("apfl"), blobs((8, 6), regression=True)), 2).evaluate("test")) == 2


def test_alpha_is_a_share():
    with pytest.raises((ValueError, PerfedError), match="less than or equal to 1"):
        APFL(alpha=1.5)
