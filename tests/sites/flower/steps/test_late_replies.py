"""Rounds in real time that continue without some sites."""

from __future__ import annotations

import math

import pytest
import torch
from exchanges import chunk_of, run_steps, task_of

from perfed.engine.record import RoundRecord
from perfed.participation.invitation import Invitation
from perfed.sites.flower.steps.late_replies import LateReplies, NobodyReplied, ReplyTimes

REPLY = {"w": torch.zeros(1)}
INVITATION = Invitation(("a", "b", "c"), False, 5.0, lambda seconds: (sorted(seconds), []))


def test_the_first_exchange_has_the_invitation_and_later_ones_need_those_that_were_used():
    record, times = RoundRecord([], 0.0), ReplyTimes({"a": 1.0, "b": 4.0}, {"no_reply": ["c"]})
    step = LateReplies(INVITATION, record, times)
    task, _ = run_steps([step], [chunk_of({"a": REPLY, "b": REPLY})], task_of("abc"))
    assert task.invitation is INVITATION
    record.exchanges, times.seconds, times.lost = 1, {"a": 2.0}, {"no_reply": ["b"], "refused": ["x"]}
    task, _ = run_steps([step], [chunk_of({"a": REPLY})], task_of("ab"))
    assert task.invitation.ids == ("a", "b") and not task.invitation.strict and math.isinf(task.invitation.limit)
    assert step.seconds == 4.0 + 2.0 and step.arrived == {"a": 1.0, "b": 4.0}
    assert record.counts == {"no_reply": ["c", "b"], "refused": ["x"]}


def test_an_exchange_without_replies_ends_the_round():
    record = RoundRecord([], 0.0)
    step = LateReplies(INVITATION, record, ReplyTimes({}, {"no_reply": ["a", "b", "c"]}))
    with pytest.raises(NobodyReplied):
        run_steps([step], [], task_of("abc"))
    assert record.counts == {"no_reply": ["a", "b", "c"]} and step.seconds == 0.0
