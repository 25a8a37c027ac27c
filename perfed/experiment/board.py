"""Other people's leaderboards: their protocol and figures, from the files that come with the package."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from perfed.engine.metrics import chosen
from perfed.errors import PerfedError, did_you_mean, first_problem
from perfed.experiment.overrides import override
from perfed.experiment.tables import merged
from perfed.plugins import known_as
from perfed.settings import LISTED, STRICT


class Row(BaseModel):
    """A row of a leaderboard: a method of theirs, with their figure, or one of ours on top.

    Attributes:
        name: what it is called; names the folder of its runs.
        method: ours; not given for a row that is shown and not run.
        theirs_mean, theirs_std: what they published, over their seeds.
        note: why ours is another figure, or what to mind.
        grid: axes of a search on validation rows (``"lr=0.01,0.1"``), before the runs; empty for none.
        experiment: what differs from the leaderboard's experiment.
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
        """The name of its folder: letters, digits, dots and hyphens."""
        return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.name.lower())


class Board(BaseModel):
    """A leaderboard that others published.

    Attributes:
        title, source: what it is, and where its figures come from.
        metric: that is reported, of the run's summary.
        best_over_test: whether they report the best over rounds on test rows.
        their_rounds: that theirs had, where ours are given fewer.
        seeds: of every row, from 0 on.
        tune_seeds: of every point of a search.
        experiment: their protocol, as an experiment's file.
        rows: theirs, then ours.
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
    def _each_once(self) -> Board:
        chosen(self.metric)
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
        """The experiment of ``row``, with ``settings`` on top."""
        return override(merged(self.experiment, row.experiment), settings, [row.method])


def board_names() -> list[str]:
    """Names of the leaderboards that come with the package, sorted."""
    folder = resources.files("perfed.experiment.boards")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def find_board(name: str) -> Board:
    """The leaderboard called ``name``, in any case.

    Raises:
        PerfedError: there is none; says which there are.

    Example:
        >>> find_board("flamby-heart").rows[0].name
        'Pooled training'
    """
    known = board_names()
    if (shipped := known_as(name, known)) is None:
        raise PerfedError(f"unknown leaderboard '{name}'{did_you_mean(name, known)}; allowed: {', '.join(known)}")
    text = (resources.files("perfed.experiment.boards") / f"{shipped}.toml").read_text(encoding="utf-8")
    try:
        return Board.model_validate(tomllib.loads(text))
    except ValidationError as error:
        raise first_problem(error, name) from None
