"""The steps that measure the clients' models in an exchange: their metrics, and their predictions for every sample."""

from __future__ import annotations

from dataclasses import replace

from perfed.engine.evaluate import Metrics, Outputs
from perfed.engine.executor import ChunkResult
from perfed.engine.steps.step import ExchangeStep, ExchangeTask


class ModelScores(ExchangeStep):
    """Lets clients score their models right after the program of the exchange.

    Args:
        split: the split on which they do.
        metrics: receives each client's metrics by id; those of the exchange before are removed.
    """

    def __init__(self, split: str, metrics: Metrics) -> None:
        self._split, self._metrics = split, metrics

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task with the split."""
        self._metrics.clear()
        return replace(task, exchange=replace(task.exchange, measure=self._split))

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Add the metrics of each client to those collected before."""
        self._metrics.update(result.metrics)
        return result


class ModelOutputs(ExchangeStep):
    """Collects what the models predict for every sample on which they are scored.

    Args:
        outputs: receives the predictions of each chunk of clients; those of the exchange before are removed.
    """

    def __init__(self, outputs: list[Outputs]) -> None:
        self._outputs = outputs

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task with the request for predictions."""
        self._outputs.clear()
        return replace(task, keep_outputs=True)

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Append the predictions for every sample."""
        self._outputs.extend(result.outputs)
        return result
