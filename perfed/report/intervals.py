"""Simultaneous intervals of mean differences where both trainings and clients vary.

Each difference between a method and the reference is modelled as d_sc = mean + A_s + B_c + E_sc, with random effects of
the seed s, the client c and their combination. Variances are estimated for all methods together (:func:`pool_spreads`),
as three seeds alone leave two degrees of freedom to each method, and the quantiles are Dunnett's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

Numbers = NDArray[np.float64]
Quantile = Callable[[float], float]
"""From degrees of freedom to a quantile."""

ERROR = 0.025
"""How often an end of an interval may be on the wrong side of the truth."""

FEWEST_SEEDS = 3
"""Seeds from which on there is an interval over several trainings; two have a quantile of 12.7 alone."""

CONTRADICTION = 1e-3
"""p-value of a method's variance among those of the others below which it is not pooled with them."""

FEWEST_FOR_SKEWNESS = 5.5
"""Clients (of unequal weights: as many as they count for) from which on skewness is estimated, six of equal weights."""

MOST_WIDENED = 1.75
"""Times Student's quantile that skewness widens an end at most: more costs width and hardly improves the coverage."""

# The constants of the pooled variances were chosen by simulation (benchmarks/verdict_coverage.py): they keep the
# family-wise error below 5 % where the methods have equal variances or proportional ones.
_LARGER, _SMALLER = 2.0, 20.0  # degrees of freedom of the pooled variance, beside a larger or a smaller one of a method
_SHARED = 1.5  # times as much variation in common as independent columns have is no evidence of a common effect
_COMMON_REFERENCE = 0.5  # correlation of differences to the same reference where it cannot be estimated
_MOST_CORRELATION = 0.95

_NORMAL_NODES = np.polynomial.hermite_e.hermegauss(32)
_NORMAL_NODES = (_NORMAL_NODES[0], _NORMAL_NODES[1] / _NORMAL_NODES[1].sum())
_UNIT_NODES = np.polynomial.legendre.leggauss(40)
_UNIT_NODES = ((1 + _UNIT_NODES[0]) / 2, _UNIT_NODES[1] / 2)

_LEAST = 1e-15
_PASSES = 20  # of the fit of effects where cells are missing; one is exact where none is
_ROUNDING = 1e-18  # of the mean square of the differences: less variance than this is rounding


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

    def limit(self, most: float) -> Gain:
        """Return the gain with its interval limited to -most … most, the range of the metric's differences."""
        if self.low is None or self.high is None:
            return self
        return Gain(self.mean, max(self.low, -most), min(self.high, most))


@dataclass(frozen=True)
class Chances:
    """The numbers of comparisons that a claim is picked from, for which an interval is corrected.

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


def student_quantile(freedom: float, error: float) -> float:
    """Return what Student's t exceeds with probability ``error``; the normal quantile for infinite ``freedom``."""
    return float(-special.ndtri(error) if freedom == inf else special.stdtrit(freedom, 1 - error))


@lru_cache(maxsize=4096)
def dunnett_quantile(number: float, freedom: float, correlation: float, error: float = ERROR) -> float:
    """Return what the largest of ``number`` Student's t with a common denominator exceeds with probability ``error``.

    Each two of the numerators have the ``correlation`` (Dunnett 1955); with one comparison this is Student's quantile.

    Example:
        >>> round(dunnett_quantile(3, 16.0, 0.5, 0.05), 2)  # Dunnett's table
        2.23
    """
    if number <= 1:
        return student_quantile(freedom, error)
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    # The integral over the common part of the numerators, and over the denominator, with more nodes near its ends.
    common, common_weights = _NORMAL_NODES
    scale, scale_weights = np.ones(1), np.ones(1)
    if freedom < inf:
        nodes, steps = _UNIT_NODES
        scale = np.sqrt(special.chdtri(freedom, 1 - nodes**2 * (3 - 2 * nodes)) / freedom)
        scale_weights = steps * 6 * nodes * (1 - nodes)

    def excess(bound: float) -> float:
        below = special.ndtr((bound * scale[:, None] + sqrt(correlation) * common) / sqrt(1 - correlation))
        return float(scale_weights @ (1 - below**number) @ common_weights) - error

    low, high = student_quantile(freedom, error), student_quantile(freedom, error / number)
    return float(brentq(excess, low - 1e-3 * abs(low), high * 1.001, xtol=1e-6))


