"""The steps that score the clients' models in an exchange and collect their predictions for every sample."""

from __future__ import annotations

from dataclasses import replace

from perfed.engine.evaluate import Metrics, Outputs
from perfed.engine.executor import ChunkResult
from perfed.engine.steps.step import ExchangeStep, ExchangeTask


class ModelScores(ExchangeStep):
    """The step that makes clients score their models right after the program of the exchange.

    Args:
        split: the split on which models are scored.
        metrics: receives each client's metrics by id; those of the previous exchange are removed.
    """

    def __init__(self, split: str, metrics: Metrics) -> None:
        self._split, self._metrics = split, metrics

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task with the split on which models are scored."""
        self._metrics.clear()
        return replace(task, exchange=replace(task.exchange, measure=self._split))

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Collect the metrics of each client."""
        self._metrics.update(result.metrics)
        return result


class ModelOutputs(ExchangeStep):
    """The step that collects the models' predictions for every sample on which they are scored.

    Args:
        outputs: receives the predictions of each chunk of clients; those of the previous exchange are removed.
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
