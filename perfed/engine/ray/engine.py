"""The engine whose chunks of clients are worked on by Ray workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.files import optional_package
from perfed.engine.engine import Engine
from perfed.engine.executor import ChunkResult, Exchange, LocalExecutor
from perfed.engine.initial import Initialiser
from perfed.engine.ray.where import chosen
from perfed.engine.steps.step import ExchangeTask
from perfed.errors import PerfedError
from perfed.training.cohort import Cohort
from perfed.training.plan import Path, Plan

CHUNK = "chunk of a worker"
"""The kind of work in the plan under which the number of clients per chunk is written down."""
_LEAST = "2.40"
_CHUNKS = 16
_LARGEST = 32


class RayEngine(Engine):
    """Chunks of clients on Ray workers, each of which keeps some of the clients.

    The results depend on the plan and not on the workers: how many there are, which has which clients, and whether
    some die on the way. Ray is there from the first piece of work on until :meth:`close`.

    Without ``plan.chunk`` a sixteenth of the clients of the run's first exchange are a chunk, at most 32, so that
    there are several for each of a few workers; the choice is recorded in the plan.
    """

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        super().__init__(federation, initialiser, plan)
        self._pool: Any = None
        self._host: LocalExecutor | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Workers are there in this time.

        Raises:
            PerfedError: Ray is not installed or not there, or has no room.
        """
        if self._pool is None:
            self._pool = self._connected()
        try:
            yield
        finally:
            self.close()

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Run chunks on all workers at once and return their results in the order of the chunks.

        Raises:
            PerfedError: Ray is not installed or not there, a chunk's workers died again and again, or what the clients'
                programs raise.
        """
        if self._pool is None:
            self._pool = self._connected()
        results: Iterator[ChunkResult] = self._pool.perform(self.make_chunk_tasks(task))
        return results

    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """Return cohorts of the clients' personalised models, on copies in this process, one at a time."""
        if self._host is None:
            self._host = LocalExecutor(self.federation, self.background, self.initialiser, self.plan)
        for chunk in self.make_chunk_tasks(ExchangeTask(Exchange("personalise", round_, -1), payload, ids)):
            yield self._host.run_program(chunk)[0]

    def close(self) -> None:
        """Let the workers go; further work starts others."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.close()

    def _connected(self) -> Any:
        ray = optional_package("ray", "--engine ray", "ray")
        if _numbers(ray.__version__) < _numbers(_LEAST):
            raise PerfedError(f"--engine ray needs Ray {_LEAST} or newer (installed: {ray.__version__})")
        from perfed.engine.ray.pool import Pool

        return Pool(chosen(), self.clients, self.background, self.initialiser, self.plan, self.notes, self.holder)

    def _choose_chunk_size(self, members: Sequence[Client]) -> int:
        if self.plan.chunk:
            return self.plan.chunk
        if CHUNK not in self.plan.paths:
            size = min(-(-len(members) // _CHUNKS), _LARGEST, self._count_fitting_clients(members))
            self.plan.paths[CHUNK] = Path(size, self.plan.threads)
            self.plan.on_choice()
        return self.plan.paths[CHUNK].chunk


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
