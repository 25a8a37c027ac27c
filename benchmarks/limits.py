"""What this machine can do at most: arithmetic of a matrix product, bytes of a copy, one or more threads."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


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


def measure(tries: int = 5) -> Limits:
    """Return float32 GFLOP/s of a product of two 1024 x 1024 matrices, and GB/s (read and written) of a 256 MB copy."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source = torch.zeros(64 << 20)
    target = torch.empty_like(source)
    product, copy = float("inf"), float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        torch.mm(a, b)
        product = min(product, time.perf_counter() - begin)
        begin = time.perf_counter()
        target.copy_(source)
        copy = min(copy, time.perf_counter() - begin)
    return Limits(2 * 1024**3 / product / 1e9, 2 * 4 * source.numel() / copy / 1e9)


if __name__ == "__main__":
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        print(f"{threads} threads: {measure()}")
