"""Replies of which only sums are known."""

from __future__ import annotations

import math

import pytest
import torch
from exchanges import chunk_of, run_steps, task_of

from perfed.engine.executor import ChunkResult
from perfed.engine.steps.secure_sums import SecureSums
from perfed.maths.aggregate import weighted_mean
from perfed.maths.sums import FixedPoint, SingleReplies

NUMBERS = FixedPoint(bits=24, parts=3)
REPLIES = {
    "a": {"w": torch.tensor([0.1, 0.7]), "num_samples": torch.tensor(3.0)},
    "b": {"w": torch.tensor([-0.4, 0.2]), "num_samples": torch.tensor(5.0)},
}


def test_a_weighted_mean_is_that_of_the_replies_to_the_precision_of_the_sum():
    _, replies = run_steps([SecureSums(NUMBERS)], [chunk_of(REPLIES)])
    mean = weighted_mean({"w": replies.w}, replies.num_samples)["w"]
    expected = [(3 * x + 5 * y) / 8 for x, y in ((0.1, -0.4), (0.7, 0.2))]
    assert mean.tolist() == pytest.approx(expected, abs=2**-24)


def test_single_replies_are_refused():
    _, replies = run_steps([SecureSums(NUMBERS)], [chunk_of(REPLIES)])
    with pytest.raises(SingleReplies, match="'w' of single clients"):
        replies.w[0]


@pytest.mark.parametrize(("losses", "mean"), [([1.0, 3.0], 2.0), ([1.0, math.nan], 1.0), ([math.nan] * 2, math.nan)])
def test_every_loss_is_the_mean_of_the_clients_that_trained(losses, mean):
    _, replies = run_steps([SecureSums(NUMBERS)], [chunk_of(REPLIES, losses)])
    assert replies.train_loss.tolist() == pytest.approx([mean, mean], nan_ok=True)


def test_folds_and_entries_of_different_shapes_are_refused():
    with pytest.raises(SingleReplies, match="'w' of one client after the other"):
        run_steps([SecureSums(NUMBERS)], [], task_of("ab", reduce={"w": lambda total, reply: total}))
    unequal = ChunkResult(("a", "b"), {"s": {"h": torch.ones(2, 2)}}, [{}, {"h": torch.Size([1])}], torch.zeros(2))
    with pytest.raises(SingleReplies, match="'s/h', whose shapes differ"):
        run_steps([SecureSums(NUMBERS)], [unequal])


def test_the_sums_that_a_method_asks_for_are_noted():
    terms = {}
    _, replies = run_steps([SecureSums(NUMBERS, lambda exchange: terms)], [chunk_of(REPLIES)])
    weighted_mean({"w": replies.w}, replies.num_samples)
    assert {("num_samples",), ("num_samples", "w")} <= {*terms}
