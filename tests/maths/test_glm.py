"""Likelihoods against autograd, partial pooling against dense normal distributions."""

import time

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from perfed.maths.glm import Site, Summary, expand_loss, loss
from perfed.maths.pooling import pool_summaries
from perfed.training.cox import cox_losses

rng = np.random.default_rng(0)
N, P = 14, 3
X = torch.from_numpy(rng.normal(size=(N, P)))
TIMES = torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]).double()
EVENTS = torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0]).double()
TARGETS = {
    "logistic": ("classification", torch.from_numpy(rng.integers(0, 2, N)), 1),
    "multinomial": ("classification", torch.from_numpy(rng.integers(0, 4, N)), 4),
    "linear": ("regression", torch.from_numpy(rng.normal(size=(N, 2))), 2),
    "cox": ("survival", torch.stack([TIMES, EVENTS], 1), 1),
}


@pytest.mark.parametrize("family", TARGETS)
def test_gradient_and_hessian_are_those_of_autograd(family):
    task, y, k = TARGETS[family]
    at = torch.from_numpy(rng.normal(size=(P, k)))

    def value(flat):
        return loss(task, X @ flat.view(P, k), y)

    found = expand_loss(task, X, X @ at, y)
    gradient = torch.autograd.functional.jacobian(value, at.flatten())
    hessian = torch.autograd.functional.hessian(value, at.flatten())
    assert torch.allclose(found.gradient.flatten(), gradient, atol=1e-10)
    assert torch.allclose(found.hessian, hessian, atol=1e-10)


def test_the_cox_likelihood_is_the_one_of_mini_batches():
    eta = torch.from_numpy(rng.normal(size=(N, 1)))
    expected = cox_losses(eta.T, TIMES[None], EVENTS[None], torch.ones(1, N)).sum()
    assert torch.allclose(loss("survival", eta, TARGETS["cox"][1]), expected)


@pytest.mark.parametrize("family", TARGETS)
def test_a_summary_is_the_profile_of_the_loss_in_the_shared_slopes(family):
    task, y, k = TARGETS[family]
    site = Site(task, X, y, shared=2, outputs=k)
    of_site, of_all = torch.tensor(0.7).double(), torch.tensor(0.4).double()
    fit = site.fit(torch.zeros(2, k).double(), of_site, of_all)
    summary = site.summary(fit, of_site, of_all)
    alone = 1 / (1 / of_site + 1 / of_all)

    def profile(slopes):  # over the intercept and the own column, by brute force
        start = np.zeros(2 * k)

        def whole(flat):
            bias, own = torch.from_numpy(flat).view(2, k)
            bias = bias * (task != "survival")
            eta = bias + X[:, :2] @ slopes.view(2, k) + X[:, 2:] * own
            return float(loss(task, eta, y) + 0.5 * alone * own.square().sum() + 5e-5 * bias.square().sum())

        return minimize(whole, start, method="BFGS", options={"gtol": 1e-9}).fun

    at = fit.slopes.flatten()
    for shift in (torch.zeros(2 * k).double(), 1e-2 * torch.from_numpy(rng.normal(size=2 * k))):
        b = at + shift
        expected = summary.constant - summary.target @ b + b @ summary.hessian @ b / 2
        assert profile(b) == pytest.approx(float(expected), abs=1e-5)


def summaries(noise=0.5):
    """Of three sites with a linear model, and their rows, centred."""
    sites, rows = [], []
    truth = rng.normal(size=P)
    for n in (9, 12, 20):
        x = rng.normal(size=(n, P))
        y = x @ (truth + 0.3 * rng.normal(size=P)) + noise * rng.normal(size=n)
        x, y = x - x.mean(0), y - y.mean()
        sites.append(Summary(*map(torch.as_tensor, (x.T @ x, x.T @ y, 0.5 * y @ y))))
        rows.append((x, y))
    return sites, rows


def marginal(rows, of_all, of_site):
    """Log-likelihood of centred rows, w and departures integrated out, the noise at its best: a dense covariance."""
    total, y = sum(len(x) for x, _ in rows), np.concatenate([y for _, y in rows])
    x = np.concatenate([x for x, _ in rows])
    covariance = np.eye(total) + x @ x.T / of_all
    start = 0
    for own, _ in rows:
        part = slice(start, start + len(own))
        covariance[part, part] += own @ own.T / of_site
        start += len(own)
    freedom = total - len(rows)
    square = y @ np.linalg.solve(covariance, y)
    return -0.5 * np.linalg.slogdet(covariance)[1] - 0.5 * freedom * np.log(square), freedom


