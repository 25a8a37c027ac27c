"""Metrics on the samples of one client have intervals that are known in closed form or contain the value."""

from __future__ import annotations

import numpy as np
import pytest
from engines import blobs
from scipy.stats import binomtest

from perfed.client_model.card import shown_metrics
from perfed.client_model.metrics import compute_metrics
from perfed.data.client import Client


def measured(right: int, rows: int) -> dict[str, dict[str, float | None]]:
    """The metrics of a model that is right of so many of ``rows`` test samples."""
    client: Client = blobs((5,), test=rows).clients[0]
    y, good = client.test.y.numpy(), np.arange(rows) < right
    said = np.eye(3)[np.where(good, y, (y + 1) % 3)] * 0.8 + 0.1
    return compute_metrics(client.test, said, "classification", 3)["of"]


@pytest.mark.long
def test_an_accuracy_has_wilsons_interval():
    for right, rows in ((70, 100), (12, 12), (0, 9)):
        found = measured(right, rows)["accuracy"]
        ends = binomtest(right, rows).proportion_ci(method="wilson")
        assert (found["value"], found["low"], found["high"]) == pytest.approx((right / rows, *ends), abs=1e-12)
    assert shown_metrics({"of": {"accuracy": measured(12, 12)["accuracy"]}}) == [
        ("accuracy", "100 %", "75.75 % to 100 %")
    ]


def test_a_bootstrap_that_tells_nothing_gives_no_interval():
    found = measured(12, 12)["loss"]
    assert found["low"] is None and found["high"] is None and found["value"] == pytest.approx(-np.log(0.9))
    loss = measured(70, 100)["loss"]
    assert loss["low"] < loss["value"] < loss["high"]
