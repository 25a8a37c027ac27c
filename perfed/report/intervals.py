"""Simultaneous confidence intervals of mean differences that vary between trainings and between clients.

Each difference between a method and the reference is modelled as d_sc = mean + A_s + B_c + E_sc, with random effects of
the seed s, the client c and their combination. Variances are estimated for all methods together
(:func:`pool_variances`), since with three seeds a single method has only two degrees of freedom. The part of the
variance that all differences share, which contains that of the reference, is estimated separately from the rest. The
quantiles are Dunnett's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import exp, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

Numbers = NDArray[np.float64]

ERROR = 0.025
"""The probability with which each end of an interval may be on the wrong side of the true value."""

FEWEST_SEEDS = 3
"""Least number of seeds for an interval over several trainings; with two, Student's quantile is 12.7."""

CONTRADICTION = 1e-3
"""The variance of a method is not pooled with the others if the p-value of their comparison is below this."""

FEWEST_FOR_SKEWNESS = 5.5
"""Least effective number of clients for an estimate of skewness: six clients of equal weights."""

MOST_WIDENED = 1.75
"""Largest factor on Student's quantile for skewness; a larger one costs width and hardly improves the coverage."""

# The constants of the pooled variances were chosen by simulation (benchmarks/verdict_coverage.py): a family-wise error
# of about 5 % if seeds vary unequally, and 60 % power for a gain of four standard errors with three seeds.
_LARGER, _SMALLER = 2.0, 20.0  # prior degrees of freedom of the pooled variance if the method's is larger or smaller
_FLOOR_LOSS = 3.0  # degrees of freedom by which the lower bound of the shared variance is reduced
_COMMON_REFERENCE = 0.5  # correlation of differences to the same reference where it cannot be estimated
_MOST_CORRELATION = 0.95

_NORMAL_NODES = np.polynomial.hermite_e.hermegauss(32)
_NORMAL_NODES = (_NORMAL_NODES[0], _NORMAL_NODES[1] / _NORMAL_NODES[1].sum())
_UNIT_NODES = np.polynomial.legendre.leggauss(40)
_UNIT_NODES = ((1 + _UNIT_NODES[0]) / 2, _UNIT_NODES[1] / 2)

_LEAST = 1e-15
_PASSES = 20  # iterations of the fit of effects; one is exact if no cells are missing
_ROUNDING = 1e-18  # variance over the mean square of the differences below which it is due to rounding


@dataclass(frozen=True)
class Gain:
    """The gain of one method over another, in the unit of the metric, with a 95 % interval.

    ``low`` and ``high`` are None if there is no interval.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """The sign of a significant gain, 1 or -1; 0 if the interval contains 0 or does not exist."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)

    def limit(self, most: float) -> Gain:
        """Return the gain with its interval clipped to [-most, most], the range of the metric's differences."""
        if self.low is None or self.high is None:
            return self
        return Gain(self.mean, max(self.low, -most), min(self.high, most))


@dataclass(frozen=True)
class ComparisonCounts:
    """The numbers of comparisons for which the two ends of an interval are corrected.

    Attributes:
        better: the number of comparisons among which "better" could be claimed.
        worse: the number of comparisons among which "worse" could be claimed.
    """

    better: float = 1
    worse: float = 1

    def multiply(self, factor: float) -> ComparisonCounts:
        """Return both numbers multiplied by ``factor``."""
        return ComparisonCounts(factor * self.better, factor * self.worse)


SINGLE_COMPARISON = ComparisonCounts()


def student_quantile(freedom: float, error: float) -> float:
    """Return the upper quantile of Student's t at probability ``error``; the normal one for infinite ``freedom``."""
    return float(-special.ndtri(error) if freedom == inf else special.stdtrit(freedom, 1 - error))


