"""What ``perfed report`` does: the page, tables, and files for papers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perfed import report
from perfed.cli.console import reserve_stdout, say_where, say_whole
from perfed.cli.figures import write_figures
from perfed.cli.options import Files, Shown, default_out
from perfed.cli.terminal import print_conclusion, print_parts
from perfed.errors import PerfedError
from perfed.experiment.comparison import Conclusion
from perfed.experiment.study import Study, read_comparison
from perfed.methods.titles import match_display_name
from perfed.report import change_communication, verdict, write_report
from perfed.report.campaign import Part, campaign_csv, grids
from perfed.report.comparison import compare_with_reference
from perfed.report.load_runs import GatheredRuns, gather_runs
from perfed.report.page.campaign import sweep_figures
from perfed.report.papers import csv_text, latex, latex_file
from perfed.report.run_results import RunResults, list_methods, main_metric
from perfed.run.directory import read_marker
from perfed.system import write_atomic


def report_all(
    directories: Sequence[Path], reference: str | None, communication: float | None, files: Files, show: Shown
) -> None:
    """Write the report of one or several directories again, print their tables and verdict, and write files."""
    for directory in (one for one in directories if read_marker(one)[0] == "campaign"):
        if len(directories) > 1 or reference is not None or communication is not None:
            raise PerfedError(
                f"{directory}: is a campaign or a sweep, reported alone, without --reference and --communication"
            )
        return _report_campaign(directory, files, show)
    files.check()
    with reserve_stdout(show.as_json):
        places, empty = _find_run_directories(directories)
        found = gather_runs(places)
        found = replace(found, left_out=[*empty, *found.left_out])
        runs = found.runs if communication is None else [change_communication(run, communication) for run in found.runs]
        reference = _choose_reference(reference, runs)
        concluded = _write_conclusion(directories, replace(found, runs=runs), reference, communication, files.out)
        for note in found.notes:
            say_whole(note, style="yellow")
        written = _write(files, directories, concluded, show.all_metrics)
        print_conclusion(concluded, show, notes=found.notes, files=written)


def _report_campaign(directory: Path, files: Files, show: Shown) -> None:
    """Write a campaign's reports again, print its tables, and write files."""
    files.check()
    with reserve_stdout(show.as_json):
        study = Study.read(directory)
        study.check()
        page, parts = study.conclude()
        if not parts:
            raise PerfedError(f"{directory}: no run has started yet")
        if files.out is not None:
            write_atomic(files.out, page.read_text(encoding="utf-8"))
        written = write_files(
            files,
            lambda: _campaign_latex(study, parts),
            lambda: campaign_csv(parts, study.key),
            lambda: sweep_figures(parts, study.key),
        )
        print_parts(study, page, parts, show, files=written)


def _campaign_latex(study: Study, parts: Sequence[Part]) -> str:
    name = study.path.resolve().name
    if study.key:
        name = str(next(iter(study.comparisons.values())).table.get("name", name))
    comments = [f"table: {command_line()}", *(f"runs: {one.origin}" for one in study.comparisons.values())]
    return latex_file((grid.latex(name) for grid in grids(parts, study.key)), comments)


def _find_run_directories(directories: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the directories of runs in order, and a message for each given directory without a run."""
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
    """Return the directory of a run, or those of a comparison's runs and of other runs in its directory."""
    if (directory / "config.toml").is_file():
        return [directory]
    found = sorted(file.parent for file in directory.glob("*/seed-*/config.toml"))
    if not _is_comparison(directory):
        return found or [directory]
    known = read_comparison(directory).started()
    return [*known, *(place for place in found if place not in known)]


def _is_comparison(directory: Path) -> bool:
    return read_marker(directory)[0] == "comparison"


def _choose_reference(given: str | None, runs: Sequence[RunResults]) -> str | None:
    """Return the name of the method given with ``--reference``."""
    done = list_methods([run for run in runs if run.summary])
    if given is None or (found := match_display_name(given, done)):
        return given and found
    raise PerfedError(f"--reference {given}: there is no finished run of it; there are: {', '.join(done) or 'none'}")


def _write_conclusion(
    directories: Sequence[Path],
    given: GatheredRuns,
    reference: str | None,
    communication: float | None,
    out: Path | None,
) -> Conclusion:
    """Write the report and return the conclusion; for a single comparison, also write ``comparison.json``."""
    (first, *others), runs = directories, given.runs
    if out is None and communication is None and not others and _is_comparison(first):
        concluded = read_comparison(first).conclude(given)
    else:
        if out is None and others:
            out = default_out("report").with_suffix(".html")
        name = "report.html" if communication is None else f"report-communication-{communication:g}.html"
        title = ", ".join(directory.resolve().name for directory in directories)
        found = verdict(runs)
        report = write_report(runs, out or first / name, title=title, left_out=given.left_out, verdict=found)
        concluded = Conclusion(runs, found, report)
    if reference is None:
        return concluded
    against = verdict(runs, reference)
    return replace(concluded, verdict=None if against is None else against.with_warnings(concluded.failed))


def _write(files: Files, directories: Sequence[Path], found: Conclusion, all_metrics: bool) -> list[Path]:
    """Write the files for papers and return their paths; ``all_metrics`` only concerns the LaTeX table."""
    name = next((str(run.config["name"]) for run in found.runs if "name" in run.config), "")
    name = name or next((run.summary.dataset for run in found.runs if run.summary), "")
    table, metric = compare_with_reference(found.runs, found.verdict), main_metric(found.runs)
    rows = table if all_metrics else [row for row in table if row.metric == metric]
    return write_files(
        files,
        lambda: latex(rows, name, _list_commands(directories, found.runs)),
        lambda: csv_text(table),
        lambda: report.figures(found.runs),
    )


def _list_commands(directories: Sequence[Path], runs: Sequence[RunResults]) -> list[str]:
    """Return lines with the commands that created the table and the runs."""
    comparisons = [one for one in map(read_comparison, filter(_is_comparison, directories)) if one.begun]
    known = {place for one in comparisons for place in one.started()}
    others = [f"perfed run {run.directory / 'config.toml'}" for run in runs if run.directory not in known]
    return [f"table: {command_line()}", *(f"runs: {told}" for told in [*(one.origin for one in comparisons), *others])]


# Files for papers ------------------------------------------------------------------------------------------


def command_line() -> str:
    """Return the command as it was given."""
    return shlex.join(["perfed", *sys.argv[1:]])


def write_files(
    files: Files, latex: Callable[[], str], csv: Callable[[], str], figures: Callable[[], Mapping[str, str]]
) -> list[Path]:
    """Make and write what was asked for, except for the page; return the paths, and say them.

    ``figures`` are SVG by the stem of their names (:func:`perfed.cli.figures.write_figures`).
    """
    written = []
    for path, text in ((files.latex, latex), (files.csv, csv)):
        if path is not None:
            write_atomic(path, text())
            written.append(path)
    for path in written:
        say_where("written", path)
    return written + (write_figures(figures(), files.figures, command_line()) if files.figures is not None else [])
