"""Codes of missing values, such as -9: those in the settings become missing, others are suspected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.errors import shorten_list
from perfed.tables.problems import Series, pandas

MISSING_TEXTS = ("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "?")
"""Texts that mean a missing value unless the setting ``missing`` switches them off."""

_FEWEST = 5  # rows of a site that hold a value at least before a message names it
_SHARE = (0.01, 0.5)  # of a site's rows that hold a value that stands for a missing one
_MIDNIGHT = r" 00:00:00(\+00:00)?$"
_OTHERS = 10  # different values beside it that a column has at least


def split_code(code: str) -> tuple[str | None, str]:
    """Return the column of ``code``, ``None`` for all columns, and the value that means missing.

    Example:
        >>> split_code("age=999"), split_code("-9")
        (('age', '999'), (None, '-9'))
    """
    name, equals, value = code.rpartition("=")
    return (name.strip() if equals else None), value.strip()


def missing_values(codes: Sequence[str], column: str) -> list[str]:
    """Return the texts that mean missing in a column: those of ``codes`` and :data:`MISSING_TEXTS`.

    An empty code switches :data:`MISSING_TEXTS` off, in every column ("") or in one ("ward=").

    Example:
        >>> missing_values(["-9", "age=999", "ward="], "ward"), "NA" in missing_values(["-9"], "age")
        (['', '-9'], True)
    """
    values = _values_of(codes, column)
    return sorted(set(values)) if "" in values else [*MISSING_TEXTS, *values]


def _values_of(codes: Sequence[str], column: str) -> list[str]:
    return [value for name, value in map(split_code, codes) if name in (None, column)]


def find_codes(cells: Series, name: str, codes: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask of the cells of a column that hold a value that means missing; numbers are compared by value.

    Args:
        cells: a column normalised by :func:`perfed.tables.cells.clean_cells`, or its array if it is of objects.
        name: the name of the column.
        codes: each a value, or ``COLUMN=VALUE``; those of other columns do not matter.
    """
    values = tuple(missing_values(codes, name) if cells.dtype == object else _values_of(codes, name))
    if not values:
        return np.zeros(len(cells), bool)
    if cells.dtype == object:
        return _equal_any_object(np.asarray(cells), values)
    pd = pandas()
    texts = cells.astype(str)
    if pd.api.types.is_datetime64_any_dtype(cells.dtype):
        return np.asarray(texts.str.replace(_MIDNIGHT, "", regex=True).isin(values).to_numpy(bool))
    if pd.api.types.is_bool_dtype(cells.dtype):
        return np.asarray(texts.isin(values).to_numpy(bool))
    return np.asarray((texts.isin(values) | cells.isin(_numbers_among(values))).to_numpy(bool))


def _equal_any_object(cells: NDArray[Any], values: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return a mask of the texts and numbers that equal one of the values; a plain loop is faster than pandas here."""
    texts, numbers = frozenset(values), _numbers_among(values)
    if not numbers:
        return np.fromiter((cell in texts for cell in cells), bool, len(cells))
    equal_texts = np.fromiter((str(cell) in texts for cell in cells), bool, len(cells))
    return equal_texts | np.isin(pandas().to_numeric(cells, errors="coerce"), numbers)


@cache
def _numbers_among(values: tuple[str, ...]) -> list[float]:
    numbers = pandas().to_numeric(pandas().Series(values), errors="coerce")
    return [float(number) for number in numbers if not np.isnan(number)]


def find_suspected_codes(columns: Mapping[str, Mapping[str, NDArray[np.float64]]]) -> Iterator[str]:
    """Yield a line for each value in columns of numbers that may mean a missing value.

    Such a value occurs in many rows of a site, and is either the only value below zero, or further from all others than
    these are from each other.

    Args:
        columns: the values of each column at each site, by name of the column and the site; NaN if missing.
    """
    for name, sites in columns.items():
        suspects: dict[float, dict[str, int]] = {}
        for site, values in sites.items():
            for code, rows in _find_outlying_value(values[np.isfinite(values)]):
                suspects.setdefault(code, {})[site] = rows
        for code, counts in suspects.items():
            share = 100 * sum(counts.values()) / sum(len(sites[site]) for site in counts)
            yield (
                f"column '{name}' holds {code:g} in {share:.0f} % of the rows of {shorten_list(list(counts), 3)}, far "
                f"from its other values; if that means missing, put '{name}={code:g}' into missing"
            )


def _find_outlying_value(values: NDArray[np.float64]) -> Iterator[tuple[float, int]]:
    """Yield the smallest and the largest value, each if it is far from the others, and the number of its rows."""
    different, rows = np.unique(values, return_counts=True)
    if len(different) <= _OTHERS:
        return
    for position, other_values in ((0, different[1:]), (-1, different[:-1])):
        code, count = float(different[position]), int(rows[position])
        if count < _FEWEST or not _SHARE[0] <= count / len(values) <= _SHARE[1] or code != round(code):
            continue
        apart = abs(code - other_values[0 if position == 0 else -1]) > np.ptp(other_values)
        if apart or (code < 0 <= other_values[0] and position == 0):
            yield code, count