@dataclass(frozen=True, eq=False)
class Spread:
    """The mean of differences between cells of seeds and clients, and what it varies by.

    Each variance is that of the mean.

    Attributes:
        seeds: estimated from the means of the seeds: that of A and E together; 0 with one seed.
        clients: the same of B and E, from the means of the clients; 0 with one client.
        cells: of E alone; 0 with one seed or one client.
        of_seeds, of_clients: degrees of freedom of the first two.
        noise: of noise that was added to the differences, which is known; the estimates have it in them.
        skewness: of the mean over the clients, the third cumulant over the variance to the power 3/2.
        seed_effects, client_effects, cell_effects: ``(seeds,)``, ``(clients,)`` and ``(seeds, clients)``: deviations
            whose sums of squares are the three variances; 0 where there is nothing.
    """

    mean: float
    seeds: float
    clients: float
    cells: float
    of_seeds: float
    of_clients: float
    noise: float
    skewness: float
    seed_effects: Numbers
    client_effects: Numbers
    cell_effects: Numbers

    @classmethod
    def from_differences(cls, differences: Numbers, weights: Numbers, noise: Numbers | None = None) -> Spread:
        """Return that of ``differences`` ``(seeds, clients)``, NaN where there is none, with ``weights`` of clients.

        ``noise``: the variance of what was added to each of them; ``None``: nothing was.
        """
        there = np.isfinite(differences) & (weights > 0)
        share = np.where(there, weights, 0.0)
        share = share / share.sum()
        values = np.where(there, differences, 0.0)
        mean = float((share * values).sum())
        centred = np.where(there, values - mean, 0.0)
        seed_share, client_share = share.sum(1), share.sum(0)
        seed_effects, of_seeds = _marginal_effects((share * centred).sum(1), seed_share)
        client_effects, of_clients = _marginal_effects((share * centred).sum(0), client_share)
        cell_effects = np.zeros(share.shape)
        if of_seeds and of_clients:
            kept = np.ix_(seed_share > 0, client_share > 0)
            lost = np.outer(_leverage(seed_share[seed_share > 0]), _leverage(client_share[client_share > 0]))
            cell_effects[kept] = share[kept] * _residuals(centred[kept], share[kept]) / np.sqrt(lost)
        seeds, clients, cells = (float(np.square(of).sum()) for of in (seed_effects, client_effects, cell_effects))
        if cells <= _ROUNDING * (share * values**2).sum():
            cells = 0.0
        known_noise = 0.0 if noise is None else float((share**2 * np.where(there, noise, 0.0)).sum())
        skewness = _skewness((share * centred).sum(0), of_clients, clients)
        effects = (seed_effects, client_effects, cell_effects)
        return cls(mean, seeds, clients, cells, of_seeds, of_clients, known_noise, skewness, *effects)

    def half_width(self, quantile: Quantile, side: int = 0) -> float:
        """Return the distance from the mean to the upper (``side = 1``) or lower (-1) end of an interval.

        Each variance has its own quantile (Cochran 1964). What the two share is counted once, with the larger one:
        t_s^2 V_s + t_c^2 max(V_c - V_e, 0), or the same the other way round, whichever is more. It is exact where only
        seeds or only clients vary, and rather too wide where both do. It is at least what the noise alone asks for,
        with the normal quantile: one seed of one client says nothing of other variation.

        With a ``side``, the quantile of the clients allows for their skewness (:func:`widen_for_skewness`).
        """
        of_seeds = quantile(self.of_seeds) if self.of_seeds > 0 else 0.0
        of_clients = quantile(self.of_clients) if self.of_clients > 0 else 0.0
        of_clients = widen_for_skewness(of_clients, side * self.skewness)
        more_seeds, more_clients = max(self.seeds - self.cells, 0.0), max(self.clients - self.cells, 0.0)
        seeds_first = of_seeds**2 * self.seeds + of_clients**2 * more_clients
        clients_first = of_clients**2 * self.clients + of_seeds**2 * more_seeds
        of_noise = quantile(inf) ** 2 * self.noise if self.noise > 0 else 0.0
        return sqrt(max(seeds_first, clients_first, of_noise))

    @property
    def is_point(self) -> bool:
        """Whether nothing says what varies."""
        return max(self.of_seeds, self.of_clients, self.noise) <= 0

    def gain(self, chances: Chances = ONE) -> Gain:
        """Return the mean with an interval whose ends err in ``ERROR`` over the numbers of comparisons (Bonferroni)."""
        if self.is_point:
            return Gain(self.mean, None, None)
        below, above = (
            self.half_width(lambda freedom, number=number: student_quantile(freedom, ERROR / number))  # type: ignore[misc]
            for number in (chances.better, chances.worse)
        )
        return Gain(self.mean, self.mean - below, self.mean + above)

    def p_value(self, chances: Chances = ONE) -> float:
        """Return the least two-sided error with which :meth:`gain` would leave 0 out."""
        if self.is_point or self.mean == 0:
            return 1.0
        distance, number = abs(self.mean), chances.better if self.mean > 0 else chances.worse

        def beyond(error: float) -> float:
            return self.half_width(lambda freedom: student_quantile(freedom, error)) - distance

        if beyond(_LEAST) <= 0:
            return min(1.0, 2 * number * _LEAST)
        from scipy.optimize import brentq

        return min(1.0, 2 * number * exp(brentq(lambda error: beyond(exp(error)), log(_LEAST), log(0.5))))


