"""What the commands print: live progress, the end of a run, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from perfed.report import TextTable
from perfed.targets import described

console = Console(width=None if sys.stdout.isatty() else 150, emoji=False)


@contextmanager
def progress(label: str, rounds: int) -> Iterator[Any]:
    """Live round, accuracy and time left on a terminal; nothing elsewhere."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=rounds, accuracy="")
        last = {"accuracy": ""}

        def update(number: int, total: int, accuracy: float | None) -> None:
            if accuracy is not None:
                last["accuracy"] = f"accuracy {100 * accuracy:.1f} %"
            bar.update(task, completed=number, accuracy=last["accuracy"])

        yield update


def print_summary(summary: dict[str, Any]) -> None:
    """A run's notes, metrics, metrics by domain and times to the target accuracies (``summary.json``)."""
    for note in summary["notes"]:
        console.print(f"  {note}", style="dim", markup=False, highlight=False)
    for name, values in summary["metrics"].items():
        scale, unit = (100, " %") if name.startswith("accuracy") else (1, "")
        cells = ", ".join(f"{key} {'-' if value is None else f'{scale * value:.4g}'}" for key, value in values.items())
        console.print(f"{summary['method']}: {name}{unit}: {cells}", markup=False, highlight=False)
    for name, values in summary.get("domains", {}).items():
        scale, unit = (100, " %") if name == "accuracy" else (1, "")
        marks = dict.fromkeys(summary.get("untrained_domains", []), " (nobody trains on it)")
        of_each = ", ".join(f"{d} {scale * value:.4g}{marks.get(d, '')}" for d, value in values.items())
        console.print(f"{summary['method']}: {name}{unit} by domain: {of_each}", markup=False, highlight=False)
    for line in described(summary.get("targets", [])):
        console.print(f"{summary['method']}: {line}", markup=False, highlight=False)
    if "oracle_accuracy" in summary:
        console.print(f"Bayes oracle (known centres): {100 * summary['oracle_accuracy']:.1f} %", highlight=False)


def print_choice(chosen: Mapping[str, tuple[list[str], float]], runs: int) -> None:
    """What a search of ``runs`` runs chose: method -> assignments and validation score."""
    shown = Table(title=f"chosen on validation data ({runs} runs)")
    for title in ("method", "settings", "validation"):
        shown.add_column(title)
    for method, (assignments, score) in chosen.items():
        shown.add_row(method, " ".join(assignments) or "(defaults)", f"{score:.4f}")
    console.print(shown)


def rich_table(table: TextTable) -> Table:
    """A table of the report for the terminal."""
    shown = Table(title=Text(table.title), caption=table.note or None)
    for index, title in enumerate(table.header):
        shown.add_column(Text(title), justify="left" if index == 0 else "right", overflow="fold", no_wrap=index == 0)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
