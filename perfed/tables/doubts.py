"""Warnings before training: columns that give away the target, values that may mean missing, and ambiguous cells.

Each column is judged by itself at each site: a rule that was learnt from the other rows predicts the target of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.column import Column
from perfed.data.partition.shards import make_generator
from perfed.errors import shorten_list
from perfed.tables.checks import Checked, Part
from perfed.tables.kinds import format_of_swapped, separates_thousands
from perfed.tables.missing import find_suspected_codes
from perfed.tables.options import TableOptions
from perfed.tables.problems import pandas

RIGHT = 0.95
"""Share of the rows that a column must be right of to be suspected of holding the answer."""
LEFT = 0.2
"""Share of the mistakes of always saying the commonest class that it may leave."""
CORRELATED = 0.99
"""Correlation with values from which on it is suspected."""

_LEAST = 10  # rows outside the commonest class, or rows with values, below which nothing is said
_MOST = 2000  # rows of a site that are looked at
_BESIDE = 5  # rows on either side of one that say which class it has
_LEADING_ZERO = re.compile(r"[+-]?0\d+([.,]\d*)?")
_EXPONENT = re.compile(r"\d+[eE]\d+")
_CODE_START = re.compile(r"[+-]?0\d|\d+[eE]\d")  # begins all texts of the two forms, and few other numbers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def describe_doubts(data: Checked, columns: Mapping[str, Sequence[Column]], options: TableOptions) -> list[str]:
    """Return a line for each column that predicts the target by itself, each value that may mean missing, and each
    column with ambiguous cells.

    Args:
        data: the tables of all sites.
        columns: per site, what the columns hold.
        options: what they are for.
    """
    sites = [_Site(part, _draw_rows(part, options)) for part in data.main]
    targets = [data.targets[site.part.site][site.rows] for site in sites]
    lines: list[str] = []
    if data.task == "classification":
        classes = [np.unique(y, return_inverse=True)[1] for y in targets]
        lines += _describe_predictive_columns(sites, columns, classes, options.target)
    else:
        values = [y.reshape(len(y), -1)[:, 0].astype(np.float64) for y in targets]
        lines += _describe_correlated_columns(sites, columns, values, options.target)
    if options.event is not None:
        lines += _describe_predictive_columns(
            sites, columns, [y[:, 1].astype(np.int64) for y in targets], options.event
        )
    lines += find_suspected_codes(_collect_numbers(sites, columns))
    lines += _describe_ambiguous_columns(data.main, columns, options)
    lines += _describe_possible_codes(data, columns, options)
    return lines


@dataclass(frozen=True, eq=False)
class _Site:
    part: Part
    rows: Ints

    def values(self, column: Column) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the values of a column in the examined rows, and a mask of the missing ones."""
        values = self.part.table.read(column)[0].to_numpy()[self.rows]
        return values, np.isnan(values) if values.dtype.kind == "f" else pandas().isna(values)


def _draw_rows(part: Part, options: TableOptions) -> Ints:
    """Return rows of a site in random order, one per group, because rows of one patient are not independent."""
    rows = make_generator(0, f"doubts about {part.site}").permutation(len(part.frame))
    if options.group is not None:
        groups = part.table.groups(options.group)[rows]
        rows = rows[np.sort(np.unique(groups, return_index=True)[1])]
    return rows[:_MOST]


def _group_columns(
    sites: Sequence[_Site], columns: Mapping[str, Sequence[Column]]
) -> dict[str, list[tuple[int, Column]]]:
    """Return by name the columns that may enter, each with the positions of the sites that have it."""
    grouped: dict[str, list[tuple[int, Column]]] = {}
    for number, site in enumerate(sites):
        for column in columns[site.part.site]:
            if column.kind in ("number", "boolean", "date", "category"):
                grouped.setdefault(column.name, []).append((number, column))
    return grouped


def _collect_numbers(sites: Sequence[_Site], columns: Mapping[str, Sequence[Column]]) -> dict[str, dict[str, Floats]]:
    """Return the values of columns of numbers, by the name of the column and the site."""
    numbers: dict[str, dict[str, Floats]] = {}
    for name, site_columns in _group_columns(sites, columns).items():
        for number, column in site_columns:
            if column.kind == "number" and not column.binary:
                numbers.setdefault(name, {})[sites[number].part.site] = sites[number].values(column)[0]
    return numbers


