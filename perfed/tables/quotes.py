"""Detection of stray quotation marks in CSV files, which would merge rows."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice

_SAMPLE = 1000  # number of rows from which numeric columns are detected
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")
_REMOVE = 'remove the mark, or write "" for a mark inside a cell in quotes'


@dataclass(frozen=True)
class _QuotedCell:
    """A quoted cell that holds line breaks.

    Attributes:
        first, last: the lines of the record, from 0, in which the cell begins and ends.
        ending: the character behind the closing mark, "" at the end of the line; ``None`` if the cell is not closed.
    """

    first: int
    last: int
    ending: str | None


class QuoteCheck:
    """A check of the records of one file, each of which spans one or more lines.

    Args:
        lines: the lines of the file, including line ends.
        records: the number, from 0, of each record's first line as the module csv reads them; the first is the header.
        width: the number of cells of the header.
        delimiter: the character between cells.
    """

    def __init__(self, lines: Sequence[str], records: Sequence[int], width: int, delimiter: str) -> None:
        self._lines = lines
        self._ends = [*records[1:], len(lines)]
        self._records = records
        self._width = width
        self._delimiter = delimiter

    def find_problem(self) -> str | None:
        """Return a message about the first stray quotation mark, which begins with its row; ``None`` if there is none.

        A quoted cell may hold line breaks. A mark is stray if its cell never ends, ends in the middle of a text in a
        later line, or spans lines most of which look like rows of the table.
        """
        for start, end in zip(self._records, self._ends, strict=True):
            if end - start > 1 or end == len(self._lines):
                for cell in _find_multiline_cells(self._lines[start:end], self._delimiter):
                    if (reason := self._explain_stray_mark(cell, start)) is not None:
                        return f"row {start + cell.first + 1}: a quotation mark opens a cell that {reason}"
        return None

    def _explain_stray_mark(self, cell: _QuotedCell, start: int) -> str | None:
        if cell.ending is None:
            return f"never ends; {_REMOVE}"
        ends = f"ends in row {start + cell.last + 1}"
        if cell.ending not in ("", self._delimiter):
            return f"{ends}, in the middle of a text; {_REMOVE}"
        lines = [line for line in self._lines[start + cell.first : start + cell.last + 1] if line.strip()]
        if 2 * sum(map(self._looks_like_a_row, lines)) > len(lines):
            advice = "remove the mark, or take the line breaks out of the cell if it is one"
            return f"{ends}, and the lines between look like rows; {advice}"
        return None

    def _looks_like_a_row(self, line: str) -> bool:
        """Return whether a single line has as many cells as the header, and numbers in the numeric columns."""
        cells = split_line(line, self._delimiter)
        return len(cells) == self._width and all(
            not cell or _is_number(cell) for cell, numeric in zip(cells, self._numeric_columns, strict=True) if numeric
        )

    @cached_property
    def _numeric_columns(self) -> list[bool]:
        """A flag for each column: whether most rows that span one line hold a number there."""
        pairs = zip(self._records[1:], self._ends[1:], strict=True)
        lines = islice((self._lines[start] for start, end in pairs if end - start == 1), _SAMPLE)
        rows = [row for row in (split_line(line, self._delimiter) for line in lines) if len(row) == self._width]
        columns = [[cell for cell in column if cell] for column in zip(*rows, strict=True)] or [[]] * self._width
        return [2 * sum(map(_is_number, column)) > len(column) for column in columns]


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell.replace('"', "")) is not None


def split_line(line: str, delimiter: str) -> list[str]:
    """Return the cells of a line in which every quoted cell also ends, without the quotation marks around them.

    Example:
        >>> split_line('"Bad, Ems",5" pipe,"stray', ",")
        ['Bad, Ems', '5" pipe', 'stray']
    """
    mark = re.escape(delimiter)
    cells = re.findall(rf'(?:^|{mark})( *"(?:[^"]|"")*" *(?={mark}|$)|[^{mark}]*)', line.strip("\r\n"))
    return [cell.strip().strip('"') for cell in cells]


def _find_multiline_cells(lines: Sequence[str], delimiter: str) -> Iterator[_QuotedCell]:
    """Yield the quoted cells of a record that hold line breaks, and a cell that is not closed.

    The rules are those of csv.reader: spaces before a cell are skipped, and text behind a closing mark belongs to the
    cell.
    """
    text, starts = "".join(lines), [0, *accumulate(map(len, lines))]
    end_of_cell = re.compile(rf"[{re.escape(delimiter)}\r\n]")
    position = 0
    while position < len(text):
        while text[position : position + 1] == " ":
            position += 1
        if text[position : position + 1] == '"':
            close = _find_closing_mark(text, position + 1)
            first = bisect_right(starts, position) - 1
            if close is None:
                yield _QuotedCell(first, len(lines) - 1, None)
                return
            last = bisect_right(starts, close) - 1
            if last > first:
                yield _QuotedCell(first, last, text[close + 1 :].lstrip(" ")[:1].strip("\r\n"))
            position = close + 1
        end = end_of_cell.search(text, position)
        position = len(text) if end is None else end.end()


def _find_closing_mark(text: str, start: int) -> int | None:
    """Return the position of the mark that closes a cell; two marks in a row stand for one inside the cell."""
    position = text.find('"', start)
    while position >= 0:
        if text[position + 1 : position + 2] != '"':
            return position
        position = text.find('"', position + 2)
    return None
