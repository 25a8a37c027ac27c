"""Weights of a blend against solvers that know nothing of it, closed forms, and their limits."""

from __future__ import annotations

from itertools import product

import cvxpy
import numpy as np
import pytest
from scipy.stats import wilcoxon

from perfed.maths.blending import (
    EXCHANGES,
    Hazards,
    Probabilities,
    Values,
    choose_prior_rows,
    drop_small_weights,
    guard_weights,
    learn_weights,
    minimise_pooled_loss,
    shrink_site_weights,
)

SITES = (40, 7, 90)


def drawn(kind, seed=0, candidates=4, sites=SITES):
    """Sites whose candidates are of different worth."""
    generator, made = np.random.default_rng(seed), []
    for n in sites:
        fold = np.arange(n) % 3
        y = generator.normal(size=n)
        noise = generator.normal(size=(n, candidates)) * np.array([0.6, 0.7, 1.0, 3.0])[:candidates]
        if kind is Probabilities:
            made.append(Probabilities(1 / (1 + np.exp(-1 - noise)), y, fold))
        elif kind is Values:
            made.append(Values(y[:, None] + noise, y, fold))
        else:
            times = np.ceil(10 * generator.exponential(np.exp(-y)))  # with ties
            made.append(
                Hazards(y[:, None] + noise, np.stack([times, generator.random(n) < 0.7], 1).astype(float), fold)
            )
    return made


def solved(loss_of, candidates=4):
    w = cvxpy.Variable(candidates, nonneg=True)
    problem = cvxpy.Problem(cvxpy.Minimize(loss_of(w)), [cvxpy.sum(w) == 1])
    problem.solve(solver=cvxpy.CLARABEL)
    return np.asarray(w.value)


def loss(rows, w):
    """As a disciplined convex expression, said anew."""
    if isinstance(rows, Probabilities):
        return -cvxpy.sum(cvxpy.log(rows.outputs @ w))
    if isinstance(rows, Values):
        return 0.5 * cvxpy.sum_squares(rows.outputs @ w - rows.y)
    total = 0
    for fold in np.unique(rows.fold):
        own = rows.fold == fold
        eta, y = rows.outputs[own] @ w, rows.y[own]
        for i in np.flatnonzero(y[:, 1]):
            total += cvxpy.log_sum_exp(eta[np.flatnonzero(y[:, 0] >= y[i, 0])]) - eta[i]
    return total


@pytest.mark.parametrize("kind", [Probabilities, Values, Hazards])
def test_pooled_weights_are_those_of_a_solver_on_the_rows_of_all(kind):
    sites = drawn(kind)
    expected = solved(lambda w: sum(loss(rows, w) for rows in sites))
    found, _ = learn_weights(sites, 50)
    assert found.weights.sum() == pytest.approx(1)
    assert found.weights.min() >= 0
    np.testing.assert_allclose(found.weights, expected, atol=2e-3)


def test_probabilities_are_shrunk_as_by_pseudo_counts():
    sites = drawn(Probabilities)
    prior, own = learn_weights(sites, 50)
    for rows, found in zip(sites, own, strict=True):
        expected = solved(lambda w, rows=rows: loss(rows, w) - 50 * prior.weights @ cvxpy.log(w))
        np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("kind", [Values, Hazards])
def test_others_are_shrunk_by_the_mean_loss_of_all_rows(kind):
    sites = drawn(kind)
    prior, own = learn_weights(sites, 50)
    if kind is Values:
        pooled = np.concatenate([rows.outputs @ prior.weights - rows.y for rows in sites])
        units = [min(np.mean((s.outputs - s.y[:, None]) ** 2, 0)) / np.mean(pooled**2) for s in sites]
        expected = [
            solved(lambda w, s=s, unit=unit: loss(s, w) + 50 * unit / sum(SITES) * sum(loss(r, w) for r in sites))
            for s, unit in zip(sites, units, strict=True)
        ]
    else:
        root = np.linalg.cholesky(prior.hessian + 1e-12 * np.eye(4)).T
        expected = [
            solved(
                lambda w, s=s: (
                    loss(s, w)
                    + 50 * (0.5 * cvxpy.sum_squares(root @ (w - prior.weights)) + prior.gradient @ (w - prior.weights))
                )
            )
            for s in sites
        ]
    for found, wanted in zip(own, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-3)


