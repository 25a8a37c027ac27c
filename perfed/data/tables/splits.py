"""Which rows of a site are tested on where each row stands alone: a part of them, or one of k folds, by class.

Rows with groups are split by :mod:`perfed.data.groups`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.partition.shards import generator


def fold_of(strata: NDArray[Any], folds: int, seed: int, purpose: str) -> NDArray[np.int64]:
    """Return the fold, 0..folds - 1, of every row.

    The folds' sizes, and their numbers of rows of each class, differ by at most one.
    """
    order = _shuffle_by_class(strata, seed, purpose)
    fold = np.empty(len(order), dtype=np.int64)
    fold[order] = np.arange(len(order)) % folds
    return fold


def held_out(strata: NDArray[Any], fraction: float, seed: int, purpose: str) -> NDArray[np.bool_]:
    """Return which rows are in the part ``fraction``, drawn by class.

    Of n rows floor or ceil of ``fraction`` n are, and so of every class. A class of one row stays out of the part.
    """
    order, classes = _shuffle_by_class(strata, seed, purpose), strata.tolist()
    alone = {label for label, count in Counter(classes).items() if count == 1}
    drawn = np.array([row for row in order if classes[row] not in alone], dtype=np.int64)
    start = generator(seed, f"start of {purpose}").uniform()
    steps = np.floor(np.arange(len(drawn) + 1) * fraction + start)
    chosen = np.zeros(len(order), dtype=bool)
    chosen[drawn[np.diff(steps) > 0]] = True
    return chosen


def _shuffle_by_class(strata: NDArray[Any], seed: int, purpose: str) -> NDArray[np.int64]:
    """Return the rows in random order, class by class."""
    _, codes = np.unique(strata, return_inverse=True)
    shuffled = generator(seed, purpose).permutation(len(strata))
    return shuffled[np.argsort(codes[shuffled], kind="stable")]
