"""Gradients of dense chains are written out: autograd's bits, without autograd."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, quick
from torch import nn

from perfed.methods.local import Local
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear, mlp
from perfed.model.stacked import Dense
from perfed.training.cohort import Cohort
from perfed.training.step import Step, mean_loss
from perfed.training.steprules import CustomStep, DirectionStep, GradientTransform

SIZES = (13, 9, 4, 1)


def by_autograd(step: Step) -> torch.Tensor:
    """The plain loss, which is not known to be it."""
    return mean_loss(step)


def dense(out: int) -> Model:
    return Model(embedding=mlp((6,), 3), body=mlp((), 50, final_activation=True), head=linear(out))


def fitted(ids, *, loss=None, train=STAGES, update=(), regression=False, model=None, dtype=torch.float64, **settings):
    method = quick(Local, **settings)
    model = model or dense(1 if regression else 3)
    found = cohort(method, blobs(SIZES, regression=regression), ids=ids, model=model, dtype=dtype)
    found.fit(train, epochs=3, loss=loss, update=update)
    return found


def assert_same_bits(found: Cohort, expected: Cohort) -> None:
    assert torch.equal(found.train_loss, expected.train_loss)
    for name, tensor in found.model.items():
        assert torch.equal(tensor, expected.model[name]), name


def no_autograd(*_, **__):
    raise AssertionError("autograd was asked for a gradient")


def heavy(out: int):
    """Without biases, and with a layer of which only the weight is trained by name."""
    return lambda shape: nn.Sequential(nn.Linear(shape[0], 40, bias=False), nn.ReLU(), nn.Linear(40, out, bias=False))


CASES = {
    "all": {},
    "adam": {"optimizer": "adam"},
    "body alone, gradients pass through the head": {"train": "body"},
    "head alone, on kept features": {"train": "head"},
    "one weight": {"train": ["embedding.0.weight", "head.bias"]},
    "no biases": {"model": Model(body=heavy(20), head=heavy(3))},
    "edited gradients": {"update": GradientTransform(lambda _, grads: {n: g / g.norm() for n, g in grads.items()})},
    "a direction of two gradients": {
        "update": DirectionStep(lambda params, gradient, batches: {
            n: g + gradient(params, batches[1])[n] for n, g in gradient(params, batches[0]).items()
        }, streams=2)
    },
    "a step of its own": {
        "update": CustomStep(lambda params, gradient, batches: {
            n: params[n] - 0.1 * g for n, g in gradient(params, batches[0]).items()
        })
    },
}  # fmt: skip


@pytest.mark.parametrize("ids", [["c0", "c1", "c2", "c3"], ["c1"]], ids=["stack", "one client"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd_in_every_bit(case, dtype, ids, monkeypatch):
    settings = {"optimizer": "sgd", "lr": 0.1, "dtype": dtype} | CASES[case]
    expected = fitted(ids, loss=by_autograd, **settings)
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    assert_same_bits(fitted(ids, **settings), expected)


@pytest.mark.parametrize("settings", [{"class_weights": "balanced"}, {"regression": True}])
def test_other_losses_of_dense_chains_have_the_same_bits(settings):
    settings = {"optimizer": "sgd", "lr": 0.01, **settings}
    assert_same_bits(fitted(None, **settings), fitted(None, loss=by_autograd, **settings))


def test_a_penalty_is_left_to_autograd():
    plain = fitted(None, optimizer="sgd", lr=0.1)
    pulled = fitted(None, optimizer="sgd", lr=0.1, loss=lambda step: mean_loss(step) + step.params["head.bias"].sum(1))
    assert not torch.equal(plain.model["head.bias"], pulled.model["head.bias"])


@pytest.mark.parametrize(
    ("body", "shape", "written"),
    [
        (mlp((6, 5), 4), (3,), True),
        (mlp((6,), 4, final_activation=True), (1, 4, 4), True),  # flattened first
        (lambda shape: nn.Sequential(nn.Linear(shape[-1], 4), nn.Sequential(nn.ReLU())), (3,), True),
        (lambda shape: nn.Linear(shape[-1], 4), (2, 3), False),  # of sequences
        (mlp((6,), 4, activation="tanh"), (3,), False),
        (mlp((6,), 4, dropout=0.5), (3,), False),
        (lambda shape: nn.Sequential(nn.ReLU(), nn.Linear(3, 4)), (3,), False),
        (lambda shape: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (3,), False),
    ],
)
def test_which_chains_are_dense(body, shape, written):
    chain = Model(body=body, head=linear(2)).build(shape)
    assert (Dense.from_chain(chain, 0) is not None) == written
    x = torch.randn(1, 5, *shape)
    if written:
        params = {name: tensor[None] for name, tensor in chain.tensors().items()}
        torch.testing.assert_close(Dense.from_chain(chain, 0).compute_outputs(params, x)[-1][0], chain(x[0]))
