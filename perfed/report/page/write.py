"""``report.html``: all sections of runs in one file, and the figures as files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfed.report.page.document import write_page
from perfed.report.page.leaderboard import leaderboard_section
from perfed.report.page.study import Study
from perfed.report.page.verdict import verdict_section
from perfed.report.runs import Run, methods_of


def write_report(runs: Sequence[Run], out: Path, *, title: str) -> Path:
    """Write the report of the runs (several methods and seeds of one data set) to ``out`` and return it.

    What a run that is not finished lacks is left out, with a sentence saying so. The file appears whole or not at all.
    """
    study = Study.of(runs)
    return write_page(out, title, facts(runs), [verdict_section(study), leaderboard_section(study)])


def facts(runs: Sequence[Run]) -> str:
    """What the runs are of, in a line."""
    methods, seeds = methods_of(runs), sorted({run.seed for run in runs})
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
