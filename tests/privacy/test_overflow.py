"""Rows whose gradients are not finite: they count as zero, and no reply or failure tells that there are any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_rows import MODELS, one_step

from perfed import start, validate
from perfed.errors import ClientsDiverged
from perfed.methods.extensions.clip import Clip
from perfed.training.private import PrivateTraining

CLIP = 0.4


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("value", [1e200, float("inf"), float("nan")])
def test_a_row_that_overflows_contributes_zero_to_gradient_and_loss(model, value):
    *_, step, loss, params = one_step(model, clip=CLIP)
    private = PrivateTraining(clip=CLIP, noise=0.0)
    x, weight = step.block.x.clone(), step.block.weight.clone()
    x[step.at, :, 2] = value
    weight[step.at, :, 2] = 0
    losses, grads = private.compute_gradients(loss, replace(step, block=replace(step.block, x=x)), params, 0)
    unit = step.weight.amax(1)  # the size of a mini-batch is public, also where a row counts nothing
    without = replace(step, block=replace(step.block, weight=weight, unit=unit.unsqueeze(0)))
    expected_losses, expected = private.compute_gradients(loss, without, params, 0)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-14)


def test_sums_of_rows_leave_out_what_is_not_finite():
    rows = torch.tensor([[3.0, 4.0], [torch.inf, 1.0], [torch.nan, 0.0], [0.3, 0.4]], dtype=torch.float64)
    sums = PrivateTraining(clip=1.0, noise=0.0).noisy_sums(rows, torch.zeros(4, dtype=torch.int64), 1, torch.arange(1))
    torch.testing.assert_close(sums, torch.tensor([[[0.9, 1.2]]], dtype=torch.float64))


def test_clip_makes_zero_of_a_gradient_without_direction():
    transform = Clip(clip_norm=1.0).gradient(None, {})  # type: ignore[arg-type]
    grads = {
        "w": torch.tensor([[torch.inf, 1.0], [3.0, 0.0], [torch.nan, 0.0]]),
        "b": torch.tensor([[1.0], [4.0], [1.0]]),
    }
    clipped = transform(None, grads)  # type: ignore[arg-type]
    torch.testing.assert_close(clipped["w"], torch.tensor([[0.0, 0.0], [0.6, 0.0], [0.0, 0.0]]))
    torch.testing.assert_close(clipped["b"], torch.tensor([[0.0], [0.8], [0.0]]))


def test_training_that_diverges_at_a_client_cannot_be_seen_where_clients_are_protected():
    table: dict[str, Any] = {
        "method": "fedavg",
        "rounds": 2,
        "data": {"name": "digits", "clients": 3},
        "model": {"body": {"kind": "mlp", "hidden": [8], "out": 8}, "head": "linear"},
        "training": {"local_epochs": 1, "optimizer": "sgd", "lr": 1e30},
    }
    with pytest.raises(ClientsDiverged):
        start(validate(table)).execute()
    run = start(validate({**table, "privacy": {"unit": "client", "epsilon": 6.0, "delta": 0.1}}))
    run.execute()
    assert all(torch.isfinite(tensor).all() for tensor in run.server.state.shared.values())
