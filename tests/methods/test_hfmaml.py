"""HF-MAML on quadratics, where the meta-gradient is ``(I - alpha A)^T (A (w - alpha (A w - b)) - b)``."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, difference, make, serve, train
from planes import LINEAR, flat, planes, quadratic
from torch import nn
from torch.func import functional_call

from perfed.errors import PerfedError
from perfed.methods.build import build_method
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.training.steprules import DirectionStep

WHOLE = {"optimizer": "sgd", "batch_size": 100, "local_epochs": 1, "lr": 0.03}
MINI = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.5}


def meta_gradient(w, a, b, alpha, *, second_order=True):
    outer = a @ (w - alpha * (a @ w - b)) - b
    return outer - alpha * a @ outer if second_order else outer


@pytest.mark.parametrize("variant", ["hessian-free", "exact", "first-order"])
def test_one_step_on_a_quadratic_is_the_closed_form(variant):
    alpha, federation = 0.07, planes((12, 9, 12), more=0.5)
    server = serve(make("hf-maml", variant=variant, alpha=alpha, **WHOLE), federation, model=LINEAR)
    w = flat(server.state.shared)
    train(server, 1)
    moved, wrong = [], []
    for client in federation:
        a, b = quadratic(client)
        second = variant != "first-order"
        moved.append(w - WHOLE["lr"] * meta_gradient(w, a, b, alpha, second_order=second))
        wrong.append(w - WHOLE["lr"] * meta_gradient(w, a, b, alpha, second_order=not second))
    found = flat(server.state.shared)  # the plain mean, though the clients differ in size
    torch.testing.assert_close(found, torch.stack(moved).mean(0), rtol=1e-9, atol=1e-10)
    assert float((found - torch.stack(wrong).mean(0)).abs().max()) > 1e-3


@pytest.mark.parametrize("delta", [1e-3, 1.0])
def test_differences_of_a_linear_gradient_are_exact_for_any_delta(delta):
    runs = [
        train(
            serve(
                make("hf-maml", variant=v, delta=delta, alpha=0.05, **MINI), planes((12, 9, 12), more=0.5), model=LINEAR
            ),
            3,
        )
        for v in ("hessian-free", "exact")
    ]
    assert difference(*runs) < 1e-9


def test_first_order_leaves_out_alpha_times_the_hessian():
    alpha, (client,) = 0.07, planes((12,), more=0.5)
    a, b = quadratic(client)
    ends = {}
    for variant in ("exact", "first-order"):
        server = serve(make("hf-maml", variant=variant, alpha=alpha, **WHOLE), planes((12,), more=0.5), model=LINEAR)
        w = flat(server.state.shared)
        ends[variant] = flat(train(server, 1).state.shared)
    left_out = alpha * a @ meta_gradient(w, a, b, alpha, second_order=False)
    torch.testing.assert_close(ends["exact"] - ends["first-order"], WHOLE["lr"] * left_out, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("variant", ["hessian-free", "exact", "first-order"])
def test_without_the_inner_step_it_is_federated_averaging(variant):
    for settings in (MINI, {"optimizer": "adam"}):
        meta = train(serve(make("hf-maml", alpha=0.0, variant=variant, **settings), blobs((9, 6, 1))), 3)
        plain = train(serve(make("fedavg", average="uniform", **settings), blobs((9, 6, 1))), 3)
        assert difference(meta, plain) < 1e-12


def test_the_three_gradients_are_taken_on_independent_mini_batches():
    """Mini-batches of one sample: the step is one of the 12^3 combinations, with three different samples."""
    alpha, lr = 0.07, 0.03
    federation = planes((12,), more=0.5)
    settings = {"optimizer": "sgd", "batch_size": 1, "lr": lr, "alpha": alpha, "variant": "exact"}
    x = torch.cat([federation.clients[0].train.x, torch.ones(12, 1, dtype=torch.float64)], 1)
    y = federation.clients[0].train.y
    seen = set()
    for seed in range(6):
        method = make("hf-maml", **settings)
        server = serve(method, federation, model=LINEAR, seed=seed)
        w = flat(server.state.shared)
        group = cohort(method, federation, model=LINEAR, seed=seed)
        group.load({name: t[None] for name, t in server.state.shared.items()})
        group.fit(("head",), steps=1, update=DirectionStep(method.meta_gradient, streams=3))
        step = (w - flat({name: t[0] for name, t in group.model.items()})) / lr
        inner = w - alpha * 2 * (x @ w - y)[:, None] * x  # (D, 4)
        outer = 2 * (inner @ x.T - y)[:, :, None] * x  # (D, D', 4)
        made = outer[:, :, None] - alpha * 2 * (outer @ x.T)[..., None] * x  # (D, D', D'', 4)
        gaps = (made - step).abs().amax(-1)
        assert float(gaps.min()) < 1e-10
        seen.add(tuple(int(i) for i in torch.unravel_index(gaps.argmin(), gaps.shape)))
    assert any(len(set(batches)) == 3 for batches in seen)


def test_the_exact_variant_is_the_gradient_of_the_adapted_loss():
    """With one batch for all three, the meta-gradient is that of ``w -> f(w - alpha grad f(w))``, here by autograd."""
    model = Model(body=mlp((6,), 5, activation="tanh", final_activation=True), head=linear(3))
    alpha, federation = 0.3, blobs((12,))
    ends = {}
    for variant in ("exact", "hessian-free", "first-order"):
        method = make("hf-maml", variant=variant, alpha=alpha, delta=1e-4, **WHOLE)
        ends[variant] = train(serve(method, federation, model=model), 1).state.shared
    server = serve(method, federation, model=model)
    chain, client = server.initialiser.chain((4,)), federation.clients[0]
    w = {name: t.clone().requires_grad_() for name, t in server.state.shared.items()}

    def loss(values):
        return nn.functional.cross_entropy(functional_call(chain, values, (client.train.x,)), client.train.y)

    first = torch.autograd.grad(loss(w), list(w.values()), create_graph=True)
    adapted = {name: t - alpha * g for (name, t), g in zip(w.items(), first, strict=True)}
    for (name, t), g in zip(w.items(), torch.autograd.grad(loss(adapted), list(w.values())), strict=True):
        target = t.detach() - WHOLE["lr"] * g
        torch.testing.assert_close(ends["exact"][name], target, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ends["hessian-free"][name], target, rtol=1e-6, atol=1e-8)
    gap = max(float((ends["first-order"][n] - t).abs().max()) for n, t in ends["exact"].items())
    assert gap > 1e-5


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_is_evaluated_is_the_global_model_after_steps_on_the_clients_own_data(steps):
    alpha, federation = 0.05, planes((12, 7), more=0.5)
    method = make("hf-maml", alpha=alpha, adapt_steps=steps, **MINI)
    server = train(serve(method, federation, model=LINEAR), 1)
    metrics = server.evaluate("test")
    for client in federation:
        a, b = quadratic(client)
        w = flat(server.state.shared)
        for _ in range(steps):
            w = w - alpha * (a @ w - b)
        x = torch.cat([client.test.x, torch.ones(len(client.test), 1, dtype=torch.float64)], 1)
        assert metrics[client.id]["mse"] == pytest.approx(float((x @ w - client.test.y).square().mean()), rel=1e-9)


def test_adaptation_may_take_a_mini_batch():
    settings = {"alpha": 0.05, **MINI}
    scores = []
    for batch in ("all", "mini-batch"):
        method = make("hf-maml", adapt_batch=batch, **settings)
        scores.append(train(serve(method, planes((12, 3), more=0.5), model=LINEAR), 1).evaluate("test"))
    assert scores[0]["c0"]["mse"] != pytest.approx(scores[1]["c0"]["mse"], rel=1e-6)
    assert scores[0]["c1"]["mse"] == pytest.approx(scores[1]["c1"]["mse"], rel=1e-9)  # three samples are one mini-batch


@pytest.mark.long
def test_the_global_model_is_a_better_start_for_one_step_than_that_of_federated_averaging():
    """Clients pull to both sides with different curvature; each method's fixed point is known."""
    alpha, federation = 0.2, planes((30, 30), more=0.5)
    settings = {"optimizer": "sgd", "batch_size": 100, "local_epochs": 1, "lr": 0.05}
    ends = {}
    for name, own in (("hf-maml", {"alpha": alpha}), ("fedavg", {})):
        ends[name] = flat(train(serve(make(name, **own, **settings), federation, model=LINEAR), 400).state.shared)

    def adapted_loss(w):
        total = 0.0
        for client in federation:
            a, b = quadratic(client)
            x = torch.cat([client.train.x, torch.ones(len(client.train), 1, dtype=torch.float64)], 1)
            total += float((x @ (w - alpha * (a @ w - b)) - client.train.y).square().mean())
        return total

    assert adapted_loss(ends["hf-maml"]) < 0.95 * adapted_loss(ends["fedavg"])


def test_the_exact_variant_needs_second_derivatives():
    """The anchors' distance has none; the other variants do without."""
    settings = {"placement": {"embedding": "personal"}, "more_extensions": (Anchors(pretrain_epochs=1),)}
    train(serve(make("hf-maml", **settings), blobs((8, 6))), 1)
    with pytest.raises(PerfedError, match="distance between Gaussians has no second derivative") as error:
        train(serve(make("hf-maml", variant="exact", **settings), blobs((8, 6))), 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "second-order"}, r"hf-maml.variant: input should be 'hessian-free', 'first-order' or 'exact'"),
        ({"alpha": -0.1}, r"hf-maml.alpha: .*greater than or equal to 0"),
        ({"delta": 0.0}, r"hf-maml.delta: .*greater than 0"),
    ],
)
def test_faulty_settings_are_one_line(settings, message):
    with pytest.raises(PerfedError, match=message) as error:
        build_method("hf-maml", settings)
    assert "\n" not in str(error.value)
