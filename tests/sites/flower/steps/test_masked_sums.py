"""Masked replies: their entries with the sums that were opened."""

from __future__ import annotations

import pytest
import torch
from exchanges import chunk_of, run_steps, task_of

from perfed.errors import PerfedError
from perfed.maths.aggregate import weighted_mean
from perfed.maths.sums import SingleReplies
from perfed.sites.flower.checks import TensorSpec
from perfed.sites.flower.steps.masked_sums import MaskedSums

MASKED = {"masked": torch.zeros(3, dtype=torch.int64)}


def opened_sums() -> MaskedSums:
    step = MaskedSums()
    step.spec = {"reply/w": TensorSpec((2,), torch.float64), "reply/num_samples": TensorSpec((), torch.float64)}
    step.totals = {("num_samples",): torch.tensor(8.0), ("num_samples", "w"): torch.tensor([4.0, -2.0])}
    return step


def test_a_mean_is_that_of_the_opened_sums():
    _, replies = run_steps([opened_sums()], [chunk_of({"a": MASKED, "b": MASKED})])
    assert replies.w.shape == (2, 2)
    assert weighted_mean({"w": replies.w}, replies.num_samples)["w"].tolist() == [0.5, -0.25]


def test_sums_that_nobody_has_opened_and_folds_are_refused():
    _, replies = run_steps([opened_sums()], [chunk_of({"a": MASKED, "b": MASKED})])
    with pytest.raises(PerfedError, match="sites were not asked for the sum of w"):
        replies.w.sum(0)
    with pytest.raises(SingleReplies, match="of one client after the other"):
        run_steps([opened_sums()], [], task_of("ab", reduce={"w": lambda total, reply: total}))


def test_nobody_has_replied_where_no_sum_was_opened():
    _, replies = run_steps([opened_sums()], [], task_of("ab"))
    assert replies.ids == []
