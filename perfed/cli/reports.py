"""What ``perfed report`` does: the page anew, tables, and files for papers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perfed.cli.console import alone_on_stdout, print_json, say, say_where, say_whole
from perfed.cli.options import Shown
from perfed.cli.pictures import write_figures
from perfed.cli.terminal import conclusion_json, print_conclusion
from perfed.cli.training import default_out
from perfed.errors import PerfedError
from perfed.experiment.compare import Comparison, is_comparison
from perfed.experiment.conclusion import Conclusion
from perfed.machine import write_atomic
from perfed.report import verdict, with_communication, write_report
from perfed.report.comparison import judged_table
from perfed.report.gather import Gathered, gathered
from perfed.report.papers import csv_text, latex
from perfed.report.runs import Run, main_metric, methods_of


@dataclass(frozen=True)
class Files:
    """What ``perfed report`` writes beside what it always does."""

    out: Path | None = None
    latex: Path | None = None
    csv: Path | None = None
    figures: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be written, before anything is.

        Raises:
            PerfedError: a folder that is not there, or a folder in a file's place.
        """
        for option, path in (("--out", self.out), ("--latex", self.latex), ("--csv", self.csv)):
            if path is not None and path.is_dir():
                raise PerfedError(f"{option} {path}: is a folder; give the name of a file")
        named = (("--out", self.out), ("--latex", self.latex), ("--csv", self.csv), ("--figures", self.figures))
        for option, path in named:
            if path is not None and not path.parent.is_dir():
                raise PerfedError(f"{option} {path}: there is no folder {path.parent}")
        if self.figures is not None and self.figures.exists() and not self.figures.is_dir():
            raise PerfedError(f"--figures {self.figures}: is a file; give the name of a folder")


def report_command(
    directories: Sequence[Path], reference: str | None, communication: float | None, files: Files, show: Shown
) -> None:
    """Write the report of one or several directories anew, print their tables and verdict, and write files."""
    files.check()
    with alone_on_stdout(show.as_json):
        places, empty = _places(directories)
        found = gathered(places)
        found = replace(found, left_out=[*empty, *found.left_out])
        runs = found.runs if communication is None else [with_communication(run, communication) for run in found.runs]
        _check_reference(reference, runs)
        concluded = _concluded(directories, replace(found, runs=runs), reference, communication, files.out)
        for note in found.notes:
            say_whole(note, style="yellow")
        written = _write(files, concluded, show.all_metrics)
        if show.as_json:
            print_json(conclusion_json(concluded, notes=found.notes, files=[str(path) for path in written]))
            return
        for path in written:
            say_where("written", path)
        print_conclusion(concluded, show.all_metrics)


def _places(directories: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Directories of runs, in order; where a directory has none, why."""
    places: list[Path] = []
    problems: list[str] = []
    for directory in directories:
        try:
            places += _runs_in(directory)
        except PerfedError as error:
            problems.append(str(error))
    if not places:
        raise PerfedError(problems[0])
    return places, problems


def _runs_in(directory: Path) -> list[Path]:
    """The run itself, or a comparison's runs and those that were put beside them."""
    if (directory / "config.toml").is_file():
        return [directory]
    found = sorted(file.parent for file in directory.glob("*/seed-*/config.toml"))
    if not is_comparison(directory):
        return found or [directory]
    known = Comparison.read(directory).started()
    return [*known, *(place for place in found if place not in known)]


def _check_reference(reference: str | None, runs: Sequence[Run]) -> None:
    done = methods_of([run for run in runs if run.summary])
    if reference is not None and reference not in done:
        has = ", ".join(done) or "none"
        raise PerfedError(f"--reference {reference}: there is no finished run of it; there are: {has}")


def _concluded(
    directories: Sequence[Path], given: Gathered, reference: str | None, communication: float | None, out: Path | None
) -> Conclusion:
    """Write the page; of a comparison alone ``comparison.json`` too."""
    (first, *others), runs = directories, given.runs
    if out is None and communication is None and not others and is_comparison(first):
        concluded = Comparison.read(first).conclude(given)
    else:
        if out is None and others:
            out = default_out("report").with_suffix(".html")
        name = "report.html" if communication is None else f"report-communication-{communication:g}.html"
        title = ", ".join(directory.resolve().name for directory in directories)
        found = verdict(runs)
        report = write_report(runs, out or first / name, title=title, left_out=given.left_out, found=found)
        concluded = Conclusion(runs, found, report)
    if reference is None:
        return concluded
    against = verdict(runs, reference)
    return replace(concluded, verdict=None if against is None else against.warned(concluded.failed))


def _write(files: Files, found: Conclusion, all_metrics: bool) -> list[Path]:
    """The files for papers; their paths."""
    table, written = judged_table(found.runs, found.verdict), []
    command = shlex.join(["perfed", *sys.argv[1:]])
    metric = main_metric(found.runs)
    rows = table if all_metrics else [row for row in table if row.metric == metric]
    texts: tuple[tuple[Path | None, Callable[[], str]], ...] = (
        (files.latex, lambda: latex(rows, command)),
        (files.csv, lambda: csv_text(table)),
    )
    for path, text in texts:
        if path is not None:
            write_atomic(path, text())
            written.append(path)
    if files.figures is not None:
        made, problem = write_figures(found.runs, files.figures)
        written += made
        if problem:
            say(problem, style="yellow")
    return written
