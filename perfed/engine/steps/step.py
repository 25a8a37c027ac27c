"""The task of an exchange, and the base class of the steps around the work of the clients.

An exchange is a pipeline. The clients do the work (:meth:`perfed.engine.engine.Engine.perform`) inside a list of steps,
of which the first is nearest to the server and the last nearest to the network. A task passes through the list from the
first step to the last, and its results pass through the list in the reverse order::

    server    send -> send -> send -> perform
              collect, receive  <-  collect, receive  <-  collect, receive  <-  results of the clients

Each optional feature of a run is a step of its own, which is in the list only if the run uses the feature
(:mod:`perfed.engine.steps.pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfed.engine.executor import ChunkResult, Exchange
from perfed.method.exchange import Fold, Replies
from perfed.participation.invitation import Invitation


@dataclass(frozen=True)
class ExchangeTask:
    """The task that the server sends to its clients in one exchange.

    Attributes:
        exchange: the program, the round, the number of the exchange, and the role of extensions.
        payload: the arguments of the program, each the same for all clients or with one row per client.
        ids: the clients.
        reduce: the folds of replies, by the name of the entry.
        keep_outputs: whether clients also return their models' predictions for every sample on which they are scored.
        invitation: at real sites, the replies that suffice; ``None`` if all are needed.
    """

    exchange: Exchange
    payload: Mapping[str, Any]
    ids: Sequence[str]
    reduce: Mapping[str, Fold] = field(default_factory=dict)
    keep_outputs: bool = False
    invitation: Invitation | None = None


class ExchangeStep:
    """Base class of all steps, whose hooks return their arguments unchanged; a step overrides those that it needs."""

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task to send instead of ``task``."""
        return task

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Return the result to use instead of ``result``, which contains the replies of one chunk of clients.

        The replies are read later, one client at a time; :meth:`ChunkResult.map_replies
        <perfed.engine.executor.ChunkResult.map_replies>` applies a function to each when it is read.
        """
        return result

    def collect(self, replies: Replies) -> Replies:
        """Return the replies to use instead of ``replies``, which have all been received and read."""
        return replies
