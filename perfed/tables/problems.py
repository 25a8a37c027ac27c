"""Messages about problems of tables, which never contain cells of rows."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from perfed.data.files import optional_package
from perfed.data.inputs import TWO_COLUMNS
from perfed.data.problems import raise_problems
from perfed.errors import shorten_list

Frame = Any
"""A pandas DataFrame; pandas is imported where tables are used, and has no types of its own."""
Series = Any
"""A pandas Series."""

Problem = tuple[str, str]
"""The source of a problem and its description."""

_SHOWN = 5  # rows that a line names


def refuse_complex(frame: Frame, where: str) -> None:
    """Raise an error whose message starts with ``where`` if a column holds complex numbers."""
    problems = []
    for position, name in enumerate(frame.columns):
        cells = frame.iloc[:, position]
        if cells.dtype == object:
            cells = cells[[isinstance(cell, complex | np.complexfloating) for cell in cells]]
        if len(cells) and (cells.dtype == object or cells.dtype.kind == "c"):
            problems.append(
                f"{where}: column '{name}' holds complex numbers {describe_rows(cells.index)}; {TWO_COLUMNS}"
            )
    raise_problems(problems)


def merge_lines(problems: Iterable[Problem]) -> list[str]:
    """Return a line for each problem, and one line for all sources with the same problem."""
    sources: dict[str, list[str]] = {}
    for source, problem in problems:
        sources.setdefault(problem, []).append(source)
    counts = {problem: f" (and {len(names) - 1} more)" if len(names) > 1 else "" for problem, names in sources.items()}
    return [f"{names[0]}{counts[problem]}: {problem}" for problem, names in sources.items()]


def pandas() -> Any:
    """Return the module pandas.

    Raises:
        PerfedError: it is not installed; names the extra.
    """
    return optional_package("pandas", "reading tables", extra="tables")


def describe_rows(labels: Iterable[Any]) -> str:
    """Return a phrase such as "in row 3" with the first few rows."""
    rows = [str(label) for label in labels]
    omitted = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"in row{'s' if len(rows) > 1 else ''} {', '.join(rows[:_SHOWN])}{omitted}"


def quote_names(names: Iterable[str]) -> str:
    """Return names in quotes, separated by commas."""
    return ", ".join(f"'{name}'" for name in names)


def describe_columns(names: Sequence[str]) -> str:
    """Return a phrase such as "column 'age'" or "columns 'age', 'sex'"."""
    return f"column{'s' if len(names) > 1 else ''} {quote_names(names)}"


def describe_unknown_column(name: str, names: Sequence[str]) -> str:
    """Return a message about a column that is not among ``names``, with a similar name or the first few names."""
    near = find_similar_name(name, names)
    return f"no column '{name}'" + (f" (did you mean '{near}'?)" if near else f"; its columns: {shorten_list(names)}")


def describe_absent_columns(
    named: Mapping[str, Iterable[str]], present: Collection[str], names: Sequence[str]
) -> list[str]:
    """Return a line for each column that an option names and no site has.

    Args:
        named: the names in each option.
        present: the names of columns that some site has.
        names: the known names of columns, among which similar ones are suggested.
    """
    lines = []
    for option, name in (
        (option, name) for option, columns in named.items() for name in columns if name not in present
    ):
        near = find_similar_name(name, names)
        listed = f"; their columns: {shorten_list(names)}" if names else ""
        lines.append(f"{option}: no site has a column '{name}'" + (f" (did you mean '{near}'?)" if near else listed))
    return lines


def find_similar_name(name: str, names: Sequence[str]) -> str | None:
    """Return the one of ``names`` with a spelling similar to ``name``."""
    same = [candidate for candidate in names if candidate.lower() == name.lower()]
    return next(iter(same or difflib.get_close_matches(name, names, n=1)), None)