def test_pulls_maximise_the_restricted_likelihood():
    sites, rows = summaries()
    freedom = marginal(rows, 1.0, 1.0)[1]
    found = pool_summaries(sites, None, None, freedom)
    best = minimize(
        lambda p: -marginal(rows, *np.exp(p))[0], np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-5}
    )
    reached = marginal(rows, found.shared_pull, found.site_pull)[0]
    assert reached == pytest.approx(-best.fun, abs=1e-3)
    assert np.log([found.shared_pull, found.site_pull]) == pytest.approx(best.x, abs=0.05)


def test_shared_slopes_are_the_best_linear_prediction():
    sites, rows = summaries()
    found = pool_summaries(sites, shared_pull=0.8, site_pull=3.0, freedom=38)
    precision, pull = 0.8 * np.eye(P), np.zeros(P)
    for x, y in rows:
        inverse = np.linalg.inv(np.eye(len(x)) + x @ x.T / 3.0)
        precision += x.T @ inverse @ x
        pull += x.T @ inverse @ y
    assert found.weight.numpy() == pytest.approx(np.linalg.solve(precision, pull), abs=1e-10)


def test_a_site_without_a_column_has_no_say_in_its_slope():
    sites, _ = summaries()
    with_others = pool_summaries(sites, 1.0, 2.0).weight
    blind = Summary(torch.zeros(P, P).double(), torch.zeros(P).double(), torch.tensor(0.0).double())
    assert torch.allclose(pool_summaries([*sites, blind, blind], 1.0, 2.0).weight, with_others)


def wide(columns, sites=3, rows=8, seed=0):
    """Sites with more columns than rows: what they say of the slopes, their centred rows and targets."""
    generator, made = np.random.default_rng(seed), []
    for _ in range(sites):
        x = generator.normal(size=(rows, columns))
        y = x[:, 0] + generator.normal(size=rows)
        made.append((x - x.mean(0), y - y.mean()))
    return [Summary(*map(torch.as_tensor, (x.T @ x, x.T @ y, 0.5 * y @ y))) for x, y in made], made


@pytest.mark.parametrize("columns", [10, 20, 40])
def test_with_more_columns_than_rows_slopes_are_the_best_linear_prediction(columns):
    """As the dense normal distribution of all rows has it, with fewer and with more columns than rows in all."""
    summaries, made = wide(columns)
    found = pool_summaries(summaries, 0.5, 2.0)
    x, y = (np.concatenate(parts) for parts in zip(*made, strict=True))
    site = np.repeat(np.arange(len(made)), [len(own) for own, _ in made])
    covariance = np.eye(len(y)) + x @ x.T / 0.5 + (site[:, None] == site) * (x @ x.T) / 2.0
    assert found.weight.numpy() == pytest.approx(x.T @ np.linalg.solve(covariance, y) / 0.5, abs=1e-10)
    evidence = -0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(covariance)[1])
    assert found.evidence == pytest.approx(evidence, abs=1e-8)


@pytest.mark.parametrize(("columns", "rows"), [(30, 8), (5, 40)])
def test_a_site_with_more_columns_than_rows_is_fitted_as_by_scikit_learn(columns, rows):
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(rows, columns)), np.arange(rows) % 2
    pull = torch.tensor(0.5).double()
    site = Site("classification", torch.from_numpy(x), torch.from_numpy(y), shared=columns, outputs=1)
    fit = site.fit(torch.zeros(columns, 1).double(), pull, pull)
    expected = LogisticRegression(C=2.0, tol=1e-12, max_iter=10_000).fit(x, y)
    assert fit.slopes[:, 0].numpy() == pytest.approx(expected.coef_[0], abs=2e-3)
    assert float(fit.bias) == pytest.approx(float(expected.intercept_[0]), abs=2e-3)


@pytest.mark.long
def test_the_work_grows_with_rows_where_these_are_fewer_than_columns():
    """In less time than ten decompositions of a matrix of all columns take."""
    summaries, _ = wide(700)
    dense = summaries[0].hessian + torch.eye(700)
    pool_summaries(summaries[:1], 1.0, 1.0)

    def seconds(work):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    fast = min(seconds(lambda: pool_summaries(summaries, None, None)) for _ in range(3))
    assert fast < 10 * min(seconds(lambda: torch.linalg.eigh(dense)) for _ in range(3))
