"""FedDAR's second-order aggregation at the server: 100 clients, 7 domains, 10 classes, 64 features, on one thread.

``python benchmarks/second_order.py [--repeats N]`` prints the time to fold the clients' Hessians (650 x 650 for each
domain, made one client at a time as in a run; making them is the clients' work and timed apart) and to solve for the
heads, damped and with the pseudo-inverse, and the peak memory of the process. Then the same heads from all Hessians
stacked. The fastest of N runs counts, in processor time, which other programs disturb less than wall time; the wall
time of the fastest run stands beside it.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import limits
import torch
from torch import Tensor

from perfed.methods.feddar.heads import softmax_hessian, with_ones
from perfed.methods.feddar.second_order import Quadratics, add_quadratics, minimise_quadratics

CLIENTS, DOMAINS, CLASSES, FEATURES, SAMPLES = 100, 7, 10, 64, 500
SIZE = CLASSES * (FEATURES + 1)
DAMPING = 0.1


class Stopwatch:
    """Processor and wall seconds of everything it was asked to call."""

    def __init__(self) -> None:
        self.processor = self.wall = 0.0

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        result = work(*args)
        self.processor += time.process_time() - processor
        self.wall += time.perf_counter() - wall
        return result


def replies(clients: Stopwatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every client's head minus the sent one, Hessians and counts, made when asked for."""
    for client in range(CLIENTS):
        generator = torch.Generator().manual_seed(client)
        features = with_ones(torch.randn(SAMPLES, FEATURES, generator=generator))
        logits = torch.randn(SAMPLES, CLASSES, generator=generator)
        domain = torch.randint(DOMAINS, (SAMPLES,), generator=generator)
        moved = 0.1 * torch.randn(DOMAINS, SIZE, 1, generator=generator)
        hessians = clients.call(softmax_hessian, features, logits, domain, DOMAINS)
        yield moved, hessians, torch.bincount(domain, minlength=DOMAINS)


def folded(clients: Stopwatch, folds: Stopwatch) -> Quadratics:
    total: Quadratics | None = None
    for reply in replies(clients):
        total = folds.call(add_quadratics, total, *reply)
    assert total is not None
    return total


def stacked(moved: Tensor, hessians: Tensor, counts: Tensor) -> Tensor:
    """The heads' changes from all Hessians at once, domain by domain, in one line per formula."""
    shares = counts.double() / counts.double().sum(0)
    changes = []
    for m in range(DOMAINS):
        change = (hessians[:, m] @ (shares[:, m, None, None] * moved[:, m].double())).sum(0)
        matrix = torch.tensordot(shares[:, m], hessians[:, m], 1)
        delta = DAMPING * matrix.trace() / SIZE
        changes.append(torch.linalg.solve(matrix + delta * torch.eye(SIZE), change))
    return torch.stack(changes)


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    old = torch.zeros(DOMAINS, SIZE, 1)
    best: dict[str, Stopwatch] = {}
    for _ in range(repeats):
        found = {name: Stopwatch() for name in ("clients", "folds", "damped", "pseudo-inverse")}
        total = folded(found["clients"], found["folds"])
        heads = found["damped"].call(lambda t: minimise_quadratics(t, old, damping=DAMPING), total)
        found["pseudo-inverse"].call(lambda t: minimise_quadratics(t, old), total)
        best = {name: min(best.get(name, s), s, key=lambda w: w.processor) for name, s in found.items()}
    memory = peak_mb()
    print("| work | processor ms | wall ms |\n|---|---|---|")
    for name, label in (
        ("clients", "Hessians, all clients"),
        ("folds", "folds"),
        ("damped", "solves, damped"),
        ("pseudo-inverse", "solves, pseudo-inverse"),
    ):
        print(f"| {label} | {1000 * best[name].processor:.0f} | {1000 * best[name].wall:.0f} |", flush=True)
    count = limits.counted(lambda: folded(Stopwatch(), Stopwatch()))
    share = limits.measure().share(*count, best["clients"].wall + best["folds"].wall)
    print(f"Hessians and folds: {share}")
    print(f"peak memory: {memory} MB; one client's Hessians: {DOMAINS * SIZE**2 * 8 >> 20} MB")

    rows, naive = list(replies(Stopwatch())), Stopwatch()
    plain = naive.call(lambda: stacked(*(torch.stack(column) for column in zip(*rows, strict=True))))
    assert torch.allclose(heads.double(), plain, rtol=1e-4, atol=1e-6)
    server = best["folds"].processor + best["damped"].processor
    print(
        f"all Hessians at once: {1000 * naive.processor:.0f} ms, {naive.processor / server:.1f} x the folds and solves,"
    )
    print(f"peak memory {peak_mb()} MB, {peak_mb() / memory:.1f} x")


if __name__ == "__main__":
    main()
