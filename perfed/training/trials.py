"""Trials that find the fastest chunk and number of threads for a kind of work, by timing a few real steps of each.

Only steps are timed, not the preparation of a fit. Stacks grow from one client on. Larger stacks save calls into torch
but need more of the processor's caches, so the time per client falls and then rises. The search ends at a stack that is
clearly slower than the best one so far, or whose trial would take long compared with the work itself. Then twice the
best size is tried. Since other programs only slow a step down, a single step is sufficient if it takes clearly less
than the best time so far. If an engine fixes the chunk, trials choose only its threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from perfed.training.plan import count_parallel_chunks, map_in_threads

_STACKS = (1, 4, 16, 64)  # sizes; larger than half of the clients are not tried
_STEPS, _LEAST = 5, 2  # largest and smallest number of timed steps, after one that warms up
_BRIEF = 0.02  # seconds of a stack's trial after which only the smallest number of steps is timed
_CLEAR = 0.6  # fraction of the best time so far; a faster step is timed only once
_WORSE = 1.15  # multiple of the best stack's time above which no larger stack is tried
_SHARE = 0.5  # largest fraction of the work that its trials may take
_ALWAYS = 0.1  # seconds that trials may always take
_THREADS_PAY = 0.9  # fraction of one thread's time that more threads must reach, as a busy machine slows them most
_CLEARLY = 0.95  # fraction of another trial's time below which a trial is faster


@dataclass(frozen=True)
class Trial:
    """Work that can be timed on copies.

    Attributes:
        begin: starts the work of the first clients, whose number is its argument, on copies. Each ``next`` of the
            iterator runs a step and returns the number of clients that took it.
        steps: the mini-batch steps, or forward passes, of all clients in the work.
        workload: returns what determines the time of a step besides machine, threads and clients, as plain values.
    """

    begin: Callable[[int], Iterator[int]]
    steps: int
    workload: Callable[[], Mapping[str, Any]] = field(default=dict)

    def find_fastest(self, clients: int, threads: int, *, parallel: bool, chunk: int | None = None) -> tuple[int, int]:
        """Return the chunk and the threads that :func:`find_fastest` chooses for this work."""
        return find_fastest(self, clients, threads, parallel=parallel, chunk=chunk)


def read_clock() -> float:
    """Return the wall time in seconds, after all work of a GPU has finished."""
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
    wall: Callable[[], float] = read_clock,
    processor: Callable[[], float] = time.process_time,
) -> tuple[int, int]:
    """Return the chunk of clients (0: all) and its torch threads that take the least time.

    Args:
        trial: the work.
        clients: the number of clients, at least 2 unless ``chunk`` is set.
        threads: the number of available threads.
        chunk: the only chunk to consider (0: all); only one and all threads are compared then.
        parallel: whether free threads work on other chunks. Stacks are then compared by processor time, which other
            programs on the machine affect least.
        wall: returns the wall time in seconds.
        processor: returns the processor time of all threads of this process in seconds.
    """
    race = _Race(trial, clients, threads if parallel else 1, wall, processor if parallel else wall)
    if chunk is not None:
        on_one = race.measure_wall_time(chunk, 1)
        return chunk, threads if race.measure_wall_time(chunk, threads) < _THREADS_PAY * on_one else 1
    for size in (*(size for size in _STACKS if 2 * size <= clients), 0):
        if not race.run(size):
            break
    twice = 2 * race.fastest_chunk()
    if 0 < twice < clients and twice not in race.seconds:
        race.run(twice)
    single_thread_best = race.fastest_chunk()
    if threads == 1:
        return single_thread_best, 1
    largest = [size for size, seconds in race.seconds.items() if seconds <= _WORSE * race.seconds[single_thread_best]][
        -1
    ]
    all_thread_seconds = {size: race.measure_wall_time(size, threads) for size in {single_thread_best, largest}}
    best = min(all_thread_seconds, key=all_thread_seconds.__getitem__)
    return (
        (best, threads)
        if all_thread_seconds[best] < _THREADS_PAY * race.measure_wall_time(single_thread_best, 1)
        else (single_thread_best, 1)
    )


def is_faster(candidate: Trial, reference: Trial) -> bool:
    """Return whether a step of one client on one thread takes clearly less time in ``candidate`` than in
    ``reference``.
    """
    seconds = [_Race(trial, 1, 1, read_clock, read_clock).measure_wall_time(1, 1) for trial in (candidate, reference)]
    return seconds[0] < _CLEARLY * seconds[1]


class _Race:
    """The stacks that were tried with one thread each, and their times.

    Attributes:
        seconds: the time of a client's step by chunk, according to the clock by which stacks are compared.
        free: the number of threads that different chunks may use at the same time.
        spent: the seconds spent so far, by the same clock.
    """

    def __init__(
        self, trial: Trial, clients: int, free: int, wall: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self.trial, self.clients, self.free, self.wall, self.clock = trial, clients, free, wall, clock
        self.seconds: dict[int, float] = {}
        self.spent = 0.0

    def fastest_chunk(self) -> int:
        """Return the fastest chunk so far."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def run(self, chunk: int) -> bool:
        """Try a chunk, and return whether a larger one may be faster; the first chunk is always tried."""
        workers = count_parallel_chunks(chunk, 1, self.clients, self.free)
        if not self.seconds:
            self.seconds[chunk] = self._measure_step(chunk, 1, workers, self.clock)
            return True
        quickest = self.seconds[self.fastest_chunk()]
        expected = (_LEAST + 1) * (chunk or self.clients) * workers * quickest
        if self.spent + expected > max(_ALWAYS, _SHARE * self.trial.steps * quickest):
            return False
        self.seconds[chunk] = self._measure_step(chunk, 1, workers, self.clock, _CLEAR * quickest)
        return self.seconds[chunk] <= _WORSE * quickest

    def measure_wall_time(self, chunk: int, threads: int) -> float:
        """Return the wall seconds of a client's step."""
        return self._measure_step(
            chunk, threads, count_parallel_chunks(chunk, threads, self.clients, max(self.free, threads)), self.wall
        )

    def _measure_step(
        self, chunk: int, threads: int, workers: int, clock: Callable[[], float], enough: float = 0.0
    ) -> float:
        """Return the least seconds of a client's step among a few, after one that warms up.

        ``enough`` ends the trial early.
        """
        begin = clock()
        step_seconds: list[float] = []
        with map_in_threads(threads, workers) as map_items:
            places = [_StepRunner(self.trial.begin, chunk or self.clients) for _ in range(workers)]
            map_items(_StepRunner.step, places)
            if not self.seconds:
                begin = clock()  # the first step of a process includes one-time work
            while len(step_seconds) < _LEAST or (len(step_seconds) < _STEPS and clock() - begin < _BRIEF):
                before = clock()
                clients = sum(map_items(_StepRunner.step, places))
                step_seconds.append((clock() - before) / clients)
                if step_seconds[-1] <= enough:
                    break
        self.spent += clock() - begin
        return min(step_seconds)


class _StepRunner:
    """Repeated steps of some clients, which start again from the first when there are no more."""

    def __init__(self, begin: Callable[[int], Iterator[int]], clients: int) -> None:
        self._begin, self._clients = begin, clients
        self._steps: Iterator[int] = iter(())

    def step(self) -> int:
        """Do a step and return how many clients took it."""
        if (count := next(self._steps, None)) is None:
            self._steps = self._begin(self._clients)
            count = next(self._steps)
        return count
