"""How much a site trusts each forest, and how far what they say together is moved: from rows that they did not see."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.maths.simplex import simplex_qp

FloatArray = NDArray[np.float64]

_STEPS, _CLOSE = 500, 1e-10


def mixture_weights(likelihood: FloatArray, before: FloatArray, rows: float) -> FloatArray:
    """Return weights ``(sources,)`` that make the rows likely: the mode under a Dirichlet prior, by EM.

    Args:
        likelihood: ``(sources, rows)``, the probability that each gives each row's own class, above 0.
        before: ``(sources,)``, the weights without any row; a source with 0 keeps it.
        rows: how many rows the prior counts as.

    Source: Dempster, Laird and Rubin 1977, section 4.3.

    Example:
        >>> mixture_weights(np.array([[0.9, 0.9], [0.1, 0.1]]), np.array([0.5, 0.5]), 0.0).round(6).tolist()
        [1.0, 0.0]
    """
    weight = before
    for _ in range(_STEPS):
        share = weight[:, None] * likelihood
        share = (share / share.sum(0)).sum(1) + rows * before
        new: FloatArray = share / share.sum()
        if np.abs(new - weight).max() < _CLOSE:
            return new
        weight = new
    return weight


def mean_weights(values: FloatArray, y: FloatArray, before: FloatArray, rows: float) -> FloatArray:
    """Return weights on the simplex ``(sources,)`` whose mean of values is nearest to ``y``, drawn to ``before``.

    ``|y - w^T V|^2 + rows d |w - w0|^2`` with d the mean squared distance between a source and the mean by ``w0``.

    Args:
        values: V, ``(sources, rows)``.
        y: ``(rows,)``.
        before: w0; a source with 0 keeps it.
        rows: how many rows the prior counts as.
    """
    used = before > 0
    v, w0 = values[used], before[used]
    apart = float(((v - w0 @ v) ** 2).mean())
    ridge = rows * apart * np.eye(len(v))
    found = np.zeros_like(before)
    found[used] = simplex_qp(v @ v.T + ridge, -2 * (v @ y + ridge @ w0))
    return found


def calibrated_logits(logs: FloatArray, y: NDArray[np.int64], strength: float) -> tuple[FloatArray, float]:
    """Return a shift per class ``(C,)`` and a slope: logits ``a + b log p`` of the largest posterior.

    The prior is normal, b around 1 and each a around 0, both of variance ``1 / strength``.

    Args:
        logs: ``(rows, C)``, log p.
        y: ``(rows,)`` labels.
        strength: of the prior.

    Source: Platt 1999; Guo, Pleiss, Sun and Weinberger 2017, section 4.2.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    classes = logs.shape[1]
    own = np.eye(classes)[y]

    def loss(at: FloatArray) -> tuple[float, FloatArray]:
        shift, slope = at[:classes], at[classes]
        z = shift + slope * logs
        z = z - z.max(1, keepdims=True)
        p = np.exp(z)
        p /= p.sum(1, keepdims=True)
        value = -np.sum(own * (z - np.log(np.exp(z).sum(1, keepdims=True))))
        value += strength / 2 * ((shift**2).sum() + (slope - 1) ** 2)
        error = p - own
        return float(value), np.append(error.sum(0) + strength * shift, (error * logs).sum() + strength * (slope - 1))

    found: Any = minimize(loss, np.append(np.zeros(classes), 1.0), jac=True, method="L-BFGS-B")
    return found.x[:classes], float(found.x[classes])


def calibrated_values(values: FloatArray, y: FloatArray, strength: float) -> tuple[float, float]:
    """Return shift and slope of the line ``a + b v`` nearest to ``y``, b drawn to 1 as by ``strength`` rows.

    ``sum (y - a - b v)^2 + strength var(v) (b - 1)^2``; the line goes through the means.
    """
    spread = values - values.mean()
    varies = float(spread @ spread)
    if varies == 0:
        return float(y.mean() - values.mean()), 1.0
    pull = strength * varies / len(values)
    slope = (float(spread @ (y - y.mean())) + pull) / (varies + pull)
    return float(y.mean() - slope * values.mean()), slope
