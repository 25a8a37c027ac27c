"""Slopes, intercepts and bins against scikit-learn's regression and by simulation; the picture on the page."""

import numpy as np
import pytest
from scipy.special import expit, logit
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from test_site_intervals import keep
from test_verdict import write

from perfed.report import figures, load_runs, write_report
from perfed.report.calibration import BINS, calibrate_methods, fit_calibration


def test_it_is_that_of_a_logistic_regression_on_the_logit():
    rng = np.random.default_rng(0)
    p = rng.beta(2, 3, 500)
    happened = rng.random(500) < expit(0.4 + 0.6 * logit(p))
    found = fit_calibration("fedavg", p, happened)
    fitted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(logit(p)[:, None], happened)
    assert found.slope == pytest.approx(fitted.coef_.item(), abs=1e-4)
    assert expit(found.intercept + logit(p)).sum() == pytest.approx(happened.sum(), abs=1e-6)
    seen, said = calibration_curve(happened, p, n_bins=BINS, strategy="quantile")
    assert found.predicted == pytest.approx(said) and found.observed == pytest.approx(seen) and found.rows == 500


@pytest.mark.long
def test_right_probabilities_have_slope_1_and_intercept_0_and_others_have_not():
    rng = np.random.default_rng(1)
    p = rng.beta(2, 2, 200_000)
    happened = rng.random(len(p)) < p
    right, extreme = fit_calibration("a", p, happened), fit_calibration("b", expit(2 * logit(p)), happened)
    assert (right.slope, right.intercept) == pytest.approx((1, 0), abs=0.02)
    assert extreme.slope == pytest.approx(0.5, abs=0.01)
    rarer = fit_calibration("c", expit(logit(p) + 0.7), happened)
    assert (rarer.slope, rarer.intercept) == pytest.approx((1, -0.7), abs=0.02)


@pytest.mark.parametrize("case", ["always", "never", "one probability"])
def test_what_tells_nothing_has_none(case):
    p = np.full(20, 0.3) if case == "one probability" else np.linspace(0.1, 0.9, 20)
    happened = np.arange(20) % 2 == 0 if case == "one probability" else np.full(20, case == "always")
    assert fit_calibration("fedavg", p, happened) is None


def test_certain_models_that_are_wrong_have_numbers_all_the_same():
    """A quarter of either kind is wrong; certain is one in a million."""
    found = fit_calibration("fedavg", np.repeat([0.0, 1.0], 40), np.arange(80) % 4 < np.repeat([1, 3], 40))
    assert found.slope == pytest.approx(logit(0.75) / logit(1 - 1e-6), abs=1e-4)
    assert found.intercept == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_of_runs_it_is_over_all_sites_and_seeds(tmp_path, classes):
    rng, rows = np.random.default_rng(2), {}
    for seed in range(2):
        for method in ("local", "fedavg", "sklearn:svc"):
            outputs = [rng.normal(size=(40, classes)) for _ in range(3)]
            y = [
                np.array([rng.choice(classes, p=row) for row in np.exp(o) / np.exp(o).sum(1)[:, None]]) for o in outputs
            ]
            keep(write(tmp_path, method, seed, [0.5] * 3), y, outputs, [0, 1, 2])
            rows.setdefault(method, []).extend(zip(y, outputs, strict=True))
    found = {of.method: of for of in calibrate_methods(load_runs(sorted(tmp_path.iterdir())))}
    assert found.keys() == {"local", "fedavg"}  # numbers of the SVC are no probabilities
    y, outputs = (np.concatenate(each) for each in zip(*rows["fedavg"], strict=True))
    p = np.exp(outputs) / np.exp(outputs).sum(1)[:, None]
    of = (p[:, 1], y == 1) if classes == 2 else (p.max(1), p.argmax(1) == y)
    right = fit_calibration("fedavg", *of)
    assert (found["fedavg"].slope, found["fedavg"].rows) == (pytest.approx(right.slope), 240)
    page = write_report(load_runs(sorted(tmp_path.iterdir())), tmp_path / "report.html", title="made up").read_text()
    section = page[page.index("Calibration</h2>") :]
    assert f"<td>{right.slope:.2f}</td><td>{right.intercept:+.2f}</td>" in section
    drawn = figures(load_runs([path for path in sorted(tmp_path.iterdir()) if path.is_dir()]))["calibration"]
    assert f"FedAvg: predicted {100 * right.predicted[0]:.1f} %, observed {100 * right.observed[0]:.1f} %" in drawn


def test_runs_of_values_have_no_calibration(tmp_path):
    run = write(tmp_path, "local", 0, [0.5], metric="mse")
    keep(run, [np.array([1.0, 2.0])], [np.array([[1.0], [2.0]])], [0])
    assert calibrate_methods(load_runs([run])) == []
