"""CENTAUR's ball is as wide as 1 / epsilon and d: Shen et al. 2023 on the linear representation problem, measured.

``python benchmarks/centaur.py``

n clients share a basis B* ``(d, k)`` and have heads of their own. In each round every client solves for its head,
takes the gradient of its loss in B, and cuts it to the norm ``C = CUT sqrt(d)``; the server adds noise of the
multiplier that T releases need at (epsilon, delta), steps along the mean and orthonormalises (their Algorithm 1 with
one local step; in perfed, FedRep under ``privacy.unit = "client"``). The distance of B to B* falls linearly to a
plateau: their theorem says that it is as wide as 1 / epsilon, and better by sqrt(d) than the d^1.5 known before. Why d:
noise of ``z C / n`` in each entry has the operator norm ``z C (sqrt(d) + sqrt(k)) / n``, and C grows like sqrt(d), as
the norm of a client's gradient does, or else it is cut. Both slopes are those of lines through logarithms.
Numbers are kept in ``docs/results/centaur-linear.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import linear_theory as theory
import torch
from log_speedup import regression
from scipy.stats import t as student  # type: ignore[import-untyped]
from torch import Tensor
from usage import usage

from perfed import rng
from perfed.datasets.linear import F64, Batch, make_key, orthonormalise
from perfed.privacy.accountant import Releases, find_noise_multiplier

FILE = Path(__file__).parent.parent / "docs/results/centaur-linear.json"
CLIENTS, K, SAMPLES, DELTA = 6000, 2, 8, 1e-5
ROUNDS, STEP, CUT = 60, 1 / 4, 1.0
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0)
DIMENSIONS = (8, 16, 32, 64)
AT_EPSILON, AT_DIMENSION = 2.0, 16
SEEDS = range(3)


def private_mean(gradients: Tensor, cut: float, noise: float, key: Tensor) -> Tensor:
    """Mean of clients' gradients ``(n, d, k)``, each cut to the norm ``cut``, with noise ``noise cut / n``."""
    norms = gradients.flatten(1).norm(dim=1).clamp_min(1e-12)
    mean: Tensor = (gradients * (cut / norms).clamp(max=1)[:, None, None]).mean(0)
    drawn: Tensor = rng.normal(key, mean.numel(), F64).view_as(mean)
    return mean + (noise * cut / len(gradients)) * drawn


def plateau(d: int, noise: float, seed: int, clients: int = CLIENTS, rounds: int = ROUNDS) -> tuple[float, float]:
    """Mean distance to B* in the last third of the rounds, and the largest share of clients cut in one of them.

    Args:
        d: dimension of the inputs.
        noise: multiplier of each round.
        seed: of the problem and of the noise.
        clients: all take part in each round, with new samples.
        rounds: of the run.
    """
    problem, everyone = (
        theory.client_problem(clients, d, K, samples=SAMPLES, noise=0.0, seed=seed),
        torch.arange(clients),
    )
    start = theory.moment_start(problem.sample(everyone, 0), K)
    cut, shares = CUT * math.sqrt(d), [0.0]

    def round_(basis: Tensor, for_heads: Batch, for_basis: Batch, step: float) -> Tensor:
        heads = theory.solve_heads(*theory.head_statistics(basis, for_heads))
        gradients = theory.basis_gradients(basis, heads, for_basis)[:, 0] / SAMPLES
        shares.append(float((gradients.flatten(1).norm(dim=1) > cut).to(F64).mean()))
        return orthonormalise(
            basis - step * private_mean(gradients, cut, noise, make_key(seed, "centaur", len(shares)))
        )

    bases = theory.trajectory(round_, problem.sample, start, STEP, [everyone] * rounds)
    distances = theory.principal_angle_distance(bases, problem.basis)
    return float(distances[-(rounds // 3) :].mean()), max(shares[-(rounds // 3) :])


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of log y in log x, and half of its 95 % interval."""
    slope, error = regression([math.log(v) for v in x], [math.log(v) for v in y])
    return slope, float(student.ppf(0.975, len(x) - 2)) * error


def measured() -> dict[str, Any]:
    """Both sweeps and their slopes."""

    def rows(pairs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        found = []
        for d, epsilon in pairs:
            noise = find_noise_multiplier(epsilon, DELTA, Releases(ROUNDS))
            runs = [plateau(d, noise, seed) for seed in SEEDS]
            found.append({"d": d, "epsilon": epsilon, "noise": noise, "distances": [run[0] for run in runs]})
            found[-1]["cut"] = max(run[1] for run in runs)
            print(found[-1], flush=True)
        return found

    by_epsilon = rows([(AT_DIMENSION, epsilon) for epsilon in EPSILONS])
    by_d = rows([(d, AT_EPSILON) for d in DIMENSIONS])
    each = {
        "epsilon": [(1 / row["epsilon"], far) for row in by_epsilon for far in row["distances"]],
        "noise": [(row["noise"], far) for row in by_epsilon for far in row["distances"]],
        "d": [(row["d"], far) for row in by_d for far in row["distances"]],
    }
    slopes = {name: line(*zip(*points, strict=True)) for name, points in each.items()}
    noises = [row["noise"] for row in by_epsilon]
    slopes["noise in 1 / epsilon"] = line([1 / row["epsilon"] for row in by_epsilon], noises)
    return {"by epsilon": by_epsilon, "by d": by_d, "slopes": slopes}


def main() -> None:
    """Measure, print and keep."""
    found = measured()
    for name, (slope, half) in found["slopes"].items():
        print(f"{name}: slope {slope:.3f} +- {half:.3f}")
    FILE.write_text(json.dumps({"command": "python benchmarks/centaur.py", **found}, indent=1) + "\n")


if __name__ == "__main__":
    usage(__doc__)
    main()
