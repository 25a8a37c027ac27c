"""CSV as perfed writes it: no text in it is a formula for a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_text(rows: Iterable[Sequence[object]], end: str = "\r\n") -> str:
    """Rows as the text of a file, each cell :func:`escaped`; ``end``: of a line."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([escaped(cell) for cell in row] for row in rows)
    return text.getvalue()


def escaped(cell: object) -> object:
    """A text that a spreadsheet would take for a formula with an apostrophe in front; anything else as it is.

    Example:
        >>> escaped("=1+1"), escaped("-0.5"), escaped(-0.5), escaped("north")
        ("'=1+1", '-0.5', -0.5, 'north')
    """
    return f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell


def unescaped(cell: str) -> str:
    """The text that :func:`escaped` was given.

    Example:
        >>> unescaped("'=1+1"), unescaped("'north'")
        ('=1+1', "'north'")
    """
    return cell[1:] if cell.startswith("'") and _is_formula(cell[1:]) else cell


def _is_formula(text: str) -> bool:
    return _FORMULA.match(text) is not None and _NUMBER.fullmatch(text) is None
