"""Times and events for trees: relative risks, weights and a slope by the partial likelihood."""

from __future__ import annotations

import numpy as np
import torch

from perfed.maths import glm
from perfed.maths.blending import Hazards, Prior, shrink_site_weights
from perfed.methods.forest.mixing import FloatArray


def expected_events(y: FloatArray, log_risk: FloatArray) -> FloatArray:
    """Return how many events each row is expected to have had until its time, ``(rows,)``.

    ``e^h`` times Breslow's cumulative hazard at that time; where all risks are alike, that of Nelson and Aalen. The
    events of all rows together are as many as were seen.

    Args:
        y: ``(rows, 2)`` times, and 1 for an event.
        log_risk: h ``(rows,)``.

    Source: Breslow 1974.

    Example:
        >>> expected_events(np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]]), np.zeros(3)).round(2).tolist()
        [0.33, 0.33, 1.33]
    """
    risk = np.exp(log_risk - log_risk.max())
    _, at = np.unique(y[:, 0], return_inverse=True)
    at_risk = np.bincount(at, risk)[::-1].cumsum()[::-1]
    found: FloatArray = risk * np.cumsum(np.bincount(at, y[:, 1]) / at_risk)[at]
    return found


def rates(y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return each row's events over those expected, and the latter, which the row weighs: ``(rows,)`` each.

    A tree of scikit-learn's with ``criterion="poisson"`` on these is that of LeBlanc and Crowley: its deviance is that
    of hazards which are proportional between leaves, its node's value is observed over expected events. A row of time
    before all events weighs 0.

    Source: LeBlanc and Crowley 1992, Biometrics 48.
    """
    expected = expected_events(y, np.zeros(len(y)))
    return np.divide(y[:, 1], expected, out=np.zeros(len(y)), where=expected > 0), expected


def relative_risk(rate: FloatArray, expected: FloatArray) -> FloatArray:
    """Return ``(1 + O) / (1 + E)`` of nodes with ``O = rate E`` events where E were expected.

    The mean under a gamma prior of one event where one was expected (Therneau and Atkinson, rpart).
    """
    return (1 + rate * expected) / (1 + expected)


def cox_loss(log_risk: FloatArray, y: FloatArray) -> float:
    """Return minus the log partial likelihood (ties: Breslow), the sum over ``(rows,)``."""
    return float(glm.loss("survival", torch.from_numpy(log_risk)[:, None], torch.from_numpy(y)))


def hazard_weights(log_risk: FloatArray, y: FloatArray, before: FloatArray, rows: float) -> FloatArray:
    """Return weights on the simplex ``(sources,)`` whose mean log risk is most likely, drawn to ``before``.

    Minus the log partial likelihood ``+ rows d/2 |w - w0|^2``, with d its mean curvature, by row, along the distances
    between a source and the mean by w0.

    Args:
        log_risk: ``(sources, rows)``.
        y: ``(rows, 2)`` times and events.
        before: w0; a source with 0 keeps it.
        rows: how many rows the prior counts as.
    """
    used = before > 0
    w0 = before[used]
    held = Hazards(log_risk[used].T, y, np.zeros(len(y), dtype=np.int64))
    apart = np.eye(len(w0)) - w0[:, None]
    curvature = float(np.trace(apart.T @ held.compute_sums(w0).hessian @ apart)) / (len(w0) * len(y))
    if curvature <= 0:  # without an event, or where all say the same
        return before
    found = np.zeros_like(before)
    prior = Prior(w0, 0.0, np.zeros_like(w0), curvature * np.eye(len(w0)))
    found[used] = shrink_site_weights(held, prior, rows)
    return found


def hazard_slope(log_risk: FloatArray, y: FloatArray, strength: float) -> float:
    """Return the slope b of a Cox model ``b h``, normal around 1 with variance ``1 / strength`` before any row.

    Args:
        log_risk: h ``(rows,)``.
        y: ``(rows, 2)`` times and events.
        strength: of the prior.

    Source: van Houwelingen 2000, Statistics in Medicine 19.
    """
    site = glm.Site("survival", torch.from_numpy(log_risk - log_risk.mean())[:, None], torch.from_numpy(y), 1, 1)
    pull = torch.tensor(strength, dtype=torch.float64)
    return float(site.fit(torch.ones(1, 1, dtype=torch.float64), pull, pull).slopes)
