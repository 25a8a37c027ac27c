"""Running a leaderboard: a comparison per row, a search before it where the row is tuned, theirs beside ours."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import tomli_w
import torch

from perfed.engine.metrics import metric_of
from perfed.errors import PerfedError, did_you_mean
from perfed.experiment.board import Board, Row, board_names, find_board
from perfed.experiment.compare import Comparison, is_comparison
from perfed.experiment.config import readable
from perfed.experiment.jobs import Execute
from perfed.experiment.overrides import grid_points
from perfed.experiment.search import Search, is_search, read_grid
from perfed.machine import write_atomic
from perfed.plugins import known_as
from perfed.report.board import Figure, board_table, write_board
from perfed.report.runs import load_run
from perfed.report.text import TextTable
from perfed.run.directory import RunDirectory, plain

MARK = "leaderboard.toml"
With = Callable[[str, int], Execute]
"""From what is worked on and its number of runs to what executes them."""


def is_leaderboard(path: Path) -> bool:
    """Whether ``path`` is the directory of a leaderboard."""
    return (path / MARK).is_file()


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
        """A new one, or the one that is in ``path``, which may get more seeds and other rows.

        Raises:
            PerfedError: no such leaderboard or row, bad settings, or ``path`` holds something else.
        """
        board = find_board(name)
        name, known = known_as(name, board_names()) or name, [row.name for row in board.run]
        chosen = tuple(known_as(row, known) or row for row in rows)
        made = cls(path, name, board.seeds if seeds is None else seeds, tuple(settings), chosen)
        for row in made.run:
            board.table(row, settings)
        if is_leaderboard(path):
            before = cls.read(path)
            if (before.name, before.settings) != (name, made.settings):
                raise PerfedError(f"{path}: holds {before.name} with other settings; choose another --out")
        else:
            RunDirectory.create(path)
        content = {"name": name, "seeds": made.seeds, "settings": list(settings), "rows": list(chosen)}
        write_atomic(path / MARK, tomli_w.dumps(content))
        return made

    @classmethod
    def read(cls, path: Path) -> Leaderboard:
        """The one that :meth:`create` wrote."""
        with readable(path / MARK) as file:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            settings = tuple(map(str, content["settings"]))
            rows = tuple(map(str, content.get("rows", ())))  # not in one that was begun before rows could be chosen
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
                hint, known = did_you_mean(name, rows), "', '".join(rows)
                raise PerfedError(f"--row: {self.name} runs no row '{name}'{hint}; it runs '{known}'")
        return [row for row in rows.values() if row.name in self.rows or not self.rows]

    def execute(self, data_dir: Path | None, device: torch.device | None, executed: With) -> list[str]:
        """Do what is not done yet, row by row, and write what came of it after each.

        Args:
            data_dir: first folder in which data files are looked for.
            device: in place of the experiments'.
            executed: makes what executes the runs of a row, which it gets the name and number of.

        Returns:
            Why runs failed.
        """
        failed: list[str] = []
        for row in self.run:
            try:
                comparison = self._comparison(row, data_dir, device, executed)
                left = len(comparison.left())
                outcomes = comparison.outcomes(data_dir, device, executed(row.name, left)) if left else ()
                failed += [f"{row.name}: {found}" for *_, found in outcomes if isinstance(found, PerfedError)]
                if left:
                    comparison.conclude()
            except PerfedError as error:
                failed.append(f"{row.name}: {error}")
            self.conclude()
        return failed

    def _comparison(self, row: Row, data_dir: Path | None, device: torch.device | None, executed: With) -> Comparison:
        """The row's comparison; new, it is of what a search chose, where the row has a grid."""
        place, seeds = self.path / row.folder, list(range(self.seeds))
        table = {**self.board.table(row, self.settings), "name": f"{self.name}: {row.name}"}
        if row.grid:
            table = self._tuned(row, table, data_dir, device, executed)
        if not is_comparison(place):
            return Comparison.create(place, table, [row.method], seeds, data_dir, device)
        found = replace(Comparison.read(place), seeds=seeds)
        self._check_same(place, found.table, table)
        found.write()
        return found

    def _tuned(
        self, row: Row, table: dict[str, Any], data_dir: Path | None, device: torch.device | None, executed: With
    ) -> dict[str, Any]:
        """The experiment with what a search on validation rows chooses, or has chosen."""
        where, tries = self.path / "tuning" / row.folder, list(range(self.board.tune_seeds))
        search = Search.read(where) if is_search(where) else None
        if search is None:
            search = Search.create(where, table, [row.method], tries, row.grid, data_dir, device)
        self._check_same(where, [search.table, search.points], [table, grid_points(row.grid)])
        search.execute(data_dir, device, executed(f"tuning {row.name}", search.size))
        return tomllib.loads((where / "chosen.toml").read_text(encoding="utf-8"))

    @staticmethod
    def _check_same(place: Path, before: Any, now: Any) -> None:
        """What is done is skipped only where it is what would be done."""
        if _without_device(before) != _without_device(now):
            raise PerfedError(f"{place}: was begun with another experiment than the leaderboard has now; remove it")

    def _figure(self, row: Row, metric: str) -> Figure:
        place = self.path / row.folder
        comparison = Comparison.read(place) if row.method and is_comparison(place) else None
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
