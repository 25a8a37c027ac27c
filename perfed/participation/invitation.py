"""Participation where time is real: who is asked, when the replies are enough, and which of them are used.

A policy decides over the replies that a round may still get as if they came last: what is already certain needs no
further wait.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from perfed.participation.clock import Rows
from perfed.participation.policy import Arrivals
from perfed.participation.selection import Selection

Used = tuple[list[str], list[str]]
"""The clients that would be used, sorted: those that have replied, and those that have not."""


@dataclass(frozen=True)
class Invitation:
    """The clients that are asked in an exchange.

    Attributes:
        ids: sorted.
        strict: whether every one of them is needed; else the round does without those that do not reply.
        limit: seconds after which replies no longer count.
        choose: who is used, by the seconds of the replies so far.
    """

    ids: tuple[str, ...]
    strict: bool
    limit: float
    choose: Callable[[Mapping[str, float]], Used]

    def enough(self, seconds: Mapping[str, float]) -> bool:
        """Whether no further reply would be used; ``seconds`` of the replies so far."""
        if len(seconds) == len(self.ids):
            return True
        return math.isinf(self.limit) and not self.choose(seconds)[1]

    @classmethod
    def of_all(cls, ids: Sequence[str], *, strict: bool) -> Invitation:
        """Whoever replies is used."""
        return cls(tuple(ids), strict, math.inf, lambda seconds: (sorted(seconds), sorted({*ids} - {*seconds})))


def invite(selection: Selection, round_: int) -> Invitation:
    """Whom the policy asks in round ``round_``."""
    asked: list[Rows] = []
    _choose(selection, round_, {}, asked=asked)
    policy = selection.policy
    ids = tuple(sorted(selection.who.ids[row] for row in asked[0]))
    return Invitation(ids, policy.strict, policy.limit, partial(_choose, selection, round_))


def take(selection: Selection, round_: int, seconds: Mapping[str, float]) -> None:
    """Let the policy remember its choice among the replies of the round, which came after ``seconds``."""
    _choose(selection, round_, seconds, lasting=True)


def _choose(
    selection: Selection,
    round_: int,
    seconds: Mapping[str, float],
    *,
    asked: list[Rows] | None = None,
    lasting: bool = False,
) -> Used:
    """The policy's choice if those that have not replied come last; it remembers it only if it is ``lasting``."""
    who, policy = selection.who, selection.policy

    def ask(rows: Rows) -> Arrivals:
        if asked is not None:
            asked.append(rows)
        times = np.array([seconds.get(who.ids[row], math.inf) for row in rows])
        order = np.lexsort((rows, times))
        return Arrivals(rows[order], times[order], who.num_samples[rows[order]])

    before = copy.deepcopy(policy.state)
    used, _ = policy.select(round_, ask)
    if not lasting:
        policy.state.clear()
        policy.state.update(before)
    ids = sorted(who.ids[row] for row in used)
    return [i for i in ids if i in seconds], [i for i in ids if i not in seconds]
