"""Audits of privacy: a lower bound of epsilon from one run, by guessing which canaries it contained."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom  # type: ignore[import-untyped]

from perfed.errors import PerfedError

_LARGEST_EPSILON = 50.0
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Audit:
    """The outcome of guesses about canaries, each of which a run contained independently with probability 1/2.

    Attributes:
        canaries: m, the number of canaries.
        guesses: r, the number of canaries about which a guess was made; the others are ignored.
        correct: v, the number of correct guesses.

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
                f"audit: {self.correct} correct of {self.guesses} guesses about {self.canaries} canaries; "
                "needed: 0 <= correct <= guesses <= canaries"
            )

    def p_value(self, epsilon: float, delta: float = 0.0) -> float:
        """Return an upper bound on the probability of v correct guesses if the run is (epsilon, delta)-private.

        It is ``P(W >= v) + 2 m delta max_i P(v > W >= v - i) / i``, where W is binomial with r trials of probability
        ``1 / (1 + exp(-epsilon))`` (Steinke, Nasr & Jagielski 2023, theorem 5.2). Neighbouring data sets differ in the
        presence of one canary.

        Raises:
            PerfedError: if epsilon is below 0, or delta is not a probability.
        """
        if not (epsilon >= 0 and 0 <= delta <= 1):
            raise PerfedError(f"audit: epsilon {epsilon:g} and delta {delta:g}; needed: at least 0, and from 0 to 1")
        accuracy = 1 / (1 + exp(-epsilon))
        tail = float(binom.sf(self.correct - 1, self.guesses, accuracy))
        below = np.cumsum(binom.pmf(np.arange(self.correct - 1, -1, -1), self.guesses, accuracy))
        worst = float((below / np.arange(1, self.correct + 1)).max(initial=0.0))
        return min(1.0, tail + 2 * self.canaries * delta * worst)

    def epsilon(self, delta: float = 0.0, confidence: float = 0.95) -> float:
        """Return a lower confidence bound of the run's epsilon at ``delta``.

        The bound exceeds the true epsilon of a run with a probability of at most ``1 - confidence``. The number of
        guesses must be chosen before the scores are seen.

        Returns:
            The bound; 0 if the guesses prove nothing.

        Raises:
            PerfedError: if the confidence is outside (0, 1) or delta is not a probability.
        """
        if not 0 < confidence < 1:
            raise PerfedError(f"audit: confidence {confidence:g}; needed: between 0 and 1")
        low, high = 0.0, _LARGEST_EPSILON
        if self.p_value(low, delta) > 1 - confidence:
            return 0.0
        while high - low > _TOLERANCE:
            middle = (low + high) / 2
            low, high = (low, middle) if self.p_value(middle, delta) > 1 - confidence else (middle, high)
        return low


def guess(scores: NDArray[np.float64], included: NDArray[np.bool_], guesses: int) -> Audit:
    """Return the outcome of guessing that the run contained the canaries with the highest scores, not the lowest.

    Args:
        scores: array ``(m,)``; the higher the score, the likelier the run contained the canary.
        included: array ``(m,)``, whether the run contained the canary.
        guesses: r, half of them for the highest and half for the lowest scores; canaries in between are ignored.

    Raises:
        PerfedError: if the shapes differ, a score is not finite, or there are more guesses than canaries.

    Example:
        >>> guess(np.array([3.0, 0.1, 0.2, -2.0]), np.array([True, False, True, False]), 2)
        Audit(canaries=4, guesses=2, correct=2)
    """
    if scores.ndim != 1 or scores.shape != included.shape or not np.isfinite(scores).all():
        raise PerfedError("audit: each canary needs one finite score and whether the run contained it")
    if not 0 <= guesses <= len(scores):
        raise PerfedError(f"audit: {guesses} guesses about {len(scores)} canaries")
    order, low = np.argsort(scores, kind="stable"), guesses // 2
    high = len(scores) - (guesses - low)
    correct = int((~included[order[:low]]).sum() + included[order[high:]].sum())
    return Audit(len(scores), guesses, correct)
