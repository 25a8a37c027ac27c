"""Intervals over two random effects: against mean squares, scipy's distributions, traces of matrices, by simulation."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import verdict_coverage
from scipy import optimize, stats

from perfed.report.intervals import (
    ComparisonCounts,
    Gain,
    VarianceComponents,
    count_discoveries,
    dunnett_quantile,
    estimate_gain,
    estimate_gains,
    pool_variances,
    student_quantile,
    widen_for_skewness,
)


def mean_squares(d):
    """Of two-way tables ``(seeds, clients)`` with one number a cell, by loops; each divided to be of the mean."""
    seeds, clients = d.shape
    mean = sum(sum(row) for row in d.tolist()) / d.size
    of_seed = [sum(d[s, c] for c in range(clients)) / clients for s in range(seeds)]
    of_client = [sum(d[s, c] for s in range(seeds)) / seeds for c in range(clients)]
    a = clients * sum((m - mean) ** 2 for m in of_seed) / (seeds - 1)
    b = seeds * sum((m - mean) ** 2 for m in of_client) / (clients - 1)
    left = [(d[s, c] - of_seed[s] - of_client[c] + mean) ** 2 for s in range(seeds) for c in range(clients)]
    e = sum(left) / ((seeds - 1) * (clients - 1))
    return mean, a / d.size, b / d.size, e / d.size


def half(d, error, side=0):
    _, a, b, e = mean_squares(d)
    of_seeds, of_clients = (stats.t.isf(error, n - 1) for n in d.shape)
    if side and d.shape[1] >= 6:
        of_clients = hall(of_clients, side * stats.skew(d.mean(0), bias=False) / np.sqrt(d.shape[1]))
    of_seeds, of_clients = of_seeds**2, of_clients**2
    return np.sqrt(max(of_seeds * a + of_clients * max(b - e, 0), of_clients * b + of_seeds * max(a - e, 0)))


def hall(quantile, skewness):
    """The quantile of Hall's transformation, by finding where the transformed value is the quantile."""
    if skewness <= 0:
        return quantile

    def transformed(t):  # of a mean below the truth, as seen from its upper end
        return t - skewness * t**2 / 3 + skewness**2 * t**3 / 27 - skewness / 6 - quantile

    return min(max(quantile, optimize.brentq(transformed, 0, 1e4)), 1.75 * quantile)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (2, 0), (0, 2), (1, 1)])
def test_it_is_that_of_the_mean_squares(a, b):
    rng = np.random.default_rng(3)
    d = 0.4 + a * rng.normal(size=(4, 1)) + b * rng.normal(size=(1, 7)) + rng.normal(size=(4, 7))
    found, (mean, *_) = estimate_gain(d, np.ones(7)), mean_squares(d)
    ends = (mean - half(d, 0.025, -1), mean + half(d, 0.025, 1))
    assert (found.mean, found.low, found.high) == pytest.approx((mean, *ends))


@pytest.mark.parametrize("shape", [(1, 9), (4, 1)], ids=["one seed", "one client"])
def test_of_one_seed_or_client_it_is_students(shape):
    d = np.random.default_rng(4).normal(0.5, 1.0, shape)
    found, values = VarianceComponents.from_differences(d, np.ones(shape[1])), d.ravel()
    right = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    assert (found.to_gain().low, found.to_gain().high) == pytest.approx(right)
    assert found.p_value() == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_one_client_of_one_seed_has_no_interval():
    assert estimate_gain(np.array([[0.25]]), np.ones(1)) == Gain(0.25, None, None)
    assert VarianceComponents.from_differences(np.array([[0.25]]), np.ones(1)).p_value() == 1.0


def test_seeds_and_clients_that_agree_have_an_interval_of_one_point():
    found = estimate_gain(np.full((3, 3), 0.25), np.array([1.0, 2.0, 5.0]))
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))


@pytest.mark.long
def test_with_weights_variances_are_unbiased_and_freedom_is_that_of_the_quadratic_form():
    rng, weights = np.random.default_rng(5), np.array([1.0, 2.0, 2.0, 9.0, 30.0])
    share = weights / weights.sum()
    left = np.diag(1 - 2 * share + (share**2).sum())
    form = (np.eye(5) - np.outer(share, np.ones(5))) @ np.diag(share**2) @ np.linalg.inv(left)
    form = form @ (np.eye(5) - np.outer(np.ones(5), share))
    found = VarianceComponents.from_differences(rng.normal(size=(3, 5)), weights)
    assert found.client_variance.freedom == pytest.approx(np.trace(form) ** 2 / np.trace(form @ form))
    assert found.seed_variance.freedom == pytest.approx(2)
    drawn = [
        VarianceComponents.from_differences(
            2 * rng.normal(size=(3, 1)) + rng.normal(size=(1, 5)) + rng.normal(size=(3, 5)) / 2, weights
        )
        for _ in range(4000)
    ]
    means = np.mean([(of.seed_variance.value, of.client_variance.value, of.cell_variance) for of in drawn], axis=0)
    cells = (share**2).sum() * 0.25 / 3
    assert means == pytest.approx((4 / 3 + cells, (share**2).sum() + cells, cells), rel=0.06)


