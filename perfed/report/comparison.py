"""Comparison of methods: mean and spread over seeds, and paired differences to a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from perfed.engine.metrics import Metric, metric_of
from perfed.methods.titles import display_name
from perfed.plugins import POOLED
from perfed.report.against import compare_methods
from perfed.report.intervals import FEWEST_SEEDS, Gain
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, describe_reported_values
from perfed.report.text import UNKNOWN, TextTable, axis_title, format_difference, format_metric
from perfed.report.verdict import Verdict

CONFIDENCE = 0.95

BOTH = "clients and seeds"


@dataclass(frozen=True)
class Difference:
    """The difference of a method to the reference over their common seeds, with a 95 % interval.

    It is positive if the method is better.

    Attributes:
        reference: the name of the reference.
        seeds: the common seeds.
        mean: the mean of the paired differences: of clients if ``over`` is ``"clients and seeds"``, otherwise of the
            means of the seeds.
        low, high: the ends of the interval; ``None`` with one or two seeds.
        over: ``"clients and seeds"``: the verdict's interval (:func:`perfed.report.against.compare_methods`);
            ``"seeds"``: Student's t.
    """

    reference: str
    seeds: tuple[int, ...]
    mean: float
    low: float | None
    high: float | None
    over: str = "seeds"


@dataclass(frozen=True)
class ComparisonRow:
    """One method under one metric, in the metric's own unit (accuracy: a fraction of 1).

    Attributes:
        method, metric: the names of the method and the metric.
        seeds: the seeds of the finished runs.
        mean: the mean over clients, averaged over the seeds.
        mean_std: the sample standard deviation over the seeds of the mean over clients; ``None`` with a single seed.
        std: the standard deviation over clients, averaged over the seeds.
        worst: the value of the worst client, averaged over the seeds.
        tenth_worst: the value that a tenth of the clients do not exceed, averaged over the seeds; ``None`` if the run
            of a seed lacks it.
        wall_seconds: the wall time, averaged over the seeds.
        difference: the difference to the reference; ``None`` for the reference, and if there are no common seeds.
    """

    method: str
    metric: str
    seeds: tuple[int, ...]
    mean: float
    mean_std: float | None
    std: float
    worst: float
    tenth_worst: float | None
    wall_seconds: float
    difference: Difference | None


def comparison_rows(runs: Sequence[RunResults]) -> list[dict[str, Any]]:
    """Return an entry for each finished run.

    It has the keys method, seed, metrics, accuracy (only for classification), wall_seconds, virtual_time, and targets
    if the run has any.
    """
    keys = {"method", "seed", "metrics", "accuracy", "wall_seconds", "virtual_time", "targets"}
    rows = [run.summary.model_dump(include=keys) for run in runs if run.summary]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def compare_table(rows: Sequence[Mapping[str, Any]], reference: str | None = None) -> list[ComparisonRow]:
    """Return a row for each metric (accuracy first) and method (in the order of ``rows``).

    Args:
        rows: the entries of :func:`comparison_rows`, each method and seed once.
        reference: the method for differences; the first one if it is not given or lacks the metric.

    Example:
        >>> spread = {"mean": 0.5, "std": 0.1, "min": 0.3, "p10": 0.4, "max": 0.7}
        >>> row, = compare_table([{"method": "fedavg", "seed": 0, "accuracy": spread, "wall_seconds": 2.0}])
        >>> row.metric, row.mean, row.mean_std, row.difference
        ('accuracy', 0.5, None, None)
    """
    spreads = [_list_spreads(row) for row in rows]
    metrics = sorted({name: None for spread in spreads for name in spread}, key=lambda name: name != "accuracy")
    table = []
    for metric in metrics:
        by_method: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row, spread in zip(rows, spreads, strict=True):
            if metric in spread:
                seeds = by_method.setdefault(row["method"], {})
                seeds[row["seed"]] = {**spread[metric], "wall_seconds": row["wall_seconds"]}
        base = reference if reference in by_method else next(iter(by_method))
        table += [_summarise_method(metric, method, base, by_method) for method in by_method]
    return table


def _list_spreads(row: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    first = {"accuracy": row["accuracy"]} if row.get("accuracy") else {}
    return first | (row.get("metrics") or {})


def _summarise_method(
    metric: str, method: str, reference: str, by_method: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> ComparisonRow:
    spreads = by_method[method]
    means = [spread["mean"] for spread in spreads.values()]
    metric_spec = metric_of(metric)
    tenths = [
        spread[metric_spec.tenth_worst]
        for spread in spreads.values()
        if spread.get(metric_spec.tenth_worst) is not None
    ]
    return ComparisonRow(
        method=method,
        metric=metric,
        seeds=tuple(sorted(spreads)),
        mean=fmean(means),
        mean_std=stdev(means) if len(means) > 1 else None,
        std=fmean(spread["std"] for spread in spreads.values()),
        worst=fmean(spread[metric_spec.worst] for spread in spreads.values()),
        tenth_worst=fmean(tenths) if len(tenths) == len(spreads) else None,  # older results lack the 90th percentile
        wall_seconds=fmean(spread["wall_seconds"] for spread in spreads.values()),
        difference=None
        if method == reference
        else _compute_difference(reference, by_method[reference], spreads, metric_spec),
    )


def _compute_difference(
    reference: str, base: Mapping[int, Mapping[str, Any]], values: Mapping[int, Mapping[str, Any]], metric_spec: Metric
) -> Difference | None:
    seeds = tuple(sorted(base.keys() & values.keys()))
    if not seeds:
        return None
    paired = [metric_spec.direction * (values[seed]["mean"] - base[seed]["mean"]) for seed in seeds]
    mean, n = fmean(paired), len(paired)
    if n < FEWEST_SEEDS:
        return Difference(reference, seeds, mean, None, None)
    from scipy import stats  # type: ignore[import-untyped]

    half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(paired) / math.sqrt(n)
    limited = Gain(mean, mean - half_width, mean + half_width).limit(metric_spec.widest)
    return Difference(reference, seeds, mean, limited.low, limited.high)


def compare_with_reference(runs: Sequence[RunResults], verdict: Verdict | None) -> list[ComparisonRow]:
    """Return the rows of :func:`compare_table` with differences to the reference of the verdict.

    If there is a verdict, the differences of every metric are paired by client and seed, with intervals over both.
    Those of the main metric are taken from the verdict, so that tables and sentences agree. Methods without a common
    client and seed with the reference have no difference.
    """
    table = compare_table(comparison_rows(runs), None if verdict is None else verdict.reference)
    if verdict is None:
        return table
    compared: list[ComparisonRow] = []
    for metric, group in groupby(table, key=lambda row: row.metric):
        rows = list(group)
        verdicts = {method.method: method for method in verdict.methods}
        if metric != verdict.metric:
            values, base = ClientTable.from_runs(runs, metric), find_reference(rows)
            verdicts = compare_methods(base, values, metric_of(metric)) if base in values.of_method else {}
        for row in rows:
            paired = verdicts.get(row.method) if row.difference else None
            if paired is not None and row.difference is not None:
                row = _replace_difference(row, row.difference, paired.gain)
            compared.append(row)
    return compared


def _replace_difference(row: ComparisonRow, difference: Difference, gain: Gain) -> ComparisonRow:
    """Return the row with the difference by client and seed ``gain``."""
    if not math.isfinite(gain.mean):
        return replace(row, difference=None)
    low, high = (None if end is None else end + 0.0 for end in (gain.low, gain.high))  # no -0.0
    return replace(row, difference=replace(difference, mean=gain.mean + 0.0, low=low, high=high, over=BOTH))


def short_table(runs: Sequence[RunResults], table: Sequence[ComparisonRow], metric: str) -> TextTable | None:
    """Return a table with the most important values: mean ± std over seeds, difference [95 % interval], worst client.

    ``None`` if no row has the metric.
    """
    rows = [row for row in table if row.metric == metric]
    if not rows:
        return None
    header = ["Method", axis_title(metric), difference_title(rows, "95 %"), "Worst client"]
    columns = [0, 2, 6, 4]
    if not any(row.difference for row in rows):
        header, columns = [*header[:2], header[3]], [0, 2, 4]
    cells = [[_format_cells(row)[column] for column in columns] for row in rows]
    over = "; mean ± std over seeds" if any(row.mean_std is not None for row in rows) else ""
    return TextTable(_build_title(metric, describe_reported_values(runs)) + over, header, cells, best=best_rows(rows))


def find_reference(rows: Sequence[ComparisonRow]) -> str:
    """Return the method with which the rows of one metric are compared."""
    return next((row.difference.reference for row in rows if row.difference), rows[0].method)


def difference_title(rows: Sequence[ComparisonRow], sure: str) -> str:
    """Return the title of the column of differences: the reference, and what the intervals of level ``sure`` are over.

    Differences are positive if a method is better, which the title states if lower values of the metric are better.
    """
    kinds = {row.difference.over for row in rows if row.difference and row.difference.low is not None}
    over = {BOTH: f"{sure} over {BOTH}", "seeds": f"{sure}, Student's t over seeds"}
    interval = " or ".join(over[kind] for kind in sorted(kinds)) or sure
    better = "" if metric_of(rows[0].metric).higher_is_better else ", + is better"
    return f"Difference to {display_name(find_reference(rows))}{better} [{interval}]"


def best_rows(rows: Sequence[ComparisonRow]) -> frozenset[int]:
    """Return the numbers of the rows with the best printed mean, without pooled methods; empty for a single row."""
    metric_spec = metric_of(rows[0].metric)
    means = {
        number: row.mean
        for number, row in enumerate(rows)
        if math.isfinite(row.mean) and not row.method.startswith(POOLED)
    }
    if len(rows) < 2 or not means:
        return frozenset()
    top = format_metric(
        rows[0].metric, metric_spec.direction * max(metric_spec.direction * mean for mean in means.values())
    )
    return frozenset(number for number, mean in means.items() if format_metric(rows[0].metric, mean) == top)


def metric_tables(table: Sequence[ComparisonRow], reported: str) -> list[TextTable]:
    """Return the rows of :func:`compare_table` as text, one table per metric; accuracy is in percent.

    ``reported`` describes the values (:func:`perfed.report.run_results.describe_reported_values`).
    """
    groups = groupby(table, key=lambda row: row.metric)
    return [_build_metric_table(metric, list(rows), _build_title(metric, reported)) for metric, rows in groups]


def _build_title(metric: str, reported: str) -> str:
    lower = "" if metric_of(metric).higher_is_better else " (lower is better)"
    return f"{metric}{lower}: {reported}" if reported else f"{metric}{lower}"


def _build_metric_table(metric: str, rows: Sequence[ComparisonRow], title: str) -> TextTable:
    metric_spec = metric_of(metric)
    header = [
        "Method",
        "Seeds",
        f"{axis_title(metric)}, mean ± std over seeds",
        "Std over clients",
        f"Worst client ({metric_spec.worst})",
        f"10 % worst ({metric_spec.tenth_worst.removeprefix('p')}th percentile)",
        difference_title(rows, "95 % interval"),
        "Wall time (s)",
    ]
    return TextTable(title, header, [_format_cells(row) for row in rows], best=best_rows(rows))


def _format_cells(row: ComparisonRow) -> list[str]:
    spread = (row.mean, row.std, row.worst, row.tenth_worst)
    values = (None if value is None or math.isnan(value) else value for value in spread)
    mean, *numbers = (UNKNOWN if value is None else format_metric(row.metric, value) for value in values)
    if row.mean_std is not None:
        mean += f" ± {format_metric(row.metric, row.mean_std)}"
    return [
        display_name(row.method),
        str(len(row.seeds)),
        mean,
        *numbers,
        _describe_difference(row),
        f"{row.wall_seconds:.1f}",
    ]


def _describe_difference(row: ComparisonRow) -> str:
    if row.difference is None:
        return UNKNOWN
    return format_difference(row.metric, row.difference.mean, row.difference.low, row.difference.high)
