"""What lets a model know its test rows from training: groups at several sites, and rows that are there twice."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfed.data.client import Client
from perfed.data.groups import Gap, SiteGroups, best_draw, find_gaps
from perfed.data.labels import Classes, Task
from perfed.data.tables.checks import Checked, Part
from perfed.data.tables.kinds import MISSING_CATEGORY, Column
from perfed.data.tables.options import TableOptions
from perfed.data.tables.problems import Series, pandas
from perfed.errors import shorten_list

FEWEST_COPIES = 0.02
"""Share of the rows below which equal rows are not mentioned; they change no accuracy by more than about that."""
MORE_THAN_CHANCE = 2.0
"""How many times as many pairs of rows as in independent columns are put down to chance; columns are never quite so."""

_SITES = 5  # that a line names

Hashes = NDArray[np.uint64]


# Groups ----------------------------------------------------------------------------------------------------------


def describe_shared_groups(data: Checked, options: TableOptions) -> list[str]:
    """Return a line with the number of groups that occur at several sites; none where there are no such."""
    if options.group is None:
        return []
    each = {part.site: np.unique(part.rows[options.group].groups) for part in data.main}
    groups, times = np.unique(np.concatenate(list(each.values())), return_counts=True)
    shared = groups[times > 1]
    if not len(shared):
        return []
    sites = [site for site, of_site in each.items() if np.isin(of_site, shared).any()]
    return [
        f"{len(shared)} of {len(groups)} values of the group '{options.group}' occur at several sites "
        f"({shorten_list(sites, _SITES)}); all rows of one value are on the same side of the split at every site"
    ]


def site_groups(clients: Iterable[Client], task: Task) -> list[SiteGroups]:
    """Return the groups of clients whose rows have some, with the class of each row, of survival the event."""
    made = []
    for client in clients:
        splits = [split for name in ("train", "test") if (split := client.split(name)) is not None]
        groups = [split.group.numpy() for split in splits if split.group is not None]
        if not groups:
            continue
        y = np.concatenate([split.y.numpy() for split in splits])
        classes = y if task == "classification" else y[:, 1] if task == "survival" else np.zeros(len(y))
        made.append(SiteGroups(client.id, np.concatenate(groups), classes.astype(np.int64)))
    return made


def describe_gaps(clients: Iterable[Client], task: Task, classes: Classes | None, options: TableOptions) -> list[str]:
    """Return a line with the sites that the division of groups leaves without test rows or without rows of a class.

    Args:
        clients: of all sites.
        task, classes: of the federation.
        options: what the columns are for.
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
    each = [f"site '{site}' has {', '.join(of_site)}" for site, of_site in list(by_site.items())[:_SITES]]
    each += [f"so have {len(by_site) - _SITES} more sites"] if len(by_site) > _SITES else []
    draw = best_draw(sites, split)
    other = f"group_draw = {draw} is more even" if draw != split.draw else "no other group_draw is more even"
    remedy = "fewer folds help" if split.folds else "a larger test_fraction helps"
    return [f"divided by the group '{options.group}', {'; '.join(each)}; {other}, and {remedy}, or another group"]


def _describe_gap(gap: Gap, task: Task, classes: Classes | None) -> str:
    of_class = ""
    if gap.label is not None and task == "survival":
        of_class = " with an event"
    elif gap.label is not None and classes is not None:
        of_class = f" of class '{classes[gap.label]}'"
    seeds = ", ".join(map(str, gap.seeds))
    rows = "training rows" if gap.split == "train" else "test rows"
    return f"no {rows}{of_class} with seed{'s' if len(gap.seeds) > 1 else ''} {seeds}"


# Rows that are there several times -------------------------------------------------------------------------------


