"""Trials that find the fastest chunk and number of threads for a kind of work, by timing a few real steps of each.

What is timed is a step, without what a fit prepares. Stacks grow from one client on. Larger ones save calls into torch
and take more of the processor's caches, so the time of a client falls and then rises: a stack that is clearly slower
than the best one so far ends the search, and so does one whose trial would take long beside the work itself. Then
twice the best is tried. Other programs only ever slow a step down: one that takes clearly less than the best time so
far is enough, and no further one of its stack is timed. If an engine fixes the chunk, trials choose only its threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from perfed.training.plan import count_parallel_chunks, map_in_threads

_STACKS = (1, 4, 16, 64)  # of which there are at least two
_STEPS, _LEAST = 5, 2  # that are timed, after one that warms up
_BRIEF = 0.02  # seconds of a stack's trial after which no more than the least steps are timed
_CLEAR = 0.6  # of the best time so far: a step that takes no more is timed once
_WORSE = 1.15  # times the best stack's time: no larger stack is tried
_SHARE = 0.5  # of the work at hand, what its trials may take
_ALWAYS = 0.1  # seconds that they may take anyway
_THREADS_PAY = 0.9  # of one thread's time: what more of them must save, since a busy machine slows them most
_CLEARLY = 0.95  # of another way's time: what a way must take less than


@dataclass(frozen=True)
class Trial:
    """Work that can be tried out.

    Attributes:
        begin: starts the work of the first clients, as many as it is given, on copies. The iterator does a step when
            it is asked for the next number, which is that of the clients that took the step.
        steps: mini-batch steps, or forward passes, of all clients in the work at hand.
        workload: what the time of a step depends on beside machine, threads and clients, as plain values.
    """

    begin: Callable[[int], Iterator[int]]
    steps: int
    workload: Callable[[], Mapping[str, Any]] = field(default=dict)

    def find_fastest(self, clients: int, threads: int, *, parallel: bool, chunk: int | None = None) -> tuple[int, int]:
        """Return the chunk and the threads that :func:`find_fastest` chooses for this work."""
        return find_fastest(self, clients, threads, parallel=parallel, chunk=chunk)


def now() -> float:
    """Return wall seconds, once all work of a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def find_fastest(
    trial: Trial,
    clients: int,
    threads: int,
    *,
    parallel: bool,
    chunk: int | None = None,
    wall: Callable[[], float] = now,
    processor: Callable[[], float] = time.process_time,
) -> tuple[int, int]:
    """Return the chunk of clients (0: all) and its torch threads that take the least time.

    Args:
        trial: the work.
        clients: how many there are, at least 2 unless ``chunk`` is set.
        threads: that may be used.
        chunk: the only chunk to consider (0: all); only one and all threads are compared then.
        parallel: whether threads that one chunk leaves free work on others, on the processor. Stacks are then compared
            by its seconds, which other programs on the machine disturb least.
        wall: seconds of wall time.
        processor: seconds of this process, of all its threads.
    """
    race = _Race(trial, clients, threads if parallel else 1, wall, processor if parallel else wall)
    if chunk is not None:
        on_one = race.wall_seconds(chunk, 1)
        return chunk, threads if race.wall_seconds(chunk, threads) < _THREADS_PAY * on_one else 1
    for size in (*(size for size in _STACKS if 2 * size <= clients), 0):
        if not race.run(size):
            break
    twice = 2 * race.best()
    if 0 < twice < clients and twice not in race.seconds:
        race.run(twice)
    alone = race.best()
    if threads == 1:
        return alone, 1
    largest = [size for size, seconds in race.seconds.items() if seconds <= _WORSE * race.seconds[alone]][-1]
    together = {size: race.wall_seconds(size, threads) for size in {alone, largest}}
    best = min(together, key=together.__getitem__)
    return (best, threads) if together[best] < _THREADS_PAY * race.wall_seconds(alone, 1) else (alone, 1)


def is_faster(one: Trial, other: Trial) -> bool:
    """Return whether a step of one client on one thread takes clearly less time in ``one`` than in ``other``."""
    seconds = [_Race(trial, 1, 1, now, now).wall_seconds(1, 1) for trial in (one, other)]
    return seconds[0] < _CLEARLY * seconds[1]


class _Race:
    """The stacks that were tried with one thread each, and what that took.

    Attributes:
        seconds: of a client's step, by chunk, by the clock that stacks are compared by.
        free: threads that may be used at the same time by different chunks.
        spent: seconds so far, by the same clock.
    """

    def __init__(
        self, trial: Trial, clients: int, free: int, wall: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self.trial, self.clients, self.free, self.wall, self.clock = trial, clients, free, wall, clock
        self.seconds: dict[int, float] = {}
        self.spent = 0.0

    def best(self) -> int:
        """The fastest chunk so far."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def run(self, chunk: int) -> bool:
        """Try a chunk, and say whether a larger one may be faster; the first is tried whatever it takes."""
        workers = count_parallel_chunks(chunk, 1, self.clients, self.free)
        if not self.seconds:
            self.seconds[chunk] = self._time(chunk, 1, workers, self.clock)
            return True
        quickest = self.seconds[self.best()]
        expected = (_LEAST + 1) * (chunk or self.clients) * workers * quickest
        if self.spent + expected > max(_ALWAYS, _SHARE * self.trial.steps * quickest):
            return False
        self.seconds[chunk] = self._time(chunk, 1, workers, self.clock, _CLEAR * quickest)
        return self.seconds[chunk] <= _WORSE * quickest

    def wall_seconds(self, chunk: int, threads: int) -> float:
        """Wall seconds of a client's step."""
        return self._time(
            chunk, threads, count_parallel_chunks(chunk, threads, self.clients, max(self.free, threads)), self.wall
        )

    def _time(self, chunk: int, threads: int, workers: int, clock: Callable[[], float], enough: float = 0.0) -> float:
        """Least seconds of a client's step in a few of them, after one that warms up; at most ``enough`` ends it."""
        begin = clock()
        found: list[float] = []
        with map_in_threads(threads, workers) as each:
            places = [_Place(self.trial.begin, chunk or self.clients) for _ in range(workers)]
            each(_Place.step, places)
            if not self.seconds:
                begin = clock()  # what a process does once is not the trial's
            while len(found) < _LEAST or (len(found) < _STEPS and clock() - begin < _BRIEF):
                before = clock()
                took = sum(each(_Place.step, places))
                found.append((clock() - before) / took)
                if found[-1] <= enough:
                    break
        self.spent += clock() - begin
        return min(found)


class _Place:
    """Where steps of some clients are done, from the first one on again when there are no more."""

    def __init__(self, begin: Callable[[int], Iterator[int]], clients: int) -> None:
        self._begin, self._clients = begin, clients
        self._steps: Iterator[int] = iter(())

    def step(self) -> int:
        """Do a step and return how many clients took it."""
        if (took := next(self._steps, None)) is None:
            self._steps = self._begin(self._clients)
            took = next(self._steps)
        return took
