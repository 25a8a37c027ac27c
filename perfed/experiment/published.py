"""Published leaderboards: other people's protocol and figures, which come with the package, and ours beside them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from perfed.engine.metrics import chosen, metric_of
from perfed.errors import PerfedError, suggest_name, summarise_validation_error
from perfed.experiment.comparison import USUAL, Comparison, ComparisonSpec, Resources
from perfed.experiment.config import merged, readable, shipped_files
from perfed.experiment.jobs import Execute
from perfed.experiment.overrides import grid_points, override
from perfed.experiment.search import Search, read_grid
from perfed.experiment.study import Study
from perfed.plugins import match_name
from perfed.report.board import Figure, board_table, write_board
from perfed.report.run_results import load_run
from perfed.report.text import TextTable
from perfed.run.directory import MARKER, RunDirectory, marker_of, plain, write_marker
from perfed.settings import LISTED, STRICT
from perfed.system import write_atomic

With = Callable[[str, int], Execute]
"""From what is worked on and its number of runs to what executes them."""


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
        """Return the experiment of ``row``, with ``settings`` on top."""
        return override(merged(self.experiment, row.experiment), settings, [row.method])


def board_names() -> list[str]:
    """Return names of the leaderboards that come with the package, sorted."""
    return [*shipped_files("boards")]


def find_board(name: str) -> Board:
    """Return the leaderboard called ``name``, in any case.

    Raises:
        PerfedError: there is none; says which there are.

    Example:
        >>> find_board("flamby-heart").rows[0].name
        'Pooled training'
    """
    known = board_names()
    if (shipped := match_name(name, known)) is None:
        raise PerfedError(f"unknown leaderboard '{name}'{suggest_name(name, known)}; allowed: {', '.join(known)}")
    try:
        return Board.model_validate(tomllib.loads(shipped_files("boards")[shipped].read_text(encoding="utf-8")))
    except ValidationError as error:
        raise summarise_validation_error(error, name) from None


@dataclass(frozen=True)
class Leaderboard:
    """A leaderboard that is run in ``path``: ``ROW/`` is a comparison, ``tuning/ROW/`` the search before it.

    Attributes:
        path: its directory.
        name: of the leaderboard.
        seeds: how many, from 0 on.
        settings: assignments on top of its experiments.
        rows: names of the rows that are run; empty: all of them.
    """

    path: Path
    name: str
    seeds: int
    settings: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    @classmethod
    def create(
        cls, path: Path, name: str, seeds: int | None, settings: Sequence[str], rows: Sequence[str] = ()
    ) -> Leaderboard:
        """Return a new one, or the one that is in ``path``, which may get more seeds and other rows.

        Raises:
            PerfedError: no such leaderboard or row, bad settings, or ``path`` holds something else.
        """
        board = find_board(name)
        name, known = match_name(name, board_names()) or name, [row.name for row in board.run]
        named = tuple(match_name(row, known) or row for row in rows)
        made = cls(path, name, board.seeds if seeds is None else seeds, tuple(settings), named)
        for row in made.run:
            board.table(row, settings)
        if marker_of(path)[0] == "leaderboard":
            before = cls.read(path)
            if (before.name, before.settings) != (name, made.settings):
                raise PerfedError(f"{path}: holds {before.name} with other settings; choose another --out")
        else:
            RunDirectory.create(path)
        content = {"name": name, "seeds": made.seeds, "settings": list(settings), "rows": list(named)}
        write_marker(path, "leaderboard", content)
        return made

    @classmethod
    def read(cls, path: Path) -> Leaderboard:
        """Return the one that :meth:`create` wrote."""
        content = marker_of(path)[1]
        with readable(path / MARKER):
            settings = tuple(map(str, content["settings"]))
            rows = tuple(map(str, content["rows"]))
            return cls(path, str(content["name"]), int(content["seeds"]), settings, rows)

    @property
    def board(self) -> Board:
        """Its rows and figures."""
        return find_board(self.name)

    @property
    def run(self) -> list[Row]:
        """The rows that are run.

        Raises:
            PerfedError: a name is none of theirs; says which there are.
        """
        rows = {row.name: row for row in self.board.run}
        for name in self.rows:
            if name not in rows:
                hint, known = suggest_name(name, rows), "', '".join(rows)
                raise PerfedError(f"--row: {self.name} runs no row '{name}'{hint}; it runs '{known}'")
        return [row for row in rows.values() if row.name in self.rows or not self.rows]

    def execute(self, executed: With, resources: Resources = USUAL) -> list[str]:
        """Do what is not done yet, row by row, and write what came of it after each.

        Args:
            executed: makes what executes the runs of a row, which it gets the name and number of.
            resources: that the runs are made with.

        Returns:
            Why runs failed.
        """
        failed: list[str] = []
        for row in self.run:
            try:
                study = self._study(row, resources, executed)
                if left := len(study.left()):
                    _, errors = study.execute(resources, executed(row.name, left))
                    failed += [f"{row.name}: {error}" for error in errors]
            except PerfedError as error:
                failed.append(f"{row.name}: {error}")
            self.conclude()
        return failed

    def _study(self, row: Row, resources: Resources, executed: With) -> Study:
        """The row's comparison; new, it is of what a search chose, where the row has a grid."""
        place, seeds = self.path / row.folder, list(range(self.seeds))
        table = {**self.board.table(row, self.settings), "name": f"{self.name}: {row.name}"}
        if row.grid:
            table = self._tuned(row, table, resources, executed)
        if not marker_of(place)[0]:
            return Study.create(place, ComparisonSpec(table, [row.method], seeds), resources)
        found = replace(Comparison.read(place), seeds=seeds)
        self._check_same(place, found.table, table)
        found.write()
        return Study(place, {"": found})

    def _tuned(self, row: Row, table: dict[str, Any], resources: Resources, executed: With) -> dict[str, Any]:
        """The experiment with what a search on validation rows chooses, or has chosen."""
        where = self.path / "tuning" / row.folder
        planned = ComparisonSpec(table, [row.method], list(range(self.board.tune_seeds)))
        there = bool(marker_of(where)[0])
        search = Search.read(where) if there else Search.create(where, planned, row.grid, resources)
        self._check_same(where, [search.table, search.points], [table, grid_points(row.grid)])
        search.execute(resources, executed(f"tuning {row.name}", search.size))
        return search.chosen

    @staticmethod
    def _check_same(place: Path, before: Any, now: Any) -> None:
        """What is done is skipped only where it is what would be done."""
        if _without_device(before) != _without_device(now):
            raise PerfedError(f"{place}: was begun with another experiment than the leaderboard has now; remove it")

    def _figure(self, row: Row, metric: str) -> Figure:
        place = self.path / row.folder
        comparison = Comparison.read(place) if row.method and marker_of(place)[0] else None
        keys = [] if comparison is None else comparison.keys
        runs = [load_run(where) for key in keys if comparison and (where := comparison.directory(*key)).is_dir()]
        done = [run for run in runs if run.summary is not None and metric in run.summary.spreads]
        last = [run.summary.spreads[metric].mean for run in done if run.summary]
        side = metric_of(metric).direction
        over = [[r.spreads[metric].mean for r in run.rounds if metric in r.spreads] for run in done]
        best = [side * max(side * value for value in values) for values in over if values]
        return Figure(
            method=row.name,
            ours_mean=fmean(last) if last else None,
            ours_std=stdev(last) if len(last) > 1 else None,
            theirs_mean=row.theirs_mean,
            theirs_std=row.theirs_std,
            their_rounds=self.board.their_rounds,
            note=row.note,
            ours_best_mean=fmean(best) if best else None,
            ours_best_std=stdev(best) if len(best) > 1 else None,
            rounds=max((run.summary.rounds for run in done if run.summary), default=None),
            seeds=len(last),
            chosen=self._chosen(row, metric),
        )

    def _chosen(self, row: Row, metric: str) -> str:
        """What the search of a tuned row chose."""
        file = self.path / "tuning" / row.folder / "grid.json"
        if not (row.grid and file.is_file()):
            return ""
        results = [result for result in read_grid(file) if result["mean"] is not None]
        side = metric_of(metric).direction
        return " ".join(max(results, key=lambda result: side * result["mean"])["settings"]) if results else ""

    def conclude(self) -> tuple[list[Figure], TextTable, Path]:
        """Write ``leaderboard.json`` and ``report.html``.

        Returns:
            Theirs and ours of every row, as far as it has been run; the same as text; the report's path.
        """
        board = self.board
        figures = [self._figure(row, board.metric) for row in board.rows]
        table = board_table(figures, board.title, board.metric, board.best_over_test)
        content = plain([asdict(figure) for figure in figures])
        write_atomic(self.path / "leaderboard.json", json.dumps(content, indent=2) + "\n")
        return figures, table, write_board(self.path / "report.html", table, figures, board.source)


def _without_device(content: Any) -> Any:
    """The same without the device, which a sitting may choose."""
    tables = content if isinstance(content, list) else [content]
    return [{k: v for k, v in part.items() if k != "device"} if isinstance(part, dict) else part for part in tables]
