"""What ``perfed leaderboard`` does, and ``resume`` with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from perfed.cli.console import alone_on_stdout, print_json, say, say_where
from perfed.cli.options import Shown, Training
from perfed.cli.progress import Work, shown
from perfed.cli.table import print_table
from perfed.cli.training import default_out, device_of, executor, resumable, shared_settings
from perfed.errors import PerfedError
from perfed.experiment.factory import Key, RunFactory
from perfed.experiment.jobs import Execute, Outcomes
from perfed.experiment.published import Leaderboard
from perfed.report.board import board_notes
from perfed.run.directory import plain


def leaderboard_command(
    name: str, settings: list[str] | None, rows: list[str] | None, seeds: int | None, how: Training, show: Shown
) -> None:
    """Run a published leaderboard's protocol, or what is left of it."""
    given = shared_settings(how.engine, settings)
    made = Leaderboard.create(how.out or default_out(name), name, seeds, given, rows or ())
    with resumable(made.path, how.data_dir, ray=how.ray), alone_on_stdout(show.as_json):
        say_where("results", made.path)
        play(made, how, show)


def play(made: Leaderboard, how: Training, show: Shown) -> None:
    """Do the rows that are not done, print the table, and say what to mind."""
    failed = made.execute(how.data_dir, device_of(how.device), lambda what, runs: _shown(what, runs, how))
    figures, table, report = made.conclude()
    if show.as_json:
        rows = plain([asdict(figure) for figure in figures])
        print_json({"directory": str(made.path), "report": str(report), "rows": rows})
    else:
        print_table(table)
        for line in board_notes(figures):
            say(line, style="dim")
        say(f"theirs: {made.board.source}", style="dim")
        say_where("report", report)
    if failed:
        raise PerfedError(f"{len(failed)} runs failed; {failed[0]}")


def _shown(what: str, runs: int, how: Training) -> Execute:
    """What executes the runs of a row, and shows how far they are."""

    def execute(factory: RunFactory, keys: Sequence[Key]) -> Outcomes:
        say(f"{what}: {len(keys)} runs", style="dim")
        with shown(Work(max(runs, len(keys)))) as work:
            work.already(runs - len(keys))
            yield from executor(how, work)(factory, keys)

    return execute