@lru_cache(maxsize=4096)
def dunnett_quantile(number: float, freedom: float, correlation: float, error: float = ERROR) -> float:
    """Return the upper quantile, at probability ``error``, of the maximum of ``number`` Student's t variables.

    They have a common denominator, and any two numerators have the same ``correlation`` (Dunnett 1955). With one
    comparison this is Student's quantile.

    Example:
        >>> round(dunnett_quantile(3, 16.0, 0.5, 0.05), 2)  # Dunnett's table
        2.23
    """
    if number <= 1:
        return student_quantile(freedom, error)
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    # Integrate over the common part of the numerators and over the denominator, with more nodes near its ends.
    common, common_weights = _NORMAL_NODES
    scale, scale_weights = np.ones(1), np.ones(1)
    if freedom < inf:
        nodes, steps = _UNIT_NODES
        scale = np.sqrt(special.chdtri(freedom, 1 - nodes**2 * (3 - 2 * nodes)) / freedom)
        scale_weights = steps * 6 * nodes * (1 - nodes)

    def tail_excess(bound: float) -> float:
        below = special.ndtr((bound * scale[:, None] + sqrt(correlation) * common) / sqrt(1 - correlation))
        return float(scale_weights @ (1 - below**number) @ common_weights) - error

    low, high = student_quantile(freedom, error), student_quantile(freedom, error / number)
    return float(brentq(tail_excess, low - 1e-3 * abs(low), high * 1.001, xtol=1e-6))


@dataclass(frozen=True)
class Variance:
    """An estimated variance of a mean difference, as the sum of two parts.

    Attributes:
        separate: the part that is estimated for this difference, or from the deviations of several differences from
            their mean.
        separate_freedom: the degrees of freedom of ``separate``; 0 if it cannot be estimated.
        shared: the part that is estimated from the mean of several differences and contains the variance of their
            common reference; 0 unless variances were pooled.
        shared_freedom: the degrees of freedom of ``shared``.
        least_shared: a lower bound of ``shared`` that :meth:`simultaneous_quantile` uses, since an estimate with few
            degrees of freedom may be small by chance.
    """

    separate: float
    separate_freedom: float
    shared: float = 0.0
    shared_freedom: float = 0.0
    least_shared: float = 0.0

    @property
    def value(self) -> float:
        """The sum of both parts."""
        return self.shared + self.separate

    @property
    def freedom(self) -> float:
        """The degrees of freedom of the sum (Satterthwaite 1946)."""
        if self.shared == 0:
            return self.separate_freedom
        return self.value**2 / (self.shared**2 / self.shared_freedom + self.separate**2 / self.separate_freedom)

    def student_quantile(self, error: float) -> float:
        """Return Student's quantile at probability ``error`` for the degrees of freedom of the sum."""
        return student_quantile(self.freedom, error)

    def simultaneous_quantile(self, number: float, correlation: float) -> float:
        """Return a quantile, at probability ``ERROR``, that holds for ``number`` differences to the same reference.

        It is the larger of two: Dunnett's with all degrees of freedom, which is right if the reference varies like the
        methods, and that of a single difference in which each part has its own Student's quantile (Cochran 1964), which
        holds if the reference varies more.
        """
        simultaneous = dunnett_quantile(number, self.shared_freedom + self.separate_freedom, correlation)
        if self.value == 0 or self.shared_freedom == 0:
            return simultaneous
        parts = ((max(self.shared, self.least_shared), self.shared_freedom), (self.separate, self.separate_freedom))
        single = sum(student_quantile(freedom, ERROR) ** 2 * part for part, freedom in parts)
        return max(simultaneous, sqrt(single / self.value))


Quantile = Callable[[Variance], float]
"""A function from an estimated variance to the quantile that belongs to it."""