def widen_for_skewness(quantile: float, skewness: float) -> float:
    """Return Student's quantile for an end on whose side the distribution of the mean has a long tail.

    With positive ``skewness`` of the mean its quantile becomes that of Hall's transformation (1992), which removes the
    skewness and, unlike that of Johnson (1978), is monotone, up to :data:`MOST_WIDENED` times Student's. Otherwise the
    quantile is returned as it is: the other end is not brought nearer to the mean, as the skewness of few clients is an
    uncertain estimate.

    Example:
        >>> round(widen_for_skewness(2.093, 0.3), 2), widen_for_skewness(2.093, -0.3)
        (2.95, 2.093)
    """
    if skewness <= 1e-9:
        return quantile
    widened = 3 / skewness * (1 - float(np.cbrt(1 - skewness * (quantile + skewness / 6))))
    return min(max(quantile, widened), MOST_WIDENED * quantile)


def pool_spreads(spreads: Sequence[Spread], correlation: float, *, clients: bool = True) -> list[Spread]:
    """Return the spreads with variances estimated from all of them together, and with their degrees of freedom.

    The variance of each one's seeds is measured in units of its cells, V_s / V_e, so that spreads that vary more in
    everything are comparable; without cells it is taken as it is. The same is done for the clients.

    Args:
        spreads: of the methods against one reference, or of sites.
        correlation: between the cells of two of them, on average.
        clients: whether the variances of clients are pooled, too.
    """
    if len(spreads) < 2:
        return list(spreads)
    scales = np.array([spread.cells if spread.cells > 0 else 1.0 for spread in spreads])
    effects = np.stack([spread.seed_effects for spread in spreads]) / np.sqrt(scales)[:, None]
    seeds, of_seeds = _pool_ratios(effects, np.array([spread.of_seeds for spread in spreads]), correlation)
    pooled = [
        replace(spread, seeds=float(variance), of_seeds=float(freedom))
        for spread, variance, freedom in zip(spreads, scales * seeds, of_seeds, strict=True)
    ]
    if not clients:
        return pooled
    effects = np.stack([spread.client_effects for spread in spreads]) / np.sqrt(scales)[:, None]
    ratios, of_clients = _pool_ratios(effects, np.array([spread.of_clients for spread in spreads]), correlation)
    return [
        replace(spread, clients=float(variance), of_clients=float(freedom))
        for spread, variance, freedom in zip(pooled, scales * ratios, of_clients, strict=True)
    ]


