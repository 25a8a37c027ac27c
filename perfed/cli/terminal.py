"""What the commands print at their end: a run, a search's choices, a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from perfed.cli.console import say, say_where
from perfed.cli.table import print_table
from perfed.engine.metrics import metric_of
from perfed.engine.metrics import shown as with_unit
from perfed.experiment.comparison import Conclusion
from perfed.experiment.search import Choice
from perfed.report import TextTable, Verdict, all_tables, comparison_rows, first_tables, reported_by
from perfed.report.comparison import judged_table
from perfed.report.runs import Run
from perfed.report.text import UNKNOWN, axis_title
from perfed.run.callbacks.targets import described
from perfed.run.directory import plain
from perfed.training.plan import PlanSettings

SITES = 12
"""Sites that are printed one by one at most; comparison.json has them all."""

_ALONE = ": one client at a time ("  # how a plan says what cannot be stacked


def print_summary(summary: dict[str, Any], verbose: bool) -> None:
    """A run's notes, metrics, metrics by domain and times to the target accuracies (``summary.json``).

    ``verbose``: the execution plan too.
    """
    for note in summary["notes"]:
        if verbose or not _of_plan(note, summary.get("plan") or {}):
            say(f"  {note}", style="dim")
    for table in _summary_tables(summary):
        print_table(table)
    for line in described(summary.get("targets", [])):
        say(f"{summary['method']}: {line}")
    if "oracle_accuracy" in summary:
        _say_oracle(summary["oracle_accuracy"], "")


def _of_plan(note: str, plan: Mapping[str, Any]) -> bool:
    try:
        said = PlanSettings.model_validate(plan).build().describe()
    except ValidationError:  # of another version
        said = []
    return note in said or _ALONE in note


def _say_oracle(accuracy: float, over: str) -> None:
    say(f"Bayes oracle (known centres){over}: {100 * accuracy:.1f} %")


def _summary_tables(summary: dict[str, Any]) -> list[TextTable]:
    """Metrics over the clients, and those of each domain."""
    by = f": {reported_by(summary['evaluation'])}" if summary.get("evaluation") else ""
    header = ["", "mean", "std over clients", "worst client", "10 % worst", "best client"]
    rows, notes = [], []
    for name, values in summary["metrics"].items():
        known = metric_of(name)
        found = [values[key] for key in ("mean", "std", known.worst)]
        found += [values.get(known.tenth_worst), values[known.best]]
        rows.append([axis_title(name), *(_number(name, value) for value in found)])
        notes += [f"{values['n']} clients have {name}."] if "n" in values else []
    tables = [TextTable(f"{summary['method']}{by}", header, rows, " ".join(notes))]
    domains = summary.get("domains", {})
    if domains:
        names = list(dict.fromkeys(name for values in domains.values() for name in values))
        sizes, untrained = summary.get("domain_samples", {}), summary.get("untrained_domains", [])
        heads = [f"{name}{' *' * (name in untrained)}{_samples(sizes.get(name))}" for name in names]
        rows = [[axis_title(m), *(_number(m, values.get(name)) for name in names)] for m, values in domains.items()]
        note = "* Nobody trains on this domain." if untrained else ""
        tables.append(TextTable(f"{summary['method']} by domain", ["", *heads], rows, note))
    return tables


def _samples(count: int | None) -> str:
    return "" if count is None else f" (n = {count})"


def _number(name: str, value: float | None) -> str:
    return UNKNOWN if value is None else f"{metric_of(name).scale * value:.4g}"


def print_choice(chosen: Mapping[str, Choice], runs: int) -> None:
    """What a search of ``runs`` runs chose, by method."""
    rows = [[m, with_unit(choice.metric, choice.mean), " ".join(choice.settings)] for m, choice in chosen.items()]
    print_table(TextTable(f"chosen on validation data ({runs} runs)", ["Method", "Validation", "Settings"], rows))
    for method, choice in chosen.items():
        for note in choice.notes:
            say(f"{method}: {note}")


def print_conclusion(found: Conclusion, all_metrics: bool) -> None:
    """A comparison's tables, where its report is, and at the end the verdict."""
    print_tables(found.runs, found.verdict, all_metrics)
    if found.oracle is not None:
        _say_oracle(found.oracle, ", mean over seeds")
    say_where("report", found.report)
    for sentence in found.sentences:
        say(sentence)


def conclusion_json(found: Conclusion, **more: Any) -> dict[str, Any]:
    """What ``--json`` prints of a comparison."""
    content = {
        "runs": comparison_rows(found.runs),
        "table": [asdict(row) for row in judged_table(found.runs, found.verdict)],
        "verdict": None if found.verdict is None else found.verdict.to_dict(),
        "oracle_accuracy": found.oracle,
        "report": str(found.report),
    }
    plain_: dict[str, Any] = plain({**content, **more})
    return plain_


def print_tables(runs: Sequence[Run], found: Verdict | None, all_metrics: bool) -> None:
    """The first tables or all; the sites one by one where they are few."""
    for table in (all_tables if all_metrics else first_tables)(runs, found):
        print_table(table)
    if found is not None and len(found.sites) <= SITES:
        print_table(found.site_table)