def test_missing_cells_are_left_out_and_effects_are_those_of_least_squares():
    rng = np.random.default_rng(6)
    d, weights = rng.normal(size=(4, 6)), np.array([1.0, 2.0, 1.0, 4.0, 1.0, 3.0])
    d[1, 3] = d[2, :2] = np.nan
    there = np.isfinite(d)
    share = np.where(there, weights, 0.0)
    share /= share.sum()
    columns = np.array([[*(np.arange(4) == s), *(np.arange(6) == c)] for s, c in zip(*np.nonzero(there), strict=True)])
    root = np.sqrt(share[there])
    fitted = columns @ np.linalg.lstsq(columns * root[:, None], d[there] * root, rcond=None)[0]
    lost = [1 - 2 * p + (p**2).sum() for p in (share.sum(1), share.sum(0))]
    right = (np.square(share[there] * (d[there] - fitted)) / np.outer(*lost)[there]).sum()
    found = VarianceComponents.from_differences(d, weights)
    assert found.mean == pytest.approx(np.average(d[there], weights=share[there]))
    assert found.cell_variance == pytest.approx(right, rel=1e-6)
    padded = np.pad(d, ((0, 1), (0, 1)), constant_values=np.nan)  # a seed and a client that have nothing
    same = VarianceComponents.from_differences(padded, np.append(weights, 3.0))
    for name in ("mean", "cell_variance", "skewness"):
        assert getattr(same, name) == pytest.approx(getattr(found, name))
    for name in ("seed_variance", "client_variance"):
        assert astuple(getattr(same, name)) == pytest.approx(astuple(getattr(found, name)))


