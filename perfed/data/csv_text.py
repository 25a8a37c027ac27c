"""CSV files whose texts are not interpreted as formulas by spreadsheets."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

# The start of a text, or of a cell under other settings of a spreadsheet, before optional spaces, quotes and zero-width
# characters.
_FORMULA = re.compile(
    r"""(^|[;|\t\r\n\v\f\x85\u2028\u2029])(?=[\s"'\ufeff\u200b-\u200f\u2060]*[=+\-@＝＋－＠])""",
)
_WRITTEN = re.compile(_FORMULA.pattern.replace(")(?=", ")'(?="))
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_text(rows: Iterable[Sequence[object]], end: str = "\r\n") -> str:
    """Return rows as the text of a CSV file, with the cells :func:`escape_cell`; ``end`` is the end of a line."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([escape_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def escape_cell(cell: object) -> object:
    """Return a text with an apostrophe wherever a spreadsheet would interpret a formula; other values are unchanged.

    A formula can begin at the start of the text, or after a semicolon, tab, bar or line break, which end a cell under
    other settings of the spreadsheet or when text is pasted.

    Example:
        >>> escape_cell("=1+1"), escape_cell("a;=1+1"), escape_cell("-0.5"), escape_cell(-0.5), escape_cell("north")
        ("'=1+1", "a;'=1+1", '-0.5', -0.5, 'north')
    """
    return _FORMULA.sub(r"\1'", cell) if isinstance(cell, str) and _NUMBER.fullmatch(cell) is None else cell


def unescape_cell(cell: str) -> str:
    """Return the original text from the result of :func:`escape_cell`.

    Example:
        >>> unescape_cell("'=1+1"), unescape_cell("a;'=1+1"), unescape_cell("'north'")
        ('=1+1', 'a;=1+1', "'north'")
    """
    return _WRITTEN.sub(r"\1", cell)
