"""Methods side by side: mean and spread over seeds, and paired differences to the first method."""

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
from perfed.report.run_results import RunResults, reported
from perfed.report.text import UNKNOWN, TextTable, axis_title, difference_text, metric_text
from perfed.report.verdict import Verdict

CONFIDENCE = 0.95

BOTH = "clients and seeds"


@dataclass(frozen=True)
class Difference:
    """By how much a method is better than the reference over their common seeds, with a 95 % interval.

    Attributes:
        mean: of the paired differences: of clients with ``over = "clients and seeds"``, else of the seeds' means.
        low, high: None where nothing can vary, as with a single seed, and with two seeds.
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
        mean: over the seeds, of the mean over clients.
        mean_std: its sample standard deviation over the seeds; None with a single seed.
        std: over the clients, averaged over the seeds.
        worst: client, averaged over the seeds.
        tenth_worst: the value that a tenth of the clients do not do better than, averaged over the seeds; None where a
            seed's run does not say it.
        wall_seconds: averaged over the seeds.
        difference: to the reference; None for that method and where no seed is shared.
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
    """One entry per finished run: method, seed, metrics, accuracy (classification only), wall_seconds,
    virtual_time, and targets where the run had any; unfinished runs are left out.
    """
    keys = {"method", "seed", "metrics", "accuracy", "wall_seconds", "virtual_time", "targets"}
    rows = [run.summary.model_dump(include=keys) for run in runs if run.summary]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def compare_table(rows: Sequence[Mapping[str, Any]], reference: str | None = None) -> list[ComparisonRow]:
    """One row per metric (accuracy first) and method (in the order of ``rows``).

    Args:
        rows: as :func:`comparison_rows` returns them, each method and seed once.
        reference: that differences are to; the first method where it is not given or lacks the metric.

    Example:
        >>> spread = {"mean": 0.5, "std": 0.1, "min": 0.3, "p10": 0.4, "max": 0.7}
        >>> row, = compare_table([{"method": "fedavg", "seed": 0, "accuracy": spread, "wall_seconds": 2.0}])
        >>> row.metric, row.mean, row.mean_std, row.difference
        ('accuracy', 0.5, None, None)
    """
    spreads = [_spreads(row) for row in rows]
    metrics = sorted({name: None for spread in spreads for name in spread}, key=lambda name: name != "accuracy")
    table = []
    for metric in metrics:
        by_method: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row, spread in zip(rows, spreads, strict=True):
            if metric in spread:
                seeds = by_method.setdefault(row["method"], {})
                seeds[row["seed"]] = {**spread[metric], "wall_seconds": row["wall_seconds"]}
        base = reference if reference in by_method else next(iter(by_method))
        table += [_row(metric, method, base, by_method) for method in by_method]
    return table


def _spreads(row: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    first = {"accuracy": row["accuracy"]} if row.get("accuracy") else {}
    return first | (row.get("metrics") or {})


def _row(
    metric: str, method: str, reference: str, by_method: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> ComparisonRow:
    values = by_method[method]
    means = [value["mean"] for value in values.values()]
    known = metric_of(metric)
    tenths = [value[known.tenth_worst] for value in values.values() if value.get(known.tenth_worst) is not None]
    return ComparisonRow(
        method=method,
        metric=metric,
        seeds=tuple(sorted(values)),
        mean=fmean(means),
        mean_std=stdev(means) if len(means) > 1 else None,
        std=fmean(value["std"] for value in values.values()),
        worst=fmean(value[known.worst] for value in values.values()),
        tenth_worst=fmean(tenths) if len(tenths) == len(values) else None,  # older results lack the 90th percentile
        wall_seconds=fmean(value["wall_seconds"] for value in values.values()),
        difference=None if method == reference else _difference(reference, by_method[reference], values, known),
    )


def _difference(
    reference: str, base: Mapping[int, Mapping[str, Any]], values: Mapping[int, Mapping[str, Any]], known: Metric
) -> Difference | None:
    seeds = tuple(sorted(base.keys() & values.keys()))
    if not seeds:
        return None
    paired = [known.direction * (values[seed]["mean"] - base[seed]["mean"]) for seed in seeds]
    mean, n = fmean(paired), len(paired)
    if n < FEWEST_SEEDS:
        return Difference(reference, seeds, mean, None, None)
    from scipy import stats  # type: ignore[import-untyped]

    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(paired) / math.sqrt(n)
    limited = Gain(mean, mean - half, mean + half).limit(known.widest)
    return Difference(reference, seeds, mean, limited.low, limited.high)


def judged_table(runs: Sequence[RunResults], found: Verdict | None) -> list[ComparisonRow]:
    """:func:`compare_table` with differences to the verdict's reference.

    Where clients have been measured, and where there is a verdict they have, every metric's differences are paired by
    client and seed, with intervals over both: those of the verdict's metric are the verdict's own, so that a table says
    what the sentences say. Methods without a client and seed in common with the reference have none.
    """
    table = compare_table(comparison_rows(runs), None if found is None else found.reference)
    if found is None:
        return table
    judged: list[ComparisonRow] = []
    for metric, group in groupby(table, key=lambda row: row.metric):
        rows = list(group)
        verdicts = {of.method: of for of in found.methods}
        if metric != found.metric:
            values, base = ClientTable.of(runs, metric), reference_of(rows)
            verdicts = compare_methods(base, values, metric_of(metric)) if base in values.of_method else {}
        for row in rows:
            paired = verdicts.get(row.method) if row.difference else None
            judged.append(
                row if paired is None or row.difference is None else _paired(row, row.difference, paired.gain)
            )
    return judged


def _paired(row: ComparisonRow, found: Difference, gain: Gain) -> ComparisonRow:
    """The row with the difference by client and seed that ``gain`` is."""
    if not math.isfinite(gain.mean):
        return replace(row, difference=None)
    low, high = (None if end is None else end + 0.0 for end in (gain.low, gain.high))  # no -0.0
    return replace(row, difference=replace(found, mean=gain.mean + 0.0, low=low, high=high, over=BOTH))


def short_table(runs: Sequence[RunResults], table: Sequence[ComparisonRow], metric: str) -> TextTable | None:
    """What a reader needs first of ``metric``: mean ± std over seeds, difference [95 % interval], worst client.

    None where no row has it.
    """
    rows = [row for row in table if row.metric == metric]
    if not rows:
        return None
    header = ["Method", axis_title(metric), difference_title(rows, "95 %"), "Worst client"]
    kept = [0, 2, 6, 4]
    if not any(row.difference for row in rows):
        header, kept = [*header[:2], header[3]], [0, 2, 4]
    cells = [[_cells(row)[column] for column in kept] for row in rows]
    over = "; mean ± std over seeds" if any(row.mean_std is not None for row in rows) else ""
    return TextTable(_title(metric, reported(runs)) + over, header, cells, best=best_rows(rows))


def reference_of(rows: Sequence[ComparisonRow]) -> str:
    """The method that the rows of one metric are compared with."""
    return next((row.difference.reference for row in rows if row.difference), rows[0].method)


def difference_title(rows: Sequence[ComparisonRow], sure: str) -> str:
    """The head of the column of differences of one metric: to what, and what the intervals are over.

    Differences are so that more is better, which is said where less of the metric is.
    """
    kinds = {row.difference.over for row in rows if row.difference and row.difference.low is not None}
    over = {BOTH: f"{sure} over {BOTH}", "seeds": f"{sure}, Student's t over seeds"}
    told = " or ".join(over[kind] for kind in sorted(kinds)) or sure
    better = "" if metric_of(rows[0].metric).higher_is_better else ", + is better"
    return f"Difference to {display_name(reference_of(rows))}{better} [{told}]"


def best_rows(rows: Sequence[ComparisonRow]) -> frozenset[int]:
    """The rows with the best mean, as it is printed, of what a federation or a site can have; none of a single row."""
    known = metric_of(rows[0].metric)
    means = {
        at: row.mean for at, row in enumerate(rows) if math.isfinite(row.mean) and not row.method.startswith(POOLED)
    }
    if len(rows) < 2 or not means:
        return frozenset()
    top = metric_text(rows[0].metric, known.direction * max(known.direction * mean for mean in means.values()))
    return frozenset(at for at, mean in means.items() if metric_text(rows[0].metric, mean) == top)


def metric_tables(table: Sequence[ComparisonRow], reported: str) -> list[TextTable]:
    """The rows of :func:`compare_table` as text, one table per metric; accuracy in percent, differences in points.

    ``reported`` says which numbers they are (:func:`perfed.report.run_results.reported`).
    """
    each = groupby(table, key=lambda row: row.metric)
    return [_metric_table(metric, list(rows), _title(metric, reported)) for metric, rows in each]


def _title(metric: str, reported: str) -> str:
    lower = "" if metric_of(metric).higher_is_better else " (lower is better)"
    return f"{metric}{lower}: {reported}" if reported else f"{metric}{lower}"


def _metric_table(metric: str, rows: Sequence[ComparisonRow], title: str) -> TextTable:
    known = metric_of(metric)
    header = [
        "Method",
        "Seeds",
        f"{axis_title(metric)}, mean ± std over seeds",
        "Std over clients",
        f"Worst client ({known.worst})",
        f"10 % worst ({known.tenth_worst.removeprefix('p')}th percentile)",
        difference_title(rows, "95 % interval"),
        "Wall time (s)",
    ]
    return TextTable(title, header, [_cells(row) for row in rows], best=best_rows(rows))


def _cells(row: ComparisonRow) -> list[str]:
    spread = (row.mean, row.std, row.worst, row.tenth_worst)
    known = (None if value is None or math.isnan(value) else value for value in spread)
    mean, *numbers = (UNKNOWN if value is None else metric_text(row.metric, value) for value in known)
    if row.mean_std is not None:
        mean += f" ± {metric_text(row.metric, row.mean_std)}"
    return [
        display_name(row.method),
        str(len(row.seeds)),
        mean,
        *numbers,
        _difference_text(row),
        f"{row.wall_seconds:.1f}",
    ]


def _difference_text(row: ComparisonRow) -> str:
    if row.difference is None:
        return UNKNOWN
    return difference_text(row.metric, row.difference.mean, row.difference.low, row.difference.high)
