"""The engine that runs chunks of clients on Ray workers."""

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
from perfed.engine.ray.where import get_cluster
from perfed.engine.steps.step import ExchangeTask
from perfed.errors import PerfedError
from perfed.training.cohort import Cohort
from perfed.training.plan import Path, Plan

CHUNK = "chunk of a worker"
"""The kind of work under which the plan records the number of clients per chunk."""
_LEAST = "2.40"
_CHUNKS = 16
_LARGEST = 32


class RayEngine(Engine):
    """An engine that runs chunks of clients on Ray workers, each of which stores some of the clients.

    The results depend on the plan but not on the workers: neither on their number, nor on which clients they store, nor
    on whether some of them die. The connection to Ray lasts from the first task until :meth:`close`.

    Without ``plan.chunk``, a chunk contains a sixteenth of the clients of the run's first exchange, but at most 32, so
    that a few workers have several chunks each. The choice is recorded in the plan.
    """

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        super().__init__(federation, initialiser, plan)
        self._pool: Any = None
        self._host: LocalExecutor | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep the workers running for the duration of the ``with`` block.

        Raises:
            PerfedError: Ray is not installed, cannot be reached, or does not have enough free cores.
        """
        if self._pool is None:
            self._pool = self._create_pool()
        try:
            yield
        finally:
            self.close()

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Run chunks on all workers at once and return their results in the order of the chunks.

        Raises:
            PerfedError: Ray is not installed or cannot be reached, or the workers of a chunk died repeatedly. Errors of
                client programs are raised, too.
        """
        if self._pool is None:
            self._pool = self._create_pool()
        results: Iterator[ChunkResult] = self._pool.perform(self.make_chunk_tasks(task))
        return results

    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """Return cohorts of the clients' personalised models, one at a time; they are copies in this process."""
        if self._host is None:
            self._host = LocalExecutor(self.federation, self.background, self.initialiser, self.plan)
        for chunk in self.make_chunk_tasks(ExchangeTask(Exchange("personalise", round_, -1), payload, ids)):
            yield self._host.run_program(chunk)[0]

    def close(self) -> None:
        """Release the workers; further tasks start new ones."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.close()

    def _create_pool(self) -> Any:
        ray = optional_package("ray", "--engine ray", "ray")
        if _parse_version(ray.__version__) < _parse_version(_LEAST):
            raise PerfedError(f"--engine ray needs Ray {_LEAST} or newer (installed: {ray.__version__})")
        from perfed.engine.ray.pool import Pool

        return Pool(get_cluster(), self.clients, self.background, self.initialiser, self.plan, self.notes, self.holder)

    def _choose_chunk_size(self, members: Sequence[Client]) -> int:
        if self.plan.chunk:
            return self.plan.chunk
        if CHUNK not in self.plan.paths:
            size = min(-(-len(members) // _CHUNKS), _LARGEST, self._count_fitting_clients(members))
            self.plan.paths[CHUNK] = Path(size, self.plan.threads)
            self.plan.on_choice()
        return self.plan.paths[CHUNK].chunk


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
