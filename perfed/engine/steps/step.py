"""What the server asks of its clients in one exchange, and what may happen around their work.

An exchange is a pipeline. The clients do the work (:meth:`perfed.engine.engine.Engine.perform`), and around it stands a
list of steps, the one nearest to the server first and the one nearest to the network last. A task goes through the list
from its first step to its last, and what comes back goes through it in the reverse order::

    server    send -> send -> send -> perform
              collect, receive  <-  collect, receive  <-  collect, receive  <-  results of the clients

A step does one thing. An optional feature of a run is a step in the list, and a run without the feature has no such
step (:mod:`perfed.engine.steps.pipeline`).
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
    """What the server asks of its clients in one exchange.

    Attributes:
        exchange: the program, the round, the number of the exchange, and what extensions do in it.
        payload: what the program receives: the same for all clients, or one row per client.
        ids: the clients.
        reduce: for each entry of the replies that is folded, the fold.
        keep_outputs: whether clients also return what their models predict for every sample on which they are scored.
        invitation: where time is real, which replies are enough; ``None``: all are needed.
    """

    exchange: Exchange
    payload: Mapping[str, Any]
    ids: Sequence[str]
    reduce: Mapping[str, Fold] = field(default_factory=dict)
    keep_outputs: bool = False
    invitation: Invitation | None = None


class ExchangeStep:
    """Base class of all steps: each hook returns its argument unchanged. A step overrides those that it needs."""

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task to send instead of ``task``."""
        return task

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Return the result to use instead of ``result``, in which the replies of one chunk of clients have come.

        The replies themselves are read later, one client at a time; :meth:`ChunkResult.map_replies
        <perfed.engine.executor.ChunkResult.map_replies>` applies a function to each when it is read.
        """
        return result

    def collect(self, replies: Replies) -> Replies:
        """Return the replies to use instead of ``replies``, once all of them have come and been read."""
        return replies
