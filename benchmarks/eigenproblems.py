"""What stands behind FLIC's distances: eigenproblems of many small Gram matrices, or products in their place.

``python benchmarks/eigenproblems.py [--repeats 3] [--json FILE]`` computes the nuclear norm and its gradient, the
polar factor, of many sets of centred rows, on one thread. perfed decomposes the smaller of the two Gram matrices.
Newton-Schulz iterations take batched products of the same matrices alone, by polynomials of degree 3 and 5, until
``|G G - G| / |G|`` is at rounding for every set; sets that are not there after 30 fall back to perfed's way. A row is
the least processor microseconds per set of turns that alternate, and the largest error of a gradient against a
singular value decomposition in float64. Sets are round (normal) or flat (their spread falls by 100 over the axes).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import limits
import torch
from torch import Tensor

from perfed.maths.divergence import inverse_root

Way = Callable[[Tensor], tuple[Tensor, Tensor]]
SIZES = [(3, 64), (6, 64), (10, 64), (20, 64), (33, 64), (50, 64), (33, 16), (50, 8)]
SETS = {(10, 64): (10, 100, 1000)}
MOST = 30


def by_eigenvalues(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return nuclear norms ``(sets,)`` and polar factors of ``x`` ``(sets, rows, k)``, as perfed does."""
    if x.shape[1] <= x.shape[2]:
        value, root = inverse_root(x @ x.mT, None, centred=True)
        return value, root @ x
    value, root = inverse_root(x.mT @ x, None)
    return value, x @ root


def by_products(x: Tensor, degree: int, told: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return the same by Newton-Schulz iterations on the smaller Gram matrix; ``told``: iterations, sets left over."""
    wide = x.shape[1] <= x.shape[2]
    gram = x @ x.mT if wide else x.mT @ x
    size = gram.flatten(1).norm(dim=1)[:, None, None]
    one, g = torch.eye(gram.shape[1], dtype=x.dtype), gram / size
    if wide:
        g += 1 / len(one)  # rows sum to zero: without an eigenvalue of one there, rounding grows with each product
    root = one / size.sqrt()
    close = 30 * torch.finfo(x.dtype).eps
    for done in range(MOST + 1):
        square = g @ g
        gap = (square - g).flatten(1).norm(dim=1) / g.flatten(1).norm(dim=1)
        if done == MOST or bool((gap <= close).all()):
            break
        if degree == 3:
            root, g = root @ (1.5 * one - 0.5 * g), torch.baddbmm(2.25 * g - 1.5 * square, square, g, alpha=0.25)
        else:
            step = 1.875 * one - 1.25 * g + 0.375 * square
            root, g = root @ step, step @ g @ step
    polar = root @ x if wide else x @ root
    value, left = (polar * x).sum((1, 2)), ~(gap <= close)
    if bool(left.any()):
        value[left], polar[left] = by_eigenvalues(x[left])
    if told is not None:
        told[:] = [done, int(left.sum())]
    return value, polar


def sets_of(sets: int, rows: int, k: int, *, flat: bool, dtype: torch.dtype) -> Tensor:
    """Return centred rows ``(sets, rows, k)``."""
    x = torch.randn(sets, rows, k, dtype=torch.float64)
    if flat:
        x = x * torch.logspace(0, -2, k, dtype=torch.float64)
    return (x - x.mean(1, keepdim=True)).to(dtype)


def error(x: Tensor, way: Way) -> float:
    """Return the largest error of a set's polar factor over the size of the true one."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    true = u * (s > 1e-6 * s[:, :1])[:, None] @ v
    return float(((way(x)[1] - true).flatten(1).norm(dim=1) / true.flatten(1).norm(dim=1)).max())


def main() -> None:
    """Print a line for each size, dtype, spectrum and number of sets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    here = limits.measure(time.process_time)
    print(f"one thread: {here.gflops:.0f} GFLOP/s, {here.gbytes:.1f} GB/s")
    kept: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.float64):
        for rows, k in SIZES:
            for sets, flat in itertools.product(SETS.get((rows, k), (100,)), (False, True)):
                x = sets_of(sets, rows, k, flat=flat, dtype=dtype)
                ways: dict[str, Way] = {
                    "eigenvalues": by_eigenvalues,
                    "degree 3": partial(by_products, degree=3),
                    "degree 5": partial(by_products, degree=5),
                }
                seconds = limits.in_turns({name: partial(way, x) for name, way in ways.items()}, arguments.repeats)
                print(f"\n{sets} sets of {rows} x {k}, {'flat' if flat else 'round'}, {str(dtype)[6:]}")
                for name, way in ways.items():
                    told: list[int] = []
                    if name != "eigenvalues":
                        way(x, told=told)  # type: ignore[call-arg]
                    each, off = 1e6 * seconds[name] / sets, error(x, way)
                    more = f", {told[0]} iterations, {told[1]} sets fell back" if told else ""
                    share = here.share(*limits.counted(partial(way, x)), seconds[name])
                    print(f"{name:11} {each:7.2f} us, error {off:.0e}, {share}{more}", flush=True)
                    row = {"sets": sets, "rows": rows, "k": k, "flat": flat, "dtype": str(dtype)[6:], "way": name}
                    kept.append({**row, "us": each, "error": off, "told": told})
    if arguments.json:
        command = " ".join(["python", *sys.argv])
        arguments.json.write_text(json.dumps({"command": command, "limits": here._asdict(), "rows": kept}, indent=1))


if __name__ == "__main__":
    main()
