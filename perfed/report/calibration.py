"""Whether probabilities are those with which things happen: slope, intercept and bins, from what the models said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

from perfed.report.run_results import RunResults, methods_of

BINS = 10
"""Bins of equally many rows."""

_EDGE = 1e-6  # probabilities are at least so far from 0 and 1

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """How a method's probabilities compare with what happened, over the rows of all sites and seeds.

    Attributes:
        slope: b of logit P(happens) = a + b logit p (Cox 1958): 1 is right, below 1 the probabilities are too extreme.
        intercept: a where b = 1: above 0 it happens more often than was said, below 0 less often.
        rows: how many there are.
        said, seen: by bin the mean probability, and the share in which it happened.
    """

    method: str
    slope: float
    intercept: float
    rows: int
    said: Numbers
    seen: Numbers


def calibrations(runs: Sequence[RunResults]) -> list[Calibration]:
    """Those of the methods whose finished runs kept probabilities of classes, in the order of the runs.

    Of two classes the probability is that of the second; of more that of the class that is predicted, and it happens
    where this is the right one.
    """
    found = []
    for method in methods_of(runs):
        own = [run for run in runs if run.method == method and run.summary]
        parts = [pair for run in own for pair in run.predictions.probabilities]
        if parts:
            p, happened = (np.concatenate(each) for each in zip(*parts, strict=True))
            of = calibration(method, p, happened)
            found += [of] if of is not None else []
    return found


def calibration(method: str, p: Numbers, happened: NDArray[np.bool_]) -> Calibration | None:
    """That of probabilities ``(rows,)`` and whether it happened; None where it is always or never so, or where every
    probability is the same.
    """
    logits = special.logit(np.clip(p, _EDGE, 1 - _EDGE))
    if happened.all() or not happened.any() or np.ptp(logits) == 0:
        return None

    def loss(ab: Numbers) -> tuple[float, Numbers]:
        eta = ab[0] + ab[1] * logits
        gradient = special.expit(eta) - happened
        value = (np.logaddexp(0, eta) - happened * eta).mean()
        return float(value), np.array([gradient.mean(), (gradient * logits).mean()])

    from scipy import optimize

    slope = optimize.minimize(loss, np.array([0.0, 1.0]), jac=True, method="BFGS", options={"gtol": 1e-8}).x[1]
    bound = 2 * abs(logits).max() + 50
    intercept = optimize.brentq(lambda a: (special.expit(a + logits) - happened).sum(), -bound, bound)
    bins = np.array_split(np.argsort(p, kind="stable"), min(BINS, len(p)))
    said, seen = (np.array([of[rows].mean() for rows in bins]) for of in (p, happened))
    return Calibration(method, float(slope), float(intercept), len(p), said, seen)
