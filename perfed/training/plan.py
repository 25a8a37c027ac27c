"""The execution plan, which divides work into chunks of clients, and the devices that torch computes on.

A plan is chosen once and recorded; with the same plan a run gives the same bits. Results of different plans agree up to
rounding. ``chunk`` is the number of clients computed together (0: all), ``threads`` the number of torch threads of one
chunk. Remaining threads work on other chunks at the same time, which changes no bit of any result.

Unless the user sets a number of threads, work uses one thread, and more only if a short trial shows that they save
time: threads of small models mostly wait for each other, and beside other programs they wait many times as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

import torch
from pydantic import ConfigDict, Field
from threadpoolctl import threadpool_limits

from perfed.errors import PerfedError
from perfed.settings import Table, exclude_default
from perfed.system import read_processor_name
from perfed.training import choices

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which users set torch's number of threads."""
MOST_THREADS = 4096
"""Largest number of torch threads in a plan."""

EngineName = Literal["auto", "stacked", "sequential", "ray"]
ENGINES: tuple[EngineName, ...] = ("auto", "stacked", "sequential", "ray")

Item = TypeVar("Item")
Result = TypeVar("Result")

HOLD = 1 << 30
"""Default number of bytes of clients' states in memory."""


@dataclass(frozen=True)
class Path:
    """The chunk size and number of threads of one kind of work."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=False)  # a strict model would refuse dictionaries

    chunk: Annotated[int, Field(ge=0, strict=True)]
    threads: Annotated[int, Field(ge=1, strict=True)]

    def size(self, clients: int) -> int:
        """Return the number of clients per chunk when there are ``clients`` in all."""
        return clients if self.chunk == 0 else min(self.chunk, clients)

    def chunk_ranges(self, clients: int) -> list[tuple[int, int]]:
        """Return the positions ``(first, stop)`` of the clients of each chunk."""
        size = self.size(clients)
        return [(first, min(first + size, clients)) for first in range(0, clients, size)]


class Tryable(Protocol):
    """Work whose paths can be compared (:class:`perfed.training.trials.Trial`)."""

    @property
    def workload(self) -> Callable[[], Mapping[str, Any]]:
        """Return, as plain values, what determines the time of a step besides kind, threads and clients."""

    def find_fastest(self, clients: int, threads: int, *, parallel: bool, chunk: int | None = None) -> tuple[int, int]:
        """Return the chunk of clients (0: all) and its torch threads that take the least time.

        If ``chunk`` is set, only this chunk is considered.
        """


@dataclass
class Plan:
    """The paths of a run by kind of work, e.g. ``"fit head"``.

    Attributes:
        engine: ``"stacked"`` (all clients of an architecture together), ``"sequential"`` (one at a time), or
            ``"auto"``: trials choose one of the two for each kind of work, on its first occurrence. ``"ray"``: chunks
            on Ray workers, within which work runs as under ``"auto"``.
        chunk: clients per chunk under ``"stacked"`` (0: all) and ``"ray"`` (0: chosen on the first occasion).
        threads: the largest number of torch threads at the same time (0: torch's number when the plan is made, and
            each kind of work uses more than one only where a trial has shown that they save time). Under ``"ray"``, the
            threads of one worker (0: one).
        untimed_threads: torch threads of everything that no trial has timed, such as a server's step. 0: as many as
            ``threads``; if ``threads`` is 0 too, one, or torch's number where the environment sets it
            (``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS``). A number below ``threads`` lets trials choose between one and
            ``threads`` on every engine; an equal one leaves no choice to them outside ``"auto"``.
        paths: choices already made.
        hold: number of bytes of clients' states in memory; beyond it the oldest states are on disk. Results do not
            depend on it.
        remember: whether choices of trials are saved for later runs of this user, and saved choices are used.
        on_choice: called after each new choice, for example to record it.
        trying: a context that is entered during trials, for example to report them.
        reasons: the kinds of work that must run one client at a time, and why.
    """

    engine: EngineName = "auto"
    chunk: int = 0
    threads: int = 0
    paths: dict[str, Path] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    hold: int = HOLD
    remember: bool = True
    untimed_threads: int = 0
    on_choice: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    trying: Callable[[], AbstractContextManager[object]] = field(default=nullcontext, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise PerfedError(f"unknown engine '{self.engine}'; allowed: {', '.join(ENGINES)}")
        if min(self.chunk, self.threads, self.untimed_threads) < 0:
            raise PerfedError("plan.chunk, plan.threads and plan.untimed_threads must be at least 0")
        if self.threads > MOST_THREADS:
            raise PerfedError(f"plan.threads must be at most {MOST_THREADS} (given: {self.threads})")
        if self.hold < 0:
            raise PerfedError(f"hold is {self.hold} bytes; at least 0 is needed")
        if self.threads == 0:
            self.threads = 1 if self.engine == "ray" else torch.get_num_threads()
            self.untimed_threads = self.untimed_threads or (self.threads if environment_sets_threads() else 1)
        self.untimed_threads = min(self.untimed_threads or self.threads, self.threads)

    def path(self, kind: str, clients: int, trial: Tryable, *, stackable: bool = True, parallel: bool = False) -> Path:
        """Return the path for ``kind`` of work with ``clients`` clients; at its first occurrence trials may choose it.

        Args:
            kind: the kind of work, a key of ``paths``.
            clients: the number of clients.
            trial: the work on copies, without lasting effect.
            stackable: whether several clients can be computed together.
            parallel: the argument with which the work will be passed to :meth:`run_chunks`.
        """
        chunk = self._fixed_chunk(clients, stackable)
        if chunk is not None and self.untimed_threads == self.threads:
            return Path(chunk, self.threads)
        if clients == 1 and stackable and self.engine in ("auto", "ray"):
            # The choice for one client must not depend on whether work with several clients came before.
            kind = f"{kind} (one client)"
        path = self.paths.get(kind)
        if path is None or chunk not in (None, path.chunk):  # the plan may have been recorded with another engine
            path = self.paths[kind] = self._choose(kind, clients, trial, parallel, chunk)
            self.on_choice()
        return Path(path.chunk, min(path.threads, self.threads))

    def _fixed_chunk(self, clients: int, stackable: bool) -> int | None:
        """Return the only chunk that the engine allows; ``None`` if trials choose it."""
        if self.engine == "sequential" or not stackable:
            return 1
        if self.engine == "stacked":
            return self.chunk
        return 1 if clients == 1 else None

    def prefers(self, kind: str, to: str, is_faster: Callable[[], bool]) -> bool:
        """Return whether to use ``kind`` instead of the kind ``to``; ``is_faster`` is called under ``"auto"``."""
        fixed = self.engine in ("stacked", "sequential")
        return fixed or kind in self.paths or (to not in self.paths and is_faster())

    def _choose(self, kind: str, clients: int, trial: Tryable, parallel: bool, chunk: int | None) -> Path:
        """Return the path that an earlier trial of the same work has chosen, or that a new trial chooses."""
        work = {"kind": kind, "clients": clients, "threads": self.threads, "parallel": parallel, **trial.workload()}
        if chunk is not None:
            work["chunk"] = chunk
        choice = choices.find_choice(work) if self.remember else None
        if choice is None:
            with self.trying(), torch.random.fork_rng(devices=[]):  # modules may draw from torch's global generator
                choice = trial.find_fastest(clients, self.threads, parallel=parallel, chunk=chunk)
            if self.remember:
                choices.save_choice(work, *choice)
        return Path(*choice)

    def run_chunks(
        self, path: Path, clients: int, work: Callable[[int, int], Result], *, parallel: bool
    ) -> list[tuple[int, int, Result]]:
        """Call ``work(first, stop)`` for each chunk of clients, several at the same time if threads are free.

        Args:
            path: the chunk size, and the torch threads of each chunk.
            clients: the number of clients.
            work: a function that only changes data of the clients ``first .. stop - 1``.
            parallel: whether ``work`` may run in several threads.

        Returns:
            ``(first, stop, result)`` of each chunk, in order.
        """
        ranges = path.chunk_ranges(clients)
        workers = count_parallel_chunks(path.chunk, path.threads, clients, self.threads) if parallel else 1
        with map_in_threads(path.threads, workers) as map_items:
            results = map_items(lambda span: work(*span), ranges)
        return [(first, stop, result) for (first, stop), result in zip(ranges, results, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for configuration files and checkpoints, which :class:`PlanSettings` reads."""
        paths = {kind: asdict(path) for kind, path in sorted(self.paths.items())}
        hold = {} if self.hold == HOLD else {"hold_megabytes": self.hold >> 20}
        remember = {} if self.remember else {"remember": False}
        untimed = {} if self.untimed_threads == self.threads else {"untimed_threads": self.untimed_threads}
        return {
            "engine": self.engine,
            "chunk": self.chunk,
            "threads": self.threads,
            **untimed,
            **hold,
            **remember,
            "paths": paths,
        }

    def describe(self) -> list[str]:
        """Return a readable line for each choice and for each reason."""
        lines = [f"engine: {self.engine}, {self.threads} threads"]
        if self.untimed_threads < self.threads:
            lines[0] += f" at most, {self.untimed_threads} where no trial chose more"
        for kind, path in sorted(self.paths.items()):
            how = "one client at a time" if path.chunk == 1 else f"{path.chunk or 'all'} clients stacked"
            lines.append(f"{kind}: {how}, {path.threads} thread{'s' if path.threads > 1 else ''} each")
        lines += [f"{kind}: one client at a time ({reason})" for kind, reason in sorted(self.reasons.items())]
        return lines


