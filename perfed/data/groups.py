"""Groups of rows that belong together, such as those of a patient: which part of a split each group is in.

A group's part depends on the seed, the purpose of the split and the group's value, and on nothing else. All sites
therefore put a person into the same part, although no site learns which groups the others have. The group's value is
hashed; seed and purpose are the key of the second hash, from which the part follows.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed import rng
from perfed.data.tables.problems import Series, pandas

Keys = NDArray[np.int64]

SEEDS = 5
"""Seeds whose test rows are looked at together where each seed draws its own."""
DRAWS = 1000
"""Draws of groups among which :func:`best_draw` chooses at most."""
_WORK = 5_000_000  # draws times pairs of a group and a class that are counted at most
_NUMBER = re.compile(r"[+-]?(\d{1,100}(\.\d{0,100})?|\.\d{1,100})(e[+-]?\d{1,3})?")
_MIDNIGHT = re.compile(r"(?<=\d)[t ]00:00(:00(\.0+)?)?(z|\+00:00)?$")
_EXACT = Context(prec=1200)


def hash_groups(values: Series) -> Keys:
    """Return a number for each row, which is the same for equal values at all sites.

    Values are equal if :func:`canonical_text` gives the same text. None of them may be missing.

    Example:
        >>> import pandas as pd
        >>> one, other = hash_groups(pd.Series([7, 12])), hash_groups(pd.Series(["12.0", "7"]))
        >>> one.tolist() == other[::-1].tolist()
        True
    """
    rows, different = pandas().factorize(values)
    digests = [hashlib.blake2b(canonical_text(value).encode(), digest_size=8).digest() for value in different]
    numbers: Keys = np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)[rows]
    return numbers


def canonical_text(value: Any) -> str:
    """Return one text for all ways in which files write a value: as a number or a text, in any case and Unicode form.

    Two persons with one text are merely kept together, and one person with two texts would be trained and tested on.
    Therefore texts that differ only in case, in spaces, in leading zeros or in composed and decomposed accents are
    equal, as are dates with and without midnight.

    Example:
        >>> [canonical_text(value) for value in (7, 7.0, "007", " 7.0 ", "P 07", "p  07")]
        ['7', '7', '7', '7', 'p 07', 'p 07']
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", str(value)).casefold())
    text = _MIDNIGHT.sub("", " ".join(text.split()))
    if not _NUMBER.fullmatch(text):
        return text
    number = _EXACT.create_decimal(text).normalize(_EXACT)
    return "0" if not number else f"{number:f}" if -30 < number.adjusted() < 30 else str(number)