def _describe_ambiguous_columns(
    parts: Sequence[Part], columns: Mapping[str, Sequence[Column]], options: TableOptions
) -> Iterator[str]:
    """Yield a line for each column of numbers or dates for which another reading of the cells is plausible."""
    sites: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        for column in columns[part.site]:
            if (reading := _describe_ambiguous_cells(part, column, options)) is not None:
                sites.setdefault((column.name, reading), []).append(part.site)
    for (name, reading), where in sites.items():
        yield f"column '{name}' at {shorten_list(where, 3)}: {reading}"


def _describe_ambiguous_cells(part: Part, column: Column, options: TableOptions) -> str | None:
    name, table, cells = column.name, part.table, part.table.cells(column.name)
    if column.kind == "number" and cells.dtype == object and column.name not in options.decimals:
        if column.format == "thousands":
            return "commas are read as separators of thousands; if they separate decimals, put it into decimals"
        if _has_whole_hundreds(table.numbers(name).to_numpy()) and separates_thousands(table.texts(name), "."):
            return (
                "points are read as decimal points, though all have three digits behind them and other numbers have "
                "three digits and no point; if they separate thousands, put it into thousands (otherwise into decimals)"
            )
    texts_of_dates = column.kind == "date" and not column.swapped and cells.dtype == object
    if texts_of_dates and format_of_swapped(cells[cells.notna().to_numpy()]) is not None:
        return (
            "all dates that a spreadsheet recognised have a day up to 12, and all that stayed texts a later one, so "
            "that it has swapped day and month; put it into swapped, or write all dates as YYYY-MM-DD"
        )
    return None


def _has_whole_hundreds(numbers: Floats) -> bool:
    """Return whether some numbers are integers from 100 to 999 and others are not integers."""
    is_integer = numbers == np.round(numbers)
    return not is_integer.all() and bool((is_integer & (np.abs(numbers) >= 100) & (np.abs(numbers) < 1000)).any())


# Classes -------------------------------------------------------------------------------------------------------


def _describe_predictive_columns(
    sites: Sequence[_Site], columns: Mapping[str, Sequence[Column]], classes: Sequence[Ints], target: str
) -> Iterator[str]:
    """Yield a warning for each column whose values or gaps predict the classes without other columns."""
    for name, site_columns in _group_columns(sites, columns).items():
        rows, most_common, by_gaps, by_values = 0, 0, 0, 0
        for number, column in site_columns:
            (values, gaps), y = sites[number].values(column), classes[number]
            most = int(np.bincount(y).max())
            rows, most_common = rows + len(y), most_common + most
            by_gaps += _count_correct_by_group(gaps.astype(np.int64), y) if gaps.any() else most
            by_values += (
                _count_correct_by_group(_encode_values(values), y)
                if _has_few_values(column)
                else _count_correct_by_neighbours(values, gaps, y)
            )
        for right, source in ((by_gaps, f"whether column '{name}' is missing"), (by_values, f"column '{name}' alone")):
            if right >= RIGHT * rows and rows - right <= LEFT * (rows - most_common) and rows - most_common >= _LEAST:
                share, usual = (f"{100 * part / rows:.0f} %" for part in (right, most_common))
                yield (
                    f"{source} predicts '{target}' for {share} of the rows (the commonest class: {usual}): does it "
                    "hold the answer?"
                )
                break


def _has_few_values(column: Column) -> bool:
    return column.kind in ("boolean", "category") or column.binary


def _encode_values(values: NDArray[Any]) -> Ints:
    """Return integer codes that are equal for equal values; missing values have a code too."""
    if values.dtype.kind == "f":  # 0, 1 and missing
        return np.where(np.isnan(values), 2, values).astype(np.int64)
    return np.asarray(pandas().factorize(values, use_na_sentinel=False)[0], np.int64)


def _count_correct_by_group(group: Ints, y: Ints) -> int:
    """Return for how many rows the unique most common class of the other rows of the group is the class of the row."""
    width = int(y.max()) + 2  # so that there is a second one
    counts = np.bincount(group * width + y, minlength=(int(group.max()) + 1) * width).reshape(-1, width)
    second, first = np.sort(counts, axis=1)[:, -2:].T
    return int(first[first - 1 > second].sum())


