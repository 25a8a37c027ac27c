"""FedAMP: attention between models that are alike, and the proximal problem around their mixture."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, make, serve, train
from torch import nn
from torch.func import functional_call

from perfed.data.federation import Federation
from perfed.methods.fedamp import FedAMP
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear

EVERYONE = torch.ones(4, dtype=torch.bool)


def two_groups() -> dict[str, torch.Tensor]:
    """Models 0 and 2 are alike, and 1 and 3; the groups are far from each other and from the origin."""
    generator = torch.Generator().manual_seed(0)
    centres = 100 + torch.tensor([0.0, 3.0, 0.0, 3.0])
    return {
        "body.weight": centres[:, None, None] + 0.1 * torch.randn(4, 3, 2, generator=generator),
        "head.bias": centres[:, None] + 0.1 * torch.randn(4, 2, generator=generator),
    }


def flat(models):
    return torch.cat([t.flatten(1).double() for t in models.values()], 1)


def test_weights_are_the_derivative_of_the_attention_function_and_rows_sum_to_one():
    method, models = FedAMP(alpha=0.1, sigma=2.0), two_groups()
    xi = method.attention(models, EVERYONE)
    for i in range(4):
        for j in range(4):
            x = (flat(models)[i] - flat(models)[j]).square().sum().requires_grad_()
            (slope,) = torch.autograd.grad(1 - torch.exp(-x / 2.0), x)
            if i != j:
                torch.testing.assert_close(xi[i, j], 0.1 * slope, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(xi.sum(1), torch.ones(4, dtype=torch.float64))
    assert bool((xi >= 0).all())


def test_models_that_are_alike_get_larger_weights():
    xi = FedAMP().attention(two_groups(), EVERYONE)
    for i in range(4):
        friend, others = (i + 2) % 4, [(i + 1) % 4, (i + 3) % 4]
        assert xi[i, friend] > 0.3 > 1e-6 > max(float(xi[i, j]) for j in others)


def test_mixtures_stay_convex_when_alpha_is_too_large():
    models = {"head.weight": torch.zeros(4, 3)}  # all alike: the paper's own weight would be 1 - 3 alpha / sigma
    xi = FedAMP(alpha=5.0).attention(models, EVERYONE)
    torch.testing.assert_close(xi, (1 - torch.eye(4, dtype=torch.float64)) / 3)
    near = FedAMP(alpha=0.2).attention(models, EVERYONE)
    torch.testing.assert_close(near.diagonal(), torch.full((4,), 0.4, dtype=torch.float64))


def test_models_that_were_never_sent_are_sent_to_nobody():
    xi = FedAMP(alpha=0.1, sigma=1e6).attention(two_groups(), torch.tensor([True, False, False, True]))
    assert not xi[[0, 2, 3], 1].any() and not xi[[0, 1, 3], 2].any() and bool((xi[[1, 2], 0] > 0).all())
    server = serve(make("fedamp"), blobs((6, 5, 4, 3)), rate=0.5, seed=2)
    server.prepare()
    record = server.round(1)
    assert {i for i, row in server.state.sent.items() if row["sent"]} == set(record.participants)


def grouped(clients=6, samples=24) -> Federation:
    """Even and odd clients have the same inputs with opposite labels."""
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i in range(clients):
        x = torch.randn(samples, 2, generator=generator)
        y = ((x[:, 0] > 0) ^ bool(i % 2)).long()
        arrays[f"c{i}"] = {"x_train": x[:8], "y_train": y[:8], "x_test": x[8:], "y_test": y[8:]}
    return Federation.from_arrays(arrays, num_classes=2)


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_training_finds_the_groups(engine):
    model = Model(body=hidden_layer(8), head=linear(2))
    method = make("fedamp", lr=0.05, local_epochs=2, lam=0.1)
    server = train(serve(method, grouped(), model=model, **ENGINES[engine]), 8)
    record = server.round(9)
    xi = record.arrays["combination"]["weights"]
    assert record.arrays["combination"]["clients"] == [f"c{i}" for i in range(6)]
    same = torch.tensor([[(i - j) % 2 == 0 and i != j for j in range(6)] for i in range(6)])
    other = torch.tensor([[(i - j) % 2 == 1 for j in range(6)] for i in range(6)])
    assert float(xi[same].min()) > 20 * float(xi[other].max()) and float(xi[same].min()) > 0.05
    metrics = server.evaluate("test")
    assert sum(values["accuracy"] for values in metrics.values()) / 6 > 0.85


@pytest.mark.long
def test_long_training_solves_the_proximal_problem_around_the_message():
    """grad f(w) + lam / alpha (w - u) = 0."""
    lam, alpha = 2.0, 0.5
    method = make("fedamp", lam=lam, alpha=alpha, optimizer="sgd", lr=0.2, batch_size=100, local_epochs=300)
    server = train(serve(method, blobs((12, 7)), model=Model(body=hidden_layer(5), head=linear(3))), 1)
    stack = {n: torch.stack([server.state.models[i][n] for i in ("c0", "c1")]) for n in server.state.models["c0"]}
    xi = method.attention(stack, torch.ones(2, dtype=torch.bool))
    server.round(2)
    for row, client in enumerate(server.engine.federation):
        w = {name: t.clone().requires_grad_() for name, t in server.state.models[client.id].items()}
        out = functional_call(server.initialiser.chain((4,)), w, (client.train.x,))
        loss = nn.functional.cross_entropy(out, client.train.y)
        for (name, value), g in zip(w.items(), torch.autograd.grad(loss, w.values()), strict=True):
            u = xi[row, 0] * stack[name][0] + xi[row, 1] * stack[name][1]
            torch.testing.assert_close(g, lam / alpha * (u - value.detach()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("proximal", "shrunk"), [("explicit", 1.0), ("implicit", 1.8)])
def test_one_step_from_the_message(proximal, shrunk):
    """The term has no gradient at u, so that the first step is that on the loss; the implicit one shrinks it."""
    lam, alpha, lr = 2.0, 0.5, 0.2
    settings = {"optimizer": "sgd", "lr": lr, "batch_size": 100, "local_epochs": 1}
    method = make("fedamp", lam=lam, alpha=alpha, proximal=proximal, **settings)
    server = serve(method, blobs((12,)), model=Model(body=hidden_layer(5), head=linear(3)))
    u = {name: t.clone().requires_grad_() for name, t in server.state.models["c0"].items()}
    train(server, 1)
    data = server.engine.federation.clients[0].train
    loss = nn.functional.cross_entropy(functional_call(server.initialiser.chain((4,)), u, (data.x,)), data.y)
    for (name, start), g in zip(u.items(), torch.autograd.grad(loss, u.values()), strict=True):
        torch.testing.assert_close(server.state.models["c0"][name], start.detach() - lr / shrunk * g)


def test_clients_that_are_far_apart_train_alone():
    """No messages and no pull: as local training."""
    settings = {"optimizer": "sgd", "lr": 0.1}
    model = Model(body=hidden_layer(5), head=linear(3))
    own = train(serve(make("fedamp", sigma=1e-9, lam=0.0, alpha=1e-20, **settings), blobs(), model=model), 3)
    local = train(serve(make("local", **settings), blobs(), model=model), 3)
    for client, state in local.engine.states.items():
        for name, tensor in state["model"].items():
            torch.testing.assert_close(own.state.models[client][name], tensor, rtol=1e-10, atol=1e-12)
    for client, values in local.evaluate("test").items():
        assert own.evaluate("test")[client] == pytest.approx(values, rel=1e-10)


def test_with_personal_embeddings_and_anchors_and_for_regression():
    anchors = Anchors(pretrain_epochs=1, pretrain_batch_size=4)
    method = make("fedamp", placement={"embedding": "personal"}, more_extensions=(anchors,))
    server = train(serve(method, blobs((8, 6, 1), dims=(3, 5))), 2)
    assert not any(name.startswith("embedding") for name in server.state.models["c0"])
    assert len(train(serve(make("fedamp"), blobs((8, 6), regression=True)), 2).evaluate("test")) == 2
