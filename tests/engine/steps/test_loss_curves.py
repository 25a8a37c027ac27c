"""Losses of local epochs, one exchange of a round after the other."""

from __future__ import annotations

import torch
from exchanges import chunk_of, run_steps

from perfed.engine.steps.loss_curves import LossCurves


def test_losses_of_later_exchanges_come_after_those_of_earlier_ones():
    curves: dict[str, list[float]] = {}
    step = LossCurves(curves)
    for losses in ({"a": [3.0, 2.0]}, {"a": [1.0], "b": [5.0]}):
        run_steps([step], [chunk_of({"a": {"w": torch.zeros(1)}}, loss_curves=losses)])
    assert curves == {"a": [3.0, 2.0, 1.0], "b": [5.0]}
