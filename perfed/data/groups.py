"""Splits by groups of rows that belong together, such as the rows of a patient.

The part of a split that a group is in depends only on the seed, the purpose of the split and the group's value. All
sites therefore put a patient into the same part, although no site learns which groups the others have. The group's
value is hashed once; a second hash, with seed and purpose as its key, determines the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed import rng

Keys = NDArray[np.int64]

SEEDS = 5
"""Number of seeds whose test rows are examined together if each seed draws its test groups independently."""
DRAWS = 1000
"""Largest number of draws that :func:`best_draw` compares."""
_WORK = 5_000_000  # largest number of draws times pairs of a group and a class that are counted


def draw_positions(groups: Keys, seed: int, purpose: str, draw: int | Tensor = 0) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each row; it is uniform over groups and the same for all rows of a group.

    Args:
        groups: hashes of the rows' groups ``(rows,)`` from :func:`perfed.tables.group_hashes.hash_groups`.
        seed, purpose, draw: a different value of any of them yields independent numbers; with a tensor of draws
            ``(draws, 1)`` the result has shape ``(draws, rows)``.
    """
    keys = rng.key(seed, purpose, draw, torch.from_numpy(np.ascontiguousarray(groups)))
    return rng.uniform(keys, 1, torch.float64)[..., 0].numpy()


@dataclass(frozen=True)
class GroupSplit:
    """The division of groups into training groups and test groups.

    Attributes:
        folds: the number of folds; seed s tests on fold s mod ``folds``. With 0, each seed draws test groups at random.
        fraction: the fraction of groups that a seed draws.
        seed: the seed of the run.
        draw: the number of the random division; see :func:`best_draw`.
    """

    folds: int
    fraction: float
    seed: int
    draw: int = 0

    @property
    def seeds(self) -> range:
        """The seeds that together test every group once; without folds, :data:`SEEDS` seeds."""
        number = self.folds or SEEDS
        first = self.seed // number * number
        return range(first, first + number)

    def mark_test_rows(self, groups: Keys, seed: int, draw: int | Tensor | None = None) -> NDArray[np.bool_]:
        """Return a mask of the rows on which the run of ``seed`` tests.

        ``groups`` and ``draw`` are those of :func:`draw_positions`; ``draw`` defaults to the attribute.
        """
        draw = self.draw if draw is None else draw
        if not self.folds:
            tested: NDArray[np.bool_] = draw_positions(groups, seed, "test groups", draw) < self.fraction
            return tested
        repetition, fold = divmod(seed, self.folds)
        folds = (draw_positions(groups, repetition, "folds of groups", draw) * self.folds).astype(np.int64)
        return np.equal(folds, fold)


@dataclass(frozen=True)
class SiteGroups:
    """The groups of a site.

    Attributes:
        site: the name of the site.
        groups: the hash of each row's group ``(rows,)`` (:func:`perfed.tables.group_hashes.hash_groups`).
        classes: the class of each row ``(rows,)``; all 0 if there are no classes.
    """

    site: str
    groups: Keys
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class Gap:
    """A split that has no rows, or no rows of a class, at a site with some seeds.

    Attributes:
        site: the name of the site.
        split: "train" or "test".
        label: the class that has no rows; ``None`` if there are no rows at all.
        seeds: the seeds with which this happens.
    """

    site: str
    split: str
    label: int | None
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class _Counts:
    """The numbers of groups and of test groups of each site and class.

    Attributes:
        cells: the site and the class that each position of the arrays stands for; the class ``None`` stands for all.
        total: the number of groups ``(cells,)``.
        tested: the number of test groups ``(seeds, cells, draws)``.
        share: the expected share of test groups.
    """

    cells: Sequence[tuple[str, int | None]]
    total: NDArray[np.float64]
    tested: NDArray[np.float64]
    share: float

    @property
    def no_test(self) -> NDArray[np.bool_]:
        """A mask of the cells without test groups, except classes too rare for one to be expected."""
        enough = (self.share * self.total >= 1) | np.array([label is None for _, label in self.cells])
        lacking: NDArray[np.bool_] = (self.tested == 0) & enough[:, None]
        return lacking

    @property
    def no_train(self) -> NDArray[np.bool_]:
        """A mask of the cells with several groups, all of which are test groups."""
        lacking: NDArray[np.bool_] = (self.tested == self.total[:, None]) & (self.total > 1)[:, None]
        return lacking

    @property
    def unevenness(self) -> NDArray[np.float64]:
        """The chi-squared statistic (Pearson) of each draw ``(draws,)``."""
        expected = (self.share * self.total)[:, None]
        return np.asarray((np.square(self.tested - expected) / expected).sum((0, 1)))


def _count_groups(sites: Sequence[SiteGroups], split: GroupSplit, draws: Sequence[int] | None = None) -> _Counts:
    """Count groups and test groups per site and class, for the given draws or for as many as may be compared."""
    from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

    cells, pairs = [], []
    distinct = np.unique(np.concatenate([site.groups for site in sites]))
    for site in sites:
        for label in (None, *np.unique(site.classes).tolist()):
            members = site.groups if label is None else site.groups[site.classes == label]
            pairs.append(np.searchsorted(distinct, np.unique(members)))
            cells.append((site.site, label))
    rows = np.repeat(np.arange(len(cells)), [len(members) for members in pairs])
    membership = coo_matrix((np.ones(len(rows)), (rows, np.concatenate(pairs))), (len(cells), len(distinct))).tocsr()
    if draws is None:
        draws = range(min(DRAWS, _WORK // len(rows)))
    draw_numbers = torch.tensor(draws)[:, None]
    masks = (split.mark_test_rows(distinct, seed, draw_numbers) for seed in split.seeds)
    tested = [membership @ np.ascontiguousarray(mask.T, np.float64) for mask in masks]
    share = 1 / split.folds if split.folds else split.fraction
    return _Counts(cells, np.asarray(membership.sum(1))[:, 0], np.stack(tested), share)


def find_gaps(sites: Sequence[SiteGroups], split: GroupSplit) -> list[Gap]:
    """Return the sites and seeds for which the split leaves no training or test rows, in total or of a class.

    A missing class is reported only if the site has enough groups of it to expect one on that side of the split.
    """
    counts = _count_groups(sites, split, [split.draw])
    gaps = []
    for part, lacking in (("test", counts.no_test), ("train", counts.no_train)):
        for position, (site, label) in enumerate(counts.cells):
            seeds = tuple(seed for seed, lacks in zip(split.seeds, lacking[:, position, 0], strict=True) if lacks)
            if seeds:
                gaps.append(Gap(site, part, label, seeds))
    return gaps


def best_draw(sites: Sequence[SiteGroups], split: GroupSplit) -> int:
    """Return the draw with the fewest gaps (:func:`find_gaps`); among equal ones the most even draw.

    At most :data:`DRAWS` draws are compared, and fewer if there are many groups. With more than five million rows,
    draw 0 is returned: a random division of so many rows is even.
    """
    if sum(len(site.groups) for site in sites) > _WORK:
        return 0
    counts = _count_groups(sites, split)
    lacking = counts.no_test.sum((0, 1)) + counts.no_train.sum((0, 1))
    return int(np.lexsort((counts.unevenness, lacking))[0]) if len(lacking) else 0
