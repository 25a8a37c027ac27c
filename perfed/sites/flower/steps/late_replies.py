"""The step of rounds in which time is real: which replies are waited for, and which came too late or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from perfed.engine.record import RoundRecord
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.method.exchange import Replies
from perfed.participation.invitation import Invitation


class NobodyReplied(Exception):
    """No reply of an exchange can be used, so that the round changes nothing."""


@dataclass
class ReplyTimes:
    """When the replies of the latest exchange came.

    Attributes:
        seconds: seconds after which each reply came, by site.
        lost: sites whose replies could not be used, by what happened to them.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)


class LateReplies(ExchangeStep):
    """Lets a round continue without the sites that do not reply in time.

    The first exchange needs the replies that the invitation asks for, later ones those of the sites used so far.

    Args:
        invitation: the policy's invitation to the round.
        record: the record of the round, in which sites are counted whose replies are lost.
        times: when the replies of the latest exchange came.

    Attributes:
        arrived: seconds after which the replies of the first exchange came, by site.
        seconds: the time of all exchanges so far.
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
        """Add the time of the exchange, and count the sites whose replies are lost.

        Raises:
            NobodyReplied: there is no reply.
        """
        if self._record.exchanges == 0:
            self.arrived = dict(self._times.seconds)
        self.seconds += max(self._times.seconds.values(), default=0.0)
        for name, sites in self._times.lost.items():
            self._record.count(name, sites)
        if not replies.ids:
            raise NobodyReplied
        return replies
