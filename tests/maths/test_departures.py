"""Pulls by column and by site against dense normal distributions, brute force and statsmodels."""

import numpy as np
import pytest
import torch
from data_files import schools
from scipy.optimize import minimize

from perfed.maths.departures import pool_with_factors
from perfed.maths.glm import Summary
from perfed.maths.pooling import pool_summaries

BOTH = {"by_column": True, "by_site": True}


def linear(departures, rows=40, seed=0, p=4):
    """Sites whose slopes depart by so much ``(m, p)``: their summaries, centred rows and degrees of freedom."""
    generator = np.random.default_rng(seed)
    truth, sites, found = generator.normal(size=p), [], []
    for depart in np.broadcast_to(departures, (len(departures), p)):
        x = generator.normal(size=(rows, p))
        y = x @ (truth + depart * generator.normal(size=p)) + generator.normal(size=rows)
        x, y = x - x.mean(0), y - y.mean()
        sites.append(Summary(*map(torch.as_tensor, (x.T @ x, x.T @ y, 0.5 * y @ y))))
        found.append((x, y))
    return sites, found, len(found) * (rows - 1)


@pytest.mark.parametrize("freedom", [True, False])
def test_with_factors_held_at_one_it_is_the_common_pull(freedom):
    sites, _, degrees = linear(np.full((5, 1), 0.5))
    of = (None, degrees if freedom else None)
    found, common = pool_with_factors(sites, *of, **BOTH, spread=1e-4), pool_summaries(sites, None, None, of[1])
    assert found.evidence == pytest.approx(common.evidence, abs=1e-4)
    assert np.log([found.shared_pull, found.site_pull]) == pytest.approx(
        np.log([common.shared_pull, common.site_pull]), abs=0.02
    )
    assert torch.allclose(found.weight, common.weight, atol=1e-3)


@pytest.mark.parametrize("by", [(True, False), (False, True), (True, True)])
def test_factors_maximise_likelihood_times_prior(by):
    """By brute force, over the covariance of all rows."""
    departures = np.outer([0.3, 0.4, 1.5], [1.0, 0.2, 2.0])
    sites, rows, degrees = linear(departures, rows=12, p=3)
    x, y = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    site = np.repeat(np.arange(3), 12)

    def cost(logs):
        v, u = (np.exp(part) if used else np.ones(3) for part, used in zip((logs[2:5], logs[5:]), by, strict=True))
        departed = (site[:, None] == site) * ((x / v) @ x.T) / u[site]
        covariance = np.eye(36) + x @ x.T / np.exp(logs[0]) + departed / np.exp(logs[1])
        square = y @ np.linalg.solve(covariance, y)
        prior = sum(logs[part] @ logs[part] for part, used in zip((slice(2, 5), slice(5, 8)), by, strict=True) if used)
        return 0.5 * (np.linalg.slogdet(covariance)[1] + degrees * np.log(square) + prior)

    best = minimize(cost, np.zeros(8), method="BFGS", options={"gtol": 1e-6}).x
    found = pool_with_factors(sites, None, degrees, by_column=by[0], by_site=by[1])
    expected = np.exp([best[:2].tolist()])[0], np.exp(best[2:5] * by[0]), np.exp(best[5:] * by[1])
    assert [found.shared_pull, found.site_pull] == pytest.approx(expected[0], rel=0.01)
    assert found.columns.numpy() == pytest.approx(expected[1], rel=0.01)
    assert found.sites.numpy() == pytest.approx(expected[2], rel=0.01)


@pytest.mark.long
def test_the_column_that_varies_over_sites_is_found():
    departures = np.tile([0.05, 0.05, 1.5, 0.05], (8, 1))
    sites, _, degrees = linear(departures)
    found = pool_with_factors(sites, None, degrees, by_column=True, by_site=False)
    of_others = found.columns[[0, 1, 3]]
    assert float(found.columns[2]) < 0.1 and float(of_others.min()) > 1
    assert float(found.site_pull * found.columns[2]) == pytest.approx(1 / 1.5**2, rel=0.8)
    assert found.evidence > pool_summaries(sites, None, None, degrees).evidence + 5
    switched_off = pool_with_factors(sites, None, degrees, by_column=False, by_site=False)
    assert switched_off.columns.tolist() == [1.0] * 4


@pytest.mark.long
def test_where_nothing_departs_as_a_whole_a_column_may():
    """One of thirty: its common pull is the greatest there is, where nothing says which way a factor should go."""
    departures = np.zeros((3, 30))
    departures[:, 4] = 2
    sites, _, degrees = linear(departures, rows=60, p=30)
    assert int(pool_with_factors(sites, None, degrees, by_column=True, by_site=False).columns.argmin()) == 4


@pytest.mark.long
def test_an_odd_site_is_pulled_less():
    sites, _, degrees = linear(np.array([[0.1]] * 7 + [[1.5]]), p=6)
    found = pool_with_factors(sites, None, degrees, by_column=False, by_site=True)
    assert float(found.sites[7]) < 0.2 and float(found.sites[:7].min()) > 0.5


@pytest.mark.long
def test_few_samples_give_no_wild_factors():
    sites, _, degrees = linear(np.full((3, 1), 0.5), rows=6)
    found = pool_with_factors(sites, None, degrees, **BOTH)
    assert all(0.1 < float(factor) < 10 for factor in (*found.columns, *found.sites))


@pytest.mark.long
def test_slopes_of_one_column_have_one_factor():
    """Two linear predictors: the same as two columns of summaries whose slopes alternate, of which one departs."""
    sites, _, _ = linear(np.tile([1.5, 1.5, 0.05, 0.05], (8, 1)))
    found = pool_with_factors(sites, None, by_column=True, by_site=False, outputs=2)
    assert len(found.columns) == 2 and float(found.columns[0]) < 0.3 < 1 < float(found.columns[1])


@pytest.mark.long
def test_of_schools_it_is_the_mixed_model_of_statsmodels():
    """Fixed slopes and levels of schools, a variance of departures for each of three columns; a prior that is flat."""
    models = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    x, y, rows = schools([0, 7, 8])
    sites = []
    for own in rows:
        of, said = x[own] - x[own].mean(0), y[own] - y[own].mean()
        sites.append(Summary(*map(torch.as_tensor, (of.T @ of, of.T @ said, 0.5 * said @ said))))
    found = pool_with_factors(sites, 1e-7, len(y) - len(rows), by_column=True, by_site=False, spread=30.0)
    levels = np.column_stack(rows).astype(float)
    names = [f"x{column}" for column in range(x.shape[1])]
    parts = models.VCSpec(
        names, [[[name]] * len(rows) for name in names], [[x[own][:, [c]] for own in rows] for c in range(len(names))]
    )
    model = models.MixedLM(y, np.column_stack([levels, x]), groups=np.column_stack(rows).argmax(1), exog_vc=parts)
    expected = model.fit(reml=True, method="lbfgs")
    assert 1 / (found.site_pull * found.columns.numpy()) == pytest.approx(
        expected.vcomp / expected.scale, rel=0.03, abs=2e-3
    )
    assert found.weight.numpy() == pytest.approx(expected.fe_params[len(rows) :], abs=2e-3)
