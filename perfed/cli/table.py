"""Tables of text on a terminal or in a pipe, whose lines fit the width and whose numbers are never shortened."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from perfed.cli.console import console, say
from perfed.report.text import TextTable

GAP = 2
_NAMES, _LEAST = 12, 5  # smallest widths of the row names: usual, and if numbers need the space


def print_table(table: TextTable) -> None:
    """Print a table with its title and note; the best rows are bold on a terminal."""
    if table.title:
        say(table.title)
    for line in fit_lines(table, console.width):
        console.print(line, soft_wrap=True)
    if table.note:
        say(table.note, style="dim")
    console.print()


def fit_lines(table: TextTable, width: int) -> Iterator[Text]:
    """Yield the lines of a table, split into parts that fit the width; each part repeats the row names.

    Headers are wrapped between words. If the columns do not fit, names and words are shortened with an ellipsis;
    numbers never are.
    """
    names = [row[0] for row in table.rows]
    columns = range(1, len(table.header))
    first = max(map(len, [*names, _longest_word(table.header[0])]))
    widths = [_compute_width(table, column, width, lines=2) for column in columns]
    if first + sum(widths) + GAP * len(widths) > width:
        widths = [_compute_width(table, column, width) for column in columns]
    if first + sum(widths) + GAP * len(widths) > width:
        cells = max(len(cell) for row in table.rows for cell in row[1:])
        first = min(first, max(_NAMES, width // 3), max(_LEAST, width - GAP - cells))
        available = width - first - GAP
        widths = [_compute_width(table, column, available) for column in columns]
        widths = [min(w, available) if _is_text(table, c) else w for c, w in zip(columns, widths, strict=True)]
    parts: list[list[int]] = [[]]
    room = width - first
    for column, needed in zip(columns, widths, strict=True):
        if needed + GAP > room and parts[-1]:
            parts.append([])
            room = width - first
        parts[-1].append(column)
        room -= needed + GAP
    for number, part in enumerate(parts):
        if number:
            yield Text()
        yield from _fit_part(table, part, first, [widths[column - 1] for column in part])


def _is_text(table: TextTable, column: int) -> bool:
    """Return whether a column contains words, which are aligned to the left."""
    return not any(re.match(r"[-+–·\d]", row[column]) for row in table.rows)


def _fit_part(table: TextTable, columns: Sequence[int], first: int, widths: Sequence[int]) -> Iterator[Text]:
    heads = [_wrap_cell(table.header[0], first)]
    heads += [_wrap_cell(table.header[column], width) for column, width in zip(columns, widths, strict=True)]
    sides = [str.ljust, *(str.ljust if _is_text(table, column) else str.rjust for column in columns)]

    def build_line(cells: Sequence[str], style: str) -> Text:
        placed = (side(cell, width) for side, cell, width in zip(sides, cells, [first, *widths], strict=True))
        return Text((" " * GAP).join(placed).rstrip(), style=style)

    height = max(map(len, heads))
    for above in range(height, 0, -1):
        yield build_line([head[-above] if above <= len(head) else "" for head in heads], "dim")
    for number, row in enumerate(table.rows):
        words = [
            shorten_name(row[c], w) if _is_text(table, c) else row[c] for c, w in zip(columns, widths, strict=True)
        ]
        cells = [shorten_name(row[0], first), *words]
        yield build_line(cells, "bold" if number in table.best else "")


def _compute_width(table: TextTable, column: int, most: int, lines: int | None = None) -> int:
    """Return the width of a column: that of its longest cell or header word, or more to fit the header in ``lines``.

    The header never makes it wider than ``most``.
    """
    head = table.header[column]
    cells = max((len(row[column]) for row in table.rows), default=0)
    least = max(cells, min(most, len(_longest_word(head))))
    enough = (width for width in range(least, len(head) + 1) if lines and len(_wrap_cell(head, width)) <= lines)
    return min(next(enough, least), max(most, cells))


def _wrap_cell(text: str, width: int) -> list[str]:
    """Return a header as lines of at most ``width``; longer words are shortened with an ellipsis."""
    words = " ".join(shorten_name(word, width) for word in text.split())
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


def _longest_word(text: str) -> str:
    return max(text.split(), key=len, default="")


def shorten_name(name: str, width: int) -> str:
    """Return a name of at most ``width`` characters, with an ellipsis in its middle if it is longer.

    Example:
        >>> shorten_name("sklearn:random-forest", 12), shorten_name("fedpac", 12)
        ('sklear…orest', 'fedpac')
    """
    if len(name) <= width:
        return name
    back = (width - 1) // 2
    return f"{name[: width - 1 - back]}…{name[len(name) - back :]}"
