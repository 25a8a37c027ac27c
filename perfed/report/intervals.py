"""Intervals of a mean difference where both trainings and clients vary: two random effects, Student's t of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

Numbers = NDArray[np.float64]

ERROR = 0.025
"""How often an end of an interval may be on the wrong side of the truth."""

_LEAST = 1e-15
_PASSES = 20  # of the fit of effects where cells are missing; one is exact where none is


@dataclass(frozen=True)
class Gain:
    """How much better than another, in the metric's own unit, with a 95 % interval; None where nothing can vary."""

    mean: float
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """1: better, -1: worse, 0: the interval has both, or is not known."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Chances:
    """How many comparisons a claim is picked from: an end of the interval errs in 2.5 % / so many (Bonferroni).

    Attributes:
        better: that could say "better".
        worse: that could say "worse".
    """

    better: float = 1
    worse: float = 1

    def times(self, more: float) -> Chances:
        """Of ``more`` places each."""
        return Chances(more * self.better, more * self.worse)


ONE = Chances()


@dataclass(frozen=True)
class Spread:
    """The mean of differences between cells of seeds and clients, and what it varies by.

    The model is d_sc = mean + A_s + B_c + E_sc, all three random. Each variance is that of the mean.

    Attributes:
        seeds: estimated from the means of the seeds: that of A and E together; 0 with one seed.
        clients: the same of B and E, from the means of the clients; 0 with one client.
        cells: of E alone; 0 with one seed or one client.
        of_seeds, of_clients: degrees of freedom of the first two.
        noise: of noise that was added to the differences, which is known; the estimates have it in them.
    """

    mean: float
    seeds: float
    clients: float
    cells: float
    of_seeds: float
    of_clients: float
    noise: float = 0.0

    @classmethod
    def of(cls, differences: Numbers, weights: Numbers, noise: Numbers | None = None) -> Spread:
        """That of ``differences`` ``(seeds, clients)``, NaN where there is none, with the ``weights`` of clients.

        ``noise``: the variance of what was added to each of them; ``None``: nothing was.
        """
        weighed = np.where(np.isfinite(differences), weights, 0.0)
        kept = np.ix_(weighed.any(1), weighed.any(0))
        share = weighed[kept] / weighed.sum()
        there = share > 0
        mean = float((share[there] * differences[kept][there]).sum())
        centred = np.where(there, differences[kept] - mean, 0.0)
        of_seed, of_client = share.sum(1), share.sum(0)
        seeds, seeds_freedom = _variance((share * centred).sum(1), of_seed)
        clients, clients_freedom = _variance((share * centred).sum(0), of_client)
        cells = 0.0
        if min(there.shape) > 1:
            own = np.square(share * _residuals(centred, share))
            cells = float((own / np.outer(_leverage(of_seed), _leverage(of_client))).sum())
        known = 0.0 if noise is None else float((share**2 * noise[kept])[there].sum())
        return cls(mean, seeds, clients, cells, seeds_freedom, clients_freedom, known)

    def half(self, error: float) -> float:
        """From the mean to an end that is wrong in ``error`` of the cases.

        Each variance has its own quantile t (Cochran 1964). What the two share is counted once, with the larger one:
        t_s^2 V_s + t_c^2 max(V_c - V_e, 0), or the same the other way round, whichever is more. It is exact where only
        seeds or only clients vary, and rather too wide where both do. It is at least what the noise alone asks for,
        with the normal quantile: one seed of one client says nothing of other variation.
        """
        of_seeds, of_clients = (
            special.stdtrit(n, error) ** 2 if n > 0 else 0.0 for n in (self.of_seeds, self.of_clients)
        )
        more_seeds, more_clients = max(self.seeds - self.cells, 0.0), max(self.clients - self.cells, 0.0)
        seeds_first = of_seeds * self.seeds + of_clients * more_clients
        of_noise = special.ndtri(error) ** 2 * self.noise
        return sqrt(max(seeds_first, of_clients * self.clients + of_seeds * more_seeds, of_noise))

    @property
    def _unknown(self) -> bool:
        """Whether nothing says what varies."""
        return max(self.of_seeds, self.of_clients, self.noise) <= 0

    def gain(self, chances: Chances = ONE) -> Gain:
        """The mean with its interval."""
        if self._unknown:
            return Gain(self.mean, None, None)
        below, above = (self.half(ERROR / number) for number in (chances.better, chances.worse))
        return Gain(self.mean, self.mean - below, self.mean + above)

    def p(self, chances: Chances = ONE) -> float:
        """The least two-sided error with which :meth:`gain` would leave 0 out."""
        if self._unknown or self.mean == 0:
            return 1.0
        away, times = abs(self.mean), chances.better if self.mean > 0 else chances.worse
        if self.half(_LEAST) <= away:
            return min(1.0, 2 * times * _LEAST)
        from scipy.optimize import brentq  # type: ignore[import-untyped]

        found = brentq(lambda error: self.half(exp(error)) - away, log(_LEAST), log(0.5))
        return min(1.0, 2 * times * exp(found))


def interval(differences: Numbers, weights: Numbers, chances: Chances = ONE, noise: Numbers | None = None) -> Gain:
    """Mean of paired differences with its 95 % interval over seeds and clients; over one of them where there is one of
    the other; over noise that is known where there is one of both.

    Args:
        differences: ``(seeds, clients)``; NaN where there is none.
        weights: ``(clients,)``, of the mean over clients.
        chances: of how many comparisons this is one.
        noise: ``(seeds, clients)``, variances of noise in the differences; ``None``: there is none.

    Example:
        >>> found = interval(np.array([[1.0, 2.0, 3.0]]), np.ones(3))  # of one seed: Student's over the clients
        >>> found.mean, round(found.low, 3), round(found.high, 3)
        (2.0, -0.484, 4.484)
    """
    return Spread.of(differences, weights, noise).gain(chances)


def selected(p_values: Numbers) -> int:
    """How many of the p-values Benjamini and Hochberg (1995) select with a rate of false discoveries of 2 ``ERROR``.

    Example:
        >>> selected(np.array([0.6, 0.01, 0.03, 0.2]))
        1
    """
    ordered = np.sort(p_values)
    passed = np.flatnonzero(ordered <= 2 * ERROR * np.arange(1, len(ordered) + 1) / len(ordered))
    return int(passed[-1]) + 1 if len(passed) else 0


def _variance(parts: Numbers, share: Numbers) -> tuple[float, float]:
    """Variance of the sum of ``parts``, what each seed (or client) adds to the mean, and its degrees of freedom.

    Each square is divided by what is left of it after the mean was taken away, 1 - 2 p + sum p^2 (1 - 1/n where all
    have the same share p). The degrees of freedom are Satterthwaite's (1946), tr(M)^2 / tr(M^2) of this quadratic form
    for equal variances: n - 1 where all have the same share.
    """
    if len(parts) < 2:
        return 0.0, 0.0
    left = _leverage(share)
    factor, squares = share**2 / left, np.square(share).sum()
    sums = [float((factor * share**power).sum()) for power in range(3)]
    of_pairs = squares**2 * sums[0] ** 2 - 4 * squares * sums[0] * sums[1] + 2 * sums[0] * sums[2] + 2 * sums[1] ** 2
    diagonal = (factor**2 * (left**2 - (squares - 2 * share) ** 2)).sum()
    return float((parts**2 / left).sum()), float((factor * left).sum() ** 2 / (of_pairs + diagonal))


def _leverage(share: Numbers) -> Numbers:
    return np.asarray(1 - 2 * share + np.square(share).sum())


def _residuals(centred: Numbers, share: Numbers) -> Numbers:
    """What is left ``(seeds, clients)`` of ``centred`` after effects of seeds and of clients, by alternating means."""
    left = centred.copy()
    for _ in range(_PASSES):
        for axis in (0, 1):
            left -= (share * left).sum(axis, keepdims=True) / share.sum(axis, keepdims=True)
        left[share == 0] = 0.0
    return left
