"""The queue of the tasks of one exchange, which returns their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from perfed.engine.executor import ChunkResult, ChunkTask


@dataclass(eq=False)
class WorkerHandle:
    """A worker and the driver's knowledge of it.

    Attributes:
        actor: the Ray actor.
        states: the number of the state that it stores, by client.
        gone: clients that it no longer needs to store, of which it has not been informed yet.
        jobs: the jobs that were sent to it, in order.
        abandoned: whether it may still work on a job whose result is not needed.
    """

    actor: Any
    states: dict[str, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    jobs: deque[Job] = field(default_factory=deque)
    abandoned: bool = False


@dataclass(eq=False)
class Job:
    """The task of a chunk in the queue.

    Attributes:
        index: the position of the task in the exchange.
        work: the task.
        chooses: whether the worker may add paths to the plan.
        deaths: the number of workers that have died while they worked on it.
        number: the number of the states that it creates.
        ref: the Ray reference of its outcome.
    """

    index: int
    work: ChunkTask
    chooses: bool = False
    deaths: int = 0
    number: int = 0
    ref: Any = None


class TaskQueue:
    """A queue of tasks that are executed in any order and whose results are returned in the order of the tasks.

    Args:
        works: the tasks of one exchange.
        limit: the largest number of waiting tasks, and of results that wait for earlier ones.

    Attributes:
        waiting: the jobs that can be sent next.
        pilot: a job that must be executed before all others while no other job is running.
    """

    def __init__(self, works: Iterable[ChunkTask], limit: int) -> None:
        self.waiting: list[Job] = []
        self.pilot: Job | None = None
        self._source = enumerate(works)
        self._limit = limit
        self._results: dict[int, ChunkResult] = {}
        self._next_index = 0

    def fill(self) -> bool:
        """Add tasks up to the limit, and return whether any job has to be sent."""
        while len(self.waiting) < self._limit and len(self._results) < self._limit:
            item = next(self._source, None)
            if item is None:
                break
            self.waiting.append(Job(*item))
        return bool(self.waiting) or self.pilot is not None

    def requeue(self, jobs: Iterable[Job]) -> None:
        """Add jobs again that have to be repeated."""
        self.waiting = sorted([*jobs, *self.waiting], key=lambda job: job.index)

    def requeue_undecided(self, job: Job) -> None:
        """Add a job again that needs a path which the plan lacks; the first such job becomes the pilot."""
        if self.pilot is None:
            self.pilot = job
        else:
            self.requeue([job])

    def add_result(self, job: Job, result: ChunkResult) -> Iterator[ChunkResult]:
        """Add the result of a job, and yield all results that are next in order."""
        self._results[job.index] = result
        while self._next_index in self._results:
            yield self._results.pop(self._next_index)
            self._next_index += 1
