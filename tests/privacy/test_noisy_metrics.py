"""Metrics that leave with noise: what a test row can change, the noise's size, what it costs, what is refused."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from gaussian import closed_form

from perfed.data.target_scale import TargetScale
from perfed.engine.evaluate import Outputs, group_of, summarise
from perfed.errors import PerfedError
from perfed.methods.build import build_method
from perfed.privacy.apply import make_private
from perfed.privacy.metrics import EvaluationPlan, NoisyMetrics, compute_clipped_means
from perfed.privacy.settings import Privacy
from perfed.rng import Noise

ROWS, CLASSES, BOUND = 6, 3, 2.0
SCALE = TargetScale((10.0,), (5.0,))


def outputs(task: str, seed: int, rows: int = ROWS) -> Outputs:
    generator = np.random.default_rng(seed)
    if task == "classification":
        y, said = generator.integers(0, CLASSES, rows), 10 * generator.normal(size=(rows, CLASSES))
    else:
        y, said = 30 * generator.normal(size=(rows, 1)), 30 * generator.normal(size=(rows, 1))
    return Outputs(np.array(["a"] * rows), None, y, said)


def metrics(task: str, **changes) -> tuple[NoisyMetrics, dict[str, float]]:
    names = ("log-loss", "brier") if task == "classification" else ("mae",)
    settings = {"unit": "sample", "noise": 1.5, "bound": BOUND, "rounds": (2, 4), **changes}
    made = NoisyMetrics(names, **settings)
    return made, made.compute_bounds(
        task, CLASSES if task == "classification" else None, None if "cl" in task else SCALE
    )


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_test_row_changes_a_metric_by_no_more_than_its_sensitivity(task):
    """Brute force: each row of many sets is left out (it counts nothing of the same n), or becomes another."""
    _, bounds = metrics(task)
    largest = dict.fromkeys(bounds, 0.0)
    for seed in range(60):
        whole, other = outputs(task, seed), outputs(task, 1000 + seed)
        before = compute_clipped_means(whole, bounds)
        for row in range(ROWS):
            kept = np.arange(ROWS) != row
            rest = Outputs(whole.client[kept], None, whole.y[kept], whole.outputs[kept])
            y, said = whole.y.copy(), whole.outputs.copy()
            y[row], said[row] = other.y[row], other.outputs[row]
            changed = compute_clipped_means(Outputs(whole.client, None, y, said), bounds)
            for name, mean in compute_clipped_means(rest, bounds).items():
                moved = max(abs(before[name] - mean * (ROWS - 1) / ROWS), abs(before[name] - changed[name]))
                largest[name] = max(largest[name], moved)
    for name, bound in bounds.items():
        assert 0.95 * bound / ROWS < largest[name] <= bound / ROWS * (1 + 1e-12), name
    if task == "regression":  # in units of the targets' deviation, 5, and of its square
        assert bounds == {"mse": BOUND * 25.0, "mae": BOUND * 5.0}


def test_a_model_that_says_no_number_of_a_row_is_not_told():
    made, bounds = metrics("regression")
    broken = outputs("regression", 0)
    broken.outputs[0] = np.nan
    assert all(np.isfinite(value) for value in made.add_noise(broken, bounds, Noise(b"s" * 32, b"m")).values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.5 / 50),
        ({"unit": "client"}, 1.5),
        ({"unit": "client", "shares": 4}, 0.75),
    ],
)
def test_the_noise_has_the_deviation_that_is_said_and_the_same_message_has_the_same(changes, expected):
    made, bounds = metrics("classification", **changes)
    said = outputs("classification", 3, rows=50)
    exact = compute_clipped_means(said, bounds)
    found = [made.add_noise(said, bounds, Noise(b"s" * 32, number.to_bytes(4, "big"))) for number in range(3000)]
    assert found[7] == made.add_noise(said, bounds, Noise(b"s" * 32, (7).to_bytes(4, "big")))
    assert found[7] != made.add_noise(said, bounds, Noise(b"t" * 32, (7).to_bytes(4, "big")))
    for name, bound in bounds.items():
        drawn = np.array([one[name] - exact[name] for one in found])
        assert drawn.std() == pytest.approx(expected * bound, rel=0.05) == made.noise_deviation(bound, 50)
        assert abs(drawn.mean()) < 4 * expected * bound / sqrt(3000)
    between = np.corrcoef([[one[name] for one in found] for name in bounds])
    assert abs(between[~np.eye(3, dtype=bool)]).max() < 0.08  # each metric has noise of its own


def plan(method: str = "fedavg", rounds: int = 4, evaluated=(2, 4), **settings):
    given = Privacy(**{"epsilon": 6.0, "delta": 1e-3, "metrics": "noisy", **settings})
    return make_private(
        build_method(method, {"local_epochs": 1}), given, rounds, None, evaluation=EvaluationPlan(["brier"], evaluated)
    )


def test_test_rows_have_a_budget_of_their_own_and_a_row_spends_the_larger():
    """Two metrics in each of two rounds: four releases. Training has five (the count of rows, and four passes)."""
    found, plain = plan(), plan(metrics="none")
    assert found.noise == plain.noise and plain.metrics is None
    assert 5.97 < closed_form(4 / found.metrics.noise**2, 1e-3) <= 6.01
    assert found.metrics.noise < found.noise  # four against five
    assert found.compute_spending(1, 2) == pytest.approx(closed_form(4 / found.metrics.noise**2, 1e-3), rel=1e-3)
    assert found.compute_spending(4, 1) == pytest.approx(closed_form(5 / found.noise**2, 1e-3), rel=1e-3)


def test_a_client_spends_both_together():
    found, plain = plan(unit="client"), plan(unit="client", metrics="none")
    assert found.metrics.noise == found.noise > plain.noise
    expected = closed_form((4 + 4) / found.noise**2, 1e-3)
    assert expected <= 6.01 and found.compute_spending(4, 2) == pytest.approx(expected, rel=1e-3)
    assert found.compute_spending(4, 2) > found.compute_spending(4, 1) > found.compute_spending(4)


def test_every_fine_tuned_model_whose_metrics_leave_is_counted():
    """Else metrics of models in between would tell of training rows what nobody has counted."""
    evaluated = (1, 2, 3, 4)
    assert plan("fedavg-ft", evaluated=evaluated).ahead.full - plan("fedavg-ft", evaluated=(4,)).ahead.full == 3 * (
        plan("fedavg-ft", evaluated=(4,)).ahead.full - plan("fedavg", evaluated=(4,)).ahead.full
    )
    assert plan("fedavg-ft", evaluated=evaluated, metrics="none").ahead == plan("fedavg-ft", evaluated=(4,)).ahead


def test_a_budget_with_noise_pays_for_rounds_and_their_metrics():
    found = plan(unit="client", rounds=50, noise=2.0, evaluated=tuple(range(5, 51, 5)))
    lasts = found.affordable_rounds
    assert 0 < lasts < plan(unit="client", rounds=50, noise=2.0, metrics="none").affordable_rounds
    assert (
        found.compute_spending(lasts, found.count_evaluations(lasts))
        <= 6.0
        < found.compute_spending(lasts + 1, found.count_evaluations(lasts + 1))
    )
    assert [found.count_evaluations(n) for n in (0, 4, 5, 6)] == [
        0,
        1,
        1,
        2,
    ]  # the last round is evaluated wherever it ends


def test_a_metric_that_is_no_mean_over_rows_is_refused_by_name():
    with pytest.raises(PerfedError, match=r"'auc' has no mechanism under privacy.metrics = 'noisy'") as error:
        make_private(
            build_method("fedavg", {}),
            Privacy(noise=1.0, delta=1e-3, metrics="noisy"),
            2,
            None,
            evaluation=EvaluationPlan(["auc"]),
        )
    assert "\n" not in str(error.value) and "log-loss" in str(error.value)


def test_of_a_group_of_clients_the_mean_alone_is_known():
    found = summarise({group_of("ab"): {"accuracy": 0.5}, group_of("abc"): {"accuracy": 0.7}})
    assert found["accuracy"]["mean"] == 0.6 and np.isnan(found["accuracy"]["min"])
    assert torch.isfinite(torch.tensor(found["accuracy"]["mean"]))
