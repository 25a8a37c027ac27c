"""Weights of forests at a site, and calibration of their mean, from rows that they were grown without."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.maths.simplex import simplex_qp

FloatArray = NDArray[np.float64]

_STEPS, _TOLERANCE = 500, 1e-10


def mixture_weights(likelihood: FloatArray, before: FloatArray, rows: float) -> FloatArray:
    """Return the weights ``(sources,)`` with the largest posterior under a Dirichlet prior, by EM.

    Args:
        likelihood: ``(sources, rows)``, each source's probability of the row's class, above 0.
        before: ``(sources,)``, the prior weights; a source with weight 0 keeps it.
        rows: number of rows that the prior is worth.

    Source: Dempster, Laird and Rubin 1977, section 4.3.

    Example:
        >>> mixture_weights(np.array([[0.9, 0.9], [0.1, 0.1]]), np.array([0.5, 0.5]), 0.0).round(6).tolist()
        [1.0, 0.0]
    """
    weight = before
    for _ in range(_STEPS):
        share = weight[:, None] * likelihood
        share = (share / share.sum(0)).sum(1) + rows * before
        new_weights: FloatArray = share / share.sum()
        if np.abs(new_weights - weight).max() < _TOLERANCE:
            return new_weights
        weight = new_weights
    return weight


def mean_weights(values: FloatArray, y: FloatArray, before: FloatArray, rows: float) -> FloatArray:
    """Return weights on the simplex ``(sources,)`` whose mean of values is nearest to ``y``, shrunk to ``before``.

    They minimise ``|y - w^T V|^2 + rows d |w - w0|^2``, where d is the mean squared distance between a source and the
    mean with weights ``w0``.

    Args:
        values: V, ``(sources, rows)``.
        y: ``(rows,)``.
        before: the prior weights w0; a source with weight 0 keeps it.
        rows: number of rows that the prior is worth.
    """
    in_prior = before > 0
    v, w0 = values[in_prior], before[in_prior]
    distance = float(((v - w0 @ v) ** 2).mean())
    ridge = rows * distance * np.eye(len(v))
    weights = np.zeros_like(before)
    weights[in_prior] = simplex_qp(v @ v.T + ridge, -2 * (v @ y + ridge @ w0))
    return weights


def calibrated_logits(logs: FloatArray, y: NDArray[np.int64], strength: float) -> tuple[FloatArray, float]:
    """Return the shift a per class ``(C,)`` and the slope b of logits ``a + b log p`` with the largest posterior.

    The prior is normal with variance ``1 / strength``; its mean is 1 for b and 0 for each a.

    Args:
        logs: ``(rows, C)``, log p.
        y: ``(rows,)`` labels.
        strength: strength of the prior.

    Source: Platt 1999; Guo, Pleiss, Sun and Weinberger 2017, section 4.2.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    classes = logs.shape[1]
    indicators = np.eye(classes)[y]

    def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
        shift, slope = parameters[:classes], parameters[classes]
        z = shift + slope * logs
        z = z - z.max(1, keepdims=True)
        p = np.exp(z)
        p /= p.sum(1, keepdims=True)
        value = -np.sum(indicators * (z - np.log(np.exp(z).sum(1, keepdims=True))))
        value += strength / 2 * ((shift**2).sum() + (slope - 1) ** 2)
        error = p - indicators
        return float(value), np.append(error.sum(0) + strength * shift, (error * logs).sum() + strength * (slope - 1))

    optimum: Any = minimize(loss, np.append(np.zeros(classes), 1.0), jac=True, method="L-BFGS-B")
    return optimum.x[:classes], float(optimum.x[classes])


def calibrated_values(values: FloatArray, y: FloatArray, strength: float) -> tuple[float, float]:
    """Return shift a and slope b of the line ``a + b v`` nearest to ``y``, with a prior for b = 1.

    They minimise ``sum (y - a - b v)^2 + strength var(v) (b - 1)^2``; the line goes through the means.
    """
    spread = values - values.mean()
    variation = float(spread @ spread)
    if variation == 0:
        return float(y.mean() - values.mean()), 1.0
    pull = strength * variation / len(values)
    slope = (float(spread @ (y - y.mean())) + pull) / (variation + pull)
    return float(y.mean() - slope * values.mean()), slope
