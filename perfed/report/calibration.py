"""Calibration of predicted probabilities: slope, intercept and bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

from perfed.report.run_results import RunResults, list_methods

BINS = 10
"""The number of bins, which have equally many rows."""

_EDGE = 1e-6  # the smallest distance of probabilities from 0 and 1

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """The probabilities of a method compared with the outcomes, over the rows of all sites and seeds.

    Attributes:
        method: the name of the method.
        slope: b of logit P(event) = a + b logit p (Cox 1958): 1 for calibrated probabilities, below 1 if they are too
            extreme.
        intercept: a if b = 1: above 0 if the event is more frequent than predicted, below 0 if it is less frequent.
        rows: the number of rows.
        predicted, observed: the mean probability and the share of events in each bin.
    """

    method: str
    slope: float
    intercept: float
    rows: int
    predicted: Numbers
    observed: Numbers


def calibrate_methods(runs: Sequence[RunResults]) -> list[Calibration]:
    """Return the calibration of each method whose finished runs kept probabilities of classes.

    For two classes the event is the second class; for more classes it is that the predicted class is right.
    """
    results = []
    for method in list_methods(runs):
        parts = [pair for run in runs if run.method == method for pair in run.predictions.probabilities]
        if parts:
            p, occurred = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            result = fit_calibration(method, p, occurred)
            results += [] if result is None else [result]
    return results


def fit_calibration(method: str, p: Numbers, occurred: NDArray[np.bool_]) -> Calibration | None:
    """Return the calibration of probabilities ``(rows,)`` of an event; ``None`` if it cannot be estimated.

    This is so if the event occurred always or never, or if all probabilities are equal.
    """
    logits = special.logit(np.clip(p, _EDGE, 1 - _EDGE))
    if occurred.all() or not occurred.any() or np.ptp(logits) == 0:
        return None

    def loss(ab: Numbers) -> tuple[float, Numbers]:
        eta = ab[0] + ab[1] * logits
        gradient = special.expit(eta) - occurred
        value = (np.logaddexp(0, eta) - occurred * eta).mean()
        return float(value), np.array([gradient.mean(), (gradient * logits).mean()])

    from scipy import optimize

    slope = optimize.minimize(loss, np.array([0.0, 1.0]), jac=True, method="BFGS", options={"gtol": 1e-8}).x[1]
    bound = 2 * abs(logits).max() + 50
    intercept = optimize.brentq(lambda a: (special.expit(a + logits) - occurred).sum(), -bound, bound)
    bins = np.array_split(np.argsort(p, kind="stable"), min(BINS, len(p)))
    predicted, observed = (np.array([values[rows].mean() for rows in bins]) for values in (p, occurred))
    return Calibration(method, float(slope), float(intercept), len(p), predicted, observed)
