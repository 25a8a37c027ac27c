"""Small quadratic programmes over the simplex, such as that of every client of FedPAC, and the projection onto it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg.lapack import dposv  # type: ignore[import-untyped]

from perfed.errors import PerfedError

FloatArray = NDArray[np.float64]

# Ridges tried in turn, and the duality gaps that end the search or are still accepted, as parts of the problem's scale.
RIDGES = (0.0, 1e-12, 1e-8, 1e-7, 1e-5, 1e-4)
# A matrix that is not positive definite with this ridge is regarded as not semi-definite.
ROUNDING = 1e-7
CLOSE, ACCEPTED = 1e-13, 5e-9


class QPFailed(PerfedError):
    """A quadratic programme over the simplex was not solved."""


def simplex_qp(matrix: ArrayLike, linear: ArrayLike | None = None) -> FloatArray:
    """Return the point of the simplex that minimises ``a^T P a + q^T a`` with ``a >= 0``, ``sum a = 1``.

    The search starts with the minimiser on the plane ``sum a = 1``, from which negative variables are removed
    repeatedly. Wolfe's algorithm follows: while the gradient shows that another variable would reduce the objective,
    the most effective one is added, and variables that are negative in the minimiser on the new plane are removed.
    Where P is singular, the smallest sufficient ridge r is added, from 1e-12 to 1e-4 of the largest entry of P (or of
    q, if that is larger); no part of P is dropped, and proximal steps ``r |a - last|^2`` remove the effect of the
    ridge. The duality gap with the original P bounds the error of the objective: it is at most 5e-9 of that entry, and
    usually at most 1e-13.

    Args:
        matrix: P, ``(m, m)``, symmetric positive semi-definite up to rounding, of any scale; may be zero.
        linear: q, ``(m,)``; ``None`` for zero.

    Returns:
        ``(m,)`` float64, not negative, summing to one up to rounding. If there are several minimisers, one of them; for
        P = 0 and no q, equal weights.

    Raises:
        QPFailed: if entries are not finite, or P is not symmetric or not positive semi-definite.
        PerfedError: if a shape is wrong.

    Source: Wolfe 1976, Mathematical Programming 11, for P of inner products and no q; the problem is Eq. 11 of Xu,
    Tong, Huang 2023.

    Example:
        >>> simplex_qp([[1.0, 0.0], [0.0, 3.0]]).round(9).tolist()
        [0.75, 0.25]
    """
    p, q = _normalise_problem(matrix, linear)
    best, gap = np.empty(0), np.inf
    for ridge in RIDGES:
        for a, candidate_gap in _iterate_proximal_points(p, q, ridge):
            if candidate_gap < gap:
                best, gap = a, candidate_gap
        if gap <= CLOSE or (gap == np.inf and ridge >= ROUNDING):
            break
    if not gap <= ACCEPTED:
        reason = "matrix is not positive semi-definite" if gap == np.inf else f"relative duality gap {gap:.1e}"
        raise QPFailed(f"quadratic programme over the simplex not solved: {reason}")
    return best


def nearest_on_simplex(point: ArrayLike) -> FloatArray:
    """Return the Euclidean projection of ``point`` ``(m,)`` onto the simplex, by :func:`simplex_qp`.

    Example:
        >>> nearest_on_simplex([0.9, 0.5, -3.0]).round(9).tolist()
        [0.7, 0.3, 0.0]
    """
    v = np.asarray(point, dtype=np.float64)
    return simplex_qp(np.eye(len(v)), -2 * v)


def _iterate_proximal_points(p: FloatArray, q: FloatArray, ridge: float) -> Iterator[tuple[FloatArray, float]]:
    """Yield solutions with ``ridge |a - last|^2`` added and their duality gaps without it, while the gaps at least
    halve.
    """
    a, last = np.zeros(len(p)), np.inf
    with suppress(ValueError):  # not positive definite to working precision
        while True:
            a = _minimise_definite(p + ridge * np.eye(len(p)), q - 2 * ridge * a)
            gradient = 2 * p @ a + q
            gap = float(gradient @ a - gradient.min())
            yield a, gap
            if not ridge or gap <= CLOSE or gap > last / 2:
                return
            last = gap


def _normalise_problem(matrix: ArrayLike, linear: ArrayLike | None) -> tuple[FloatArray, FloatArray]:
    """Return P and q divided by a power of two that brings the largest entry near 1, with q shifted to start at
    zero.
    """
    p = np.asarray(matrix, dtype=np.float64)
    if p.ndim != 2 or p.shape[0] != p.shape[1] or not len(p):
        raise PerfedError(f"matrix must be square and not empty, not of shape {p.shape}")
    q = np.zeros(len(p)) if linear is None else np.asarray(linear, dtype=np.float64)
    if q.shape != p.shape[:1]:
        raise PerfedError(f"linear must be of shape ({len(p)},), not {q.shape}")
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        raise QPFailed("matrix and linear must be finite")
    q = q - q.min()
    exponent = np.frexp(max(np.abs(p).max(), q.max()))[1]
    p, q = np.ldexp(p, -exponent), np.ldexp(q, -exponent)
    if np.abs(p - p.T).max() > 1e-10:
        raise QPFailed("matrix must be symmetric")
    return (p + p.T) / 2, q


def _minimise_definite(p: FloatArray, q: FloatArray) -> FloatArray:
    """Return the minimiser for positive definite P by Wolfe's algorithm, from the result of
    :func:`_minimise_by_pruning`.
    """
    a = _minimise_by_pruning(p, q)
    value = a @ p @ a + q @ a
    while True:
        gradient, rounding = 2 * p @ a + q, 2 * np.abs(p) @ a + q
        slope = gradient - gradient @ a + CLOSE * (rounding + rounding @ a)
        best = int(slope.argmin())
        if slope[best] >= 0:
            return a
        candidate = _add_variable(best, a, p, q)
        lower = candidate @ p @ candidate + q @ candidate
        if lower >= value:  # the remaining slope is rounding
            return a
        a, value = candidate, lower


def _add_variable(new: int, a: FloatArray, p: FloatArray, q: FloatArray) -> FloatArray:
    """Return a better point with the variable ``new`` added and the variables removed that would become negative."""
    a = a.copy()
    support = np.union1d(np.flatnonzero(a), [new])
    while True:
        current, target = a[support], _minimise_on_plane(p, q, support)
        falling = np.flatnonzero(target <= 0)
        if not len(falling):
            a[support] = target / target.sum()
            return a
        steps = current[falling] / (current[falling] - target[falling]).clip(np.finfo(float).tiny)
        first = int(steps.argmin())
        moved = (current + steps[first] * (target - current)).clip(0)
        moved[falling[first]] = 0
        a[support] = moved
        support = np.delete(support, falling[first])


def _minimise_by_pruning(p: FloatArray, q: FloatArray) -> FloatArray:
    """Return the minimiser on ``sum a = 1`` after repeatedly removing variables that are negative in it.

    This is often the solution itself, after about five solves.
    """
    support = np.arange(len(p))
    while True:
        minimiser = _minimise_on_plane(p, q, support)
        positive = minimiser > 0
        if positive.all():
            a = np.zeros(len(p))
            a[support] = minimiser / minimiser.sum()
            return a
        support = support[positive]


def _minimise_on_plane(p: FloatArray, q: FloatArray, support: NDArray[np.intp]) -> FloatArray:
    """Return the minimiser over the variables in ``support`` subject to ``sum a = 1`` only.

    Raises:
        ValueError: if P is not positive definite to working precision for these variables.
    """
    right = np.stack([np.ones(len(support)), -q[support] / 2], axis=1)
    _, solutions, info = dposv(p[support][:, support], right)
    if info:
        raise ValueError("not positive definite to working precision")
    free, shift = solutions.T
    minimiser: FloatArray = shift + free * (1 - shift.sum()) / free.sum()
    return minimiser
