"""What this machine can do at most, and what the rounds of a run take.

``python benchmarks/limits.py`` prints arithmetic of a matrix product and bytes of a copy, with one and all threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PrivateAttr

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


def least(work: Callable[[], object], tries: int = 5) -> float:
    """Return the least wall seconds of a few tries of ``work``."""
    seconds = float("inf")
    for _ in range(tries):
        begin = wall()
        work()
        seconds = min(seconds, wall() - begin)
    return seconds


def product_gflops(size: int, device: torch.device | str = "cpu") -> float:
    """Return GFLOP/s of a product of two float32 matrices of that size."""
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    return 2 * size**3 / least(lambda: torch.mm(a, b)) / 1e9


def measure() -> Limits:
    """Return float32 GFLOP/s of a product of two 1024 x 1024 matrices, and GB/s (read and written) of a 256 MB copy."""
    source = torch.zeros(64 << 20)
    target = torch.empty_like(source)
    return Limits(product_gflops(1024), 2 * 4 * source.numel() / least(lambda: target.copy_(source)) / 1e9)


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
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        print(f"{threads} threads: {measure()}")
