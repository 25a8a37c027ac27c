"""The server's step of FedPAC: weights of all clients' heads from their feature statistics, on one thread.

``python benchmarks/combination.py [--repeats N]`` prints the time of the Gram matrix and of the quadratic programmes
(everything else) for 25 to 200 clients, 62 classes and 128 features, float32 statistics: clients in five groups
(``groups``: a head is combined from about a third of the clients) and clients that hardly differ (``alike``: from
almost all). Then quadprog on every whole problem in place of ``simplex_qp``, the form with covariances, and the
statistics of 100 clients with 600 samples each. The fastest of N runs counts, in processor time, which other programs
disturb less than wall time; the wall time of the fastest run stands beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import limits
import numpy as np
import quadprog
import torch
from torch import Tensor

from perfed.methods.fedpac.combination import (
    centred_gram,
    client_statistics,
    combination_weights,
    combination_weights_general,
)

CLASSES, FEATURES, SAMPLES = 62, 128, 600


def statistics(clients: int, apart: float) -> tuple[Tensor, Tensor, Tensor]:
    """``h``, V and n of clients in five groups whose means lie ``apart``, in units of the sampling error's size."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(5, CLASSES, FEATURES, generator=generator).repeat_interleave(clients // 5, 0)
    h = apart * groups + torch.randn(clients, CLASSES, FEATURES, generator=generator)
    v = (1 + torch.rand(clients, generator=generator)) * CLASSES * FEATURES * SAMPLES
    return h, v, torch.full((clients,), SAMPLES)


def fastest(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Processor time and wall time in seconds, each the least of the repeats."""
    found = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        call()
        found.append((time.process_time() - processor, time.perf_counter() - wall))
    return min(x for x, _ in found), min(x for _, x in found)


def whole_problems(h: Tensor, v: Tensor, n: Tensor) -> None:
    gram, m = centred_gram(h.flatten(1).double()).numpy(), len(h)
    noise = np.diag((v / n).double().numpy())
    constraints = np.concatenate([np.ones((m, 1)), np.eye(m)], axis=1)
    bounds = np.eye(m + 1)[0]
    for i in range(m):
        p = gram[i, i] - gram[i][:, None] - gram[i] + gram + noise
        quadprog.solve_qp(2 * p / p.max(), np.zeros(m), constraints, bounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| clients | statistics | heads combined | Gram ms | QPs ms | all ms | wall ms | quadprog alone ms |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, apart in (("groups", 3.0), ("alike", 0.2)):
        for clients in (25, 50, 100, 200):
            h, v, n = statistics(clients, apart)
            flat = h.flatten(1)
            gram, _ = fastest(partial(centred_gram, flat.double()), repeats)
            whole, wall = fastest(partial(combination_weights, h, v, n), repeats)
            alone, _ = fastest(partial(whole_problems, h, v, n), 1)
            combined = combination_weights(h, v, n)
            assert not combined.failed.any()
            support = (combined.weights > 1e-9).sum(1).double().mean()
            times = [1000 * x for x in (gram, whole - gram, whole, wall, alone)]
            print(f"| {clients} | {kind} | {support:.0f} | " + " | ".join(f"{x:.1f}" for x in times) + " |", flush=True)
    share = limits.measure().share(*limits.counted(partial(centred_gram, flat.double())), gram)
    print(f"Gram matrix of {clients} clients: {share}")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(100 * SAMPLES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (len(features),), generator=generator)
    owner = torch.arange(100).repeat_interleave(SAMPLES)
    for moments in (False, True):
        used, _ = fastest(partial(client_statistics, features, labels, owner, 100, CLASSES, second_moments=moments), 3)
        print(f"statistics of 100 clients x {SAMPLES} samples, second moments {moments}: {1000 * used:.0f} ms")
    found = client_statistics(features, labels, owner, 100, CLASSES, second_moments=True)
    second = found.second_moments
    assert second is not None
    used, _ = fastest(partial(combination_weights_general, found.means, second, torch.full((100,), 600)), 1)
    print(f"the form with covariances, 100 clients: {1000 * used:.0f} ms")


if __name__ == "__main__":
    main()
