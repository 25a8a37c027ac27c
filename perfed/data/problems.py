"""An error that lists all problems of the data at once."""

from __future__ import annotations

from collections.abc import Sequence

from perfed.errors import PerfedError


class DataProblems(PerfedError):
    """An error with one or several problems, whose text is the first one.

    Attributes:
        problems: a line for each problem: file (or site), column, rows and what is allowed.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        count_note = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{count_note}")
        self.problems = tuple(problems)


def raise_problems(problems: Sequence[str]) -> None:
    """Raise :class:`DataProblems` unless the list is empty."""
    if problems:
        raise DataProblems(problems)
