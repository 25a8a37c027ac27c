"""The works of one exchange on their way to workers and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from perfed.engine.executor import ChunkResult, ChunkTask


@dataclass(eq=False)
class WorkerHandle:
    """A worker.

    Attributes:
        actor: of Ray.
        states: the number of the state that it has of a client.
        gone: clients that it need not keep any longer, which it has not been told yet.
        jobs: sent to it, in order.
        abandoned: whether it may still do a job that nobody waits for.
    """

    actor: Any
    states: dict[str, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    jobs: deque[Job] = field(default_factory=deque)
    abandoned: bool = False


@dataclass(eq=False)
class Job:
    """A chunk's work.

    Attributes:
        index: its place among those of the exchange.
        work: what is to be done.
        chooses: whether it may add paths to the plan.
        deaths: how many workers have died over it.
        number: of the states that it makes.
        ref: of what comes of it.
    """

    index: int
    work: ChunkTask
    chooses: bool = False
    deaths: int = 0
    number: int = 0
    ref: Any = None


class TaskQueue:
    """Works go out in any order, and what was done comes back in theirs.

    Args:
        works: of one exchange.
        most: how many may wait to go out, and how many to be handed on.

    Attributes:
        waiting: those that may go out next.
        pilot: one that must go out alone before all others.
    """

    def __init__(self, works: Iterable[ChunkTask], most: int) -> None:
        self.waiting: list[Job] = []
        self.pilot: Job | None = None
        self._source = enumerate(works)
        self._most = most
        self._found: dict[int, ChunkResult] = {}
        self._due = 0

    def fill(self) -> bool:
        """Let works come in while there is room; whether any is to go out."""
        while len(self.waiting) < self._most and len(self._found) < self._most:
            item = next(self._source, None)
            if item is None:
                break
            self.waiting.append(Job(*item))
        return bool(self.waiting) or self.pilot is not None

    def back(self, jobs: Iterable[Job]) -> None:
        """They are to go out again."""
        self.waiting = sorted([*jobs, *self.waiting], key=lambda job: job.index)

    def undecided(self, job: Job) -> None:
        """It met work of a kind that is not known: the first such is the pilot."""
        if self.pilot is None:
            self.pilot = job
        else:
            self.back([job])

    def came(self, job: Job, done: ChunkResult) -> Iterator[ChunkResult]:
        """Take in what was done; all that is next in order."""
        self._found[job.index] = done
        while self._due in self._found:
            yield self._found.pop(self._due)
            self._due += 1
