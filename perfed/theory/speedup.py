"""What SRPFL's theory says of a schedule: rounds to a distance, the time that they take, and its bounds on both."""

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


def srpfl_time_bound(clients: int, a: float, *, excess: float, rate: float = 1.0, cost: float = 0.0) -> float:
    """Upper bound of SRPFL's expected time to ``excess`` times the floor of N clients.

    ``log N (6 (c + 1) + 4 l) / log(1 / (1-a)) / rate`` with c = cost rate and l = log(1 / (excess - 1)); logarithms are
    natural. ``a`` is theorem 4.7's (:func:`perfed.theory.algorithms.contraction_constant`), or a measured contraction;
    that theorem's absolute constants, in its conditions on samples and n_0, are not published and not needed.

    Source: Tziotis et al. 2023, lemma B.2 (equation 217).
    """
    return math.log(clients) * _srpfl(excess, rate * cost) / -math.log1p(-a) / rate


def full_time_bound(clients: int, a: float, *, excess: float, rate: float = 1.0) -> float:
    """What lemma B.3 says that full participation takes at least: ``log N (log N + 2 l) / log(1 / (1-a)) / rate``.

    Its number of rounds leaves out ``2 log((1 + sqrt(1-a)) sqrt(n_0 / (1-a)))`` of the numerator (equations 252, 253),
    so that it is a lower bound only where N or the cost of communication is large, and above the expected time
    elsewhere.

    Source: Tziotis et al. 2023, lemma B.3 (equation 248).
    """
    return math.log(clients) * _full(clients, excess) / -math.log1p(-a) / rate


def speed_up_bound(clients: int, *, excess: float, rate: float = 1.0, cost: float = 0.0) -> float:
    """The speed-up that theorem 4.9 promises: ``(log N + 2 l) / (6 (c + 1) + 4 l)``, in which a and n_0 cancel.

    Source: Tziotis et al. 2023, equation 256.
    """
    return _full(clients, excess) / _srpfl(excess, rate * cost)


def speed_up_slope(*, excess: float, rate: float = 1.0, cost: float = 0.0) -> float:
    """The slope of :func:`speed_up_bound` in log N."""
    return 1 / _srpfl(excess, rate * cost)


def _srpfl(excess: float, c: float) -> float:
    return 6 * (c + 1) + 4 * math.log(1 / (excess - 1))


def _full(clients: int, excess: float) -> float:
    return math.log(clients) + 2 * math.log(1 / (excess - 1))
