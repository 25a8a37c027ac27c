"""What is wrong with tables: all of it at once, one line each, without a row's content."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from perfed.data.files import optional_package
from perfed.errors import PerfedError

Frame = Any
"""A pandas DataFrame; pandas is imported where tables are used, and has no types of its own."""
Series = Any
"""A pandas Series."""

_SHOWN = 5  # rows that a line names


class TableProblems(PerfedError):
    """Faults of tables.

    Attributes:
        problems: one line each: file (or site), column, rows and what is allowed. The error's text is the first.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")
        self.problems = tuple(problems)


def refuse(problems: Sequence[str]) -> None:
    """Raise :class:`TableProblems` if there are any."""
    if problems:
        raise TableProblems(problems)


def pandas() -> Any:
    """The module pandas.

    Raises:
        PerfedError: it is not installed; names the extra.
    """
    return optional_package("pandas", "reading tables", extra="tables")


def in_rows(labels: Iterable[Any]) -> str:
    """ "in row 3", or the first few of several."""
    rows = [str(label) for label in labels]
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"in row{'s' if len(rows) > 1 else ''} {', '.join(rows[:_SHOWN])}{more}"


def listed(names: Iterable[str]) -> str:
    """Names in quotes, with commas."""
    return ", ".join(f"'{name}'" for name in names)


def unknown(name: str, names: Sequence[str]) -> str:
    """What to say of a column that is not among ``names``: the nearest, and all."""
    near = difflib.get_close_matches(name, names, n=1) or [n for n in names if n.lower() == name.lower()]
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"no column '{name}'{hint}; its columns: {', '.join(names)}"