def describe_copies(
    main: Sequence[Part],
    given: Sequence[Part],
    columns: Mapping[str, Sequence[Column]],
    task: Task,
    options: TableOptions,
) -> list[str]:
    """Return a line with the number of rows that may be tested on while a row with equal values is trained on.

    Rows are equal if all columns that may enter and the target are, once they are parsed. Rows of one group do not
    count, since they stay together. Where columns hold few values, as many equal rows as chance explains are not
    mentioned: nothing can be learnt by heart from them.

    Args:
        main: the rows of each site.
        given: rows that sites are tested on, in place of a split.
        columns: per site, what the columns hold.
        task: what the targets are for.
        options: what the columns are for.
    """
    rows = _Rows.of([*main, *given], columns, task, options)
    tested = rows.part >= len(main)
    if given:
        copied = tested & np.isin(rows.hashes, rows.hashes[~tested])
        number, candidates = int(copied.sum()), int(tested.sum())
    else:
        copied = rows.count_units() > 1
        number, candidates = int(copied.sum()), len(copied)
    if not number or number < FEWEST_COPIES * candidates or not rows.more_than_chance:
        return []
    elsewhere = int((copied & (rows.count_sites() > 1)).sum())
    also = f" ({elsewhere} of them a row of another site)" if elsewhere else ""
    what = "test rows equal a training row" if given else "rows equal another row"
    return [
        f"{number} of {candidates} {what} in all columns and in '{options.target}'{also}: a model may know a test row "
        "from its copy; if these are copies, leave them out, or name as group what they belong to, such as a patient"
    ]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of all tables.

    Attributes:
        hashes: of each row's values.
        unit: what stays together: rows of one group, or each row.
        part: which table each row is of.
        site: which site each row is of.
        pairs: of rows that are equal and not of one unit.
        pairs_by_chance: how many pairs would be equal if columns were independent.
    """

    hashes: Hashes
    unit: NDArray[np.int64]
    part: NDArray[np.int64]
    site: NDArray[np.int64]
    pairs: int
    pairs_by_chance: float

    @classmethod
    def of(
        cls, parts: Sequence[Part], columns: Mapping[str, Sequence[Column]], task: Task, options: TableOptions
    ) -> _Rows:
        cells = [dict(_hash_columns(part, columns[part.site], task, options)) for part in parts]
        hashes = [_combine(of_part) for of_part in cells]
        lengths = [len(part.frame) for part in parts]
        total = sum(lengths)
        if options.group is None:
            unit = np.arange(total)
        else:
            unit = np.concatenate([part.rows[options.group].groups for part in parts])
        chance = 0.0
        for names in dict.fromkeys(tuple(of_part) for of_part in cells):
            same = [of_part for of_part in cells if tuple(of_part) == names]
            probability = [_match_probability(np.concatenate([of_part[name] for of_part in same])) for name in names]
            number = sum(len(of_part[names[0]]) for of_part in same)
            chance += number * (number - 1) / 2 * float(np.prod(probability))
        sites = {site: number for number, site in enumerate(columns)}
        every = np.concatenate(hashes)
        frame = pandas().DataFrame({"hash": every, "unit": unit})
        by_unit = frame.value_counts().to_numpy()
        pairs = _count_pairs(frame["hash"].value_counts().to_numpy()) - _count_pairs(by_unit)
        part = np.repeat(np.arange(len(parts)), lengths)
        return cls(every, unit, part, np.array([sites[p.site] for p in parts])[part], pairs, chance)

    @property
    def more_than_chance(self) -> bool:
        """Whether there are clearly more equal pairs than chance explains: by three standard deviations of a count."""
        most = MORE_THAN_CHANCE * self.pairs_by_chance
        return self.pairs > most + 3 * math.sqrt(most)

    def count_units(self) -> NDArray[np.int64]:
        """Return for each row in how many units a row is equal to it."""
        return self._count_different(self.unit)

    def count_sites(self) -> NDArray[np.int64]:
        """Return for each row at how many sites a row is equal to it."""
        return self._count_different(self.site)

    def _count_different(self, what: NDArray[np.int64]) -> NDArray[np.int64]:
        frame = pandas().DataFrame({"hash": self.hashes, "what": what})
        return np.asarray(frame.groupby("hash")["what"].transform("nunique"), np.int64)


def _hash_columns(
    part: Part, columns: Sequence[Column], task: Task, options: TableOptions
) -> Iterator[tuple[str, Hashes]]:
    """Yield the columns that make rows equal, by name and in the order of names, with a number for each value."""
    for column in sorted(columns, key=lambda column: column.name):
        if column.name in part.frame:
            yield column.name, _hash_values(part.rows[column.name].read(column)[0])
    kind = "category" if task == "classification" else "number"
    roles = ((options.target, kind), (options.event, "category"), (options.domain, "category"))
    for name, kind_of_role in roles:
        if name is not None:
            cells = part.rows[name]
            values = cells.numbers if kind_of_role == "number" else cells.read(Column(name, "category"))[0]
            yield name, _hash_values(values)


def _hash_values(values: Series) -> Hashes:
    if values.dtype == object:
        return np.asarray(pandas().util.hash_array(values.fillna(MISSING_CATEGORY).astype(str).to_numpy(object)))
    return np.asarray(pandas().util.hash_array(values.to_numpy(np.float64) + 0.0))  # -0 is 0


def _combine(columns: Mapping[str, Hashes]) -> Hashes:
    """Return a number for each row, which says what all its columns hold."""
    total = np.zeros(len(next(iter(columns.values()))), np.uint64)
    for name, hashes in columns.items():
        total = np.asarray(pandas().util.hash_array(total ^ np.uint64(zlib.crc32(name.encode())))) + hashes
    return total


def _match_probability(values: Hashes) -> float:
    """Return the probability that two rows hold the same value."""
    counts = pandas().Series(values).value_counts().to_numpy()
    number = len(values)
    return 2 * _count_pairs(counts) / (number * (number - 1)) if number > 1 else 0.0


def _count_pairs(counts: NDArray[np.int64]) -> int:
    return int((counts * (counts - 1) // 2).sum())
