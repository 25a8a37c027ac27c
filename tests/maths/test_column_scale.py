"""The scale of columns inside a generalised linear model, against scikit-learn and scaled inputs."""

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from perfed.maths.column_scale import ColumnScale, shared_scale
from perfed.maths.glm import Site

NONE = torch.zeros(0, dtype=torch.float64)


def rows(seed=0, n=30):
    x = np.random.default_rng(seed).normal(size=(n, 3)) * [0.01, 1e4, 3.0] + [5.0, -7e4, 2015.0]
    x[:, 2] = x[0, 2]
    return torch.from_numpy(x)


def test_without_a_known_scale_rows_are_standardised():
    x = rows()
    assert ColumnScale.from_rows(x, NONE).transform(x).numpy() == pytest.approx(StandardScaler().fit_transform(x))


def test_a_known_scale_replaces_the_deviation_of_the_first_columns():
    x, known = rows(), torch.tensor([2.0, 0.0, 4.0]).double()
    scale = ColumnScale.from_rows(x, known)
    assert scale.deviation.tolist() == pytest.approx([2.0, float(x[:, 1].std(correction=0)), 4.0])


@pytest.mark.parametrize("task", ["regression", "classification", "survival"])
def test_a_restored_fit_predicts_what_the_fit_of_scaled_columns_predicts(task):
    x, generator = rows(), np.random.default_rng(1)
    y = {
        "regression": generator.normal(size=(30, 1)),
        "classification": np.arange(30) % 2,
        "survival": np.column_stack([generator.exponential(size=30), np.ones(30)]),
    }[task]
    scale, pull = ColumnScale.from_rows(x, NONE), torch.tensor(1.0).double()
    site = Site(task, scale.transform(x), torch.from_numpy(y), shared=2, outputs=1)
    fit = site.fit(torch.zeros(2, 1).double(), pull, pull)
    restored = scale.restore_fit(fit, intercept=task != "survival")
    expected = site.x @ torch.cat([fit.slopes, fit.local]) + fit.bias
    found = x @ torch.cat([restored.slopes, restored.local]) + restored.bias
    if task == "survival":
        expected, found = expected - expected.mean(), found - found.mean()
    assert torch.allclose(found, expected, atol=1e-8)


def test_a_restored_summary_is_that_of_the_columns_as_they_are():
    """Of values: the Gram matrix of centred rows, and their products with the targets."""
    x, pull = rows()[:, :2], torch.tensor(1.0).double()
    y = x @ torch.tensor([[100.0], [1e-4]]).double()
    scale = ColumnScale.from_rows(x, NONE)
    site = Site("regression", scale.transform(x), y, shared=2, outputs=1)
    fit = site.fit(torch.zeros(2, 1).double(), pull, pull)
    found = scale.restore_summary(site.summary(fit, pull, pull), 1)
    centred, target = x - x.mean(0), y - y.mean()
    assert found.hessian.numpy() == pytest.approx((centred.T @ centred).numpy(), rel=1e-5)
    assert found.target.numpy() == pytest.approx((centred.T @ target)[:, 0].numpy(), rel=1e-5)


@pytest.mark.parametrize(("task", "classes"), [("regression", 1), ("classification", 2), ("classification", 4)])
def test_the_shared_scale_of_uninformative_targets_is_the_deviation_within_sites(task, classes):
    """Also where one site does not have a column."""
    pull, summaries, freedom = torch.tensor(1e9).double(), [], []
    outputs = 1 if classes <= 2 else classes
    x = [rows(seed, 40)[:, :2] + 1e5 * seed for seed in range(3)]
    x[2][:, 1] = 0
    for own in x:
        scale = ColumnScale.from_rows(own, NONE)
        y = torch.zeros(40, 1).double() if task == "regression" else torch.arange(40) % classes
        site = Site(task, scale.transform(own), y, shared=2, outputs=outputs)
        fit = site.fit(torch.zeros(2, outputs).double(), pull, pull)
        summaries.append(scale.restore_summary(site.summary(fit, pull, pull), outputs))
        freedom.append(39.0 * outputs)
    squares = [sum(((own - own.mean(0))[:, column] ** 2).sum() for own in x) for column in (0, 1)]
    expected = [float(squares[0] / 117) ** 0.5, float(squares[1] / 78) ** 0.5]
    assert shared_scale(task, summaries, freedom, outputs).tolist() == pytest.approx(expected, rel=1e-4)


def test_a_column_of_which_no_site_says_anything_has_no_scale():
    x, pull = rows(), torch.tensor(1.0).double()
    scale = ColumnScale.from_rows(x, NONE)
    site = Site("regression", scale.transform(x), torch.ones(30, 1).double(), shared=3, outputs=1)
    summary = scale.restore_summary(site.summary(site.fit(torch.zeros(3, 1).double(), pull, pull), pull, pull), 1)
    assert (shared_scale("regression", [summary], [29.0], 1) > 0).tolist() == [True, True, False]
