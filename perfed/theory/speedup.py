"""What SRPFL's theory says of a schedule: rounds to a distance, and the time that they take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfed.errors import PerfedError
from perfed.participation.schedule import order_statistic


def rounds_to_reach(target: float, floor: float, a: float, start: float = 1.0) -> int:
    """Rounds in which a distance falls from ``start`` to ``target``, moving towards ``floor`` by sqrt(1-a) a round.

    Source: Tziotis et al. 2023, equations 207 and 252 (the bound of theorem 4.7 taken as an equality).
    """
    if target <= floor:
        raise PerfedError(f"the target distance is {target}, but must be above the floor, {floor:.4g}")
    return 0 if target >= start else math.ceil(2 * math.log((target - floor) / (start - floor)) / math.log1p(-a))


def expected_time(
    sizes: Sequence[int], lengths: Sequence[int], clients: int, *, rate: float = 1.0, cost: float = 0.0
) -> float:
    """Expected wall-clock time ``sum_r tau_r (E[T_(n_r)] + C)`` of a schedule (Tziotis et al. 2023, section 4)."""
    rounds = zip(sizes, lengths, strict=True)
    return math.fsum(tau * (order_statistic(n, clients, rate) + cost) for n, tau in rounds)