def draw_positions(groups: Keys, seed: int, purpose: str, draw: int | Tensor = 0) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each row, which is uniform over groups and the same for rows of one group.

    Args:
        groups: ``(rows,)`` of :func:`hash_groups`.
        seed, purpose, draw: others give independent numbers; of draws ``(draws, 1)`` the result is ``(draws, rows)``.
    """
    keys = rng.key(seed, purpose, draw, torch.from_numpy(np.ascontiguousarray(groups)))
    return rng.uniform(keys, 1, torch.float64)[..., 0].numpy()


@dataclass(frozen=True)
class GroupSplit:
    """How groups are divided into those that are trained on and those that are tested on.

    Attributes:
        folds: seed s tests on fold s mod ``folds``; 0: each seed draws its own groups.
        fraction: of the groups that a seed draws.
        seed: of the run.
        draw: which of many divisions; see :func:`best_draw`.
    """

    folds: int
    fraction: float
    seed: int
    draw: int = 0

    @property
    def seeds(self) -> range:
        """The seeds that test every group once, or of own groups as many as are usually compared."""
        number = self.folds or SEEDS
        first = self.seed // number * number
        return range(first, first + number)

    def mark_test_rows(self, groups: Keys, seed: int, draw: int | Tensor | None = None) -> NDArray[np.bool_]:
        """Return whether the run of a seed tests on each row; arguments as of :func:`draw_positions`."""
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
        site: its name.
        groups: ``(rows,)`` of :func:`hash_groups`.
        classes: ``(rows,)`` the class of each row; all 0 where there are no classes.
    """

    site: str
    groups: Keys
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class Gap:
    """Rows that a site lacks with some seeds.

    Attributes:
        site: its name.
        split: "train" or "test".
        label: the class of which there are none; ``None``: there are no rows at all.
        seeds: with which.
    """

    site: str
    split: str
    label: int | None
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class _Counts:
    """How many groups each site has to test on.

    Attributes:
        cells: the site and the class of each row of the arrays; ``None``: groups of any class.
        total: ``(cells,)`` how many groups there are.
        tested: ``(seeds, cells, draws)`` how many of them are tested on.
        share: of the groups that should be.
    """

    cells: Sequence[tuple[str, int | None]]
    total: NDArray[np.float64]
    tested: NDArray[np.float64]
    share: float

    @property
    def no_test(self) -> NDArray[np.bool_]:
        """Return where nothing is tested on although there are groups enough for it (any class: always)."""
        enough = (self.share * self.total >= 1) | np.array([label is None for _, label in self.cells])
        lacking: NDArray[np.bool_] = (self.tested == 0) & enough[:, None]
        return lacking

    @property
    def no_train(self) -> NDArray[np.bool_]:
        """Return where nothing is left to train on although there are several groups."""
        lacking: NDArray[np.bool_] = (self.tested == self.total[:, None]) & (self.total > 1)[:, None]
        return lacking

    @property
    def unevenness(self) -> NDArray[np.float64]:
        """Return Pearson's chi-squared statistic of each draw."""
        expected = (self.share * self.total)[:, None]
        return np.asarray((np.square(self.tested - expected) / expected).sum((0, 1)))


def _count_groups(sites: Sequence[SiteGroups], split: GroupSplit, draws: Sequence[int] | None = None) -> _Counts:
    from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

    cells, pairs = [], []
    every = np.unique(np.concatenate([site.groups for site in sites]))
    for site in sites:
        for label in (None, *np.unique(site.classes).tolist()):
            members = site.groups if label is None else site.groups[site.classes == label]
            pairs.append(np.searchsorted(every, np.unique(members)))
            cells.append((site.site, label))
    rows = np.repeat(np.arange(len(cells)), [len(members) for members in pairs])
    holds = coo_matrix((np.ones(len(rows)), (rows, np.concatenate(pairs))), (len(cells), len(every))).tocsr()
    if draws is None:
        draws = range(min(DRAWS, _WORK // len(rows)))
    column = torch.tensor(draws)[:, None]
    tested = [
        holds @ np.ascontiguousarray(split.mark_test_rows(every, seed, column).T, np.float64) for seed in split.seeds
    ]
    share = 1 / split.folds if split.folds else split.fraction
    return _Counts(cells, np.asarray(holds.sum(1))[:, 0], np.stack(tested), share)


def find_gaps(sites: Sequence[SiteGroups], split: GroupSplit) -> list[Gap]:
    """Return which sites lack test rows, or rows of a class of which they have groups enough, with which seeds."""
    counts = _count_groups(sites, split, [split.draw])
    gaps = []
    for name, lacks in (("test", counts.no_test), ("train", counts.no_train)):
        for at, (site, label) in enumerate(counts.cells):
            seeds = tuple(seed for seed, lack in zip(split.seeds, lacks[:, at, 0], strict=True) if lack)
            if seeds:
                gaps.append(Gap(site, name, label, seeds))
    return gaps


def best_draw(sites: Sequence[SiteGroups], split: GroupSplit) -> int:
    """Return the draw in which sites lack test rows, and rows of a class, least often, and which is most even.

    Up to :data:`DRAWS` draws are compared, and fewer where there are many groups. Draw 0 is returned where there are
    too many; chance alone is even then.
    """
    if sum(len(site.groups) for site in sites) > _WORK:
        return 0
    counts = _count_groups(sites, split)
    lacking = counts.no_test.sum((0, 1)) + counts.no_train.sum((0, 1))
    return int(np.lexsort((counts.unevenness, lacking))[0]) if len(lacking) else 0
