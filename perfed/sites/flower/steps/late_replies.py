"""The step of real-time rounds that decides which replies are waited for, and counts missing replies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from perfed.engine.record import RoundRecord
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.method.exchange import Replies
from perfed.participation.invitation import Invitation


class NobodyReplied(Exception):
    """The error of an exchange without usable replies; the round then changes nothing."""


@dataclass
class ReplyTimes:
    """The arrival times of the replies in the latest exchange.

    Attributes:
        seconds: The seconds until the reply of each site arrived, by site.
        lost: The sites without a usable reply, by the reason ("refused" or "no_reply").
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)


class LateReplies(ExchangeStep):
    """The step that lets a round continue without the sites that do not reply in time.

    The first exchange needs the replies that the invitation asks for, later exchanges the replies of the sites that
    have replied so far.

    Args:
        invitation: The policy's invitation to the round.
        record: The record of the round, which counts the sites without usable replies.
        times: The arrival times of the replies in the latest exchange.

    Attributes:
        arrived: The seconds until the replies of the first exchange arrived, by site.
        seconds: The total time of all exchanges so far.
    """

    def __init__(self, invitation: Invitation, record: RoundRecord, times: ReplyTimes) -> None:
        self._invitation, self._record, self._times = invitation, record, times
        self.arrived: dict[str, float] = {}
        self.seconds = 0.0

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task with the invitation to its exchange."""
        if self._record.exchanges == 0:
            return replace(task, invitation=self._invitation)
        return replace(task, invitation=Invitation.of_all(task.ids, strict=self._invitation.strict))

    def collect(self, replies: Replies) -> Replies:
        """Add the time of the exchange, count the sites without usable replies, and return the replies unchanged.

        Raises:
            NobodyReplied: There is no reply.
        """
        if self._record.exchanges == 0:
            self.arrived = dict(self._times.seconds)
        self.seconds += max(self._times.seconds.values(), default=0.0)
        for name, sites in self._times.lost.items():
            self._record.count(name, sites)
        if not replies.ids:
            raise NobodyReplied
        return replies
