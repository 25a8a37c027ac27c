"""SRPFL's schedule: how many clients take part in each stage, and for how long.

Times are those of clients whose speeds are exponential: a round lasts as long as its slowest participant."""

from __future__ import annotations

import math
from itertools import pairwise

from perfed.errors import PerfedError


def error_floor(a: float, ratio: float) -> float:
    """Where the bound of theorem 4.7 comes to rest with n = ratio n_0.

    ``a / (sqrt(ratio (1-a)) (1 - sqrt(1-a)))``, which is ``(1 + sqrt(1-a)) / sqrt(ratio (1-a))``.
    """
    _check(0 < a < 1, "a", a, "strictly between 0 and 1")
    return (1 + math.sqrt(1 - a)) / math.sqrt(ratio * (1 - a))


def order_statistic(n: int, clients: int, rate: float = 1.0) -> float:
    """Expected time of the n-th fastest of N clients, times ~ Exp(rate): ``(H_N - H_{N-n}) / rate``."""
    _check(1 <= n <= clients, "n", n, f"from 1 to the number of clients, {clients}")
    _check(rate > 0, "rate", rate, "above 0")
    return math.fsum(1 / j for j in range(clients - n + 1, clients + 1)) / rate


def stage_sizes(clients: int, first: int) -> list[int]:
    """Participants of SRPFL's stages: n_0, 2 n_0, 4 n_0, ... and N (Tziotis et al. 2023, algorithm 2)."""
    _check(1 <= first <= clients, "n0", first, f"from 1 to the number of clients, {clients}")
    sizes = [first]
    while sizes[-1] < clients:
        sizes.append(min(clients, 2 * sizes[-1]))
    return sizes


def doubling_points(clients: int, first: int, a: float, *, rate: float = 1.0, cost: float = 0.0) -> list[float]:
    """X_1, X_2, ...: the distances at which twice as many clients make more progress per unit of time.

    ``X_{r+1} = floor_r (1 + (E_r + C)(1 - q) / (E_{r+1} - E_r))`` with E_r = E[T_(n_r)], q = sqrt(n_r / n_{r+1})
    (1/sqrt(2), except where N is not n_0 times a power of 2) and :func:`error_floor` of n_r / n_0.

    Source: Tziotis et al. 2023, lemma B.1 (equation 202, whose index r is that of the stage that ends).
    """
    sizes = stage_sizes(clients, first)
    times = [order_statistic(n, clients, rate) for n in sizes]
    points = []
    for (n, now), (larger, later) in pairwise(zip(sizes, times, strict=True)):
        gain = (now + cost) * (1 - math.sqrt(n / larger)) / (later - now)
        points.append(error_floor(a, n / first) * (1 + gain))
    return points


def middle_stage_rounds(clients: int, first: int, a: float) -> list[float]:
    """t_r of the stages between the first and the last, before rounding.

    The rounds in which a distance falls from X_r to X_{r+1} (:func:`doubling_points`), moving towards the floor of n_r
    by sqrt(1-a) a round: ``t_r = 2 log(g_r (E_{r+1} - E_r) / (E_r - E_{r-1})) / log(1 / (1-a))`` with
    ``g_r = (1 - q_{r-1}) / (q_{r-1} (1 - q_r))``, in which rate and cost cancel. g_r is the sqrt(2) of equation 203,
    except in the last of these stages where N is not n_0 times a power of 2. Negative where the bound of stage r holds
    at once.

    Source: Tziotis et al. 2023, lemma B.1.
    """
    floors = [error_floor(a, n / first) for n in stage_sizes(clients, first)[1:-1]]
    ends = pairwise(doubling_points(clients, first, a))
    return [
        2 * math.log((start - floor) / (end - floor)) / -math.log1p(-a)
        for floor, (start, end) in zip(floors, ends, strict=True)
    ]


def stage_lengths(clients: int, first: int, a: float, *, excess: float) -> list[int]:
    """tau_r, the rounds of each stage of :func:`stage_sizes`, at least 1 each.

    The middle stages take t_r, in which the rate of the exponential times and the cost of communication cancel; the
    last ends at ``excess`` times the floor of N: ``2 log(1 / (excess - 1)) / log(1 / (1-a))``. The first has one round:
    it ends at X_1, which is above the floor of n_0, at least 2 for every a, and no distance is above 1. Where n_0 = N
    that stage is the only one.

    ``clients`` is N, ``first`` n_0, ``a`` strictly between 0 and 1 (the theorem's is at most 1/4), ``excess`` the c-hat
    of the target error (equation 12), between 1 and sqrt(2).

    Source: Tziotis et al. 2023, lemma B.1 and equations 203, 207, 240.
    """
    _check(1 < excess < math.sqrt(2), "excess", excess, "strictly between 1 and the root of 2")
    _check(0 < a < 1, "a", a, "strictly between 0 and 1")
    if len(stage_sizes(clients, first)) == 1:
        return [1]
    closing = 2 * math.log(1 / (excess - 1)) / -math.log1p(-a)
    return [1, *(max(1, math.ceil(t)) for t in (*middle_stage_rounds(clients, first, a), closing))]


def _check(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise PerfedError(f"{name} is {value}, but must be {allowed}")
