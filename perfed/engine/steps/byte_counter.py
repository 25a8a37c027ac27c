"""The step that counts the bytes of payloads and replies."""

from __future__ import annotations

from typing import Any

from perfed import tree
from perfed.engine.executor import ChunkResult
from perfed.engine.record import RoundRecord
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.method.exchange import Each


class ByteCounter(ExchangeStep):
    """The step that counts the bytes of payloads and replies as they are sent over the network.

    Args:
        record: the record of the round, whose ``bytes_down`` and ``bytes_up`` are increased.
        invited: the number of clients that receive the first exchange, including those that reply too late to be used.
    """

    def __init__(self, record: RoundRecord, invited: int) -> None:
        self._record, self._invited = record, invited

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Count the bytes of the payload for every client that receives it."""
        size = sum(_payload_size(value, len(task.ids)) for value in task.payload.values())
        is_first = self._record.exchanges == 0
        self._record.bytes_down += size * self._invited // len(task.ids) if is_first else size
        return task

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Count the bytes of each reply when it is read."""
        return result.map_replies(self._count_reply)

    def _count_reply(self, client: str, reply: dict[str, Any]) -> dict[str, Any]:
        self._record.bytes_up += tree.count_bytes(reply)
        return reply


def _payload_size(value: Any, clients: int) -> int:
    if isinstance(value, Each):
        return sum(tree.count_bytes(row) for row in value.rows.values())
    return tree.count_bytes(value) * clients
