"""Steps of a fit as CUDA graphs: a step is one call, where its hundred kernels were each started from Python.

A graph is recorded once, of a step that reads and writes fixed places, and replayed for each step that follows.
Parameters and the optimiser's state are changed in place, as they always are. A mini-batch is copied to where the graph
reads. Each number of clients, and each size of mini-batch, has a graph of its own.

Nobody has run this on a GPU yet. ``tests/training/test_graphs.py`` records and replays on the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from perfed.training.batches import Block
from perfed.training.step import Step

WARM, WORTH = 2, 8
"""Steps of a shape before it is recorded, which load libraries; steps that a fit needs, or recording costs more."""


class Graph(Protocol):
    """What records a step and does it again."""

    def record(self, step: Callable[[], Tensor]) -> Tensor:
        """Record ``step`` without doing it; return where its losses will be after each replay."""

    def replay(self) -> None:
        """Do the recorded step."""


class CudaGraph:
    """The one of torch."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, step: Callable[[], Tensor]) -> Tensor:
        """Record ``step``; other threads may use the GPU meanwhile."""
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return step()

    def replay(self) -> None:
        """Start all its kernels."""
        self._graph.replay()


@dataclass(frozen=True)
class _Recorded:
    block: Block  # of one step: where the graph reads
    graph: Graph
    losses: Tensor


class Replays:
    """The steps of one fit, replayed from the third of their shape on.

    Args:
        do: does a step, and returns the losses before it. All that it reads is in the mini-batch's ``x``, ``y`` and
            ``weight``, or stays where it is.
        new: makes a graph.
    """

    def __init__(self, do: Callable[[Step], Tensor], new: Callable[[], Graph] = CudaGraph) -> None:
        self._do, self._new = do, new
        self._seen: dict[tuple[int, int], int] = {}
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def step(self, step: Step) -> Tensor:
        """Do ``step``; return the losses before it."""
        shape = step.block.clients, step.width
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] <= WARM:
            return self._do(step)
        if shape not in self._recorded:
            self._recorded = {known: of for known, of in self._recorded.items() if known[0] == shape[0]}
            self._recorded[shape] = self._record(step)
        found = self._recorded[shape]
        for held, new in ((found.block.x, step.x), (found.block.y, step.y), (found.block.weight, step.weight)):
            held[0].copy_(new)
        found.graph.replay()
        return found.losses.clone()

    def _record(self, step: Step) -> _Recorded:
        block, graph = step.block, self._new()
        held = replace(
            block,
            x=step.x.unsqueeze(0).clone(),
            y=step.y.unsqueeze(0).clone(),
            weight=step.weight.unsqueeze(0).clone(),
            _cache={},
        )
        return _Recorded(held, graph, graph.record(lambda: self._do(replace(step, block=held, at=0, _outputs={}))))