@dataclass(frozen=True, eq=False)
class VarianceComponents:
    """The mean of the differences of all cells (pairs of a seed and a client), and the components of its variance.

    All variances are variances of the mean.

    Attributes:
        seed_variance: the variance due to A and E together, from the means of the seeds; 0 with one seed.
        client_variance: the variance due to B and E together, from the means of the clients; 0 with one client.
        cell_variance: the variance due to E; 0 with one seed or one client.
        noise: the known variance of noise that was added to the differences; the other estimates include it.
        skewness: the skewness of the mean over clients (third cumulant over the variance to the power 3/2).
        seed_effects, client_effects, cell_effects: ``(seeds,)``, ``(clients,)`` and ``(seeds, clients)``, the
            deviations whose sums of squares are the three variances; 0 where no difference was measured.
    """

    mean: float
    seed_variance: Variance
    client_variance: Variance
    cell_variance: float
    noise: float
    skewness: float
    seed_effects: Numbers
    client_effects: Numbers
    cell_effects: Numbers

    @classmethod
    def from_differences(
        cls, differences: Numbers, weights: Numbers, noise: Numbers | None = None
    ) -> VarianceComponents:
        """Estimate the components from the differences.

        Args:
            differences: ``(seeds, clients)``, NaN where nothing was measured.
            weights: the weights of the clients ``(clients,)``.
            noise: the variance of the noise in each difference ``(seeds, clients)``; ``None`` if there is none.
        """
        is_measured = np.isfinite(differences) & (weights > 0)
        share = np.where(is_measured, weights, 0.0)
        share = share / share.sum()
        values = np.where(is_measured, differences, 0.0)
        mean = float((share * values).sum())
        centred = np.where(is_measured, values - mean, 0.0)
        seed_share, client_share = share.sum(1), share.sum(0)
        seed_effects, seed_freedom = _estimate_marginal_effects((share * centred).sum(1), seed_share)
        client_effects, client_freedom = _estimate_marginal_effects((share * centred).sum(0), client_share)
        cell_effects = np.zeros(share.shape)
        if seed_freedom and client_freedom:
            measured = np.ix_(seed_share > 0, client_share > 0)
            remainder = np.outer(
                _compute_remainder_factor(seed_share[seed_share > 0]),
                _compute_remainder_factor(client_share[client_share > 0]),
            )
            cell_effects[measured] = (
                share[measured] * _remove_marginal_effects(centred[measured], share[measured]) / np.sqrt(remainder)
            )
        seed_variance, client_variance, cell_variance = (
            float(np.square(effects).sum()) for effects in (seed_effects, client_effects, cell_effects)
        )
        if cell_variance <= _ROUNDING * (share * values**2).sum():
            cell_variance = 0.0
        return cls(
            mean,
            Variance(seed_variance, seed_freedom),
            Variance(client_variance, client_freedom),
            cell_variance,
            noise=0.0 if noise is None else float((share**2 * np.where(is_measured, noise, 0.0)).sum()),
            skewness=_estimate_skewness((share * centred).sum(0), client_freedom, client_variance),
            seed_effects=seed_effects,
            client_effects=client_effects,
            cell_effects=cell_effects,
        )

    def half_width(self, quantile: Quantile, side: int = 0) -> float:
        """Return the distance from the mean to the upper (``side = 1``) or lower (-1) end of an interval.

        Each variance has its own quantile (Cochran 1964). The part that both contain is counted once: the squared
        distance is t_s^2 V_s + t_c^2 max(V_c - V_e, 0), or the same with seeds and clients exchanged, whichever is
        larger. This is exact if only seeds or only clients vary, and conservative if both do. The distance is at least
        the normal quantile times the standard deviation of the noise.

        With a ``side``, the quantile of the clients allows for their skewness (:func:`widen_for_skewness`).
        """
        seeds, clients = self.seed_variance, self.client_variance
        seed_quantile = quantile(seeds) if seeds.freedom > 0 else 0.0
        client_quantile = quantile(clients) if clients.freedom > 0 else 0.0
        client_quantile = widen_for_skewness(client_quantile, side * self.skewness)
        seeds_without_cells = max(seeds.value - self.cell_variance, 0.0)
        clients_without_cells = max(clients.value - self.cell_variance, 0.0)
        seeds_first = seed_quantile**2 * seeds.value + client_quantile**2 * clients_without_cells
        clients_first = client_quantile**2 * clients.value + seed_quantile**2 * seeds_without_cells
        noise_part = quantile(Variance(self.noise, inf)) ** 2 * self.noise if self.noise > 0 else 0.0
        return sqrt(max(seeds_first, clients_first, noise_part))

    @property
    def lacks_variance(self) -> bool:
        """Whether no component of the variance can be estimated, so that there is no interval."""
        return max(self.seed_variance.freedom, self.client_variance.freedom, self.noise) <= 0

    def to_gain(self, counts: ComparisonCounts = SINGLE_COMPARISON) -> Gain:
        """Return the mean with its Bonferroni-corrected interval: each end errs with ``ERROR`` over its comparisons."""
        if self.lacks_variance:
            return Gain(self.mean, None, None)
        below, above = (self._student_half_width(ERROR / number) for number in (counts.better, counts.worse))
        return Gain(self.mean, self.mean - below, self.mean + above)

    def p_value(self, counts: ComparisonCounts = SINGLE_COMPARISON) -> float:
        """Return the smallest two-sided error for which the interval of :meth:`to_gain` would exclude 0."""
        if self.lacks_variance or self.mean == 0:
            return 1.0
        distance, number = abs(self.mean), counts.better if self.mean > 0 else counts.worse

        def width_excess(error: float) -> float:
            return self._student_half_width(error) - distance

        if width_excess(_LEAST) <= 0:
            return min(1.0, 2 * number * _LEAST)
        from scipy.optimize import brentq

        return min(1.0, 2 * number * exp(brentq(lambda log_error: width_excess(exp(log_error)), log(_LEAST), log(0.5))))

    def _student_half_width(self, error: float) -> float:
        return self.half_width(lambda variance: variance.student_quantile(error))


