"""Exchanges with results that a test writes down, to see what single steps make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from engines import blobs, make, serve

from perfed import tree
from perfed.engine.engine import InProcessEngine
from perfed.engine.executor import ChunkResult, Exchange
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.method.exchange import Replies


class ScriptedEngine(InProcessEngine):
    """Returns ``results``, whatever it is asked; ``task`` is what it was asked last."""

    results: Sequence[ChunkResult] = ()
    task: ExchangeTask

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        self.task = task
        return iter(self.results)


def chunk_of(replies: Mapping[str, Mapping[str, Any]], losses: Sequence[float] = (), **fields: Any) -> ChunkResult:
    """Return one chunk of clients whose replies are stacked."""
    loss = torch.tensor(losses or [1.0] * len(replies), dtype=torch.float64)
    return ChunkResult(tuple(replies), tree.stack([*replies.values()]), [{}] * len(replies), loss, **fields)


def task_of(ids: Sequence[str], payload: Mapping[str, Any] | None = None, **fields: Any) -> ExchangeTask:
    return ExchangeTask(Exchange("train", 1, 0), payload or {}, sorted(ids), **fields)


def scripted_engine() -> ScriptedEngine:
    engine = serve(make("fedavg"), blobs(), runner=ScriptedEngine).engine
    assert isinstance(engine, ScriptedEngine)
    return engine


def run_steps(
    steps: Sequence[ExchangeStep], results: Sequence[ChunkResult], task: ExchangeTask | None = None
) -> tuple[ExchangeTask, Replies]:
    """Run one exchange that has these results; return the task that the clients get, and the replies."""
    engine = scripted_engine()
    engine.results = results
    replies = engine.run(task or task_of([client for result in results for client in result.ids]), steps)
    return engine.task, replies
