"""What this machine can do at most, and what the rounds of a run take.

``python benchmarks/limits.py`` prints arithmetic of a matrix product and bytes of a copy, with one and all threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PrivateAttr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from usage import usage

from perfed.run.callback import Callback


class Limits(NamedTuple):
    """The best of a few tries on this machine, now."""

    gflops: float
    gbytes: float

    def share(self, flop: float, bytes_: float, seconds: float) -> str:
        """Return achieved GFLOP/s and GB/s, each with its share of the limit."""
        arithmetic, memory = flop / seconds / 1e9, bytes_ / seconds / 1e9
        return (
            f"{arithmetic:.1f} GFLOP/s ({arithmetic / self.gflops:.0%}), "
            f"{memory:.1f} GB/s ({memory / self.gbytes:.0%})"
        )  # fmt: skip


def wall() -> float:
    """Return wall seconds, once all work of a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def least(work: Callable[[], object], tries: int = 5, clock: Callable[[], float] = wall) -> float:
    """Return the least seconds, by a clock, of a few tries of ``work``."""
    seconds = float("inf")
    for _ in range(tries):
        begin = clock()
        work()
        seconds = min(seconds, clock() - begin)
    return seconds


def in_turns(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least processor seconds of each work, one after the other so often."""
    seconds = dict.fromkeys(work, float("inf"))
    for name, each in [*work.items()] * repeats:
        each()  # the caches are then this one's
        seconds[name] = min(seconds[name], least(each, 2, time.process_time))
    return seconds


class _Bytes(TorchDispatchMode):
    """Bytes of the tensors that operations read and write; views move none."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:
            schema = func._schema
            changed = [a for a, said in zip(args, schema.arguments, strict=False) if said.is_write]
            new = made if all(said.alias_info is None for said in schema.returns) else None
            self.total += sum(t.nbytes for t in tree_leaves((args, kwargs, changed, new)) if isinstance(t, Tensor))
        return made


def counted(work: Callable[[], object]) -> tuple[float, float]:
    """Return the FLOP and the bytes of what ``work`` does with tensors, in this thread.

    FLOP are those of matrix products and convolutions, forward and backward, two for each product and sum. Bytes are
    those of all that operations read and write, as if no cache were there: with one they can be more than a copy's.
    """
    moved = _Bytes()  # type: ignore[no-untyped-call]
    with moved, FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops()), float(moved.total)


def product_gflops(size: int, device: torch.device | str = "cpu", clock: Callable[[], float] = wall) -> float:
    """Return GFLOP/s of a product of two float32 matrices of that size."""
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    return 2 * size**3 / least(lambda: torch.mm(a, b), clock=clock) / 1e9


def measure(clock: Callable[[], float] = wall) -> Limits:
    """Return float32 GFLOP/s of a product of two 1024 x 1024 matrices, and GB/s (read and written) of a 256 MB copy."""
    source = torch.zeros(64 << 20)
    target = torch.empty_like(source)
    copied = least(lambda: target.copy_(source), clock=clock)
    return Limits(product_gflops(1024, clock=clock), 2 * source.nbytes / copied / 1e9)


class Laps(Callback):
    """Seconds of each round by a clock, from the first round on."""

    clock: Callable[[], float] = wall
    _marks: list[float] = PrivateAttr(default_factory=list)

    def begin(self, run: Any) -> None:
        """Start counting."""
        self._marks.append(self.clock())

    def after_round(self, run: Any, record: Any) -> bool:
        """Count a round."""
        self._marks.append(self.clock())
        return False

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Those of all rounds but the first, which tries ways."""
        return np.diff(self._marks)[1:]


if __name__ == "__main__":
    usage(__doc__)
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        print(f"{threads} threads: {measure()}")