@pytest.mark.parametrize("kind", [Probabilities, Values, Hazards])
def test_no_prior_is_the_sites_own_and_all_prior_is_the_pooled(kind):
    sites = drawn(kind)
    prior, alone = learn_weights(sites, 0.0)
    _, together = learn_weights(sites, float("inf"))
    for rows, found, same in zip(sites, alone, together, strict=True):
        np.testing.assert_allclose(found, solved(lambda w, rows=rows: loss(rows, w)), atol=2e-2)
        np.testing.assert_array_equal(same, prior.weights)
        assert rows.compute_sums(found).value <= rows.compute_sums(prior.weights).value + 1e-4
        nearly = shrink_site_weights(rows, prior, 1e9)
        np.testing.assert_allclose(nearly, prior.weights, atol=2e-3)


def test_two_predictors_have_their_closed_form():
    """Minimum of |a u + (1 - a) v|^2 is at a = v (v - u) / |u - v|^2, where that is between 0 and 1."""
    (rows,) = drawn(Values, candidates=2, sites=(200,))
    u, v = (rows.outputs - rows.y[:, None]).T
    a = v @ (v - u) / ((u - v) @ (u - v))
    assert 0 < a < 1
    np.testing.assert_allclose(minimise_pooled_loss(rows.compute_sums, 2, mixture=False).weights, [a, 1 - a], atol=1e-9)


@pytest.mark.parametrize("kind", [Probabilities, Values, Hazards])
def test_what_leaves_is_sums_the_order_of_rows_and_sites_does_not_matter(kind):
    sites = drawn(kind)
    turned = [rows.select(np.ones(len(rows.fold), bool)) for rows in reversed(sites)]
    order = np.random.default_rng(1).permutation(len(turned[0].fold))
    turned[0] = kind(turned[0].outputs[order], turned[0].y[order], turned[0].fold[order])
    np.testing.assert_allclose(learn_weights(turned, 50)[0].weights, learn_weights(sites, 50)[0].weights, atol=1e-5)


def test_two_that_are_each_right_of_half_of_the_rows_are_better_together():
    """Which fails where a blend is a choice."""
    good, bad = np.full(50, 0.9), np.full(50, 0.3)
    rows = Probabilities(np.stack([np.r_[good, bad], np.r_[bad, good]], 1), np.zeros(100), np.arange(100) % 5)
    prior, (own,) = learn_weights([rows], 50)
    np.testing.assert_allclose(own, [0.5, 0.5], atol=1e-4)
    alone = min(rows.compute_sums(np.eye(2)[k]).value for k in range(2))
    assert rows.compute_sums(prior.weights).value < 0.95 * alone


def test_sites_that_are_alike_want_the_prior_and_sites_that_differ_do_not():
    alike = [Values(*parts) for parts in _sites(differ=False)]
    differ = [Values(*parts) for parts in _sites(differ=True)]
    assert choose_prior_rows(alike) >= 200
    assert choose_prior_rows(differ) <= 10


def _sites(differ):
    generator = np.random.default_rng(3)
    for site in range(12):
        y = generator.normal(size=60)
        spread = np.array([0.3, 3.0]) if differ and site % 2 else np.array([3.0, 0.3] if differ else [1.0, 1.0])
        yield y[:, None] + generator.normal(size=(60, 2)) * spread, y, np.arange(60) % 5


def test_without_rows_a_site_has_what_all_have_and_nobody_has_anything_it_is_the_mean():
    sites = [*drawn(Probabilities), Probabilities(np.empty((0, 4)), np.empty(0), np.empty(0, int))]
    prior, own = learn_weights(sites, 50)
    np.testing.assert_array_equal(own[-1], prior.weights)
    assert learn_weights(sites[-1:], 50)[0].weights.tolist() == [0.25] * 4


def test_a_site_whose_targets_can_be_told_exactly_is_not_drowned_by_noisy_ones():
    """Which fails where all errors count in one unit."""
    generator = np.random.default_rng(0)
    noisy = [Values(y[:, None] + generator.normal(size=(60, 2)) * [9.0, 3.0], y, np.arange(60) % 5)
             for y in generator.normal(size=(9, 60))]  # fmt: skip
    y = generator.normal(size=60)
    exact = Values(y[:, None] + generator.normal(size=(60, 2)) * [0.01, 0.3], y, np.arange(60) % 5)
    _, own = learn_weights([*noisy, exact], 50)
    assert own[-1][0] > 0.97 and all(weights[0] < 0.3 for weights in own[:-1])


