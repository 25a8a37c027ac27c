"""The HTML report with all sections, and its figures as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfed.methods.titles import display_name
from perfed.report.page.blend import blend_figures, blend_section
from perfed.report.page.curves import (
    calibration_figures,
    calibration_section,
    curve_figures,
    curves_section,
    epoch_figures,
    epochs_section,
)
from perfed.report.page.federation import domain_figures, domains_section, federation_figures, federation_section
from perfed.report.page.gains import gain_figures, gains_section
from perfed.report.page.html import build_note
from perfed.report.page.leaderboard import leaderboard_section
from perfed.report.page.page_data import ReportData
from perfed.report.page.paper import make_standalone
from perfed.report.page.pictures import combination_section, embedding_section, picture_figures
from perfed.report.page.reproduce import reproduce_section
from perfed.report.page.speeds import speed_figures, speeds_section
from perfed.report.page.style import write_page
from perfed.report.page.verdict import verdict_section
from perfed.report.run_results import RunResults, list_methods
from perfed.report.text import join_names
from perfed.report.verdict import Verdict


def write_report(
    runs: Sequence[RunResults],
    out: Path,
    *,
    title: str,
    command: str = "",
    left_out: Sequence[str] = (),
    verdict: Verdict | None = None,
) -> Path:
    """Write the report of the runs (several methods and seeds of one data set) to ``out``, and return the path.

    Unfinished runs appear only in the learning curves; a sentence at the top names them. The file is written
    atomically.

    Args:
        runs: the runs; at least one.
        out: the path of the file.
        title: the title of the page.
        command: the command that created the runs.
        left_out: lines on what is missing in the page (:func:`perfed.report.load_runs.gather_runs`).
        verdict: the verdict on the runs; computed if it is not passed.
    """
    report = ReportData.from_runs(runs, verdict)
    sections = [
        verdict_section(report),
        leaderboard_section(report),
        gains_section(report),
        blend_section(report),
        calibration_section(report),
        curves_section(report),
        epochs_section(report),
        speeds_section(report),
        domains_section(report),
        embedding_section(report),
        combination_section(report),
        federation_section(report),
        reproduce_section(report, command),
    ]
    return write_page(out, title, summarize_runs(runs), [_describe_omissions(report, left_out), *sections])


def figures(runs: Sequence[RunResults]) -> dict[str, str]:
    """Return every figure of the report as standalone SVG text with light colours, by the stem of its file name."""
    report = ReportData.from_runs(runs)
    draw_functions = (
        gain_figures,
        blend_figures,
        calibration_figures,
        curve_figures,
        epoch_figures,
        speed_figures,
        domain_figures,
        picture_figures,
        federation_figures,
    )
    return {name: make_standalone(figure) for draw in draw_functions for name, figure in draw(report).items()}


def _describe_omissions(report: ReportData, lines: Sequence[str]) -> str:
    """Return notes on unfinished runs, runs without the main metric, and runs of a seed that had different data."""
    unfinished = [f"{display_name(run.method)} with seed {run.seed}" for run in report.runs if not run.summary]
    lacking = [
        display_name(run.method) for run in report.runs if run.summary and report.metric not in run.summary.spreads
    ]
    notes = list(lines)
    if unfinished:
        notes.append(f"Not finished, so only in the learning curves: {', '.join(unfinished)}.")
    if report.metric and lacking:
        notes.append(f"Not compared, because {report.metric} is missing: {', '.join(dict.fromkeys(lacking))}.")
    marks: dict[int, dict[str, str]] = {}
    for run in report.runs:
        if run.data is not None:
            marks.setdefault(run.seed, {}).setdefault(run.data, display_name(run.method))
    for seed, methods in marks.items():
        if len(methods) > 1:
            notes.append(
                f"With seed {seed} {join_names(list(methods.values()))} had different data: do not compare them."
            )
    return "".join(map(build_note, notes))


def summarize_runs(runs: Sequence[RunResults]) -> str:
    """Return a line with the data set and the numbers of methods, seeds, clients and rounds."""
    methods, seeds = list_methods(runs), sorted({run.seed for run in runs})
    clients = sorted({len(run.clients.ids) for run in runs if run.clients})
    trained = [run for run in runs if run.summary is None or run.summary.rounds]  # the others have no rounds
    finished_rounds = sorted({run.rounds[-1].round if run.rounds else 0 for run in trained})
    return " · ".join(
        [
            *[run.summary.dataset for run in runs if run.summary][:1],
            _format_count(len(methods), "method"),
            f"{_format_count(len(seeds), 'seed')} ({', '.join(map(str, seeds))})",
            *([f"{_format_range(clients)} clients"] if clients else []),
            *([f"{_format_range(finished_rounds)} rounds"] if finished_rounds else []),
            *{
                f"{run.communication:g} s of communication per exchange, as set for this report"
                for run in runs
                if run.communication is not None
            },
        ]
    )


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _format_range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
