"""Audits: a lower bound of epsilon from one run, by guessing which canaries were in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom  # type: ignore[import-untyped]

from perfed.errors import PerfedError

_LARGEST = 50.0
_EXACT = 1e-4


@dataclass(frozen=True)
class Audit:
    """What came of guesses about canaries, each of which was in a run or not by a fair coin of its own.

    Attributes:
        canaries: m, how many there were.
        guesses: r, about how many of them a guess was made; the others count for nothing.
        correct: v, how many guesses were right.

    Example:
        >>> audit = Audit(canaries=1000, guesses=1000, correct=731)  # e / (1 + e) is 0.731
        >>> 0.8 < audit.epsilon() < 1.0
        True
    """

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.guesses <= self.canaries:
            raise PerfedError(
                f"audit: {self.correct} right of {self.guesses} guesses about {self.canaries} canaries; "
                "needed: 0 <= correct <= guesses <= canaries"
            )

    def p_value(self, epsilon: float, delta: float = 0.0) -> float:
        """Return the largest probability of so many right guesses after anything (epsilon, delta)-private.

        ``P(W >= v) + 2 m delta max_i P(v > W >= v - i) / i`` with W binomial of r trials of probability
        ``1 / (1 + exp(-epsilon))`` (Steinke, Nasr & Jagielski 2023, theorem 5.2). Neighbours of the privacy are runs
        that differ in one canary.

        Raises:
            PerfedError: epsilon below 0, or a delta that is no probability.
        """
        if not (epsilon >= 0 and 0 <= delta <= 1):
            raise PerfedError(f"audit: epsilon {epsilon:g} and delta {delta:g}; needed: at least 0, and from 0 to 1")
        right = 1 / (1 + exp(-epsilon))
        tail = float(binom.sf(self.correct - 1, self.guesses, right))
        below = np.cumsum(binom.pmf(np.arange(self.correct - 1, -1, -1), self.guesses, right))
        worst = float((below / np.arange(1, self.correct + 1)).max(initial=0.0))
        return min(1.0, tail + 2 * self.canaries * delta * worst)

    def epsilon(self, delta: float = 0.0, confidence: float = 0.95) -> float:
        """Return the epsilon below which the run cannot have been private at ``delta``, with ``confidence``.

        A private run gives more than its own epsilon with a probability of at most ``1 - confidence``. The number of
        guesses must have been chosen before.

        Returns:
            0 where the guesses prove nothing.

        Raises:
            PerfedError: a confidence outside (0, 1), or as :meth:`p_value`.
        """
        if not 0 < confidence < 1:
            raise PerfedError(f"audit: confidence {confidence:g}; needed: between 0 and 1")
        low, high = 0.0, _LARGEST
        if self.p_value(low, delta) > 1 - confidence:
            return 0.0
        while high - low > _EXACT:
            middle = (low + high) / 2
            low, high = (low, middle) if self.p_value(middle, delta) > 1 - confidence else (middle, high)
        return low


def guess(scores: NDArray[np.float64], included: NDArray[np.bool_], guesses: int) -> Audit:
    """Return what comes of guessing that the canaries with the highest scores were in, and those with the lowest out.

    Args:
        scores: ``(m,)``, the higher the likelier a canary was in the run.
        included: ``(m,)``, whether it was.
        guesses: r, half of them for each side; the canaries between are left out.

    Raises:
        PerfedError: arrays of other shapes, scores that are not finite, or more guesses than canaries.

    Example:
        >>> guess(np.array([3.0, 0.1, 0.2, -2.0]), np.array([True, False, True, False]), 2)
        Audit(canaries=4, guesses=2, correct=2)
    """
    if scores.ndim != 1 or scores.shape != included.shape or not np.isfinite(scores).all():
        raise PerfedError("audit: one finite score is needed for each canary, and whether it was in")
    if not 0 <= guesses <= len(scores):
        raise PerfedError(f"audit: {guesses} guesses about {len(scores)} canaries")
    order, low = np.argsort(scores, kind="stable"), guesses // 2
    high = len(scores) - (guesses - low)
    correct = int((~included[order[:low]]).sum() + included[order[high:]].sum())
    return Audit(len(scores), guesses, correct)
