"""The leaderboard: all methods by one metric, compared with one reference, as numbers and as a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.against import MethodVerdict, average_sent_bytes, best_reference, compare_methods
from perfed.report.comparison import ComparisonRow, compare_table, comparison_rows
from perfed.report.paired import ClientTable, holm, paired_p
from perfed.report.run_results import RunResults, main_metric
from perfed.report.text import SAME, UNKNOWN, TextTable, axis_title, format_metric, format_short


@dataclass(frozen=True)
class Standing:
    """The results of a method by one metric.

    Attributes:
        row: the mean, spread and worst clients, averaged over the seeds.
        megabytes: the megabytes sent up and down in all rounds of a run; ``None`` if its rounds lack them.
        against: the comparison with the reference over common clients and seeds; ``None`` for the reference.
        p: the p-value of a paired test over the clients (:func:`perfed.report.paired.paired_p`), with Holm's correction
            for the methods compared with the reference.
    """

    row: ComparisonRow
    megabytes: float | None
    against: MethodVerdict | None
    p: float | None


def standings(runs: Sequence[RunResults], reference: str | None = None, metric: str | None = None) -> list[Standing]:
    """Return the standings of the finished methods in the order of ``runs``.

    By default, the metric and the reference are those of the verdict.
    """
    metric = metric or main_metric(runs)
    if metric is None:
        return []
    rows = [row for row in compare_table(comparison_rows(runs)) if row.metric == metric]
    table, metric_spec = ClientTable.from_runs(runs, metric), metric_of(metric)
    base = reference or best_reference(table, metric_spec)
    sizes = {row.method: average_sent_bytes(runs, row.method) for row in rows}
    compared_methods = [m for m in table.of_method if m != base and base in table.of_method]
    verdicts = compare_methods(base, table, metric_spec, sizes) if base in table.of_method else {}
    p_values = holm({method: paired_p(table.gains(method, base, metric_spec)) for method in compared_methods if base})
    megabytes = {method: None if size is None else size / 1e6 for method, size in sizes.items()}
    return [Standing(row, megabytes[row.method], verdicts.get(row.method), p_values.get(row.method)) for row in rows]


def leaderboard(runs: Sequence[RunResults], reference: str | None = None, metric: str | None = None) -> TextTable:
    """Return :func:`standings` as a table of text, the best method first."""
    metric = metric or main_metric(runs) or ""
    metric_spec = metric_of(metric)
    results = standings(runs, reference, metric)
    base = next((standing.row.method for standing in results if standing.against is None), UNKNOWN)
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
    ordered = sorted(results, key=lambda standing: -metric_spec.direction * standing.row.mean)
    return TextTable(axis_title(metric), header, [format_cells(standing) for standing in ordered])


def format_cells(standing: Standing) -> list[str]:
    """Return the cells of a row of :func:`leaderboard`."""
    row, metric = standing.row, standing.row.metric
    spread = "" if row.mean_std is None else f" ± {format_metric(metric, row.mean_std)}"
    against = standing.against
    counts = against and f"{against.worse} / {against.equal} / {against.better}"
    return [
        display_name(row.method),
        str(len(row.seeds)),
        format_metric(metric, row.mean) + spread,
        UNKNOWN if against is None or not against.runs else format_gain(against, metric),
        counts or UNKNOWN,
        format_metric(metric, row.worst),
        UNKNOWN if row.tenth_worst is None else format_metric(metric, row.tenth_worst),
        UNKNOWN if standing.megabytes is None else f"{standing.megabytes:.1f}",
        f"{row.wall_seconds:.1f}",
    ]


def format_gain(verdict: MethodVerdict, metric: str) -> str:
    """Return a gain as text, ``+2.0 [+0.1, +3.9]``, or without its interval if that is unknown."""
    gain = verdict.gain
    mean = format_short(metric, gain.mean, "+")
    if gain.low is None or gain.high is None:
        return mean
    if gain.mean == gain.low == gain.high == 0:
        return SAME
    return f"{mean} [{format_short(metric, gain.low, '+')}, {format_short(metric, gain.high, '+')}]"
