"""A site's rows, of which each column is parsed once: for as many runs, seeds and questions as there are."""

from __future__ import annotations

from perfed.data.tables.kinds import Cells, Column, Kind, guess
from perfed.data.tables.problems import Frame, pandas


class Parsed:
    """A data frame whose columns are parsed when they are first asked for, and kept.

    Args:
        frame: as the site has it; its index names the rows in messages.

    Attributes:
        frame: the same, with texts as names.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
        self._cells: dict[str, Cells] = {}
        self._guessed: dict[tuple[str, Kind | None, Parsed | None], Column] = {}

    def __getitem__(self, name: str) -> Cells:
        if name not in self._cells:
            self._cells[name] = Cells(self.frame[name])
        return self._cells[name]

    def guess(self, name: str, said: Kind | None = None, more: Parsed | None = None) -> Column:
        """What the column ``name`` holds, by its rows and those of ``more``: :func:`perfed.data.tables.kinds.guess`."""
        key = name, said, more
        if key not in self._guessed:
            both = more is not None and name in more.frame
            cells = Cells(pandas().concat([self.frame[name], more.frame[name]])) if more and both else self[name]
            self._guessed[key] = guess(cells, name, said)
        return self._guessed[key]
