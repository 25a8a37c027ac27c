"""Times and events for trees: relative risks, and weights and a slope by the partial likelihood."""

from __future__ import annotations

import numpy as np
import torch

from perfed.maths import glm
from perfed.maths.blending import Hazards, Prior, shrink_site_weights
from perfed.methods.forest.mixing import FloatArray


def expected_events(y: FloatArray, log_risk: FloatArray) -> FloatArray:
    """Return the expected number of events of each row until its time, ``(rows,)``.

    It is ``e^h`` times Breslow's cumulative hazard at that time, which is that of Nelson and Aalen if all risks are
    equal. The sum over rows equals the number of observed events.

    Args:
        y: ``(rows, 2)`` times, and 1 for an event.
        log_risk: h ``(rows,)``.

    Source: Breslow 1974.

    Example:
        >>> expected_events(np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]]), np.zeros(3)).round(2).tolist()
        [0.33, 0.33, 1.33]
    """
    risk = np.exp(log_risk - log_risk.max())
    _, time_index = np.unique(y[:, 0], return_inverse=True)
    at_risk = np.bincount(time_index, risk)[::-1].cumsum()[::-1]
    expected: FloatArray = risk * np.cumsum(np.bincount(time_index, y[:, 1]) / at_risk)[time_index]
    return expected


def compute_rates(y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return each row's events divided by its expected events, and the latter as the row's weight: ``(rows,)`` each.

    With these, scikit-learn's tree with ``criterion="poisson"`` is that of LeBlanc and Crowley: its deviance is that of
    proportional hazards between leaves, and the value of a node is observed over expected events. A row whose time is
    before all events has weight 0.

    Source: LeBlanc and Crowley 1992, Biometrics 48.
    """
    expected = expected_events(y, np.zeros(len(y)))
    return np.divide(y[:, 1], expected, out=np.zeros(len(y)), where=expected > 0), expected


def relative_risk(rate: FloatArray, expected: FloatArray) -> FloatArray:
    """Return ``(1 + O) / (1 + E)`` of nodes with ``O = rate E`` events where E were expected.

    It is the posterior mean under a gamma prior that is worth one observed and one expected event (Therneau and
    Atkinson, rpart).
    """
    return (1 + rate * expected) / (1 + expected)


def cox_loss(log_risk: FloatArray, y: FloatArray) -> float:
    """Return minus the log partial likelihood (ties: Breslow), the sum over ``(rows,)``."""
    return float(glm.loss("survival", torch.from_numpy(log_risk)[:, None], torch.from_numpy(y)))


def hazard_weights(log_risk: FloatArray, y: FloatArray, before: FloatArray, rows: float) -> FloatArray:
    """Return weights on the simplex ``(sources,)`` whose mean log risk is most likely, shrunk to ``before``.

    They minimise minus the log partial likelihood ``+ rows d/2 |w - w0|^2``, where d is its mean curvature per row
    along the differences between a source and the mean with weights w0.

    Args:
        log_risk: ``(sources, rows)``.
        y: ``(rows, 2)`` times and events.
        before: the prior weights w0; a source with weight 0 keeps it.
        rows: number of rows that the prior is worth.
    """
    in_prior = before > 0
    w0 = before[in_prior]
    site_rows = Hazards(log_risk[in_prior].T, y, np.zeros(len(y), dtype=np.int64))
    differences = np.eye(len(w0)) - w0[:, None]
    curvature = float(np.trace(differences.T @ site_rows.compute_sums(w0).hessian @ differences)) / (len(w0) * len(y))
    if curvature <= 0:  # no event, or equal outputs of all sources
        return before
    weights = np.zeros_like(before)
    prior = Prior(w0, 0.0, np.zeros_like(w0), curvature * np.eye(len(w0)))
    weights[in_prior] = shrink_site_weights(site_rows, prior, rows)
    return weights


def hazard_slope(log_risk: FloatArray, y: FloatArray, strength: float) -> float:
    """Return the slope b of a Cox model ``b h``, with a normal prior of mean 1 and variance ``1 / strength``.

    Args:
        log_risk: h ``(rows,)``.
        y: ``(rows, 2)`` times and events.
        strength: strength of the prior.

    Source: van Houwelingen 2000, Statistics in Medicine 19.
    """
    site = glm.Site("survival", torch.from_numpy(log_risk - log_risk.mean())[:, None], torch.from_numpy(y), 1, 1)
    pull = torch.tensor(strength, dtype=torch.float64)
    return float(site.fit(torch.ones(1, 1, dtype=torch.float64), pull, pull).slopes)
