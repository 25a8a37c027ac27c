"""Small quadratic programmes over the simplex: the one every client of FedPAC has, and the projection."""

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
# A matrix that this ridge does not make positive definite is taken for one that is not semi-definite.
ROUNDING = 1e-7
CLOSE, ACCEPTED = 1e-13, 5e-9


class QPFailed(PerfedError):
    """A quadratic programme over the simplex was not solved."""


def simplex_qp(matrix: ArrayLike, linear: ArrayLike | None = None) -> FloatArray:
    """The point of the simplex that minimises ``a^T P a + q^T a``: ``a >= 0``, ``sum a = 1``.

    First the minimiser on the plane ``sum a = 1``, without the variables that it makes negative, and so on; then
    Wolfe's algorithm: while the gradient says that another variable would help, the one that helps most comes in, and
    those that the minimiser on the plane of all these makes negative go out. Where P is singular, the smallest ridge
    r that solves it is added, from 1e-12 to 1e-4 of the largest entry of P (or of q, if that is larger); no part of P
    is dropped, and the ridge's own effect is removed by proximal steps, ``r |a - last|^2``. The duality gap with P as
    given tells whether the point is good: it bounds the error of the objective, at most 5e-9 of that entry, and as a
    rule at most 1e-13.

    Args:
        matrix: P, ``(m, m)``, symmetric positive semi-definite up to rounding, of any scale; may be zero.
        linear: q, ``(m,)``; None for zero.

    Returns:
        ``(m,)`` float64, not negative, summing to one up to rounding. Several minimisers: any (for P = 0, all equal).

    Raises:
        QPFailed: entries that are not finite; P not symmetric or not positive semi-definite.
        PerfedError: a wrong shape.

    Source: Wolfe 1976, Mathematical Programming 11, for P of inner products and no q; the problem is Eq. 11 of Xu,
    Tong, Huang 2023.

    Example:
        >>> simplex_qp([[1.0, 0.0], [0.0, 3.0]]).round(9).tolist()
        [0.75, 0.25]
    """
    p, q = _normalised(matrix, linear)
    best, gap = np.empty(0), np.inf
    for ridge in RIDGES:
        for a, found in _proximal_points(p, q, ridge):
            if found < gap:
                best, gap = a, found
        if gap <= CLOSE or (gap == np.inf and ridge >= ROUNDING):
            break
    if not gap <= ACCEPTED:
        reason = "matrix is not positive semi-definite" if gap == np.inf else f"relative duality gap {gap:.1e}"
        raise QPFailed(f"quadratic programme over the simplex not solved: {reason}")
    return best


def nearest_on_simplex(point: ArrayLike) -> FloatArray:
    """The point of the simplex nearest to ``point`` ``(m,)``: the Euclidean projection, by :func:`simplex_qp`.

    Example:
        >>> nearest_on_simplex([0.9, 0.5, -3.0]).round(9).tolist()
        [0.7, 0.3, 0.0]
    """
    v = np.asarray(point, dtype=np.float64)
    return simplex_qp(np.eye(len(v)), -2 * v)


def _proximal_points(p: FloatArray, q: FloatArray, ridge: float) -> Iterator[tuple[FloatArray, float]]:
    """Solutions with ``ridge |a - last|^2`` added, and their duality gaps without it, while those at least halve."""
    a, last = np.zeros(len(p)), np.inf
    with suppress(ValueError):  # not positive definite to working precision
        while True:
            a = _active_set(p + ridge * np.eye(len(p)), q - 2 * ridge * a)
            gradient = 2 * p @ a + q
            gap = float(gradient @ a - gradient.min())
            yield a, gap
            if not ridge or gap <= CLOSE or gap > last / 2:
                return
            last = gap


def _normalised(matrix: ArrayLike, linear: ArrayLike | None) -> tuple[FloatArray, FloatArray]:
    """P and q divided by a power of two that brings the largest entry near 1; q shifted to start at zero."""
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


def _active_set(p: FloatArray, q: FloatArray) -> FloatArray:
    """Minimiser for positive definite P, by Wolfe's algorithm from where :func:`_pruned` ends."""
    a = _pruned(p, q)
    value = a @ p @ a + q @ a
    while True:
        gradient, rounding = 2 * p @ a + q, 2 * np.abs(p) @ a + q
        slope = gradient - gradient @ a + CLOSE * (rounding + rounding @ a)
        best = int(slope.argmin())
        if slope[best] >= 0:
            return a
        grown = _with(best, a, p, q)
        lower = grown @ p @ grown + q @ grown
        if lower >= value:  # all that is left is rounding
            return a
        a, value = grown, lower


def _with(new: int, a: FloatArray, p: FloatArray, q: FloatArray) -> FloatArray:
    """A better point of the variables of ``a`` and ``new``: the minimiser on their plane, without those in its way."""
    a = a.copy()
    chosen = np.union1d(np.flatnonzero(a), [new])
    while True:
        held, target = a[chosen], _on_plane(p, q, chosen)
        falling = np.flatnonzero(target <= 0)
        if not len(falling):
            a[chosen] = target / target.sum()
            return a
        steps = held[falling] / (held[falling] - target[falling]).clip(np.finfo(float).tiny)
        first = int(steps.argmin())
        moved = (held + steps[first] * (target - held)).clip(0)
        moved[falling[first]] = 0
        a[chosen] = moved
        chosen = np.delete(chosen, falling[first])


def _pruned(p: FloatArray, q: FloatArray) -> FloatArray:
    """The minimiser with ``sum a = 1`` alone, without the variables that it makes negative, until none is.

    Often the solution itself, in about five solves.
    """
    chosen = np.arange(len(p))
    while True:
        found = _on_plane(p, q, chosen)
        positive = found > 0
        if positive.all():
            a = np.zeros(len(p))
            a[chosen] = found / found.sum()
            return a
        chosen = chosen[positive]


def _on_plane(p: FloatArray, q: FloatArray, chosen: NDArray[np.intp]) -> FloatArray:
    """The minimiser over the chosen variables with ``sum a = 1`` alone.

    Raises:
        ValueError: P is not positive definite there to working precision.
    """
    right = np.stack([np.ones(len(chosen)), -q[chosen] / 2], axis=1)
    _, solved, info = dposv(p[chosen][:, chosen], right)
    if info:
        raise ValueError("not positive definite to working precision")
    free, shift = solved.T
    found: FloatArray = shift + free * (1 - shift.sum()) / free.sum()
    return found
