"""Splits of a site's rows without groups, stratified by class: a random fraction, or one of k folds.

Rows with groups are split by :mod:`perfed.data.groups`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.partition.shards import make_generator


def assign_folds(strata: NDArray[Any], folds: int, seed: int, purpose: str) -> NDArray[np.int64]:
    """Return the fold (0 to ``folds - 1``) of each row.

    The sizes of the folds differ by at most one, and so do their numbers of rows of each class.
    """
    order = _shuffle_by_class(strata, seed, purpose)
    fold = np.empty(len(order), dtype=np.int64)
    fold[order] = np.arange(len(order)) % folds
    return fold


def draw_test_rows(strata: NDArray[Any], fraction: float, seed: int, purpose: str) -> NDArray[np.bool_]:
    """Return a mask of a random ``fraction`` of the rows, stratified by class.

    Its size is ``fraction`` n, rounded up or down, for all n rows and within each class. A class with a single row is
    never drawn.
    """
    order, classes = _shuffle_by_class(strata, seed, purpose), strata.tolist()
    single_classes = {label for label, count in Counter(classes).items() if count == 1}
    candidates = np.array([row for row in order if classes[row] not in single_classes], dtype=np.int64)
    start = make_generator(seed, f"start of {purpose}").uniform()
    steps = np.floor(np.arange(len(candidates) + 1) * fraction + start)
    test_rows = np.zeros(len(order), dtype=bool)
    test_rows[candidates[np.diff(steps) > 0]] = True
    return test_rows


def _shuffle_by_class(strata: NDArray[Any], seed: int, purpose: str) -> NDArray[np.int64]:
    """Return the row numbers in random order within each class, one class after the other."""
    _, codes = np.unique(strata, return_inverse=True)
    shuffled = make_generator(seed, purpose).permutation(len(strata))
    return shuffled[np.argsort(codes[shuffled], kind="stable")]