class PlanSettings(Table):
    """The ``[plan]`` table of an experiment: the initial attributes of a :class:`Plan`.

    ``paths`` and ``untimed_threads`` are recorded by runs.
    """

    engine: EngineName = "auto"
    chunk: int = Field(0, ge=0)
    threads: int = Field(0, ge=0, le=MOST_THREADS)
    untimed_threads: int = Field(
        0,
        ge=0,
        le=MOST_THREADS,
        description="torch threads of work that no trial has timed",
        exclude_if=exclude_default(0),
    )
    hold_megabytes: int = Field(
        HOLD >> 20,
        ge=0,
        description="of clients' states in memory; the others are on disk",
        exclude_if=exclude_default(HOLD >> 20),
    )
    remember: bool = Field(
        True,
        description="whether later runs of this user take over what trials choose",
        exclude_if=exclude_default(True),
    )
    paths: dict[str, Path] = Field(default_factory=dict)

    def build(self) -> Plan:
        """Return a new plan with the recorded choices."""
        hold = self.hold_megabytes << 20
        return Plan(
            self.engine,
            self.chunk,
            self.threads,
            dict(self.paths),
            untimed_threads=self.untimed_threads,
            hold=hold,
            remember=self.remember,
        )


def count_parallel_chunks(chunk: int, threads: int, clients: int, available: int) -> int:
    """Return how many chunks of ``chunk`` clients (0: all) are computed at the same time with ``available`` threads."""
    return max(1, min(-(-clients // (chunk or clients)), available // threads))


def environment_sets_threads() -> bool:
    """Return whether the user has set torch's number of threads by an environment variable."""
    return any(os.environ.get(name) for name in THREAD_VARIABLES)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch compute with ``count`` threads inside the context, and restore its number of threads afterwards."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let torch and NumPy's and SciPy's linear algebra compute with ``count`` threads inside the context."""
    with use_threads(count), threadpool_limits(count, user_api="blas"):
        yield


@contextmanager
def map_in_threads(
    threads: int, workers: int
) -> Iterator[Callable[[Callable[[Item], Result], Sequence[Item]], list[Result]]]:
    """Yield a function that maps work over items, ``workers`` at a time with ``threads`` torch threads each."""
    with use_threads(threads):
        if workers == 1:
            yield lambda work, items: [work(item) for item in items]
            return
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            yield lambda work, items: list(pool.map(work, items))


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def open_device(name: str, where: str) -> torch.device:
    """Return the torch device called ``name``.

    Raises:
        PerfedError: if the kind does not exist or this machine has none; the message starts with ``where``.
    """
    if name.partition(":")[0] not in _DEVICES:
        raise PerfedError(f"{where}: unknown device; allowed: {', '.join(_DEVICES)}, or one with a number")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PerfedError(f"{where}: {str(error).splitlines()[0]}") from None
    return device


def describe_arithmetic(device: torch.device) -> str:
    """Return what the last digits of results depend on besides plan and cohort: processor, instruction set, torch."""
    parts = [read_processor_name(), torch.backends.cpu.get_cpu_capability()]
    if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):
        parts.append(f"oneDNN up to {limit}")
    if device.type != "cpu":
        parts.append(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    return ", ".join([*parts, f"torch {torch.__version__}"])
