"""Thresholds of decision trees, placed between the values of a column so that new values do not lie on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = (5**0.5 - 1) / 2
"""Position of a threshold between two values, as a fraction of the distance between them.

In the middle between 40 and 42 lies 41, which the next row may hold: which side it falls on is then decided by
rounding. The golden ratio is the number that fractions approximate worst (Hurwitz 1891). A threshold between two values
that are n steps of a grid apart is at least 0.38/n of a step away from every point of the grid, whatever the grid is:
whole numbers, numbers with one or two decimals, or these after standardisation.
"""

FloatArray = NDArray[np.float64]


def distinct_values(x: NDArray[Any]) -> list[FloatArray]:
    """Return the sorted different values of each column of ``x`` ``(rows, columns)``, in the precision of float32.

    Trees of scikit-learn compare their inputs in this precision.
    """
    return [np.unique(column.astype(np.float32)).astype(np.float64) for column in x.T]


def place_between(low: FloatArray, high: FloatArray) -> FloatArray:
    """Return thresholds t with ``low <= t < high``, :data:`GOLDEN` of the way, as numbers that float32 can hold.

    Args:
        low, high: values ``(k,)`` that float32 can hold, ``low < high``.

    Example:
        >>> place_between(np.array([1.0, 40.0]), np.array([2.0, 42.0])).round(3).tolist()
        [1.618, 41.236]
    """
    threshold = (low + GOLDEN * (high - low)).astype(np.float32).astype(np.float64)
    return np.where(threshold < high, threshold, low)  # neighbouring numbers of float32 have none in between


def separate_values(tree: Any, values: Sequence[FloatArray]) -> None:
    """Move the thresholds of a fitted tree so that values between those of its training rows do not lie on them.

    Each threshold stays between the same two values of its column, so that all training rows keep their leaves.

    Args:
        tree: ``tree_`` of an estimator of scikit-learn's, which is changed.
        values: of each column (:func:`distinct_values`).
    """
    inner = np.flatnonzero(tree.children_left >= 0)
    for column in np.unique(tree.feature[inner]):
        nodes = inner[tree.feature[inner] == column]
        above = np.searchsorted(values[column], tree.threshold[nodes], side="right")
        tree.threshold[nodes] = place_between(values[column][above - 1], values[column][above])