def widen_for_skewness(quantile: float, skewness: float) -> float:
    """Return Student's quantile widened for an end on the side of the long tail of the mean's distribution.

    For positive ``skewness`` it is the quantile of Hall's transformation (1992), which removes the skewness and, unlike
    that of Johnson (1978), is monotone; at most :data:`MOST_WIDENED` times Student's quantile. Otherwise the quantile
    is returned unchanged: the end on the other side is not moved towards the mean, since the skewness of few clients is
    an uncertain estimate.

    Example:
        >>> round(widen_for_skewness(2.093, 0.3), 2), widen_for_skewness(2.093, -0.3)
        (2.91, 2.093)
    """
    if skewness <= 1e-9:
        return quantile
    widened = 3 / skewness * (1 - float(np.cbrt(1 - skewness * (quantile + skewness / 6))))
    return min(max(quantile, widened), MOST_WIDENED * quantile)


def pool_variances(
    components: Sequence[VarianceComponents], correlation: float, *, clients: bool = True
) -> list[VarianceComponents]:
    """Return the components with pooled variances of the seeds and of the clients.

    The seed variance of each difference is pooled as the ratio V_s / V_e to its variance between cells, so that
    differences whose variances are proportional are comparable; without cells it is pooled unscaled. The variances of
    clients are treated in the same way.

    Args:
        components: the components of all methods against one reference, or of all sites.
        correlation: the mean correlation between the cells of two differences.
        clients: whether the variances of clients are pooled, too.
    """
    if len(components) < 2:
        return list(components)
    scales = np.array([component.cell_variance if component.cell_variance > 0 else 1.0 for component in components])
    seed_effects = np.stack([component.seed_effects for component in components])
    seed_freedom = np.array([component.seed_variance.freedom for component in components])
    seed_variances = _pool_scaled(seed_effects, scales, seed_freedom, correlation)
    pooled = [
        replace(component, seed_variance=variance)
        for component, variance in zip(components, seed_variances, strict=True)
    ]
    if not clients:
        return pooled
    client_effects = np.stack([component.client_effects for component in components])
    client_freedom = np.array([component.client_variance.freedom for component in components])
    client_variances = _pool_scaled(client_effects, scales, client_freedom, correlation)
    return [
        replace(component, client_variance=variance)
        for component, variance in zip(pooled, client_variances, strict=True)
    ]


def _pool_scaled(effects: Numbers, scales: Numbers, freedom: Numbers, correlation: float) -> list[Variance]:
    """Return a variance for each row of ``effects`` ``(rows, levels)``, pooled in units of the rows' ``scales``.

    Rows whose variance contradicts those of the others are not pooled.
    """
    variances = np.square(effects).sum(1)
    pooled = [Variance(float(variance), float(degrees)) for variance, degrees in zip(variances, freedom, strict=True)]
    if not freedom.all() or not variances.any():
        return pooled
    alike = _are_alike(variances / scales, freedom)
    if alike.sum() < 2 or not variances[alike].any():
        return pooled
    ratios = _pool_rows(effects[alike] / np.sqrt(scales[alike])[:, None], freedom[alike], correlation)
    for row, ratio in zip(np.flatnonzero(alike).tolist(), ratios, strict=True):
        scale = float(scales[row])
        parts = (scale * ratio.separate, ratio.separate_freedom, scale * ratio.shared, ratio.shared_freedom)
        pooled[row] = Variance(*parts, scale * ratio.least_shared)
    return pooled


