"""Standardised targets: models see numbers of variance 1, and everything that people see is in the unit of the data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import perfed
from perfed.data.federation import Federation
from perfed.data.new_client import new_client
from perfed.data.target_scale import Sums, TargetScale
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.sklearn_run import SklearnRun


def far(clients=4, samples=40, seed=0) -> Federation:
    """Linear targets near 1000, in hundreds."""
    draw = np.random.default_rng(seed)
    arrays = {}
    for i in range(clients):
        x = draw.normal(size=(samples, 3))
        y = 1000 + 300 * x[:, 0] - 200 * x[:, 1] + 20 * draw.normal(size=samples)
        arrays[f"c{i}"] = {"x_train": x[:30], "y_train": y[:30], "x_test": x[30:], "y_test": y[30:]}
    return Federation.from_arrays(arrays)


def run(federation, rounds=30):
    model = perfed.Model(head=perfed.linear(1))
    method = perfed.build_method("local", {"lr": 0.1, "local_epochs": 2})
    made = perfed.Run(federation, method, model, rounds=rounds)
    return made, made.execute()["metrics"]


def test_the_scale_is_that_of_all_training_samples_together():
    federation = far()
    y = torch.cat([client.train.y for client in federation]).double()
    scale = federation.standardised().target_scale
    assert scale.mean == pytest.approx([float(y.mean())]) and scale.std == pytest.approx([float(y.std(correction=0))])
    together = torch.cat([client.train.y for client in federation.standardised()])
    assert float(together.mean()) == pytest.approx(0, abs=1e-9) and float(together.var(correction=0)) == pytest.approx(
        1
    )
    for before, after in zip(federation, federation.standardised(), strict=True):
        torch.testing.assert_close(scale.up(after.test.y), before.test.y)


def test_several_values_have_a_scale_each():
    y = torch.tensor([[1.0, 100.0], [3.0, 300.0]])
    scale = TargetScale.from_targets([y])
    assert (scale.mean, scale.std) == ((2.0, 200.0), (1.0, 100.0))
    assert scale.down(y).tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    torch.testing.assert_close(scale.up(scale.down(y)), y)


def test_sums_of_each_client_give_the_scale_of_all_rows_without_cancelling():
    parts = [
        torch.tensor([[1e9 + i, 5.0 * i] for i in range(first, last)], dtype=torch.float64)
        for first, last in ((0, 3), (3, 20))
    ]
    scale, rows = (
        TargetScale.of_sums([Sums.from_targets(part) for part in parts]),
        torch.arange(20, dtype=torch.float64),
    )
    assert scale.mean == (1e9 + 9.5, 47.5)
    assert scale.std == pytest.approx((float(rows.std(correction=0)), 5 * float(rows.std(correction=0))), rel=1e-12)
    for part in parts:
        of = Sums.from_targets(part)
        assert of.number == len(part) and of.total == tuple(part.sum(0).tolist())
        assert of.squares == pytest.approx((len(part) * part.var(0, correction=0)).tolist())
    tenth = [torch.full((n, 1), 0.1).double() for n in (3, 7)]
    with pytest.raises(PerfedError, match="the same for all samples"):
        TargetScale.of_sums([Sums.from_targets(part) for part in tenth])


@pytest.mark.long
def test_metrics_and_predictions_are_in_the_unit_of_the_data():
    federation = far()
    made, metrics = run(federation.standardised())
    errors = []
    for client in federation:
        predicted = made.predict(client.id, client.test.x)[:, 0]
        site = made.site(client.id)
        np.testing.assert_allclose(site.predict(client.test.x.numpy())[:, 0], predicted.numpy(), rtol=1e-4)
        error = float((predicted - client.test.y).square().mean())
        assert made.client_metrics[client.id]["mse"] == pytest.approx(error, rel=1e-3)
        assert site.facts["metrics"]["of"]["mse"]["value"] == pytest.approx(error, rel=1e-3)
        errors.append(error)
    assert metrics["mse"]["mean"] == pytest.approx(np.mean(errors), rel=1e-3)
    # Without the scale the same steps do not get near targets of 1000.
    assert metrics["mse"]["mean"] < 5_000 < 100_000 < run(federation)[1]["mse"]["mean"]


def test_scikit_learns_models_are_scored_in_the_unit_of_the_data_too():
    table = {"rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}}
    experiment = validate(table)
    plain = SklearnRun("sklearn:ridge", experiment, far()).execute()["metrics"]["mse"]["mean"]
    scaled = SklearnRun("sklearn:ridge", experiment, far().standardised()).execute()["metrics"]["mse"]["mean"]
    assert scaled == pytest.approx(plain, rel=1e-6)


@pytest.mark.long
def test_a_new_site_brings_its_targets_in_the_unit_of_the_data():
    federation = far().standardised()
    made, _ = run(federation)
    new = far(seed=5).clients[0]
    client = new_client(
        federation, "new", {"x": new.train.x, "y": new.train.y, "x_test": new.test.x, "y_test": new.test.y}
    )
    site = made.join(client)
    error = np.square(site.predict(new.test.x.numpy())[:, 0] - new.test.y.numpy()).mean()
    assert error < 10_000
    assert site.facts["metrics"]["of"]["mse"]["value"] == pytest.approx(error, rel=1e-3)


def test_what_has_no_scale_is_refused():
    same = Federation.from_arrays({"a": {"x_train": np.zeros((3, 2)), "y_train": np.ones(3)}})
    with pytest.raises(PerfedError, match="the same for all samples of all clients"):
        same.standardised()
    labels = Federation.from_arrays({"a": {"x_train": np.zeros((3, 2)), "y_train": np.array([0, 1, 1])}})
    with pytest.raises(PerfedError, match="targets of classification are not standardised"):
        labels.standardised()
