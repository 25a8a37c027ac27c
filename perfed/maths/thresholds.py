"""Thresholds of decision trees that new values are unlikely to hit exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = (5**0.5 - 1) / 2
"""Position of a threshold between two values, as a fraction of the distance between them.

A threshold in the middle between 40 and 42 is 41. If a new row holds 41, rounding decides on which side it falls. The
golden ratio is the number that fractions approximate worst (Hurwitz 1891): a threshold between two values that are n
steps of a grid apart is at least 0.38/n of a step away from every point of the grid. This holds for integers, for
numbers with one or two decimals, and for these after standardisation.
"""

FloatArray = NDArray[np.float64]


def distinct_values(x: NDArray[Any]) -> list[FloatArray]:
    """Return the sorted distinct values of each column of ``x`` ``(rows, columns)``, rounded to float32.

    The trees of scikit-learn compare their inputs in this precision.
    """
    return [np.unique(column.astype(np.float32)).astype(np.float64) for column in x.T]


def place_between(low: FloatArray, high: FloatArray) -> FloatArray:
    """Return thresholds t with ``low <= t < high`` at the fraction :data:`GOLDEN` of the way, exact in float32.

    Args:
        low, high: values ``(k,)`` that are exact in float32, with ``low < high``.

    Example:
        >>> place_between(np.array([1.0, 40.0]), np.array([2.0, 42.0])).round(3).tolist()
        [1.618, 41.236]
    """
    threshold = (low + GOLDEN * (high - low)).astype(np.float32).astype(np.float64)
    return np.where(threshold < high, threshold, low)  # no float32 lies between neighbouring ones


def separate_values(tree: Any, values: Sequence[FloatArray]) -> None:
    """Move the thresholds of a fitted tree, in place, to positions that new values are unlikely to hit exactly.

    Each threshold stays between the same two values of its column, so that all training rows stay in their leaves.

    Args:
        tree: the attribute ``tree_`` of an estimator of scikit-learn.
        values: the distinct values of each column (:func:`distinct_values`).
    """
    inner = np.flatnonzero(tree.children_left >= 0)
    for column in np.unique(tree.feature[inner]):
        nodes = inner[tree.feature[inner] == column]
        above = np.searchsorted(values[column], tree.threshold[nodes], side="right")
        tree.threshold[nodes] = place_between(values[column][above - 1], values[column][above])