def _pool_rows(effects: Numbers, freedom: Numbers, correlation: float) -> list[Variance]:
    """Return the variance of each row of ``effects`` ``(rows, levels)``, with its shared part.

    The shared part is the variance of the mean of all rows. It has the degrees of freedom of a single row. Its lower
    bound is the value that follows from the separate part and ``correlation`` if the reference varies like the methods,
    times 1 - 3 / n for n degrees of freedom of the separate part.

    The separate part is the variance of the deviations from the mean of all rows. That of each row is shrunk towards
    their average (Smyth 2004): slightly if it is larger, since such a method may really vary more, and strongly if it
    is smaller, which is often due to chance.
    """
    number, mean_effects = len(effects), effects.mean(0)
    separate = np.square(effects - mean_effects).sum(1)
    average = separate.mean()
    shared_freedom = float(freedom.mean())
    separate_freedom = float(freedom.sum()) - shared_freedom
    expected = average * (1 + (number - 1) * correlation) / ((1 - correlation) * (number - 1))
    shared = float(np.square(mean_effects).sum())
    least_shared = float(expected * max(1 - _FLOOR_LOSS / separate_freedom, 0.0))
    weights = freedom / (freedom + np.where(separate > average, _LARGER, _SMALLER))
    shrunk = average + weights * (separate - average)
    return [Variance(part, separate_freedom, shared, shared_freedom, least_shared) for part in shrunk.tolist()]


def _are_alike(variances: Numbers, freedom: Numbers) -> NDArray[np.bool_]:
    """Return a mask of the variances that an F test does not distinguish from the smaller ones.

    The test starts from the smaller half and adds the other variances in ascending order.
    """
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


def _estimate_correlation(components: Sequence[VarianceComponents]) -> float:
    """Return the mean correlation between the cells of two differences, clipped to 0 … 0.95.

    It is 1/2 if a difference has no variation between cells, and 0 for a single difference.
    """
    if len(components) < 2:
        return 0.0
    cells = np.stack([component.cell_effects.ravel() for component in components])
    lengths = np.linalg.norm(cells, axis=1, keepdims=True)
    if not lengths.all():
        return _COMMON_REFERENCE
    total, number = np.square((cells / lengths).sum(0)).sum(), len(components)
    return float(np.clip((total - number) / (number * (number - 1)), 0.0, _MOST_CORRELATION))


def estimate_gains(
    differences: Mapping[str, Numbers],
    weights: Numbers,
    counts: ComparisonCounts = SINGLE_COMPARISON,
    noise: Mapping[str, Numbers | None] | None = None,
) -> dict[str, Gain]:
    """Return the mean paired difference of each method to one reference, with simultaneous 95 % intervals.

    The intervals cover the variation between seeds and between clients. With one seed they cover clients only, with one
    client seeds only, and with one of both the known noise. With two seeds there is no interval. If no method differs
    from the reference, some lower end is above 0 in 2.5 % of the comparisons and some upper end is below 0 in 2.5 %.
    Methods whose differences do not vary between cells keep their own variances.

    Args:
        differences: the differences ``(seeds, clients)`` of each method; NaN where nothing was measured.
        weights: the weights of the clients ``(clients,)`` in the mean.
        counts: the numbers of comparisons for which the intervals are corrected.
        noise: the variances of the noise in the differences ``(seeds, clients)`` of each method; ``None`` if there is
            none.
    """
    components = {
        method: VarianceComponents.from_differences(values, weights, (noise or {}).get(method))
        for method, values in differences.items()
        if np.isfinite(values).any()
    }
    gains = {method: Gain(float("nan"), None, None) for method in differences}
    gains |= {method: Gain(component.mean, None, None) for method, component in components.items()}
    seeds = {method: int(np.isfinite(differences[method]).any(1).sum()) for method in components}
    with_interval = {
        method: component
        for method, component in components.items()
        if not component.lacks_variance and (seeds[method] == 1 or seeds[method] >= FEWEST_SEEDS)
    }
    for members in _group_comparable_methods(with_interval):
        correlation = _estimate_correlation(list(members.values()))
        pooled = pool_variances(list(members.values()), correlation)
        better, worse = (
            partial(Variance.simultaneous_quantile, number=number, correlation=correlation)
            for number in (counts.better, counts.worse)
        )
        for method, component in zip(members, pooled, strict=True):
            below, above = component.half_width(better, -1), component.half_width(worse, 1)
            gains[method] = Gain(component.mean, component.mean - below, component.mean + above)
    return gains


