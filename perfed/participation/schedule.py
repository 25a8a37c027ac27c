"""The schedule of SRPFL, with the number of clients and rounds of each stage, and the phase of a run.

The schedule assumes clients with exponential times and rounds that last as long as their slowest participant. Settings,
messages and checkpoints use the papers' word "stage" for a phase; elsewhere a stage is a part of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, Field

from perfed.errors import PerfedError
from perfed.settings import STRICT


def error_floor(a: float, ratio: float) -> float:
    """Return the limit of the bound of theorem 4.7 for n = ratio n_0.

    It is ``a / (sqrt(ratio (1-a)) (1 - sqrt(1-a)))``, which equals ``(1 + sqrt(1-a)) / sqrt(ratio (1-a))``.
    """
    _check(0 < a < 1, "a", a, "strictly between 0 and 1")
    return (1 + math.sqrt(1 - a)) / math.sqrt(ratio * (1 - a))


def order_statistic(n: int, clients: int, rate: float = 1.0) -> float:
    """Return the expected time of the n-th fastest of N clients, times ~ Exp(rate): ``(H_N - H_{N-n}) / rate``."""
    _check(1 <= n <= clients, "n", n, f"from 1 to the number of clients, {clients}")
    _check(rate > 0, "rate", rate, "above 0")
    return math.fsum(1 / j for j in range(clients - n + 1, clients + 1)) / rate


def stage_sizes(clients: int, first: int) -> list[int]:
    """Return the numbers of participants of SRPFL's stages: n_0, 2 n_0, 4 n_0, ..., N.

    Source: Tziotis et al. 2023, algorithm 2.
    """
    _check(1 <= first <= clients, "n0", first, f"from 1 to the number of clients, {clients}")
    sizes = [first]
    while sizes[-1] < clients:
        sizes.append(min(clients, 2 * sizes[-1]))
    return sizes


def doubling_points(clients: int, first: int, a: float, *, rate: float = 1.0, cost: float = 0.0) -> list[float]:
    """Return X_1, X_2, ...: the distances from which on twice as many clients make more progress per unit of time.

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
    """Return t_r, the numbers of rounds of the stages between the first and the last, before rounding.

    In t_r rounds a distance falls from X_r to X_{r+1} (:func:`doubling_points`), approaching the floor of n_r by a
    factor sqrt(1-a) per round: ``t_r = 2 log(g_r (E_{r+1} - E_r) / (E_r - E_{r-1})) / log(1 / (1-a))`` with
    ``g_r = (1 - q_{r-1}) / (q_{r-1} (1 - q_r))``, in which rate and cost cancel. g_r is the sqrt(2) of equation 203,
    except in the last of these stages if N is not n_0 times a power of 2. A number is negative if the bound of stage r
    holds immediately.

    Source: Tziotis et al. 2023, lemma B.1.
    """
    floors = [error_floor(a, n / first) for n in stage_sizes(clients, first)[1:-1]]
    ends = pairwise(doubling_points(clients, first, a))
    return [
        2 * math.log((start - floor) / (end - floor)) / -math.log1p(-a)
        for floor, (start, end) in zip(floors, ends, strict=True)
    ]


def stage_lengths(clients: int, first: int, a: float, *, excess: float) -> list[int]:
    """Return tau_r, the number of rounds of each stage of :func:`stage_sizes`, at least 1 each.

    The middle stages have t_r rounds, in which the rate of the exponential times and the cost of communication cancel.
    The last stage ends at ``excess`` times the floor of N: ``2 log(1 / (excess - 1)) / log(1 / (1-a))``. The first
    stage has one round: it ends at X_1, which is above the floor of n_0 and hence at least 2 for every a, and no
    distance is above 1. If n_0 = N, it is the only stage.

    Args:
        clients: N.
        first: n_0.
        a: strictly between 0 and 1 (in the theorem at most 1/4).
        excess: c-hat of the target error (equation 12), between 1 and sqrt(2).

    Source: Tziotis et al. 2023, lemma B.1 and equations 203, 207, 240.
    """
    _check(1 < excess < math.sqrt(2), "excess", excess, "strictly between 1 and the root of 2")
    _check(0 < a < 1, "a", a, "strictly between 0 and 1")
    if len(stage_sizes(clients, first)) == 1:
        return [1]
    last = 2 * math.log(1 / (excess - 1)) / -math.log1p(-a)
    return [1, *(max(1, math.ceil(t)) for t in (*middle_stage_rounds(clients, first, a), last))]


def _check(condition: bool, name: str, value: float, allowed: str) -> None:
    if not condition:
        raise PerfedError(f"{name} is {value}, but must be {allowed}")


class PhaseRule(BaseModel):
    """The number of clients of the first phase, which doubles from phase to phase, and the rule that ends a phase."""

    model_config = STRICT

    first: int = Field(4, ge=1, description="n_0, clients used in the first stage")
    rule: str
    stage_rounds: int | list[int] | None = Field(
        None, description="for rule 'fixed': rounds of every stage, or of each (the last number for all later ones)"
    )
    patience: int = Field(5, ge=1, description="for rule 'plateau': rounds without a lower training loss")
    tolerance: float = Field(1e-3, ge=0, description="for rule 'plateau': relative decrease that counts as lower")


class Phases:
    """The current phase of a run.

    Args:
        settings: the settings of the policy.
        lengths: the number of rounds of each phase, for rules that determine them other than by ``stage_rounds``.
        where: the table of the settings in messages.

    Attributes:
        state: plain data, which are changed in place.
        final: whether all clients take part, which the policy sets in every round. The final phase does not end.
    """

    def __init__(self, settings: PhaseRule, lengths: Sequence[int] | None, where: str) -> None:
        if settings.rule == "fixed":
            stage_rounds = settings.stage_rounds
            if stage_rounds is None:
                raise PerfedError(f"{where}.rule = 'fixed' needs {where}.stage_rounds")
            lengths = stage_rounds if isinstance(stage_rounds, list) else [stage_rounds]
            if not lengths or min(lengths) < 1:
                raise PerfedError(f"{where}.stage_rounds must be at least 1 (given: {stage_rounds})")
        self.settings = settings
        self.lengths = lengths
        self.final = False
        self.state: dict[str, Any] = {"stage": 0, "rounds": 0, "best": None, "stale": 0}

    @property
    def number(self) -> int:
        """The number of the phase, from 0."""
        return int(self.state["stage"])

    def observe(self, train_loss: float, over: bool = False) -> None:
        """Update the phase after a round.

        Args:
            train_loss: the mean training loss of the round.
            over: whether the phase ends, for policies that decide it themselves.
        """
        state = self.state
        state["rounds"] += 1
        if self.lengths is not None:
            over = state["rounds"] >= self.lengths[min(self.number, len(self.lengths) - 1)]
        elif self.settings.rule == "plateau":
            best = state["best"]
            lower = best is None or train_loss < best - self.settings.tolerance * abs(best)
            state["best"] = train_loss if lower else best
            state["stale"] = 0 if lower else state["stale"] + 1
            over = state["stale"] >= self.settings.patience
        if over and not self.final:
            state.update(stage=self.number + 1, rounds=0, best=None, stale=0)


def check_first(where: str, first: int, clients: int) -> None:
    """Raise a :class:`PerfedError` unless n_0 is at most the number of invited clients."""
    if first > clients:
        few = f"{clients} client{'s are' if clients != 1 else ' is'} invited to a round (participation.rate)"
        raise PerfedError(f"{where}.first is {first}, but only {few}; lower it")
