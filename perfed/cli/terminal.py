"""What the commands print: live progress, the end of a run, tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from perfed.cli.console import console
from perfed.engine.metrics import metric_of
from perfed.engine.metrics import shown as with_unit
from perfed.experiment.compare import Conclusion
from perfed.experiment.search import Choice
from perfed.report import TextTable, reported_by
from perfed.run.targets import described

SITES = 12
"""Sites that are printed one by one at most; comparison.json has them all."""


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
            bar.update(task, completed=number, total=total, accuracy=last["accuracy"])

        yield update


def print_summary(summary: dict[str, Any]) -> None:
    """A run's notes, metrics, metrics by domain and times to the target accuracies (``summary.json``)."""
    for note in summary["notes"]:
        console.print(f"  {note}", style="dim", markup=False, highlight=False)
    if summary.get("evaluation"):
        console.print(f"  {reported_by(summary['evaluation'])}", style="dim", markup=False, highlight=False)
    for name, values in summary["metrics"].items():
        metric = metric_of(name)
        over_clients = {"mean": values["mean"], "std": values["std"], "worst client": values[metric.worst]}
        over_clients |= {"10 % worst": values.get(metric.tenth_worst), "best client": values[metric.best]}
        text = _values(name, "", over_clients) + (f" ({values['n']} clients have it)" if "n" in values else "")
        console.print(f"{summary['method']}: {text}", markup=False, highlight=False)
    for name, values in summary.get("domains", {}).items():
        marks = dict.fromkeys(summary.get("untrained_domains", []), " (nobody trains on it)")
        console.print(
            f"{summary['method']}: {_values(name, ' by domain', values, marks)}", markup=False, highlight=False
        )
    if "domain_samples" in summary:
        counts = ", ".join(f"{name} {count}" for name, count in summary["domain_samples"].items())
        console.print(f"  samples by domain: {counts}", style="dim", markup=False, highlight=False)
    for line in described(summary.get("targets", [])):
        console.print(f"{summary['method']}: {line}", markup=False, highlight=False)
    if "oracle_accuracy" in summary:
        console.print(f"Bayes oracle (known centres): {100 * summary['oracle_accuracy']:.1f} %", highlight=False)


def _values(name: str, of: str, values: Mapping[str, float | None], marks: Mapping[str, str] | None = None) -> str:
    """Values of the metric ``name`` in its unit, with what ``marks`` say; those that are not known are dashes."""
    metric, marks = metric_of(name), marks or {}
    cells = (
        f"{key} {'-' if value is None else f'{metric.scale * value:.4g}'}{marks.get(key, '')}"
        for key, value in values.items()
    )
    return f"{name}{metric.unit and ' ' + metric.unit}{of}: {', '.join(cells)}"


def print_choice(chosen: Mapping[str, Choice], runs: int) -> None:
    """What a search of ``runs`` runs chose, by method."""
    shown = Table(title=f"chosen on validation data ({runs} runs)")
    for title in ("method", "settings", "validation"):
        shown.add_column(title)
    for method, choice in chosen.items():
        shown.add_row(method, " ".join(choice.settings), with_unit(choice.metric, choice.mean))
    console.print(shown)
    for method, choice in chosen.items():
        for note in choice.notes:
            console.print(f"{method}: {note}", soft_wrap=True, markup=False, highlight=False)


def print_conclusion(found: Conclusion) -> None:
    """A comparison's tables, verdict and report; the sites one by one where they are few."""
    for table in found.tables:
        console.print(rich_table(table))
    if found.verdict is not None:
        if len(found.verdict.sites) <= SITES:
            console.print(rich_table(found.verdict.site_table))
        for sentence in found.verdict.sentences:
            console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    if found.oracle is not None:
        console.print(f"Bayes oracle (known centres), mean over seeds: {100 * found.oracle:.1f} %", highlight=False)
    console.print(f"report: {found.report}", soft_wrap=True, highlight=False)


def rich_table(table: TextTable) -> Table:
    """A table of the report for the terminal."""
    shown = Table(title=Text(table.title), caption=table.note or None)
    for index, title in enumerate(table.header):
        shown.add_column(Text(title), justify="left" if index == 0 else "right", overflow="fold", no_wrap=index == 0)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
