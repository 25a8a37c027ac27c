"""Participation at real sites: which clients are invited, when a round has enough replies, and which are used.

To decide whether to wait longer, a policy chooses as if all missing replies came last.
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
"""The sorted clients that a policy would use: those that have replied, and those that have not."""


@dataclass(frozen=True)
class Invitation:
    """The clients that are invited to an exchange.

    Attributes:
        ids: the sorted ids of the clients.
        strict: whether every reply is needed; otherwise the round continues without clients that do not reply.
        limit: the seconds after which replies are not used any more.
        choose: returns the clients that would be used, given the seconds of the replies so far.
    """

    ids: tuple[str, ...]
    strict: bool
    limit: float
    choose: Callable[[Mapping[str, float]], Used]

    def is_complete(self, seconds: Mapping[str, float]) -> bool:
        """Return whether no further reply would be used, given the seconds of the replies so far."""
        if len(seconds) == len(self.ids):
            return True
        return math.isinf(self.limit) and not self.choose(seconds)[1]

    @classmethod
    def of_all(cls, ids: Sequence[str], *, strict: bool) -> Invitation:
        """Return an invitation of ``ids`` of which all replies are used."""
        return cls(tuple(ids), strict, math.inf, lambda seconds: (sorted(seconds), sorted({*ids} - {*seconds})))


def create_invitation(selection: Selection, round_: int) -> Invitation:
    """Return the invitation to round ``round_``, for the clients that the policy invites."""
    invited: list[Rows] = []
    _choose(selection, round_, {}, invited=invited)
    policy = selection.policy
    ids = tuple(sorted(selection.who.ids[row] for row in invited[0]))
    return Invitation(ids, policy.strict, policy.limit, partial(_choose, selection, round_))


def record_choice(selection: Selection, round_: int, seconds: Mapping[str, float]) -> None:
    """Let the policy choose among the replies of a round, which came after ``seconds``, and update its state."""
    _choose(selection, round_, seconds, update_state=True)


def _choose(
    selection: Selection,
    round_: int,
    seconds: Mapping[str, float],
    *,
    invited: list[Rows] | None = None,
    update_state: bool = False,
) -> Used:
    """Return the policy's choice as if all missing replies came last.

    Args:
        selection: the policy and the clients.
        round_: the number of the round.
        seconds: the seconds of the replies so far, by id.
        invited: receives the rows of the invited clients.
        update_state: whether the policy keeps the change of its state.
    """
    who, policy = selection.who, selection.policy

    def ask(rows: Rows) -> Arrivals:
        if invited is not None:
            invited.append(rows)
        times = np.array([seconds.get(who.ids[row], math.inf) for row in rows])
        order = np.lexsort((rows, times))
        return Arrivals(rows[order], times[order], who.num_samples[rows[order]])

    before = copy.deepcopy(policy.state)
    rows, _ = policy.select(round_, ask)
    if not update_state:
        policy.state.clear()
        policy.state.update(before)
    ids = sorted(who.ids[row] for row in rows)
    return [i for i in ids if i in seconds], [i for i in ids if i not in seconds]
