"""Leaderboards that are run: perfed's figures beside the published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from perfed.data.reading import to_json_values
from perfed.engine.metrics import metric_of
from perfed.errors import PerfedError
from perfed.experiment.comparison import USUAL, ComparisonSpec, Resources
from perfed.experiment.jobs import Execute
from perfed.experiment.published import Leaderboard, Row
from perfed.experiment.search import Search, best_result, read_chosen, read_grid
from perfed.experiment.study import Study, read_comparison
from perfed.report.board import Figure, board_table, write_board
from perfed.report.run_results import RunResults, load_run
from perfed.report.text import TextTable
from perfed.run.directory import read_marker
from perfed.system import write_atomic

MakeExecute = Callable[[str, int], Execute]
"""Returns the function that executes the runs of a row, from the name of the row and the number of its runs."""


def run_leaderboard(study: Study, make_execute: MakeExecute, resources: Resources = USUAL) -> list[str]:
    """Execute the runs that have not finished, row by row, and write the leaderboard after each row.

    ``ROW/`` in the study's directory is a comparison, ``tuning/ROW/`` the search that chooses the row's settings.

    Args:
        study: the study of a leaderboard.
        make_execute: returns the function that executes the runs of a row.
        resources: the resources of the runs.

    Returns:
        An error message for each run that failed.
    """
    board, failed = leaderboard_of(study), list[str]()
    for row in board.run:
        try:
            comparison = _open_row(study.path, board, row, make_execute, resources)
            if unfinished := comparison.list_unfinished():
                _, errors = comparison.execute(resources, make_execute(row.name, len(unfinished)))
                failed += [f"{row.name}: {error}" for error in errors]
        except PerfedError as error:
            failed.append(f"{row.name}: {error}")
        conclude_leaderboard(study)
    return failed


def leaderboard_of(study: Study) -> Leaderboard:
    """Return the specification of a leaderboard's study."""
    assert isinstance(study.spec, Leaderboard)
    return study.spec


def _open_row(path: Path, board: Leaderboard, row: Row, make_execute: MakeExecute, resources: Resources) -> Study:
    """Return the comparison of a row; a new one has the settings that a search chose, if the row has a grid."""
    place = path / row.folder
    table = {**board.board.table(row, board.settings), "name": f"{board.name}: {row.name}"}
    if row.grid:
        tuning = path / "tuning" / row.folder
        tuned = ComparisonSpec(table, [row.method], list(range(board.board.tune_seeds)))
        search = _open(tuning, Search.from_grid(tuned, row.grid), resources)
        search.choose(resources, make_execute(f"tuning {row.name}", len(search.keys)))
        table = read_chosen(tuning)
    return _open(place, ComparisonSpec(table, [row.method], list(range(board.seeds))), resources)


def _open(path: Path, spec: ComparisonSpec | Search, resources: Resources) -> Study:
    """Return the study in ``path`` with the seeds of ``spec``, or a new one.

    Raises:
        PerfedError: the study in ``path`` has another experiment or another grid.
    """
    if not read_marker(path)[0]:
        return Study.create(path, spec, resources)
    before = Study.read(path).spec
    if not isinstance(before, ComparisonSpec) or _select_identity(before) != _select_identity(spec):
        raise PerfedError(f"{path}: was started with another experiment than the leaderboard has now; remove it")
    study = Study(path, replace(before, seeds=spec.seeds))
    study.write()
    return study


def _select_identity(spec: ComparisonSpec) -> tuple[Any, ...]:
    """Return the parts of a specification that must not change when a study is continued; the device may change."""
    table = {key: value for key, value in spec.table.items() if key != "device"}
    return table, spec.points if isinstance(spec, Search) else None


def _build_figure(path: Path, board: Leaderboard, row: Row, metric: str) -> Figure:
    place, runs = path / row.folder, list[RunResults]()
    if row.method and read_marker(place)[0]:
        comparison = read_comparison(place)
        runs = [load_run(run) for key in comparison.keys if (run := comparison.directory(*key)).is_dir()]
    finished = [(run, run.summary) for run in runs if run.summary is not None and metric in run.summary.spreads]
    last = [summary.spreads[metric].mean for _, summary in finished]
    side = metric_of(metric).direction
    curves = [[line.spreads[metric].mean for line in run.rounds if metric in line.spreads] for run, _ in finished]
    best = [side * max(side * value for value in curve) for curve in curves if curve]
    return Figure(
        method=row.name,
        ours_mean=fmean(last) if last else None,
        ours_std=stdev(last) if len(last) > 1 else None,
        theirs_mean=row.theirs_mean,
        theirs_std=row.theirs_std,
        their_rounds=board.board.their_rounds,
        note=row.note,
        ours_best_mean=fmean(best) if best else None,
        ours_best_std=stdev(best) if len(best) > 1 else None,
        rounds=max((summary.rounds for _, summary in finished), default=None),
        seeds=len(last),
        chosen=_chosen_settings(path / "tuning" / row.folder / "grid.json") if row.grid else "",
    )


def _chosen_settings(file: Path) -> str:
    """Return the settings that a row's search chose; empty if there is no result yet."""
    scored = [result for result in read_grid(file) if result["mean"] is not None] if file.is_file() else []
    return " ".join(best_result(scored)["settings"]) if scored else ""


def conclude_leaderboard(study: Study) -> tuple[list[Figure], TextTable, Path]:
    """Write ``leaderboard.json`` and ``report.html``.

    Returns:
        The published figure and perfed's of each row, as far as it has been run; the same as a table; the report.
    """
    leaderboard = leaderboard_of(study)
    board = leaderboard.board
    figures = [_build_figure(study.path, leaderboard, row, board.metric) for row in board.rows]
    table = board_table(figures, board.title, board.metric, board.best_over_test)
    content = to_json_values([asdict(figure) for figure in figures])
    write_atomic(study.path / "leaderboard.json", json.dumps(content, indent=2) + "\n")
    return figures, table, write_board(study.path / "report.html", table, figures, board.source)
