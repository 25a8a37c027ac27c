"""Which rows of a site are tested on: a part of them, or one of k folds; by class, and whole groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.partition.shards import generator


def fold_of(
    strata: NDArray[Any], groups: NDArray[Any] | None, folds: int, seed: int, purpose: str
) -> NDArray[np.int64]:
    """The fold, 0..folds - 1, of every row.

    Rows of a group are in one fold. Without groups the folds' sizes, and their numbers of rows of each class, differ by
    at most one; with groups this holds of groups, each counting for the class most of its rows have.
    """
    unit_of_row, order, _ = _ordered(strata, groups, seed, purpose)
    fold = np.empty(len(order), dtype=np.int64)
    fold[order] = np.arange(len(order)) % folds
    return fold[unit_of_row]


def held_out(
    strata: NDArray[Any], groups: NDArray[Any] | None, fraction: float, seed: int, purpose: str
) -> NDArray[np.bool_]:
    """Which rows are in the part ``fraction``, drawn by class.

    Of n rows floor or ceil of ``fraction`` n, and so of every class; with groups this holds of groups, as in
    :func:`fold_of`. A class of one row (one group) stays out of the part.
    """
    unit_of_row, order, classes = _ordered(strata, groups, seed, purpose)
    alone = {label for label, count in Counter(classes).items() if count == 1}
    drawn = np.array([unit for unit in order if classes[unit] not in alone], dtype=np.int64)
    start = generator(seed, f"start of {purpose}").uniform()
    steps = np.floor(np.arange(len(drawn) + 1) * fraction + start)
    chosen = np.zeros(len(order), dtype=bool)
    chosen[drawn[np.diff(steps) > 0]] = True
    return chosen[unit_of_row]


def _ordered(
    strata: NDArray[Any], groups: NDArray[Any] | None, seed: int, purpose: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Any]]:
    """The unit (row or group) of every row; the units in random order class by class; the class of every unit."""
    if groups is None:
        unit_of_row, classes = np.arange(len(strata)), strata.tolist()
    else:
        _, unit_of_row = np.unique(groups, return_inverse=True)
        members = [strata[unit_of_row == unit].tolist() for unit in range(unit_of_row.max() + 1)]
        classes = [max(sorted(set(held)), key=held.count) for held in members]
    _, codes = np.unique(np.array(classes), return_inverse=True)
    shuffled = generator(seed, purpose).permutation(len(classes))
    return unit_of_row, shuffled[np.argsort(codes[shuffled], kind="stable")], classes
