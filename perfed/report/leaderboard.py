"""The leaderboard: every method under one metric against one reference, as numbers and as a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.against import MethodVerdict, best_reference, compare_methods, sent
from perfed.report.comparison import ComparisonRow, compare_table, comparison_rows
from perfed.report.paired import ClientTable, holm, paired_p
from perfed.report.run_results import RunResults, main_metric
from perfed.report.text import SAME, UNKNOWN, TextTable, axis_title, metric_text, short_number


@dataclass(frozen=True)
class Standing:
    """A method under a metric.

    Attributes:
        row: its mean, spread and worst clients, averaged over the seeds.
        megabytes: up and down in all rounds of a run; None where its rounds lack them.
        against: it compared with the reference over common clients and seeds; None for the reference itself.
        p: of a paired test over the clients (:func:`perfed.report.paired.paired_p`), by Holm's correction for all
            methods compared with the reference.
    """

    row: ComparisonRow
    megabytes: float | None
    against: MethodVerdict | None
    p: float | None


def standings(runs: Sequence[RunResults], reference: str | None = None, metric: str | None = None) -> list[Standing]:
    """The finished methods in the order of ``runs``; by default under the main metric and the verdict's reference."""
    metric = metric or main_metric(runs)
    if metric is None:
        return []
    rows = [row for row in compare_table(comparison_rows(runs)) if row.metric == metric]
    table, known = ClientTable.of(runs, metric), metric_of(metric)
    base = reference or best_reference(table, known)
    sizes = {row.method: sent(runs, row.method) for row in rows}
    others = [m for m in table.of_method if m != base and base in table.of_method]
    found = compare_methods(base, table, known, sizes) if base in table.of_method else {}
    p_values = holm({method: paired_p(table.gains(method, base, known)) for method in others if base})
    megabytes = {method: None if size is None else size / 1e6 for method, size in sizes.items()}
    return [Standing(row, megabytes[row.method], found.get(row.method), p_values.get(row.method)) for row in rows]


def leaderboard(runs: Sequence[RunResults], reference: str | None = None, metric: str | None = None) -> TextTable:
    """:func:`standings` as text, the best first."""
    metric = metric or main_metric(runs) or ""
    known = metric_of(metric)
    found = standings(runs, reference, metric)
    base = next((of.row.method for of in found if of.against is None), UNKNOWN)
    header = [
        "Method",
        "Seeds",
        f"{axis_title(metric)}, mean ± std over seeds",
        f"Better than {display_name(base)} by [95 % interval over clients and seeds]",
        "Worse / equal / better client-runs",
        "Worst client",
        "10 % worst",
        "Sent (MB)",
        "Wall time (s)",
    ]
    ordered = sorted(found, key=lambda of: -known.direction * of.row.mean)
    return TextTable(axis_title(metric), header, [cells(of) for of in ordered])


def cells(of: Standing) -> list[str]:
    """A row of :func:`leaderboard`."""
    row, metric = of.row, of.row.metric
    spread = "" if row.mean_std is None else f" ± {metric_text(metric, row.mean_std)}"
    counts = of.against and f"{of.against.worse} / {of.against.equal} / {of.against.better}"
    return [
        display_name(row.method),
        str(len(row.seeds)),
        metric_text(metric, row.mean) + spread,
        UNKNOWN if of.against is None or not of.against.runs else gain_text(of.against, metric),
        counts or UNKNOWN,
        metric_text(metric, row.worst),
        UNKNOWN if row.tenth_worst is None else metric_text(metric, row.tenth_worst),
        UNKNOWN if of.megabytes is None else f"{of.megabytes:.1f}",
        f"{row.wall_seconds:.1f}",
    ]


def gain_text(found: MethodVerdict, metric: str) -> str:
    """``+2.0 [+0.1, +3.9]``; without an interval the gain alone."""
    gain = found.gain
    mean = short_number(metric, gain.mean, "+")
    if gain.low is None or gain.high is None:
        return mean
    if gain.mean == gain.low == gain.high == 0:
        return SAME
    return f"{mean} [{short_number(metric, gain.low, '+')}, {short_number(metric, gain.high, '+')}]"