@pytest.mark.parametrize("kind", [Probabilities, Values, Hazards])
def test_gradient_and_hessian_are_those_of_the_loss(kind):
    """By differences of the value."""
    (rows,) = drawn(kind, sites=(30,))
    w, h = np.array([0.1, 0.2, 0.3, 0.4]), 1e-4
    at, steps = rows.compute_sums(w), np.eye(4) * h
    slope = [(rows.compute_sums(w + e).value - rows.compute_sums(w - e).value) / (2 * h) for e in steps]
    np.testing.assert_allclose(at.gradient, slope, rtol=1e-5)
    curvature = [(rows.compute_sums(w + e).gradient - rows.compute_sums(w - e).gradient) / (2 * h) for e in steps]
    np.testing.assert_allclose(at.hessian, curvature, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("n", [30, 3000])
def test_few_sums_are_asked_for_and_the_duality_gap_is_small(n, spread):
    """A gap that is nought proves the least loss: no weight could be worth more than its rows."""
    generator, asked = np.random.default_rng(n), [0]
    noise = generator.normal(size=(n, 1)) + generator.normal(size=(n, 8)) * generator.uniform(0.2, 6, size=8)
    rows = Probabilities(1 / (1 + np.exp(-spread * noise - 1)), np.zeros(n), np.zeros(n, int))

    def sums(weights):
        asked[0] += 1
        return rows.compute_sums(weights)

    found = minimise_pooled_loss(sums, 8, mixture=True)
    assert (-found.gradient).max() - 1 < 1e-4
    assert asked[0] <= 12 < EXCHANGES


def test_a_row_that_one_bad_candidate_alone_allows_is_no_trap():
    said = np.full((1000, 3), 0.9)
    said[:, 2], said[0] = 0.1, (0.0, 0.0, 0.9)
    rows = Probabilities(said, np.zeros(1000), np.zeros(1000, int))
    found = minimise_pooled_loss(rows.compute_sums, 3, mixture=True)
    assert (-found.gradient).max() - 1 < 1e-4
    assert 0 < found.weights[2] < 0.01


# No site worse off ----------------------------------------------------------------------------------------------


def far_row():
    """Nine noisy sites that prefer candidate 1, and one where 0 is nearer in 59 rows of 60; of one row both are far."""
    generator = np.random.default_rng(0)
    for site in range(10):
        y, exact = generator.normal(size=60), site == 9
        away = generator.uniform(0.5, 1.5, size=(60, 2)) * ([0.01, 0.03] if exact else [9.0, 3.0])
        if exact:
            away[-1] = (0.5, 0.4)
        yield Values(y[:, None] + away, y, np.arange(60) % 5)


def test_a_site_whose_own_model_is_nearer_at_nearly_all_rows_keeps_it_though_one_far_row_hides_that():
    sites = list(far_row())
    _, own = learn_weights(sites, 50)
    rows, mixed = sites[-1], drop_small_weights(own[-1])
    worse = (rows.outputs @ mixed - rows.y) ** 2 - (rows.outputs[:, 0] - rows.y) ** 2
    assert (worse > 0).sum() > 50 and worse.mean() < 0  # a mean would say that the blend is better
    found = [guard_weights(rows, drop_small_weights(weights), [0]) for rows, weights in zip(sites, own, strict=True)]
    assert mixed[1] > 0.01 and found[-1].tolist() == [1, 0]
    for weights, before in zip(found[:-1], own[:-1], strict=True):
        np.testing.assert_array_equal(weights, drop_small_weights(before))


def test_a_blend_that_errs_a_little_more_at_most_rows_and_much_less_at_some_stays():
    y, half = np.zeros(200), np.array([0.5, 0.5])
    said = np.stack([0.1 + 1e-3 * np.arange(200), 0.5 + 1e-3 * np.arange(200)], 1)
    said[::20, 0] = 5
    worse = (said @ half) ** 2 - said[:, 0] ** 2
    assert (worse > 0).mean() == 0.95 and worse.mean() < 0
    assert guard_weights(Values(said, y, np.arange(200) % 5), half, [0]) is half
    said[::20, 0] = 0.1  # without these rows
    assert guard_weights(Values(said, y, np.arange(200) % 5), half, [0]).tolist() == [1, 0]


def test_of_probabilities_ranks_say_nothing():
    """A rare class: one candidate is sure that it is never there; the log loss of the blend is less by far."""
    said = np.tile([0.99, 0.9], (200, 1))
    said[::20] = (0.01, 0.1)
    rows, half = Probabilities(said, np.zeros(200), np.arange(200) % 5), np.array([0.5, 0.5])
    assert rows.compute_sums(half).value < rows.compute_sums(np.array([1.0, 0.0])).value
    assert guard_weights(rows, half, [0]) is half


@pytest.mark.parametrize("n", [0, 1, 3])
def test_too_few_rows_and_no_difference_and_survival_say_nothing(n):
    y, half = np.zeros(n), np.array([0.5, 0.5])
    rows = Values(np.stack([y, 1 + np.arange(n)], 1), y, np.arange(n))
    assert guard_weights(rows, half, [0]) is half  # 2 ** -3 is more than 10 %
    assert guard_weights(rows, half, []) is half
    assert guard_weights(Values(rows.outputs[:, [0, 0]], y, rows.fold), half, [0]) is half
    assert guard_weights(Hazards(rows.outputs, np.ones((n, 2)), rows.fold), half, [0]) is half


def test_the_best_own_model_is_that_with_the_least_loss():
    y = np.random.default_rng(0).normal(size=30)
    rows = Values(y[:, None] + [0.3, 0.1, 0.2, 2.0] * np.linspace(0.9, 1, 30)[:, None], y, np.arange(30) % 5)
    assert guard_weights(rows, np.array([0, 0, 0, 1.0]), [0, 2]).tolist() == [0, 0, 1, 0]


def test_the_test_is_that_of_all_signs_that_the_ranks_could_have():
    """By counting them (Wilcoxon 1945)."""
    generator, acted = np.random.default_rng(2), 0
    signs = np.array(list(product([0, 1], repeat=10)))
    for _ in range(200):
        worse = generator.standard_t(3, size=10) + 0.6
        least = abs(worse.min())
        rows = Values(np.sqrt(np.stack([np.full(10, least), least + worse], 1)), np.zeros(10), np.arange(10))
        ranks = 1 + np.argsort(np.argsort(abs(worse)))
        p = (signs @ ranks >= ranks[worse > 0].sum()).mean()
        expected = p < 0.1 and np.sort(worse)[1:].sum() > 0
        assert (guard_weights(rows, np.array([0.0, 1.0]), [0])[0] == 1) == expected
        acted += expected
    assert 20 < acted < 180


@pytest.mark.long
def test_where_the_blend_is_as_good_as_the_own_model_a_false_alarm_is_as_rare_as_it_says():
    """10 % at a site: own model and blend err alike, in turn of either sign."""
    generator, half, fired, tries = np.random.default_rng(5), np.array([0.5, 0.5]), 0, 2000
    for number in range(tries):
        own, blend = generator.standard_t(3, size=(2, 40))
        rows = Values(np.stack([own, 2 * blend - own], 1), np.zeros(40), np.arange(40) % 5)
        assert number or np.allclose(rows.outputs @ half, blend)
        fired += guard_weights(rows, half, [0]) is not half
    assert 0.06 < fired / tries < 0.1 + 3 * np.sqrt(0.1 * 0.9 / tries)


def exchangeable(generator, models, rows=40):
    """A site whose blend and own models err alike, and the weights of its blend."""
    blend, own = np.split(generator.standard_t(3, size=(rows, 1 + models)), [1], axis=1)
    weights = np.full(models + 1, 1 / (models + 1))
    rest = (blend[:, 0] - own @ weights[:-1]) / weights[-1]
    return Values(np.column_stack([own, rest]), np.zeros(rows), np.arange(rows) % 5), weights


@pytest.mark.long
@pytest.mark.parametrize("models", [2, 3, 6])
def test_nor_is_a_false_alarm_more_frequent_where_the_best_of_several_own_models_is_selected(models):
    generator, tries = np.random.default_rng(models), 800
    fired = sum(
        guard_weights(rows, weights, range(models)) is not weights
        for rows, weights in (exchangeable(generator, models) for _ in range(tries))
    )
    assert 0.05 < fired / tries < 0.1 + 2 * np.sqrt(0.1 * 0.9 / tries)


@pytest.mark.long
def test_own_models_that_are_clearly_worse_do_not_count_as_competitors():
    """The p-value of the blend against the best own model is between 5 and 10 %."""
    rows, weights = np.arange(12), np.array([0.5, 0.0, 0.5])
    worse = np.where(np.isin(rows, [2, 5, 10]), -1.0, 1.0) * (1 + rows)
    assert 0.05 < wilcoxon(worse, alternative="greater").pvalue < 0.1

    def guarded_beside(other):
        best, blend = np.full(12, 100.0), 100 + worse
        said = np.sqrt(np.stack([best, other, blend], 1))
        said[:, 2] = 2 * said[:, 2] - said[:, 0]  # of which the blend has half
        return guard_weights(Values(said, np.zeros(12), rows), weights, [0, 1])

    assert guarded_beside(300.0 + rows).tolist() == [1, 0, 0]
    assert guarded_beside(100.001 + 0.1 * (-1.0) ** rows) is weights
