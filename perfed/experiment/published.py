"""Published leaderboards: the protocols and figures that come with the package."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from perfed.engine.metrics import find_metric
from perfed.errors import PerfedError, suggest_name, summarise_validation_error
from perfed.experiment.comparison import USUAL, Resources
from perfed.experiment.config import merge_tables, shipped_files
from perfed.experiment.overrides import override
from perfed.plugins import match_name
from perfed.settings import LISTED, STRICT


class Row(BaseModel):
    """A row of a leaderboard: a published method with its figure, or a further method of perfed.

    Attributes:
        name: the name of the row, from which the folder of its runs is named.
        method: perfed's method; not given for a row that is shown but not run.
        theirs_mean, theirs_std: the published mean and standard deviation over the seeds of its authors.
        note: the reason why perfed's figure differs, or a caveat.
        grid: axes of a search on validation rows before the runs (``"lr=0.01,0.1"``); empty for none.
        experiment: the settings that differ from the leaderboard's experiment.
    """

    model_config = STRICT

    name: str
    method: str = ""
    theirs_mean: float | None = None
    theirs_std: float | None = None
    note: str = ""
    grid: Annotated[tuple[str, ...], LISTED] = ()
    experiment: dict[str, Any] = {}

    @property
    def folder(self) -> str:
        """The name of the row's folder, of letters, digits, dots and hyphens."""
        return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.name.lower())


class Board(BaseModel):
    """A published leaderboard.

    Attributes:
        title, source: the title, and where the published figures come from.
        metric: the metric of the figures.
        best_over_test: whether the published figures are the best over rounds on test rows.
        their_rounds: the number of rounds of the published runs, where perfed's have fewer.
        seeds: the number of seeds of every row, counted from 0.
        tune_seeds: the number of seeds of every point of a search.
        experiment: the published protocol, as an experiment.
        rows: the published rows, then perfed's further methods.
    """

    model_config = STRICT

    title: str
    source: str
    metric: str
    best_over_test: bool = False
    their_rounds: int | None = Field(None, ge=1)
    seeds: int = Field(5, ge=1)
    tune_seeds: int = Field(1, ge=1)
    experiment: dict[str, Any]
    rows: Annotated[tuple[Row, ...], LISTED]

    @model_validator(mode="after")
    def _check_rows(self) -> Board:
        find_metric(self.metric)
        folders = [row.folder for row in self.rows]
        for row in self.rows:
            if folders.count(row.folder) > 1:
                raise PerfedError(f"rows: '{row.name}' is there twice")
        return self

    @property
    def run(self) -> list[Row]:
        """The rows that are run."""
        return [row for row in self.rows if row.method]

    def table(self, row: Row, settings: Sequence[str] = ()) -> dict[str, Any]:
        """Return the experiment of ``row``, with ``settings`` on top."""
        return override(merge_tables(self.experiment, row.experiment), settings, [row.method])


def board_names() -> list[str]:
    """Return the sorted names of the leaderboards that come with the package."""
    return [*shipped_files("boards")]


def find_board(name: str) -> Board:
    """Return the leaderboard called ``name``, in any case.

    Raises:
        PerfedError: there is none; the message lists those that exist.

    Example:
        >>> find_board("flamby-heart").rows[0].name
        'Pooled training'
    """
    names = board_names()
    if (shipped := match_name(name, names)) is None:
        raise PerfedError(f"unknown leaderboard '{name}'{suggest_name(name, names)}; allowed: {', '.join(names)}")
    try:
        return Board.model_validate(tomllib.loads(shipped_files("boards")[shipped].read_text(encoding="utf-8")))
    except ValidationError as error:
        raise summarise_validation_error(error, name) from None


@dataclass(frozen=True)
class Leaderboard:
    """The part of a published leaderboard that is run: the content of its marker.

    Attributes:
        name: the name of the leaderboard.
        seeds: the number of seeds, counted from 0.
        settings: assignments on top of the leaderboard's experiments.
        rows: the names of the rows that are run; empty for all.
    """

    kind: ClassVar[str] = "leaderboard"

    name: str
    seeds: int
    settings: tuple[str, ...]
    rows: tuple[str, ...]

    @classmethod
    def from_names(cls, name: str, seeds: int | None, settings: Sequence[str], rows: Sequence[str] = ()) -> Self:
        """Return the leaderboard of these names in any case; ``seeds``: as many as the leaderboard has if ``None``.

        Raises:
            PerfedError: no such leaderboard.
        """
        board = find_board(name)
        row_names = [row.name for row in board.run]
        return cls(
            match_name(name, board_names()) or name,
            board.seeds if seeds is None else seeds,
            tuple(settings),
            tuple(match_name(row, row_names) or row for row in rows),
        )

    @property
    def board(self) -> Board:
        """The published rows and figures."""
        return find_board(self.name)

    @property
    def run(self) -> list[Row]:
        """The rows that are run.

        Raises:
            PerfedError: the leaderboard runs no row of one of the names; the message lists those that it runs.
        """
        rows = {row.name: row for row in self.board.run}
        for name in self.rows:
            if name not in rows:
                hint, names = suggest_name(name, rows), "', '".join(rows)
                raise PerfedError(f"--row: {self.name} runs no row '{name}'{hint}; it runs '{names}'")
        return [row for row in rows.values() if row.name in self.rows or not self.rows]

    def prepare(self, resources: Resources = USUAL) -> Self:
        """Return the leaderboard after checking its rows and settings; data are checked before the runs of each row.

        Raises:
            PerfedError: no such row, or bad settings.
        """
        for row in self.run:
            self.board.table(row, self.settings)
        return self
