"""Warnings about test rows that training rows give away: groups at several sites, and rows with equal values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfed.data.client import Client
from perfed.data.column import MISSING_CATEGORY, Column
from perfed.data.groups import Gap, SiteGroups, best_draw, find_gaps
from perfed.data.labels import Classes, Task
from perfed.errors import shorten_list
from perfed.tables.checks import Checked, Part
from perfed.tables.options import TableOptions
from perfed.tables.problems import Series, pandas

FEWEST_COPIES = 0.02
"""Share of rows below which equal rows are not reported; they change an accuracy by about that share at most."""
MORE_THAN_CHANCE = 2.0
"""Ratio up to which equal pairs are attributed to chance: observed pairs over those expected of independent columns.

It exceeds 1 because real columns are never quite independent.
"""

_SITES = 5  # largest number of sites that a line names

Hashes = NDArray[np.uint64]


# Groups ----------------------------------------------------------------------------------------------------------


def describe_shared_groups(data: Checked, options: TableOptions) -> list[str]:
    """Return a line with the number of groups that occur at several sites; an empty list if there are none."""
    if options.group is None:
        return []
    groups_by_site = {part.site: np.unique(part.table.groups(options.group)) for part in data.main}
    groups, counts = np.unique(np.concatenate(list(groups_by_site.values())), return_counts=True)
    shared = groups[counts > 1]
    if not len(shared):
        return []
    sites = [site for site, members in groups_by_site.items() if np.isin(members, shared).any()]
    return [
        f"{len(shared)} of {len(groups)} values of the group '{options.group}' occur at several sites "
        f"({shorten_list(sites, _SITES)}); all rows of one value are on the same side of the split at every site"
    ]


def site_groups(clients: Iterable[Client], task: Task) -> list[SiteGroups]:
    """Return the groups and classes of the rows of each client that has groups.

    The class of a row is its event for survival, and 0 for regression.
    """
    groups_of_sites = []
    for client in clients:
        splits = [split for name in ("train", "test") if (split := client.split(name)) is not None]
        groups = [split.group.numpy() for split in splits if split.group is not None]
        if not groups:
            continue
        y = np.concatenate([split.y.numpy() for split in splits])
        classes = y if task == "classification" else y[:, 1] if task == "survival" else np.zeros(len(y))
        groups_of_sites.append(SiteGroups(client.id, np.concatenate(groups), classes.astype(np.int64)))
    return groups_of_sites


def describe_gaps(clients: Iterable[Client], task: Task, classes: Classes | None, options: TableOptions) -> list[str]:
    """Return a line that names the sites without training or test rows, in total or of a class, and suggests a remedy.

    Args:
        clients: the clients of all sites.
        task, classes: the task of the federation and its classes.
        options: the options of the tables, which define how groups are split.
    """
    split = options.group_split
    sites = site_groups(clients, task) if split.folds or split.fraction else []
    gaps = find_gaps(sites, split) if sites else []
    gaps = [gap for gap in gaps if task != "survival" or gap.label != 0]
    if not gaps:
        return []
    by_site: dict[str, list[str]] = {}
    for gap in gaps:
        by_site.setdefault(gap.site, []).append(_describe_gap(gap, task, classes))
    descriptions = [f"site '{site}' has {', '.join(of_site)}" for site, of_site in list(by_site.items())[:_SITES]]
    descriptions += [f"so have {len(by_site) - _SITES} more sites"] if len(by_site) > _SITES else []
    draw = best_draw(sites, split)
    alternative = f"group_draw = {draw} is more even" if draw != split.draw else "no other group_draw is more even"
    remedy = "fewer folds help" if split.folds else "a larger test_fraction helps"
    sites_text = "; ".join(descriptions)
    return [f"divided by the group '{options.group}', {sites_text}; {alternative}, and {remedy}, or another group"]


def _describe_gap(gap: Gap, task: Task, classes: Classes | None) -> str:
    class_text = ""
    if gap.label is not None and task == "survival":
        class_text = " with an event"
    elif gap.label is not None and classes is not None:
        class_text = f" of class '{classes[gap.label]}'"
    seeds = ", ".join(map(str, gap.seeds))
    rows = "training rows" if gap.split == "train" else "test rows"
    return f"no {rows}{class_text} with seed{'s' if len(gap.seeds) > 1 else ''} {seeds}"


# Rows with equal values ------------------------------------------------------------------------------------------


def describe_copies(
    main: Sequence[Part],
    test_parts: Sequence[Part],
    columns: Mapping[str, Sequence[Column]],
    task: Task,
    options: TableOptions,
) -> list[str]:
    """Return a line with the number of possible test rows that equal a training row; an empty list if they are few.

    Rows are equal if their target and all their input columns are equal after parsing. Equal rows of one group do not
    count, since they stay together. Columns with few different values have equal rows by chance, which do no harm;
    nothing is reported unless there are clearly more than that.

    Args:
        main: the table of each site.
        test_parts: separate tables of test rows, which replace a split.
        columns: the parsed columns of each site.
        task: the task of the federation.
        options: the options of the tables.
    """
    rows = _Rows.from_parts([*main, *test_parts], columns, task, options)
    tested = rows.part >= len(main)
    if test_parts:
        copied = tested & np.isin(rows.hashes, rows.hashes[~tested])
        copies, candidates = int(copied.sum()), int(tested.sum())
    else:
        copied = rows.count_units() > 1
        copies, candidates = int(copied.sum()), len(copied)
    if not copies or copies < FEWEST_COPIES * candidates or not rows.more_than_chance:
        return []
    from_other_sites = int((copied & (rows.count_sites() > 1)).sum())
    site_note = f" ({from_other_sites} of them a row of another site)" if from_other_sites else ""
    subject = "test rows equal a training row" if test_parts else "rows equal another row"
    return [
        f"{copies} of {candidates} {subject} in all columns and in '{options.target}'{site_note}: a model may "
        "know a test row from its copy; if these are copies, leave them out, or name as group what they belong to, "
        "such as a patient"
    ]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of all tables, as hashes of their values.

    Attributes:
        hashes: the hash of each row's values.
        unit: the number of each row's unit, whose rows stay together: its group, or the row itself without groups.
        part: the number of each row's table.
        site: the number of each row's site.
        pairs: the number of pairs of equal rows from different units.
        pairs_by_chance: the expected number of pairs of equal rows if columns were independent.
    """

    hashes: Hashes
    unit: NDArray[np.int64]
    part: NDArray[np.int64]
    site: NDArray[np.int64]
    pairs: int
    pairs_by_chance: float

    @classmethod
    def from_parts(
        cls, parts: Sequence[Part], columns: Mapping[str, Sequence[Column]], task: Task, options: TableOptions
    ) -> _Rows:
        """Hash the rows of tables and count pairs of equal rows."""
        cells = [dict(_hash_columns(part, columns[part.site], task, options)) for part in parts]
        hashes = [_combine_hashes(hashes_of_part) for hashes_of_part in cells]
        lengths = [len(part.frame) for part in parts]
        total = sum(lengths)
        if options.group is None:
            unit = np.arange(total)
        else:
            unit = np.concatenate([part.table.groups(options.group) for part in parts])
        chance = 0.0
        for names in dict.fromkeys(tuple(hashes_of_part) for hashes_of_part in cells):
            alike = [hashes_of_part for hashes_of_part in cells if tuple(hashes_of_part) == names]
            probability = [
                _match_probability(np.concatenate([hashes_of_part[name] for hashes_of_part in alike])) for name in names
            ]
            number = sum(len(hashes_of_part[names[0]]) for hashes_of_part in alike)
            chance += number * (number - 1) / 2 * float(np.prod(probability))
        sites = {site: number for number, site in enumerate(columns)}
        all_hashes = np.concatenate(hashes)
        frame = pandas().DataFrame({"hash": all_hashes, "unit": unit})
        by_unit = frame.value_counts().to_numpy()
        pairs = _count_pairs(frame["hash"].value_counts().to_numpy()) - _count_pairs(by_unit)
        part = np.repeat(np.arange(len(parts)), lengths)
        return cls(
            all_hashes, unit, part, np.array([sites[part_of_site.site] for part_of_site in parts])[part], pairs, chance
        )

    @property
    def more_than_chance(self) -> bool:
        """Whether the number of equal pairs exceeds what chance explains by three standard deviations of a count."""
        most = MORE_THAN_CHANCE * self.pairs_by_chance
        return self.pairs > most + 3 * math.sqrt(most)

    def count_units(self) -> NDArray[np.int64]:
        """Return for each row the number of units that contain an equal row."""
        return self._count_different(self.unit)

    def count_sites(self) -> NDArray[np.int64]:
        """Return for each row the number of sites that have an equal row."""
        return self._count_different(self.site)

    def _count_different(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        frame = pandas().DataFrame({"hash": self.hashes, "what": ids})
        return np.asarray(frame.groupby("hash")["what"].transform("nunique"), np.int64)


def _hash_columns(
    part: Part, columns: Sequence[Column], task: Task, options: TableOptions
) -> Iterator[tuple[str, Hashes]]:
    """Yield the name of each column that is compared, in alphabetical order, with a hash for each of its values."""
    for column in sorted(columns, key=lambda column: column.name):
        if column.name in part.frame:
            yield column.name, _hash_values(part.table.read(column)[0])
    kind = "category" if task == "classification" else "number"
    roles = ((options.target, kind), (options.event, "category"), (options.domain, "category"))
    for name, kind_of_role in roles:
        if name is not None:
            values = part.table.numbers(name) if kind_of_role == "number" else part.table.read_texts(name)[0]
            yield name, _hash_values(values)


def _hash_values(values: Series) -> Hashes:
    if values.dtype == object:
        return np.asarray(pandas().util.hash_array(values.fillna(MISSING_CATEGORY).astype(str).to_numpy(object)))
    return np.asarray(pandas().util.hash_array(values.to_numpy(np.float64) + 0.0))  # -0 is 0


def _combine_hashes(columns: Mapping[str, Hashes]) -> Hashes:
    """Return one hash for each row from the hashes of its columns."""
    total = np.zeros(len(next(iter(columns.values()))), np.uint64)
    for name, hashes in columns.items():
        total = np.asarray(pandas().util.hash_array(total ^ np.uint64(zlib.crc32(name.encode())))) + hashes
    return total


def _match_probability(values: Hashes) -> float:
    """Return the probability that two rows hold the same value."""
    counts = np.unique(values, return_counts=True)[1]
    number = len(values)
    return 2 * _count_pairs(counts) / (number * (number - 1)) if number > 1 else 0.0


def _count_pairs(counts: NDArray[np.int64]) -> int:
    return int((counts * (counts - 1) // 2).sum())