@pytest.mark.parametrize("counts", [ComparisonCounts(), ComparisonCounts(5, 20), ComparisonCounts(40, 8)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_p_value_is_the_error_with_which_an_end_is_0(counts, sign):
    d = sign * np.random.default_rng(7).normal(1.5, 1.0, (5, 8))

    def end(error):
        times = counts.better if sign > 0 else counts.worse
        return mean_squares(sign * d)[0] - half(sign * d, error / 2 / times)

    found = VarianceComponents.from_differences(d, np.ones(8)).p_value(counts)
    assert found < 1 and found == pytest.approx(optimize.brentq(end, 1e-12, 1.0), rel=1e-6)


def test_selected_are_those_of_scipys_adjusted_p_values():
    rng = np.random.default_rng(8)
    for size in (1, 5, 40):
        p = rng.beta(0.3, 1, size)
        assert count_discoveries(p) == (stats.false_discovery_control(p) <= 0.05).sum()


def test_two_seeds_have_no_interval():
    d = np.random.default_rng(1).normal(size=(2, 20))
    assert estimate_gain(d, np.ones(20)) == Gain(pytest.approx(d.mean()), None, None)
    padded = np.vstack([d, np.full((1, 20), np.nan)])
    both = estimate_gains({"two": padded, "three": np.vstack([d, d[:1]])}, np.ones(20))
    assert both["two"].low is None and both["three"].low is not None


@pytest.mark.parametrize(("number", "freedom", "correlation"), [(3, 16, 0.5), (8, 2, 0.3), (5, 6, 0.9), (4, 30, 0.0)])
def test_quantiles_are_dunnetts(number, freedom, correlation):
    quantile = dunnett_quantile(number, float(freedom), correlation)
    shape = np.full((number, number), correlation) + (1 - correlation) * np.eye(number)
    inside = stats.multivariate_t(shape=shape, df=freedom).cdf(np.full(number, quantile), random_state=0)
    assert 1 - inside == pytest.approx(0.025, abs=2e-4)


def test_the_quantile_of_one_comparison_is_students_and_of_many_freedoms_normal():
    assert dunnett_quantile(1, 2.0, 0.5) == pytest.approx(stats.t.isf(0.025, 2))
    assert student_quantile(np.inf, 0.01) == pytest.approx(stats.norm.isf(0.01))
    assert dunnett_quantile(8, np.inf, 0.5) == pytest.approx(dunnett_quantile(8, 1e5, 0.5), abs=1e-3)


def test_skewness_widens_the_end_with_the_long_tail_alone():
    d = np.array([[0.1, 0.2, 0.15, 0.05, 0.1, 0.2, 0.1, 2.0]])
    gain, student = estimate_gain(d, np.ones(8)), stats.t.interval(0.95, 7, d.mean(), stats.sem(d.ravel()))
    assert gain.low == pytest.approx(student[0]) and gain.high > 1.2 * student[1]
    mirrored = estimate_gain(-d, np.ones(8))
    assert (mirrored.low, mirrored.high) == pytest.approx((-gain.high, -gain.low))
    assert widen_for_skewness(2.0, 0.4) == pytest.approx(hall(2.0, 0.4))
    five = estimate_gain(d[:, :5], np.ones(5))  # too few clients to know their skewness
    assert five.high - five.mean == pytest.approx(five.mean - five.low)


def differences(rng, methods, seeds, clients, effects):
    """Differences of equal methods to a reference, with standard deviations of seeds, clients and cells."""
    shapes = [(seeds, 1), (1, clients), (seeds, clients)]
    values = sum(size * rng.normal(size=(methods + 1, *shape)) for size, shape in zip(effects, shapes, strict=True))
    return {str(m): values[m] - values[0] for m in range(1, methods + 1)}


@pytest.mark.long
def test_pooled_variances_and_freedom_are_those_of_the_analysis_of_variance():
    """With equal variances, on average: sums of squares of methods x seeds and methods x clients."""
    rng, a, b, e = np.random.default_rng(9), 0.5, 0.7, 1.0
    pooled = []
    for _ in range(600):
        spreads = [
            VarianceComponents.from_differences(d, np.ones(10)) for d in differences(rng, 6, 3, 10, (a, b, e)).values()
        ]
        pooled.append(
            [
                (of.seed_variance.value, of.client_variance.value, of.seed_variance.freedom)
                for of in pool_variances(spreads, 0.5)
            ]
        )
    seeds, clients, freedom = np.mean(pooled, axis=(0, 1))
    cells = 2 * e**2 / 30
    assert 2 * a**2 / 3 + cells <= seeds <= 1.4 * (2 * a**2 / 3 + cells)  # rather too large than too small
    assert 2 * b**2 / 10 + cells <= clients <= 1.4 * (2 * b**2 / 10 + cells)
    assert 2 * 2 < freedom <= 2 * 6  # of one method it is 2


def test_a_method_whose_seeds_vary_more_keeps_a_wider_interval():
    rng = np.random.default_rng(10)
    d = differences(rng, 4, 3, 20, (0.1, 0.3, 0.5))
    d["1"] = d["1"] + np.array([[-4.0], [0.0], [4.0]])
    gains = estimate_gains(d, np.ones(20), ComparisonCounts(4, 4))
    widths = {method: gain.high - gain.low for method, gain in gains.items()}
    without = estimate_gains({m: d[m] for m in ("2", "3", "4")}, np.ones(20), ComparisonCounts(4, 4))
    assert all(gains[m].low == pytest.approx(without[m].low, abs=0.05) for m in without)  # and does not widen others
    assert widths["1"] > 5 * max(widths[m] for m in without)


def test_a_method_that_is_deterministic_does_not_narrow_the_others():
    rng = np.random.default_rng(12)
    d = differences(rng, 2, 3, 8, (0.3, 0.3, 0.5))
    fixed = np.tile(rng.normal(size=8), (3, 1))
    gains = estimate_gains({**d, "fixed": fixed}, np.ones(8), ComparisonCounts(3, 3))
    without = estimate_gains(d, np.ones(8), ComparisonCounts(3, 3))
    assert all(gains[m] == without[m] for m in d)
    student = stats.t.isf(0.025, 7) * stats.sem(fixed[0])
    assert student < gains["fixed"].mean - gains["fixed"].low <= stats.t.isf(0.025 / 3, 7) * stats.sem(fixed[0])


def allowed(share, of):
    """The most wrong verdicts of so many that are no surprise where ``share`` of them are."""
    return stats.binom.ppf(0.999, of, share) / of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seeds", [1, 3, 5])
@pytest.mark.parametrize("of", [(3, 0.0, 1.0), (6, 1.0, 0.3), (20, 0.0, 1.0), (20, 1.0, 1.0)], ids=str)
@pytest.mark.parametrize("a", [0.0, 0.35, 1.0])
def test_equal_methods_are_ahead_or_behind_in_5_of_100_cases_at_most(seeds, of, a):
    """A bootstrap over clients and seeds was wrong in up to 31 of 100."""
    assert verdict_coverage.of_two(seeds, a, of, 300)["wrong"] <= allowed(0.05, 300)


def test_an_interval_of_many_seeds_and_clients_is_no_wider_than_needed():
    for a, of in ((0.5, (100, 0.0, 1.0)), (0.0, (100, 1.0, 0.3)), (1.0, (100, 1.0, 1.0))):
        assert verdict_coverage.of_two(30, a, of, 50)["width"] < 1.2


@pytest.mark.long
@pytest.mark.parametrize(("alone", "federated"), [(1, 8), (3, 5)])
def test_none_of_several_equal_methods_is_ahead_and_none_behind_the_best_local_one(alone, federated):
    """Uncorrected, some were behind the best of three in 14 to 19 of 100 cases."""
    found = verdict_coverage.of_family(alone, federated, 5, 0.35, 100)
    assert found["ahead"] + found["behind"] <= allowed(0.05, 100)


@pytest.mark.long
@pytest.mark.parametrize("federated", [1, 3, 8])
def test_a_gain_of_four_standard_errors_is_detected_whatever_the_number_of_methods(federated):
    """With the variance of each method on its own it was in 63, 25 and 13 of 100 cases."""
    detected = verdict_coverage.of_family(1, federated, 3, 0.0, 150)["detected"]
    assert detected >= stats.binom.ppf(0.001, 150, 0.6) / 150


@pytest.mark.long
@pytest.mark.parametrize("kind", verdict_coverage.UNEQUAL)
def test_unequal_variances_of_methods_are_no_reason_to_be_ahead_or_behind(kind):
    assert verdict_coverage.of_unequal(kind, 3, 3, 0.35, 150) <= allowed(0.05, 150)


@pytest.mark.long
def test_a_reference_whose_seeds_vary_more_than_those_of_the_methods_is_rarely_different():
    """With variances that are pooled as if the reference varied like the methods, 10 of 100 verdicts were wrong."""
    kind = "seeds of the reference vary three times as much"
    assert verdict_coverage.of_unequal(kind, 8, 3, 1.0, 700) <= allowed(0.05, 700)


def test_the_shared_part_of_the_seeds_variance_has_the_freedom_of_one_method():
    """The mean squares of the seeds' means by loops, and Satterthwaite's degrees of freedom of their sum."""
    rng = np.random.default_rng(13)
    values = rng.normal(size=(6, 4, 9))
    values[0] += 5 * rng.normal(size=(4, 1))  # the seeds of the reference
    d = {str(m): values[m] - values[0] for m in range(1, 6)}
    means = np.array([[np.mean(row) for row in d[method]] for method in d])
    of_seeds = [sum(means[m, s] for m in range(5)) / 5 for s in range(4)]
    of_methods = [sum(means[m]) / 4 for m in range(5)]
    shared = sum((mean - means.mean()) ** 2 for mean in of_seeds) / 3 / 4
    left = [(means[m, s] - of_seeds[s] - of_methods[m] + means.mean()) ** 2 for m in range(5) for s in range(4)]
    separate = sum(left) / 5 / 3 / 4  # with 5 in place of 4: the shared part contains a fifth of the methods' variance
    components = [VarianceComponents.from_differences(each, np.ones(9)) for each in d.values()]
    scale = np.mean([each.cell_variance for each in components])
    components = [replace(each, cell_variance=scale) for each in components]
    pooled = pool_variances(components, 0.5)
    assert np.mean([each.seed_variance.value for each in pooled]) == pytest.approx(shared + separate, rel=0.05)
    freedom = (shared + separate) ** 2 / (shared**2 / 3 + separate**2 / 12)
    assert [each.seed_variance.freedom for each in pooled] == pytest.approx([freedom] * 5, rel=0.02)
    students = stats.t.isf(0.025, 3) ** 2 * shared + stats.t.isf(0.025, 12) ** 2 * pooled[0].seed_variance.separate
    assert pooled[0].seed_variance.simultaneous_quantile(5, 0.5) ** 2 * pooled[0].seed_variance.value == pytest.approx(
        students
    )


@pytest.mark.long
@pytest.mark.parametrize(("seeds", "clients"), [(1, 6), (1, 20), (3, 20)])
def test_with_exponential_effects_of_clients_an_end_is_wrong_in_6_of_100_cases_at_most(seeds, clients):
    """Student's interval had one wrong end in 7 to 14 of 100."""
    found = verdict_coverage.of_skewed(seeds, clients, 0.3, 500)
    assert found["high"] <= allowed(0.06, 500) and found["low"] <= allowed(0.025, 500)
