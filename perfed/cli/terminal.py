"""The results that commands print, as text or JSON: of a run, a comparison, a campaign, a search or a leaderboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perfed.cli.console import print_json, say, say_where
from perfed.cli.options import Shown
from perfed.cli.table import print_table
from perfed.data.federation import Federation
from perfed.data.reading import to_json_values
from perfed.engine.metrics import describe_metric as with_unit
from perfed.engine.metrics import metric_of
from perfed.experiment.comparison import Conclusion
from perfed.experiment.leaderboard import leaderboard_of
from perfed.experiment.search import Choice
from perfed.experiment.study import Study
from perfed.methods.titles import display_name
from perfed.report import TextTable, all_tables, comparison_rows, describe_evaluation, first_tables
from perfed.report.board import Figure, board_notes
from perfed.report.campaign import Part, campaign_rows, grids
from perfed.report.comparison import compare_with_reference
from perfed.report.text import UNKNOWN, axis_title
from perfed.run.callbacks.targets import describe_targets
from perfed.training.plan import PlanSettings

SITES = 12
"""The largest number of sites that are printed one by one; comparison.json contains all."""

_NOT_STACKED = ": one client at a time ("  # part of the note of a plan about stages that cannot be stacked


def print_run(directory: Path, summary: dict[str, Any], report: Path, show: Shown) -> None:
    """Print the summary of a run and the path of its report."""
    if show.as_json:
        return print_json(to_json_values({"directory": directory, "summary": summary, "report": report}))
    print_summary(summary, show.verbose)
    say_where("report", report)


def say_outcome(label: str, summary: dict[str, Any], verbose: bool) -> None:
    """Print the result of one of several runs in one line; ``verbose``: its notes too."""
    metric_texts = [f"{name} {values['mean']:.4g}" for name, values in summary["metrics"].items()]
    text = f"{100 * summary['accuracy']['mean']:.1f} %" if "accuracy" in summary else ", ".join(metric_texts)
    say(f"{label}: {text} in {summary['wall_seconds']:.1f} s")
    for note in summary["notes"] if verbose else ():
        say(f"  {note}", style="dim")


def print_summary(summary: dict[str, Any], verbose: bool) -> None:
    """Print a run's notes, metrics, metrics by domain and times to the target accuracies (``summary.json``).

    ``verbose``: also print the execution plan.
    """
    for note in summary["notes"]:
        if verbose or not _describes_plan(note, summary.get("plan") or {}):
            say(f"  {note}", style="dim")
    for table in _build_summary_tables(summary):
        print_table(table)
    for line in describe_targets(summary.get("targets", [])):
        say(f"{display_name(summary['method'])}: {line}")
    if "oracle_accuracy" in summary:
        _say_oracle(summary["oracle_accuracy"], "")


def _describes_plan(note: str, plan: Mapping[str, Any]) -> bool:
    """Return whether a note of a run is part of the description of its execution plan."""
    try:
        plan_lines = PlanSettings.model_validate(plan).build().describe()
    except ValidationError:  # the plan was written by another version of perfed
        plan_lines = []
    return note in plan_lines or _NOT_STACKED in note


def _say_oracle(accuracy: float, over: str) -> None:
    say(f"Bayes oracle (known centres){over}: {100 * accuracy:.1f} %")


def _build_summary_tables(summary: dict[str, Any]) -> list[TextTable]:
    """Return a table of the metrics over the clients and, where there are domains, one of the metrics by domain."""
    by = f": {describe_evaluation(summary['evaluation'])}" if summary.get("evaluation") else ""
    header = ["", "mean", "std over clients", "worst client", "10 % worst", "best client"]
    rows, notes = [], []
    for name, values in summary["metrics"].items():
        metric = metric_of(name)
        numbers = [values[key] for key in ("mean", "std", metric.worst)]
        numbers += [values.get(metric.tenth_worst), values[metric.best]]
        rows.append([axis_title(name), *(_format_number(name, value) for value in numbers)])
        notes += [f"{values['n']} clients have {name}."] if "n" in values else []
    tables = [TextTable(f"{display_name(summary['method'])}{by}", header, rows, " ".join(notes))]
    domains = summary.get("domains", {})
    if domains:
        names = list(dict.fromkeys(name for values in domains.values() for name in values))
        sizes, untrained = summary.get("domain_samples", {}), summary.get("untrained_domains", [])
        heads = [f"{name}{' *' * (name in untrained)}{_format_samples(sizes.get(name))}" for name in names]
        rows = [
            [axis_title(m), *(_format_number(m, values.get(name)) for name in names)] for m, values in domains.items()
        ]
        note = "* Nobody trains on this domain." if untrained else ""
        tables.append(TextTable(f"{display_name(summary['method'])} by domain", ["", *heads], rows, note))
    return tables


def _format_samples(count: int | None) -> str:
    return "" if count is None else f" (n = {count})"


def _format_number(name: str, value: float | None) -> str:
    return UNKNOWN if value is None else f"{metric_of(name).scale * value:.4g}"


def print_choice(study: Study, choices: Mapping[str, Choice], show: Shown) -> None:
    """Print the settings that a search chose for each method, and the paths of its files."""
    if show.as_json:
        methods = {method: asdict(choice) for method, choice in choices.items()}
        return print_json(to_json_values({"directory": study.path, "runs": len(study.keys), "chosen": methods}))
    rows = [
        [display_name(m), with_unit(choice.metric, choice.mean), " ".join(choice.settings)]
        for m, choice in choices.items()
    ]
    print_table(
        TextTable(f"chosen on validation data ({len(study.keys)} runs)", ["Method", "Validation", "Settings"], rows)
    )
    for method, choice in choices.items():
        for note in choice.notes:
            say(f"{display_name(method)}: {note}")
    say_where("chosen settings", study.path / "chosen.toml")
    say_where("whole grid", study.path / "grid.json")


def print_conclusion(conclusion: Conclusion, show: Shown, **extra: Any) -> None:
    """Print a comparison's tables, the path of its report and the verdict; ``extra``: further entries of the JSON."""
    if show.as_json:
        return print_json(to_json_values({**_conclusion_to_dict(conclusion), **extra}))
    for table in (all_tables if show.all_metrics else first_tables)(conclusion.runs, conclusion.verdict):
        print_table(table)
    if conclusion.verdict is not None and len(conclusion.verdict.sites) <= SITES:
        print_table(conclusion.verdict.site_table)
    if conclusion.oracle is not None:
        _say_oracle(conclusion.oracle, ", mean over seeds")
    say_where("report", conclusion.report)
    for sentence in conclusion.sentences:
        say(sentence)


