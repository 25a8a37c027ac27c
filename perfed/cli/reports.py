"""The work of ``perfed report``: the page, printed tables, and files for papers."""

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
    for directory in (path for path in directories if read_marker(path)[0] == "campaign"):
        if len(directories) > 1 or reference is not None or communication is not None:
            raise PerfedError(
                f"{directory}: is a campaign or a sweep, reported alone, without --reference and --communication"
            )
        return _report_campaign(directory, files, show)
    files.check()
    with reserve_stdout(show.as_json):
        run_directories, empty = _find_run_directories(directories)
        gathered = gather_runs(run_directories)
        gathered = replace(gathered, left_out=[*empty, *gathered.left_out])
        runs = (
            gathered.runs
            if communication is None
            else [change_communication(run, communication) for run in gathered.runs]
        )
        reference = _choose_reference(reference, runs)
        conclusion = _write_conclusion(directories, replace(gathered, runs=runs), reference, communication, files.out)
        for note in gathered.notes:
            say_whole(note, style="yellow")
        written = _write_paper_files(files, directories, conclusion, show.all_metrics)
        print_conclusion(conclusion, show, notes=gathered.notes, files=written)


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
            lambda: _format_campaign_latex(study, parts),
            lambda: campaign_csv(parts, study.key),
            lambda: sweep_figures(parts, study.key),
        )
        print_parts(study, page, parts, show, files=written)


def _format_campaign_latex(study: Study, parts: Sequence[Part]) -> str:
    name = study.path.resolve().name
    if study.key:
        name = str(next(iter(study.comparisons.values())).table.get("name", name))
    comments = [
        f"table: {command_line()}",
        *(f"runs: {comparison.origin}" for comparison in study.comparisons.values()),
    ]
    return latex_file((grid.latex(name) for grid in grids(parts, study.key)), comments)


def _find_run_directories(directories: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the directories of runs in order, and a message for each given directory without a run."""
    run_directories: list[Path] = []
    problems: list[str] = []
    for directory in directories:
        try:
            run_directories += _list_run_directories(directory)
        except PerfedError as error:
            problems.append(str(error))
    if not run_directories:
        raise PerfedError(problems[0])
    return run_directories, problems


def _list_run_directories(directory: Path) -> list[Path]:
    """Return the directory of a run, or those of a comparison's runs and of other runs in its directory."""
    if (directory / "config.toml").is_file():
        return [directory]
    run_directories = sorted(file.parent for file in directory.glob("*/seed-*/config.toml"))
    if not _is_comparison(directory):
        return run_directories or [directory]
    started = read_comparison(directory).started()
    return [*started, *(path for path in run_directories if path not in started)]


def _is_comparison(directory: Path) -> bool:
    return read_marker(directory)[0] == "comparison"


def _choose_reference(name: str | None, runs: Sequence[RunResults]) -> str | None:
    """Return the method that ``--reference`` names; ``None`` without this option."""
    finished = list_methods([run for run in runs if run.summary])
    if name is None or (method := match_display_name(name, finished)):
        return name and method
    raise PerfedError(f"--reference {name}: there is no finished run of it; there are: {', '.join(finished) or 'none'}")


def _write_conclusion(
    directories: Sequence[Path],
    gathered: GatheredRuns,
    reference: str | None,
    communication: float | None,
    out: Path | None,
) -> Conclusion:
    """Write the report and return the conclusion; for a single comparison, also write ``comparison.json``."""
    (first, *further), runs = directories, gathered.runs
    if out is None and communication is None and not further and _is_comparison(first):
        conclusion = read_comparison(first).conclude(gathered)
    else:
        if out is None and further:
            out = default_out("report").with_suffix(".html")
        name = "report.html" if communication is None else f"report-communication-{communication:g}.html"
        title = ", ".join(directory.resolve().name for directory in directories)
        default_verdict = verdict(runs)
        report = write_report(
            runs, out or first / name, title=title, left_out=gathered.left_out, verdict=default_verdict
        )
        conclusion = Conclusion(runs, default_verdict, report)
    if reference is None:
        return conclusion
    chosen_verdict = verdict(runs, reference)
    return replace(
        conclusion, verdict=None if chosen_verdict is None else chosen_verdict.with_warnings(conclusion.failed)
    )


def _write_paper_files(
    files: Files, directories: Sequence[Path], conclusion: Conclusion, all_metrics: bool
) -> list[Path]:
    """Write the files for papers and return their paths; ``all_metrics`` only concerns the LaTeX table."""
    name = next((str(run.config["name"]) for run in conclusion.runs if "name" in run.config), "")
    name = name or next((run.summary.dataset for run in conclusion.runs if run.summary), "")
    table, metric = compare_with_reference(conclusion.runs, conclusion.verdict), main_metric(conclusion.runs)
    rows = table if all_metrics else [row for row in table if row.metric == metric]
    return write_files(
        files,
        lambda: latex(rows, name, _list_commands(directories, conclusion.runs)),
        lambda: csv_text(table),
        lambda: report.figures(conclusion.runs),
    )


def _list_commands(directories: Sequence[Path], runs: Sequence[RunResults]) -> list[str]:
    """Return lines with the commands that created the table and the runs."""
    comparisons = [study for study in map(read_comparison, filter(_is_comparison, directories)) if study.begun]
    started = {path for study in comparisons for path in study.started()}
    other_commands = [f"perfed run {run.directory / 'config.toml'}" for run in runs if run.directory not in started]
    return [
        f"table: {command_line()}",
        *(f"runs: {command}" for command in [*(study.origin for study in comparisons), *other_commands]),
    ]


# Files for papers ------------------------------------------------------------------------------------------


def command_line() -> str:
    """Return the command line of this process."""
    return shlex.join(["perfed", *sys.argv[1:]])


def write_files(
    files: Files, latex: Callable[[], str], csv: Callable[[], str], figures: Callable[[], Mapping[str, str]]
) -> list[Path]:
    """Create the requested files except for the page, write them, print their paths, and return these.

    ``figures`` returns SVGs by file name without suffix (:func:`perfed.cli.figures.write_figures`).
    """
    written = []
    for path, text in ((files.latex, latex), (files.csv, csv)):
        if path is not None:
            write_atomic(path, text())
            written.append(path)
    for path in written:
        say_where("written", path)
    return written + (write_figures(figures(), files.figures, command_line()) if files.figures is not None else [])
