"""The runs of a study: one after the other, or side by side in other processes."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from perfed.engine.ray.jobs import RayTasks
from perfed.engine.ray.keeping import keep_workers
from perfed.errors import PerfedError
from perfed.experiment.factory import DATA, Key, ProgressEvent, RunFactory
from perfed.experiment.worker import GRACE, Source, packed, serve
from perfed.experiment.worker import task as ray_task
from perfed.run.any_run import AnyRun
from perfed.system import delay_sigint

START_METHOD = "spawn"
"""How worker processes begin, as multiprocessing calls it; "spawn" is everywhere and takes nothing along."""
TRIES = 2
"""Times that a run is tried whose process ends in the middle of it."""
_EVERY = 0.05  # seconds between two looks at what workers say

Outcomes = Generator[tuple[Key, dict[str, Any] | PerfedError], None, None]
Execute = Callable[[RunFactory, Sequence[Key]], Outcomes]
"""Executes the runs of these keys: each with its summary, or why it failed."""

Tell = Callable[[str, ProgressEvent | None], None]
"""Is told how far the run with a label is; None when it has ended."""


def in_turn(
    factory: RunFactory,
    keys: Sequence[Key],
    execute: Callable[[Callable[[], AnyRun], str], dict[str, Any]] = lambda make, label: make().execute(),
) -> Outcomes:
    """Execute one run after the other in this process; ``execute`` makes one ready and executes it, by its label."""
    with keep_workers():
        for key in keys:
            try:
                yield key, execute(lambda key=key: factory(*key), factory.label(*key))  # type: ignore[misc]
            except PerfedError as error:
                yield key, error


class WorkerPool(Protocol):
    """Workers by number, each a process that does one run at a time."""

    def give(self, worker: int, key: Key) -> None:
        """Let a worker without a run do this one; its process begins if it is not there."""

    def news(self) -> list[tuple[int, str, Any]]:
        """Return what came since the last time: worker, and its :data:`~perfed.experiment.worker.Message`."""

    def stop(self) -> None:
        """End them all; runs that are not done leave checkpoints of their last whole rounds."""


@dataclass(frozen=True)
class Jobs:
    """Executes runs side by side: an :data:`Execute`.

    A run has the bits that it has alone with the same plan; ``plan.threads = 0`` means here: as many threads as are
    free for one of ``number`` runs. A run whose process is killed goes on from its checkpoint in another one, once.

    Attributes:
        number: of runs at the same time.
        ray_address: HOST:PORT of a Ray cluster whose machines share this one's files, in place of processes here.
        tell: told of the run with this label; None when it has ended.
        source: the federation that the runs are on, where it is in memory.

    Raises:
        PerfedError: ``number`` is below 1. From the call, before any run begins: other processes do not know something
            that the runs need.
    """

    number: int
    ray_address: str | None = None
    tell: Tell = lambda label, news: None
    source: Source | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise PerfedError(f"jobs must be at least 1 (given: {self.number})")

    def __call__(self, factory: RunFactory, keys: Sequence[Key]) -> Outcomes:
        """Each run as it ends, in whatever order."""
        if not keys:
            return
        number = min(self.number, len(keys))
        parcel = packed(factory, self.source)
        pool: WorkerPool = (
            Processes(parcel, max(1, torch.get_num_threads() // number))
            if self.ray_address is None
            else RayTasks(self.ray_address, ray_task, parcel, number)
        )
        try:
            yield from self._followed(pool, number, factory, keys)
        finally:
            pool.stop()

    def _followed(self, pool: WorkerPool, number: int, factory: RunFactory, keys: Sequence[Key]) -> Outcomes:
        waiting, idle, lost, anyone = deque(keys), list(range(number)), Counter[Key](), False
        doing: dict[int, Key] = {}
        while waiting or doing:
            while waiting and idle:
                worker = idle.pop(0)
                doing[worker] = waiting.popleft()
                pool.give(worker, doing[worker])
            heard = pool.news()
            for worker, kind, value in heard:
                if worker not in doing:  # it ended when it had nothing to do
                    continue
                if kind == "ready":
                    anyone = True
                elif kind == "news":
                    self.tell(factory.label(*doing[worker]), value)
                elif kind == "refused":
                    raise PerfedError(value)
                elif kind == "lost" and not anyone:
                    raise PerfedError(
                        f"jobs: the first process ended before it could do anything ({value}); a script that gives "
                        "jobs must do so under 'if __name__ == \"__main__\":'"
                    )
                else:
                    key = doing.pop(worker)
                    idle.append(worker)
                    lost[key] += kind == "lost"
                    if kind == "lost" and lost[key] < TRIES:
                        waiting.appendleft(key)
                        again = f"its process ended ({value}); it is tried once more, from its last checkpoint"
                        self.tell(factory.label(*key), ProgressEvent(DATA, remarks=(again,)))
                        continue
                    self.tell(factory.label(*key), None)
                    yield key, _outcome(kind, value)
            if not heard:
                time.sleep(_EVERY)


def _outcome(kind: str, value: Any) -> dict[str, Any] | PerfedError:
    if kind == "broke":
        raise value
    if kind == "lost":
        return PerfedError(f"its process ended {TRIES} times in the middle of it, at last by {value}")
    summary: dict[str, Any] | PerfedError = PerfedError(value) if kind == "failed" else value
    return summary


class Processes:
    """A :class:`WorkerPool` on this machine.

    Args:
        parcel: of :func:`~perfed.experiment.worker.packed`; each process reads it once.
        threads: torch threads of each.
    """

    def __init__(self, parcel: bytes, threads: int) -> None:
        self._parcel, self._threads = parcel, threads
        self._members: dict[int, tuple[BaseProcess, Connection]] = {}

    def give(self, worker: int, key: Key) -> None:
        """Do as :class:`WorkerPool` says of all pools."""
        with suppress(ConnectionError):  # it has died; the news say so
            if worker not in self._members:
                self._members[worker] = self._begun(worker)
                self._members[worker][1].send_bytes(self._parcel)
            self._members[worker][1].send(key)

    def _begun(self, worker: int) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context(START_METHOD)
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._threads), name=f"perfed job {worker}")  # type: ignore[attr-defined]
        with delay_sigint():  # Ctrl-C goes to all processes of a terminal; this one says what comes of it
            process.start()
        theirs.close()
        return process, ours

    def news(self) -> list[tuple[int, str, Any]]:
        """Do as :class:`WorkerPool` says of all pools."""
        heard: list[tuple[int, str, Any]] = []
        for worker, (process, connection) in list(self._members.items()):
            lost = not process.is_alive()  # asked first, so that its last words are heard
            try:
                while connection.poll():
                    heard.append((worker, *connection.recv()))
            except (EOFError, OSError):
                lost = True
            if lost:
                process.join()
                connection.close()
                del self._members[worker]
                heard.append((worker, "lost", _ending(process.exitcode)))
        return heard

    def stop(self) -> None:
        """Do as :class:`WorkerPool` says of all pools."""
        members, deadline = list(self._members.values()), time.monotonic() + GRACE
        try:
            for process, _ in members:
                process.terminate()
            for process, _ in members:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process, connection in members:
                process.kill()
                process.join()
                connection.close()
            self._members.clear()


def _ending(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
