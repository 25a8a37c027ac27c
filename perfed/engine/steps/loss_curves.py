"""The step that collects the training loss of every local epoch."""

from __future__ import annotations

from perfed.engine.executor import ChunkResult
from perfed.engine.steps.step import ExchangeStep


class LossCurves(ExchangeStep):
    """The step that collects the loss of each local epoch of the clients that are watched.

    Args:
        curves: receives the losses by client id; losses of later exchanges of a round are appended.
    """

    def __init__(self, curves: dict[str, list[float]]) -> None:
        self._curves = curves

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Append the loss of each local epoch to the record."""
        for client, losses in result.loss_curves.items():
            self._curves.setdefault(client, []).extend(losses)
        return result
