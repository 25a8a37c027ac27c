"""The steps of a method's extensions, which add to payloads and process replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perfed.engine.executor import ChunkResult
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.errors import PerfedError
from perfed.method.exchange import Replies, ServerState
from perfed.method.extension import Extension, extension_payloads, undo_outgoing


class ExtensionPayloads(ExchangeStep):
    """The step that adds the extensions' data to payloads, and collects the replies that they use after the round.

    Args:
        extensions: the extensions of the method, with the numbers of the round.
        state: the server's parameter sets.
        replies: receives the replies of each exchange in which the extensions added to them.
    """

    def __init__(self, extensions: Sequence[Extension], state: ServerState, replies: list[Replies]) -> None:
        self._extensions, self._state, self._replies = extensions, state, replies
        self._adds_to_replies = False

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task with the entry ``extensions`` in its payload, if they take part in this exchange."""
        self._adds_to_replies = task.exchange.extensions == "all"
        if task.exchange.extensions == "nothing":
            return task
        return replace(task, payload={**task.payload, "extensions": extension_payloads(self._extensions, self._state)})

    def collect(self, replies: Replies) -> Replies:
        """Collect the replies, if the extensions have added to them."""
        if self._adds_to_replies:
            self._replies.append(replies)
        return replies


class ExtensionReplies(ExchangeStep):
    """The step that reverses the changes of extensions to each reply (``incoming`` is the inverse of ``outgoing``).

    Args:
        extensions: the extensions of the method, with the numbers of the round.
        state: the server's parameter sets.
    """

    def __init__(self, extensions: Sequence[Extension], state: ServerState) -> None:
        self._extensions, self._state = extensions, state

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Return the result with the replies of the client programs.

        Raises:
            PerfedError: when a reply is read that ``outgoing`` cannot have returned; the message names the client.
        """
        return result.map_replies(self._restore_reply)

    def _restore_reply(self, client: str, reply: dict[str, Any]) -> dict[str, Any]:
        try:
            return undo_outgoing(self._extensions, self._state, reply)
        except PerfedError as error:
            raise PerfedError(f"the reply of client '{client}': {error}") from None
