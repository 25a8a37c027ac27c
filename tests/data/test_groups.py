"""Groups of rows that belong together: recognised however they are written, and in one part at every site."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

from perfed import Federation, PerfedError
from perfed.data.client import Client, Split
from perfed.data.groups import Gap, GroupSplit, SiteGroups, best_draw, find_gaps
from perfed.data.held_out import fold_as_test, split_validation, with_validation
from perfed.tables.group_hashes import hash_groups

WRITTEN = {
    "whole numbers": pd.Series([1, 12, 100]),
    "numbers with a gap": pd.Series([1.0, 12.0, 100.0]),
    "texts of numbers": pd.Series(["1.0", " 12 ", "1e2"]),
    "leading zeros": pd.Series(["001", "0012", "00100"]),
    "mixed": pd.Series([1, "12", 100.0], dtype=object),
    "large type": pd.Series([1, 12, 100], dtype="Int64"),
    "categories": pd.Series(["1", "12", "100"], dtype="category"),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_group_is_recognised_however_its_number_is_written(written):
    assert hash_groups(WRITTEN[written]).tolist() == hash_groups(pd.Series([1, 12, 100])).tolist()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("M\u00fcller 1", unicodedata.normalize("NFD", "M\u00fcller 1")),
        ("P007", " p007 "),
        ("north  ward", "north ward"),
        (pd.Timestamp("1980-03-31"), "1980-03-31"),
        (pd.Timestamp("1980-03-31"), "1980-03-31 00:00:00"),
        (0, "-0.0"),
        (12345678901234567, "12345678901234567"),
        (1e16, "10000000000000000"),
    ],
)
def test_a_group_is_recognised_in_another_spelling(one, other):
    assert hash_groups(pd.Series([one], dtype=object)) == hash_groups(pd.Series([other], dtype=object))


def test_different_groups_have_different_numbers():
    texts = ["P1", "P11", "P 1", "1", "-1", "1.5", "15", "1980-03-31", "1980-03-30 12:00:00", "", "12345678901234568"]
    numbers = hash_groups(pd.Series(texts))
    assert len(set(numbers.tolist())) == len(texts)
    assert not set(numbers.tolist()) & set(hash_groups(pd.Series(["12345678901234567"])).tolist())


@pytest.mark.parametrize("seed", range(3))
def test_folds_hold_every_group_once_whoever_else_is_there(seed):
    groups = np.random.default_rng(seed).integers(0, 2**62, 4000)
    seeds = range(4 * seed, 4 * seed + 4)
    parts = np.stack([GroupSplit(4, 0.0, s).mark_test_rows(groups, s) for s in seeds])
    assert (parts.sum(0) == 1).all()
    assert np.abs(parts.mean(1) - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / 4000)
    some = np.flatnonzero(groups % 3 == 0)
    assert (GroupSplit(4, 0.0, seeds[0]).mark_test_rows(groups[some], seeds[0]) == parts[0][some]).all()
    others = [GroupSplit(4, 0.0, s, draw).mark_test_rows(groups, s) for s, draw in ((seeds[0] + 4, 0), (seeds[0], 1))]
    assert all(0.5 < (one == parts[0]).mean() < 0.75 for one in others)  # independent: 0.625


def sites(seed: int, counts: tuple[int, ...] = (12, 9), shared: int = 3) -> list[SiteGroups]:
    """Sites with groups of two rows each, some of which both have, and of two classes."""
    rng = np.random.default_rng(seed)
    made = []
    for number, count in enumerate(counts):
        groups = np.repeat([*range(shared), *range(1000 * (number + 1), 1000 * (number + 1) + count - shared)], 2)
        made.append(SiteGroups(f"site {number}", groups.astype(np.int64), rng.integers(0, 2, len(groups))))
    return made


def gaps_by_counting(found: list[SiteGroups], split: GroupSplit) -> set[tuple[str, str, int | None, int]]:
    """Which site lacks rows of which class with which seed, one row after the other."""
    share = 1 / split.folds if split.folds else split.fraction
    gaps = set()
    for site in found:
        for label in (None, 0, 1):
            members = {
                g for g, c in zip(site.groups.tolist(), site.classes.tolist(), strict=True) if label in (None, c)
            }
            for seed in split.seeds:
                tested = {g for g in members if split.mark_test_rows(np.array([g]), seed)[0]}
                if members and not tested and (label is None or len(members) * share >= 1):
                    gaps.add((site.site, "test", label, seed))
                if len(members) > 1 and tested == members:
                    gaps.add((site.site, "train", label, seed))
    return gaps


@pytest.mark.parametrize("split", [GroupSplit(5, 0.0, 7), GroupSplit(2, 0.0, 0, 3), GroupSplit(0, 0.3, 11)])
@pytest.mark.parametrize("seed", range(3))
def test_gaps_are_those_that_counting_finds(split, seed):
    found = sites(seed)
    gaps = find_gaps(found, split)
    assert {(gap.site, gap.split, gap.label, s) for gap in gaps for s in gap.seeds} == gaps_by_counting(found, split)
    assert all(isinstance(gap, Gap) and all(a < b for a, b in pairwise(gap.seeds)) for gap in gaps)


@pytest.mark.long
@pytest.mark.parametrize("folds", [3, 5])
def test_the_best_draw_leaves_no_site_without_test_rows_or_a_class_where_that_is_possible(folds):
    found = sites(0, (30, 25, 20))
    draw = best_draw(found, GroupSplit(folds, 0.0, 0))
    assert not gaps_by_counting(found, GroupSplit(folds, 0.0, 0, draw))

    def spread(number: int) -> float:
        """Sum of squared differences of the groups of each class and fold from their mean."""
        split = GroupSplit(folds, 0.0, 0, number)
        held = [
            [
                len(set(s.groups[split.mark_test_rows(s.groups, seed) & np.isin(s.classes, label)]))
                for seed in range(folds)
            ]
            for s in found
            for label in ([0, 1], [0], [1])
        ]
        return float(np.var(held, axis=1).sum())

    usual = [spread(number) for number in range(40)]
    assert spread(draw) < min(usual) or spread(draw) < 0.5 * np.median(usual)


# Parts of training rows ------------------------------------------------------------------------------------------


def client(name: str, groups: list[int]) -> Client:
    """Samples that are numbered by their groups, of two classes in turns."""
    group = torch.tensor(groups).repeat_interleave(2)
    y = torch.arange(len(group)) % 2
    return Client(name, Split(group.float()[:, None], y, group=group))


def groups_of(split: Split | None) -> set[int]:
    return set() if split is None else set(split.x[:, 0].int().tolist())


@pytest.fixture
def two() -> Federation:
    """Two clients that share the groups 10 to 29."""
    return Federation((client("a", list(range(30))), client("b", list(range(10, 40)))), 2)


def test_validation_rows_are_of_other_groups_than_training_rows_of_any_client(two):
    made = [with_validation(one, 0.3, True, seed=1) for one in two]
    trained, held = ([groups_of(getattr(c, name)) for c in made] for name in ("train", "validation"))
    assert all(held) and not set.union(*trained) & set.union(*held)
    assert set.union(*trained, *held) == set(range(40))
    apart = split_validation(Federation(tuple(made), 2), seed=1)
    chosen, scored = ([groups_of(getattr(c, name)) for c in apart] for name in ("validation", "test"))
    assert not set.union(*chosen) & set.union(*scored) and set.union(*chosen, *scored) == set.union(*held)


def test_inner_folds_are_the_same_at_every_client(two):
    folds = [[fold_as_test(one, (i, 4), True, seed=2) for one in two] for i in range(4)]
    for made in folds:
        tested, trained = (set.union(*(groups_of(getattr(c, name)) for c in made)) for name in ("test", "train"))
        assert not tested & trained and tested | trained == set(range(40))
    assert sum(len(c.test) for made in folds for c in made if c.test is not None) == 120


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda one: with_validation(one, 0.999, True, 0), "a share of 0.999 for validation"),
        (lambda one: [fold_as_test(one, (i, 2), True, 0) for i in range(2)], "fold . of 2 of the training rows"),
    ],
)
def test_a_client_of_which_nothing_is_left_to_train_on_is_named(cut, words):
    with pytest.raises(PerfedError, match=rf"client 'c': all its 1 groups are in {words}, and nothing is left"):
        cut(client("c", [7]))
