"""``report.html``: all sections of runs in one file, and the figures as files of their own."""

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
from perfed.report.page.html import note
from perfed.report.page.leaderboard import leaderboard_section
from perfed.report.page.page_data import Study
from perfed.report.page.paper import standalone
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
    found: Verdict | None = None,
) -> Path:
    """Write the report of the runs (several methods and seeds of one data set) to ``out`` and return it.

    What a run that is not finished lacks is left out, with a sentence saying so. The file appears whole or not at all.

    Args:
        runs: at least one.
        out: the file.
        title: of the page.
        command: that made the runs.
        left_out: lines on what is not in the page (:func:`perfed.report.load_runs.gather_runs`).
        found: the verdict on the runs, if it is known already.
    """
    study = Study.of(runs, found)
    sections = [
        verdict_section(study),
        leaderboard_section(study),
        gains_section(study),
        blend_section(study),
        calibration_section(study),
        curves_section(study),
        epochs_section(study),
        speeds_section(study),
        domains_section(study),
        embedding_section(study),
        combination_section(study),
        federation_section(study),
        reproduce_section(study, command),
    ]
    return write_page(out, title, facts(runs), [_left_out(study, left_out), *sections])


def figures(runs: Sequence[RunResults]) -> dict[str, str]:
    """Every figure of the report as an SVG file of its own with light colours, by the stem of a file's name."""
    study = Study.of(runs)
    of = (
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
    return {name: standalone(drawn) for drawing in of for name, drawn in drawing(study).items()}


def _left_out(study: Study, lines: Sequence[str]) -> str:
    """A line for everything that is missing, or that does not belong together."""
    unfinished = [f"{display_name(run.method)} with seed {run.seed}" for run in study.runs if not run.summary]
    other = [display_name(run.method) for run in study.runs if run.summary and study.metric not in run.summary.spreads]
    told = list(lines)
    if unfinished:
        told.append(f"Not finished, so in the learning curves alone: {', '.join(unfinished)}.")
    if study.metric and other:
        told.append(f"Not compared, for lack of {study.metric}: {', '.join(dict.fromkeys(other))}.")
    marks: dict[int, dict[str, str]] = {}
    for run in study.runs:
        if run.data is not None:
            marks.setdefault(run.seed, {}).setdefault(run.data, display_name(run.method))
    for seed, of in marks.items():
        if len(of) > 1:
            told.append(f"With seed {seed} {join_names(list(of.values()))} had different data: do not compare them.")
    return "".join(map(note, told))


def facts(runs: Sequence[RunResults]) -> str:
    """What the runs are of, in a line."""
    methods, seeds = list_methods(runs), sorted({run.seed for run in runs})
    clients = sorted({len(run.clients.ids) for run in runs if run.clients})
    trained = [run for run in runs if run.summary is None or run.summary.rounds]  # the others have no rounds
    done = sorted({run.rounds[-1].round if run.rounds else 0 for run in trained})
    return " · ".join(
        [
            *[run.summary.dataset for run in runs if run.summary][:1],
            _count(len(methods), "method"),
            f"{_count(len(seeds), 'seed')} ({', '.join(map(str, seeds))})",
            *([f"{_range(clients)} clients"] if clients else []),
            *([f"{_range(done)} rounds"] if done else []),
            *{
                f"{run.communication:g} s of communication per exchange, as set for this report"
                for run in runs
                if run.communication is not None
            },
        ]
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