def _group_comparable_methods(components: Mapping[str, VarianceComponents]) -> list[dict[str, VarianceComponents]]:
    """Return groups of methods whose variances are pooled: those with the same sources of variation.

    A method with several seeds and clients whose differences do not vary between cells forms a group of its own,
    since there is no unit in which its variances could be compared with those of others.
    """
    groups: dict[object, dict[str, VarianceComponents]] = {}
    for method, component in components.items():
        sources = (component.seed_variance.freedom > 0, component.client_variance.freedom > 0)
        key: object = method if all(sources) and component.cell_variance == 0 else sources
        groups.setdefault(key, {})[method] = component
    return list(groups.values())


def estimate_gain(
    differences: Numbers,
    weights: Numbers,
    counts: ComparisonCounts = SINGLE_COMPARISON,
    noise: Numbers | None = None,
) -> Gain:
    """Return the mean paired difference of one method with its interval; see :func:`estimate_gains`.

    Example:
        >>> gain = estimate_gain(np.array([[1.0, 2.0, 3.0]]), np.ones(3))  # one seed: Student's interval over clients
        >>> gain.mean, round(gain.low, 3), round(gain.high, 3)
        (2.0, -0.484, 4.484)
    """
    return estimate_gains({"": differences}, weights, counts, {"": noise})[""]


def count_discoveries(p_values: Numbers) -> int:
    """Return the number of p-values that Benjamini and Hochberg (1995) select at a false discovery rate of 2 ``ERROR``.

    Example:
        >>> count_discoveries(np.array([0.6, 0.01, 0.03, 0.2]))
        1
    """
    ordered = np.sort(p_values)
    passed = np.flatnonzero(ordered <= 2 * ERROR * np.arange(1, len(ordered) + 1) / len(ordered))
    return int(passed[-1]) + 1 if len(passed) else 0


def _estimate_marginal_effects(parts: Numbers, share: Numbers) -> tuple[Numbers, float]:
    """Return the contribution of each seed (or client) to the mean, and the degrees of freedom.

    The effects are scaled so that their sum of squares estimates the variance of the mean: each square is divided by
    1 - 2 p + sum p^2, its expected remainder after subtraction of the mean (1 - 1/n for equal shares p). The degrees of
    freedom are Satterthwaite's (1946), tr(M)^2 / tr(M^2) of this quadratic form for equal variances (n - 1 for equal
    shares).
    """
    is_measured = share > 0
    effects = np.zeros(len(parts))
    if is_measured.sum() < 2:
        return effects, 0.0
    parts, share = parts[is_measured], share[is_measured]
    remainder = _compute_remainder_factor(share)
    factor, squares = share**2 / remainder, np.square(share).sum()
    sums = [float((factor * share**power).sum()) for power in range(3)]
    of_pairs = squares**2 * sums[0] ** 2 - 4 * squares * sums[0] * sums[1] + 2 * sums[0] * sums[2] + 2 * sums[1] ** 2
    diagonal = (factor**2 * (remainder**2 - (squares - 2 * share) ** 2)).sum()
    effects[is_measured] = parts / np.sqrt(remainder)
    return effects, float((factor * remainder).sum() ** 2 / (of_pairs + diagonal))


def _estimate_skewness(parts: Numbers, freedom: float, variance: float) -> float:
    """Return the skewness of a mean from the contribution of each client; 0 with too few clients for an estimate."""
    number = freedom + 1
    if number < FEWEST_FOR_SKEWNESS or variance <= 0:
        return 0.0
    return float(np.power(parts, 3).sum() * number**2 / ((number - 1) * (number - 2)) / variance**1.5)


def _compute_remainder_factor(share: Numbers) -> Numbers:
    return np.asarray(1 - 2 * share + np.square(share).sum())


def _remove_marginal_effects(centred: Numbers, share: Numbers) -> Numbers:
    """Return the residuals ``(seeds, clients)`` of ``centred`` after removal of seed and client effects."""
    residuals = centred.copy()
    for _ in range(_PASSES):
        for axis in (0, 1):
            residuals -= (share * residuals).sum(axis, keepdims=True) / share.sum(axis, keepdims=True)
        residuals[share == 0] = 0.0
    return residuals