def _conclusion_to_dict(conclusion: Conclusion) -> dict[str, Any]:
    return {
        "runs": comparison_rows(conclusion.runs),
        "table": [asdict(row) for row in compare_with_reference(conclusion.runs, conclusion.verdict)],
        "verdict": None if conclusion.verdict is None else conclusion.verdict.to_dict(),
        "oracle_accuracy": conclusion.oracle,
        "report": conclusion.report,
    }


def print_parts(study: Study, page: Path, parts: Sequence[Part], show: Shown, **extra: Any) -> None:
    """Print the tables of a campaign or sweep, the first sentence on each comparison, and the path of the report."""
    if show.as_json:
        content = {"directory": study.path, "key": study.key, "table": campaign_rows(parts), "report": page}
        return print_json(to_json_values({**content, **extra}))
    for grid in grids(parts, study.key):
        print_table(grid.table)
    for part in parts:
        for sentence in part.sentences[:1]:
            say(f"{part.name}: {sentence}")
    say_where("report", page)


def print_board(study: Study, figures: Sequence[Figure], table: TextTable, report: Path, show: Shown) -> None:
    """Print a leaderboard's table and notes, and the path of its report."""
    if show.as_json:
        rows = [asdict(figure) for figure in figures]
        return print_json(to_json_values({"directory": study.path, "report": report, "rows": rows}))
    print_table(table)
    for line in (*board_notes(figures), f"theirs: {leaderboard_of(study).board.source}"):
        say(line, style="dim")
    say_where("report", report)


def print_federation(federation: Federation) -> None:
    """Print the data of each client in numbers, and warnings about them."""
    header, *rows = federation.facts.rows()
    print_table(TextTable("", header, rows))
    for sentence in federation.facts.sentences():
        say(sentence)
