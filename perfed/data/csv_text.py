"""CSV as perfed writes it: no text in it is a formula for a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

# At the begin of a text, and behind what other settings of a spreadsheet take for the end of a cell; spaces, quotes and
# characters of no width may come first.
_FORMULA = re.compile(
    r"""(^|[;|\t\r\n\v\f\x85\u2028\u2029])(?=[\s"'\ufeff\u200b-\u200f\u2060]*[=+\-@＝＋－＠])""",
)
_WRITTEN = re.compile(_FORMULA.pattern.replace(")(?=", ")'(?="))
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_text(rows: Iterable[Sequence[object]], end: str = "\r\n") -> str:
    """Return rows as the text of a CSV file, each cell :func:`escaped`; ``end`` is that of a line."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([escaped(cell) for cell in row] for row in rows)
    return text.getvalue()


def escaped(cell: object) -> object:
    """Return a text with an apostrophe where a spreadsheet would take a formula to begin; anything else as it is.

    That is at its begin, and behind a semicolon, tab, bar or line break: these end a cell with other settings of the
    spreadsheet, or when text is pasted.

    Example:
        >>> escaped("=1+1"), escaped("a;=1+1"), escaped("-0.5"), escaped(-0.5), escaped("north")
        ("'=1+1", "a;'=1+1", '-0.5', -0.5, 'north')
    """
    return _FORMULA.sub(r"\1'", cell) if isinstance(cell, str) and _NUMBER.fullmatch(cell) is None else cell


def unescaped(cell: str) -> str:
    """Return the text that :func:`escaped` was given.

    Example:
        >>> unescaped("'=1+1"), unescaped("a;'=1+1"), unescaped("'north'")
        ('=1+1', 'a;=1+1', "'north'")
    """
    return _WRITTEN.sub(r"\1", cell)