def _pool_ratios(effects: Numbers, freedom: Numbers, correlation: float) -> tuple[Numbers, Numbers]:
    """Return a variance for each row of ``effects`` ``(columns, levels)``, and its degrees of freedom.

    The pooled variance is the mean square of the effects after their correlation is removed, or the mean of their own
    variances where this is more: the reference may vary more than the others, which all differences then have in
    common. Each row's own variance is shrunk towards it (Smyth 2004): slightly where it is the larger one, as such a
    method may vary more than others, and strongly where it is the smaller one, which is often chance.

    The degrees of freedom are those of one row times the number of rows, or less where the rows vary together more than
    the correlation explains: then they are not independent.

    Rows whose own variance contradicts those of the others are not pooled.
    """
    own = np.square(effects).sum(1)
    if not freedom.all() or not own.any():
        return own, freedom
    alike = _are_alike(own, freedom)
    ratios, degrees = own.copy(), freedom.copy()
    ratios[alike], degrees[alike] = _shrink(effects[alike], own[alike], freedom[alike], correlation)
    return ratios, degrees


def _are_alike(variances: Numbers, freedom: Numbers) -> NDArray[np.bool_]:
    """Return which variances do not contradict the smaller ones by an F test, beginning with the smaller half."""
    order = np.argsort(variances, kind="stable")
    alike = np.zeros(len(variances), dtype=bool)
    alike[order[: len(order) // 2 + 1]] = True
    for next_larger in order[len(order) // 2 + 1 :]:
        mean = variances[alike].mean()
        ratio = variances[next_larger] / mean if mean > 0 else inf
        if special.fdtrc(freedom[next_larger], freedom[alike].sum(), ratio) < CONTRADICTION:
            break
        alike[next_larger] = True
    return alike


def _shrink(effects: Numbers, own: Numbers, freedom: Numbers, correlation: float) -> tuple[Numbers, Numbers]:
    number = len(effects)
    together = np.square(effects.sum(0)).sum() / number
    apart = (own.sum() - together) / (1 - correlation)
    together = together / (1 - correlation + correlation * number)
    pooled = max((together + apart) / number, own.mean())
    weight = freedom / (freedom + np.where(own > pooled, _LARGER, _SMALLER))
    independent = np.clip(_SHARED * (together + apart) / max(together, _LEAST), 1.0, number)
    return pooled + weight * (own - pooled), freedom * independent


def _correlation(spreads: Sequence[Spread]) -> float:
    """Return the mean correlation of the spreads' cells, between 0 and 0.95; 1/2 where there are none.

    It is 0 for a single spread, whose variance is its own.
    """
    if len(spreads) < 2:
        return 0.0
    cells = np.stack([spread.cell_effects.ravel() for spread in spreads])
    lengths = np.linalg.norm(cells, axis=1, keepdims=True)
    if not lengths.all():
        return _COMMON_REFERENCE
    total, number = np.square((cells / lengths).sum(0)).sum(), len(spreads)
    return float(np.clip((total - number) / (number * (number - 1)), 0.0, _MOST_CORRELATION))


def intervals(
    differences: Mapping[str, Numbers],
    weights: Numbers,
    chances: Chances = ONE,
    noise: Mapping[str, Numbers | None] | None = None,
) -> dict[str, Gain]:
    """Return the mean of paired differences of each method to one reference, with simultaneous 95 % intervals.

    They are over seeds and clients, over one of them where there is one of the other, and over noise that is known
    where there is one of both. Where nothing differs, some upper end is below 0 in 2.5 % of the comparisons, and some
    lower end is above it in 2.5 %. Methods whose differences do not vary between cells keep their own variances.
    There is no interval with two seeds.

    Args:
        differences: by method ``(seeds, clients)``; NaN where there is none.
        weights: ``(clients,)``, of the mean over clients.
        chances: the numbers of comparisons that the intervals are corrected for.
        noise: by method ``(seeds, clients)``, variances of noise in the differences; ``None``: there is none.
    """
    spreads = {
        method: Spread.from_differences(values, weights, (noise or {}).get(method))
        for method, values in differences.items()
        if np.isfinite(values).any()
    }
    gains = {method: Gain(float("nan"), None, None) for method in differences}
    gains |= {method: Gain(spread.mean, None, None) for method, spread in spreads.items()}
    counts = {method: int(np.isfinite(differences[method]).any(1).sum()) for method in spreads}
    with_interval = {
        method: spread
        for method, spread in spreads.items()
        if not spread.is_point and (counts[method] == 1 or counts[method] >= FEWEST_SEEDS)
    }
    for members in _comparable_groups(with_interval):
        correlation = _correlation(list(members.values()))
        pooled = pool_spreads(list(members.values()), correlation)

        def end(spread: Spread, number: float, side: int, correlation: float = correlation) -> float:
            return spread.half_width(lambda freedom: dunnett_quantile(number, freedom, correlation), side)

        for method, spread in zip(members, pooled, strict=True):
            below, above = end(spread, chances.better, -1), end(spread, chances.worse, 1)
            gains[method] = Gain(spread.mean, spread.mean - below, spread.mean + above)
    return gains


def _comparable_groups(spreads: Mapping[str, Spread]) -> list[dict[str, Spread]]:
    """Return the methods whose variances are pooled together: those with the same sources of variation.

    A method whose differences vary between seeds and clients, but not between cells, is on its own: it is
    deterministic, or has no unit in which its variances are comparable.
    """
    groups: dict[object, dict[str, Spread]] = {}
    for method, spread in spreads.items():
        sources = (spread.of_seeds > 0, spread.of_clients > 0)
        key: object = method if all(sources) and spread.cells == 0 else sources
        groups.setdefault(key, {})[method] = spread
    return list(groups.values())


def interval(differences: Numbers, weights: Numbers, chances: Chances = ONE, noise: Numbers | None = None) -> Gain:
    """Return :func:`intervals` of one method.

    Example:
        >>> gain = interval(np.array([[1.0, 2.0, 3.0]]), np.ones(3))  # of one seed: Student's over the clients
        >>> gain.mean, round(gain.low, 3), round(gain.high, 3)
        (2.0, -0.484, 4.484)
    """
    return intervals({"": differences}, weights, chances, {"": noise})[""]


def selected(p_values: Numbers) -> int:
    """How many of the p-values Benjamini and Hochberg (1995) select with a rate of false discoveries of 2 ``ERROR``.

    Example:
        >>> selected(np.array([0.6, 0.01, 0.03, 0.2]))
        1
    """
    ordered = np.sort(p_values)
    passed = np.flatnonzero(ordered <= 2 * ERROR * np.arange(1, len(ordered) + 1) / len(ordered))
    return int(passed[-1]) + 1 if len(passed) else 0


def _marginal_effects(parts: Numbers, share: Numbers) -> tuple[Numbers, float]:
    """Return what each seed (or client) adds to the mean, and the degrees of freedom.

    The effects are scaled so that their sum of squares is the variance of the mean: each square is divided by what is
    left of it after the mean was taken away, 1 - 2 p + sum p^2 (1 - 1/n where all have the same share p). The degrees
    of freedom are Satterthwaite's (1946), tr(M)^2 / tr(M^2) of this quadratic form for equal variances: n - 1 where all
    have the same share.
    """
    there = share > 0
    effects = np.zeros(len(parts))
    if there.sum() < 2:
        return effects, 0.0
    parts, share = parts[there], share[there]
    left = _leverage(share)
    factor, squares = share**2 / left, np.square(share).sum()
    sums = [float((factor * share**power).sum()) for power in range(3)]
    of_pairs = squares**2 * sums[0] ** 2 - 4 * squares * sums[0] * sums[1] + 2 * sums[0] * sums[2] + 2 * sums[1] ** 2
    diagonal = (factor**2 * (left**2 - (squares - 2 * share) ** 2)).sum()
    effects[there] = parts / np.sqrt(left)
    return effects, float((factor * left).sum() ** 2 / (of_pairs + diagonal))


def _skewness(parts: Numbers, freedom: float, variance: float) -> float:
    """Return the skewness of a mean from what each client adds to it; 0 where too few clients could say it."""
    number = freedom + 1
    if number < FEWEST_FOR_SKEWNESS or variance <= 0:
        return 0.0
    return float(np.power(parts, 3).sum() * number**2 / ((number - 1) * (number - 2)) / variance**1.5)


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
