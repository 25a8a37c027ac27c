"""Execution of the runs of a study, one after the other or in parallel in other processes."""

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
from perfed.experiment.rows import AnyRun
from perfed.experiment.worker import GRACE, Source, pack_factory, serve
from perfed.experiment.worker import execute_task as ray_task
from perfed.system import delay_sigint

START_METHOD = "spawn"
"""The start method of worker processes; "spawn" exists on every system, and its processes inherit no state."""
TRIES = 2
"""The number of times that a run is tried if its process ends before the run does."""
_POLL_SECONDS = 0.05  # seconds between two polls of the workers

Outcomes = Generator[tuple[Key, dict[str, Any] | PerfedError], None, None]
Execute = Callable[[RunFactory, Sequence[Key]], Outcomes]
"""Executes the runs of some keys and yields each key with the summary of its run, or with the error."""

Tell = Callable[[str, ProgressEvent | None], None]
"""Receives the label of a run and its progress; ``None`` when the run has ended."""


def execute_in_turn(
    factory: RunFactory,
    keys: Sequence[Key],
    execute: Callable[[Callable[[], AnyRun], str], dict[str, Any]] = lambda make, label: make().execute(),
) -> Outcomes:
    """Execute one run after the other in this process.

    Args:
        factory: builds the runs.
        keys: the keys of the runs.
        execute: builds and executes a run, from the function that builds it and its label.

    Yields:
        The key of each run, and its summary or error.
    """
    with keep_workers():
        for key in keys:
            try:
                yield key, execute(lambda key=key: factory(*key), factory.label(*key))  # type: ignore[misc]
            except PerfedError as error:
                yield key, error


class WorkerPool(Protocol):
    """Numbered workers, each of which is a process that executes one run at a time."""

    def assign(self, worker: int, key: Key) -> None:
        """Assign a run to an idle worker, whose process is started if it does not exist."""

    def receive_messages(self) -> list[tuple[int, str, Any]]:
        """Return the messages that arrived since the last call.

        Returns:
            For each message, the number of the worker and the :data:`~perfed.experiment.worker.Message`.
        """

    def stop(self) -> None:
        """Stop all workers; unfinished runs write checkpoints of their last complete rounds."""


@dataclass(frozen=True)
class Jobs:
    """An :data:`Execute` that executes several runs in parallel.

    Each run gives the same bits as without parallel runs if its plan is the same; with ``plan.threads = 0``, the
    threads of the machine are divided among ``number`` runs. A run whose process is killed is continued once, from its
    last checkpoint in another process.

    Attributes:
        number: the number of parallel runs.
        ray_address: HOST:PORT of a Ray cluster whose machines share the files of this machine; ``None`` for processes
            on this machine.
        tell: receives the progress of each run.
        source: the federation of the runs, if it is in memory.

    Raises:
        PerfedError: ``number`` is below 1. The call raises it, before any run starts, if other processes cannot import
            something that the runs need.
    """

    number: int
    ray_address: str | None = None
    tell: Tell = lambda label, news: None
    source: Source | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise PerfedError(f"jobs must be at least 1 (given: {self.number})")

    def __call__(self, factory: RunFactory, keys: Sequence[Key]) -> Outcomes:
        """Execute the runs, and yield the key and outcome of each when it ends."""
        if not keys:
            return
        number = min(self.number, len(keys))
        parcel = pack_factory(factory, self.source)
        pool: WorkerPool = (
            Processes(parcel, max(1, torch.get_num_threads() // number))
            if self.ray_address is None
            else RayTasks(self.ray_address, ray_task, parcel, number)
        )
        try:
            yield from self._distribute_runs(pool, number, factory, keys)
        finally:
            pool.stop()

    def _distribute_runs(self, pool: WorkerPool, number: int, factory: RunFactory, keys: Sequence[Key]) -> Outcomes:
        """Assign runs to idle workers until all have ended, and yield the key and outcome of each when it ends."""
        waiting, idle, losses, any_ready = deque(keys), list(range(number)), Counter[Key](), False
        running: dict[int, Key] = {}
        while waiting or running:
            while waiting and idle:
                worker = idle.pop(0)
                running[worker] = waiting.popleft()
                pool.assign(worker, running[worker])
            messages = pool.receive_messages()
            for worker, kind, value in messages:
                if worker not in running:  # its process ended while it was idle
                    continue
                if kind == "ready":
                    any_ready = True
                elif kind == "news":
                    self.tell(factory.label(*running[worker]), value)
                elif kind == "refused":
                    raise PerfedError(value)
                elif kind == "lost" and not any_ready:
                    raise PerfedError(
                        f"jobs: the first process ended before it could do anything ({value}); a script that gives "
                        "jobs must do so under 'if __name__ == \"__main__\":'"
                    )
                else:
                    key = running.pop(worker)
                    idle.append(worker)
                    losses[key] += kind == "lost"
                    if kind == "lost" and losses[key] < TRIES:
                        waiting.appendleft(key)
                        remark = f"its process ended ({value}); it is tried once more, from its last checkpoint"
                        self.tell(factory.label(*key), ProgressEvent(DATA, remarks=(remark,)))
                        continue
                    self.tell(factory.label(*key), None)
                    yield key, _to_outcome(kind, value)
            if not messages:
                time.sleep(_POLL_SECONDS)


def _to_outcome(kind: str, value: Any) -> dict[str, Any] | PerfedError:
    """Return the summary or error of a run from the last message of its worker."""
    if kind == "broke":
        raise value
    if kind == "lost":
        return PerfedError(f"its process ended {TRIES} times before the run had finished, the last time by {value}")
    summary: dict[str, Any] | PerfedError = PerfedError(value) if kind == "failed" else value
    return summary


class Processes:
    """A :class:`WorkerPool` of processes on this machine.

    Args:
        parcel: the bytes from :func:`~perfed.experiment.worker.pack_factory`, which each process reads once.
        threads: the number of torch threads of each process.
    """

    def __init__(self, parcel: bytes, threads: int) -> None:
        self._parcel, self._threads = parcel, threads
        self._members: dict[int, tuple[BaseProcess, Connection]] = {}

    def assign(self, worker: int, key: Key) -> None:
        """Send a run to a process; see :meth:`WorkerPool.assign`."""
        with suppress(ConnectionError):  # the process has died, which receive_messages reports
            if worker not in self._members:
                self._members[worker] = self._start_process(worker)
                self._members[worker][1].send_bytes(self._parcel)
            self._members[worker][1].send(key)

    def _start_process(self, worker: int) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context(START_METHOD)
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._threads), name=f"perfed job {worker}")  # type: ignore[attr-defined]
        with delay_sigint():  # Ctrl-C reaches all processes of a terminal, and only this one handles it
            process.start()
        theirs.close()
        return process, ours

    def receive_messages(self) -> list[tuple[int, str, Any]]:
        """Return the messages of the processes; see :meth:`WorkerPool.receive_messages`."""
        messages: list[tuple[int, str, Any]] = []
        for worker, (process, connection) in list(self._members.items()):
            lost = not process.is_alive()  # checked before polling, so that the last messages of a process are read
            try:
                while connection.poll():
                    messages.append((worker, *connection.recv()))
            except (EOFError, OSError):
                lost = True
            if lost:
                process.join()
                connection.close()
                del self._members[worker]
                messages.append((worker, "lost", _describe_exit(process.exitcode)))
        return messages

    def stop(self) -> None:
        """End all processes; see :meth:`WorkerPool.stop`."""
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


def _describe_exit(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
