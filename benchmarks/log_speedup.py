"""SRPFL's speed-up grows like log N: theorem 4.9 of Tziotis et al. 2023 on the linear problem, measured.

``python benchmarks/log_speedup.py [--seeds N] [--cost C]``

For N = 2^4 .. 2^10 clients whose times are Exp(1), drawn anew in every round, FedRep on the linear representation
problem is run with full participation and with SRPFL's schedule. Both take as many rounds as lemma B.1 needs, from the
measured contraction and floor, to come to ``EXCESS`` times the floor of N clients. The ratio of their times is fitted
by a line in log N. Beside each measured number is what the paper promises (lemmas B.2 and B.3, theorem 4.9), from the
measured contraction.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import linear_theory as theory
import torch
from torch import Tensor

from perfed import rng
from perfed.datasets.linear import LinearProblem
from perfed.participation import schedule

FIRST, STEP, EXCESS = 8, 1 / 8, 1.1
NUMBERS = [2**e for e in range(4, 11)]
F64 = torch.float64
CONTRACTION = 1 - (1 - STEP) ** 2


@dataclass(frozen=True)
class Trajectory:
    """Distance to the truth before each round and at the end, and each round's participants and seconds."""

    distances: Tensor
    participants: list[int]
    seconds: list[float]

    def total(self, cost: float) -> float:
        """Seconds of all rounds with a communication of ``cost`` seconds each."""
        return sum(self.seconds) + cost * len(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """SRPFL and full participation on the same problem of N clients; both should come to ``target``."""

    clients: int
    target: float
    srpfl: Trajectory
    fedrep: Trajectory

    def speed_up(self, cost: float) -> float:
        """Time of full participation over that of SRPFL."""
        return self.fedrep.total(cost) / self.srpfl.total(cost)


def problem_of(clients: int, seed: int) -> LinearProblem:
    """6 dimensions, a representation of 2, 8 fresh samples with noise per client and round."""
    return theory.client_problem(clients, 6, 2, samples=8, noise=1.0, seed=seed)


def floors() -> Tensor:
    """Mean distance at rest ``(4, 3)`` of 16, 32, 64, 128 participants in three problems, from a start at the truth."""
    table = torch.empty(4, 3, dtype=F64)
    for row, n in enumerate(NUMBERS[:4]):
        for column in range(3):
            problem = problem_of(n, 100 + column)
            everyone = [torch.arange(n)] * 90
            bases = theory.trajectory(theory.fedrep_round, problem.sample, problem.basis, STEP, everyone)
            table[row, column] = theory.principal_angle_distance(bases[25:], problem.basis).mean()
    return table


def simulate(
    problem: LinearProblem, start: Tensor, sizes: Sequence[int], lengths: Sequence[int], seed: int
) -> Trajectory:
    """The fastest ``sizes[r]`` of all clients take part in each of the ``lengths[r]`` rounds of stage r."""
    clients, participants, seconds = len(problem.heads), [], []

    def fastest() -> Iterator[Tensor]:
        for t, n in enumerate(n for n, tau in zip(sizes, lengths, strict=True) for _ in range(tau)):
            drawn = -torch.log1p(-rng.uniform(rng.key(seed, "times", t), clients, F64))
            who = drawn.argsort()[:n]
            participants.append(n)
            seconds.append(float(drawn[who[-1]]))
            yield who.sort().values

    bases = theory.trajectory(theory.fedrep_round, problem.sample, start, STEP, fastest())
    return Trajectory(theory.principal_angle_distance(bases, problem.basis), participants, seconds)


def compare(clients: int, seed: int, unit: float) -> Comparison:
    """Both methods on the problem of ``seed``; ``unit / sqrt(n)`` is the floor of n participants."""
    a = CONTRACTION
    problem = problem_of(clients, seed)
    start = theory.moment_start(problem.sample(torch.arange(FIRST), 0), 2)
    distance = float(theory.principal_angle_distance(start, problem.basis))
    sizes, floor, target = schedule.stage_sizes(clients, FIRST), unit / FIRST**0.5, EXCESS * unit / clients**0.5
    opening = schedule.doubling_points(clients, FIRST, a)[0] / schedule.error_floor(a, 1) * floor
    lengths = schedule.stage_lengths(clients, FIRST, a, excess=EXCESS)
    lengths[0] = theory.rounds_to_reach(opening, floor, a, distance)
    full = theory.rounds_to_reach(target, unit / clients**0.5, a, distance)
    srpfl = simulate(problem, start, sizes, lengths, seed)
    return Comparison(clients, target, srpfl, simulate(problem, start, [clients], [full], seed + 1000))


def comparisons(seeds: int, rest: Tensor) -> list[Comparison]:
    """All N, ``seeds`` problems each; ``rest`` are the :func:`floors`."""
    unit = float((rest * torch.tensor(NUMBERS[:4]).sqrt()[:, None]).mean())
    return [compare(clients, seed, unit) for clients in NUMBERS for seed in range(seeds)]


def regression(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line and its standard error."""
    xs, ys = torch.tensor(x, dtype=F64), torch.tensor(y, dtype=F64)
    centred = xs - xs.mean()
    slope = (centred * ys).sum() / centred.square().sum()
    left = ys - ys.mean() - slope * centred
    return float(slope), float((left.square().sum() / (len(y) - 2) / centred.square().sum()).sqrt())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="problems for each N")
    parser.add_argument("--cost", type=float, default=0.0, help="seconds of communication per round, in mean times")
    options = parser.parse_args()
    table = comparisons(options.seeds, floors())
    print("| N | FedRep | B.3: at least | FedRep-SRPFL | B.2: at most | speed-up | 4.9: at least |")
    print("|---|---|---|---|---|---|---|")
    for clients in NUMBERS:
        rows = [row for row in table if row.clients == clients]
        full, srpfl, ratio = (
            sum(values) / len(rows)
            for values in (
                [row.fedrep.total(options.cost) for row in rows],
                [row.srpfl.total(options.cost) for row in rows],
                [row.speed_up(options.cost) for row in rows],
            )
        )
        least = theory.full_time_bound(clients, CONTRACTION, excess=EXCESS)
        most = theory.srpfl_time_bound(clients, CONTRACTION, excess=EXCESS, cost=options.cost)
        promised = theory.speed_up_bound(clients, excess=EXCESS, cost=options.cost)
        print(f"| {clients} | {full:.1f} | {least:.1f} | {srpfl:.1f} | {most:.1f} | {ratio:.3f} | {promised:.3f} |")
    logs = [math.log(row.clients) for row in table]
    slope, error = regression(logs, [row.speed_up(options.cost) for row in table])
    print(f"speed-up = constant + ({slope:.4f} +- {error:.4f}) log N, communication {options.cost:g}")
    print(f"the bound of theorem 4.9 has the slope {theory.speed_up_slope(excess=EXCESS, cost=options.cost):.4f}")


if __name__ == "__main__":
    main()