def _count_correct_by_neighbours(values: Floats, gaps: NDArray[np.bool_], y: Ints) -> int:
    """Return the same for the rows with the nearest numbers instead of a group; rows without a number are a group."""
    right = _count_correct_by_group(np.zeros(gaps.sum(), np.int64), y[gaps]) if gaps.any() else 0
    sorted_y = y[~gaps][np.argsort(values[~gaps], kind="stable")]
    if not len(sorted_y):
        return right
    hot = np.eye(int(y.max()) + 2, dtype=np.int64)[sorted_y]
    below = np.concatenate([np.zeros_like(hot[:1]), hot.cumsum(0)])
    position = np.arange(len(sorted_y))
    near = below[np.minimum(position + _BESIDE + 1, len(sorted_y))] - below[np.maximum(position - _BESIDE, 0)] - hot
    own_class = near[position, sorted_y]
    near[position, sorted_y] = -1
    return right + int((own_class > near.max(1)).sum())


# Values --------------------------------------------------------------------------------------------------------


def _describe_correlated_columns(
    sites: Sequence[_Site], columns: Mapping[str, Sequence[Column]], targets: Sequence[Floats], target: str
) -> Iterator[str]:
    """Yield a warning for each column whose values or gaps predict the target, or its order, without other columns."""
    for name, site_columns in _group_columns(sites, columns).items():
        rows, by_gaps, by_order, by_values = 0, 0.0, 0.0, 0.0
        for number, column in site_columns:
            (values, gaps), y = sites[number].values(column), targets[number]
            rows += len(y)
            by_gaps += len(y) * _compute_explained_variance(gaps.astype(np.int64), y) if gaps.any() else 0.0
            if _has_few_values(column):
                by_values += len(y) * _compute_explained_variance(_encode_values(values), y)
            else:
                by_order += len(y) * _compute_rank_correlation(values[~gaps], y[~gaps])
        for share, source, least, measured in (
            (by_gaps / rows, f"whether column '{name}' is missing gives", CORRELATED**2, "R²"),
            (by_values / rows, f"column '{name}' alone gives", CORRELATED**2, "R²"),
            (by_order / rows, f"column '{name}' alone orders the rows by", CORRELATED, "rank correlation"),
        ):
            if share >= least and rows >= _LEAST:
                yield f"{source} '{target}' ({measured} {share:.2f}): does it hold the answer?"
                break


def _compute_explained_variance(group: Ints, y: Floats) -> float:
    """Return R² of predicting a row by the mean of the other rows of its group, relative to that of all other rows."""
    number, sums = np.bincount(group), np.bincount(group, weights=y)
    other_rows = number[group] - 1
    if len(y) < 2 or not (other_rows > 0).any() or np.ptp(y) == 0:
        return 0.0
    overall_mean = (y.sum() - y) / (len(y) - 1)
    mean = np.where(other_rows > 0, (sums[group] - y) / np.maximum(other_rows, 1), overall_mean)
    return 1.0 - float(np.square(y - mean).sum() / np.square(y - overall_mean).sum())


def _compute_rank_correlation(values: Floats, y: Floats) -> float:
    """Return the absolute value of Spearman's rank correlation of values and targets."""
    if len(y) < _LEAST or np.ptp(values) == 0 or np.ptp(y) == 0:
        return 0.0
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    return abs(float(np.corrcoef(rankdata(values), rankdata(y))[0, 1]))


def _describe_possible_codes(
    data: Checked, columns: Mapping[str, Sequence[Column]], options: TableOptions
) -> Iterator[str]:
    """Yield a line for each column of numbers that look like codes, with leading zeros or written like 1E2.

    Columns that the study names in ``numbers`` are omitted.
    """
    forms = (
        (_LEADING_ZERO, "have leading zeros, which numbers lose"),
        (_EXPONENT, "are written like 1E2, which is read as 100"),
    )
    numeric = {column.name for kinds in columns.values() for column in kinds if column.kind == "number"}
    numeric -= set(options.named["numbers"])
    targets = {options.target} if all(y.dtype.kind in "if" for y in data.targets.values()) else set()
    for name in sorted(numeric | targets):
        advice = "name it in categories" if name in numeric else "put a letter before each"
        candidates: dict[str, list[str]] = {}
        for part in data.main:
            cells = part.table.cells(name) if name in part.frame.columns else None
            if cells is not None and cells.dtype == object:
                texts = (cell for cell in cells.to_numpy() if isinstance(cell, str))
                candidates[part.site] = list(filter(_CODE_START.match, texts))
        for form, description in forms:
            numbers = {site: sum(map(bool, map(form.fullmatch, texts))) for site, texts in candidates.items()}
            rows = {site: number for site, number in numbers.items() if number}
            if rows:
                values = f"{sum(rows.values())} values of {shorten_list(list(rows), 3)}"
                yield f"column '{name}': {values} {description}; if these are codes, {advice}"
