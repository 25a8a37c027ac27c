"""Tables and series over the comparisons of a campaign or a sweep, with one column per comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import numpy as np

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.comparison import ComparisonRow, best_rows, compare_with_reference
from perfed.report.intervals import Gain, estimate_gain
from perfed.report.paired import ClientTable
from perfed.report.papers import CSV_COLUMNS, csv_of, csv_rows, escape_latex, latex_table, make_label
from perfed.report.run_results import RunResults, list_methods, main_metric
from perfed.report.text import UNKNOWN, TextTable, axis_title, directed_title, format_metric
from perfed.report.verdict import Verdict


@dataclass(frozen=True)
class Part:
    """The results of one comparison of a campaign.

    Attributes:
        name: the name of the comparison; ``key=value`` in a sweep.
        runs: the runs that have started.
        verdict: the verdict on the runs; ``None`` if fewer than two methods can be compared.
        page: the path of its report, relative to the page of the campaign; empty if there is none.
        sentences: the sentences of the verdict.
    """

    name: str
    runs: tuple[RunResults, ...]
    verdict: Verdict | None = None
    page: str = ""
    sentences: tuple[str, ...] = ()

    @cached_property
    def metric(self) -> str | None:
        """The metric by which the runs are compared; None if nothing was measured."""
        return main_metric([run for run in self.runs if run.summary])

    @cached_property
    def rows(self) -> list[ComparisonRow]:
        """The rows of the comparison, one for each metric and method."""
        return compare_with_reference(self.runs, self.verdict)

    def of(self, metric: str) -> dict[str, ComparisonRow]:
        """Return the rows of a metric by method."""
        return {row.method: row for row in self.rows if row.metric == metric}

    def members(self, method: str) -> list[RunResults]:
        """Return the finished runs of a method."""
        return [run for run in self.runs if run.method == method and run.summary]


@dataclass(frozen=True)
class Grid:
    """The table of one metric, with a row per method and a column per comparison.

    Attributes:
        metric: the name of the metric.
        key: the key of a sweep; empty for a campaign.
        parts: the comparisons that have the metric.
    """

    metric: str
    key: str
    parts: tuple[Part, ...]

    @property
    def columns(self) -> list[str]:
        """The titles of the columns: values of the key, or names of comparisons."""
        return [value_of(part, self.key) for part in self.parts]

    @property
    def methods(self) -> list[str]:
        """The methods of all parts, in the order in which they first appear."""
        return list(dict.fromkeys(method for part in self.parts for method in part.of(self.metric)))

    @property
    def ranked(self) -> list[str]:
        """The methods, sorted by their mean over the parts, the best first."""
        means = {
            m: fmean(part.of(self.metric)[m].mean for part in self.parts if m in part.of(self.metric))
            for m in self.methods
        }
        return sorted(self.methods, key=lambda method: -metric_of(self.metric).direction * means[method])

    def cell(self, part: Part, method: str) -> str:
        """Return the mean ± standard deviation over the seeds as text."""
        row = part.of(self.metric).get(method)
        if row is None:
            return UNKNOWN
        spread = "" if row.mean_std is None else f" ± {format_metric(self.metric, row.mean_std)}"
        return format_metric(self.metric, row.mean) + spread

    @property
    def title(self) -> str:
        """The title of the table, which describes the numbers."""
        seeds = max(len(row.seeds) for part in self.parts for row in part.of(self.metric).values())
        over = " ± standard deviation over the seeds" if seeds > 1 else ""
        return f"{directed_title(self.metric)}{f' by {self.key}' if self.key else ''}: mean{over}"

    @property
    def table(self) -> TextTable:
        """The content as text."""
        rows = [[display_name(method), *(self.cell(part, method) for part in self.parts)] for method in self.methods]
        return TextTable(self.title, ["Method", *self.columns], rows)

    def latex(self, name: str) -> str:
        """Return the table as LaTeX with the best mean of each column in bold; ``name`` is used in the label."""
        best = {}
        for part in self.parts:
            rows = list(part.of(self.metric).values())
            best[part.name] = {rows[row].method for row in best_rows(rows)}
        lines = []
        for method in self.methods:
            cells = [escape_latex(self.cell(part, method)) for part in self.parts]
            bold = [method in best[part.name] for part in self.parts]
            lines.append(
                [
                    escape_latex(display_name(method)),
                    *(rf"\textbf{{{c}}}" if b else c for c, b in zip(cells, bold, strict=True)),
                ]
            )
        words = (name, self.metric, f"by {self.key}" if self.key else "")
        return latex_table(f"{self.title}.", make_label(*words), ["Method", *self.columns], lines)


def value_of(part: Part, key: str) -> str:
    """Return the value of a sweep's key, or the name of the comparison if ``key`` is empty.

    Example:
        >>> value_of(Part("uniform=20", ()), "uniform"), value_of(Part("digits", ()), "")
        ('20', 'digits')
    """
    return part.name.removeprefix(f"{key}=") if key else part.name


def grids(parts: Sequence[Part], key: str) -> list[Grid]:
    """Return a table for each main metric of the comparisons."""
    metrics = dict.fromkeys(part.metric for part in parts if part.metric)
    return [Grid(metric, key, tuple(part for part in parts if part.metric == metric)) for metric in metrics]


def campaign_rows(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return a row per comparison, metric and method with the fields of a ``ComparisonRow``."""
    return [{"comparison": part.name, **asdict(row)} for part in parts for row in part.rows]


def campaign_csv(parts: Sequence[Part], key: str) -> str:
    """Return the rows of all comparisons as CSV, whose first column is the key's value or the comparison's name."""
    rows = ([value_of(part, key), *row] for part in parts for row in csv_rows(part.rows))
    return csv_of([key or "comparison", *CSV_COLUMNS], rows)


@dataclass(frozen=True)
class Series:
    """A quantity over the values of a sweep's key.

    Attributes:
        name: the name in file names.
        title: the title of the vertical axis.
        unit: the unit after a value.
        points: the values by method and position in the sweep, in the displayed unit.
    """

    name: str
    title: str
    unit: str
    points: Mapping[str, Mapping[int, Gain]]


def series(grid: Grid) -> list[Series]:
    """Return the available series: mean, 10 % worst clients, mean and worst over domains, and training time."""
    metric_spec = metric_of(grid.metric)
    title, unit = directed_title(grid.metric), f" {metric_spec.unit}".rstrip()
    worst = "min" if metric_spec.higher_is_better else "max"
    quantities = [
        Series("mean", f"{title}, mean over the clients", unit, _collect_points(grid, _compute_mean)),
        Series(
            "tenth", f"{axis_title(grid.metric)}, 10 % worst clients", unit, _collect_points(grid, _compute_tenth_worst)
        ),
        Series(
            "domains",
            f"{title}, mean over the domains",
            unit,
            _collect_points(grid, partial(_compute_domain_value, "mean")),
        ),
        Series(
            "worst-domain", f"{title}, worst domain", unit, _collect_points(grid, partial(_compute_domain_value, worst))
        ),
        Series("seconds", "Training (s)", " s", _collect_points(grid, _compute_training_seconds)),
    ]
    return [quantity for quantity in quantities if quantity.points]


def _collect_points(grid: Grid, compute_gain: Any) -> dict[str, dict[int, Gain]]:
    points: dict[str, dict[int, Gain]] = {}
    for method in grid.ranked:
        gains = {position: compute_gain(part, method, grid.metric) for position, part in enumerate(grid.parts)}
        if known_gains := {position: gain for position, gain in gains.items() if gain is not None}:
            points[method] = known_gains
    return points


def _compute_mean(part: Part, method: str, metric: str) -> Gain | None:
    """Return the mean with an interval over clients and seeds, limited to the range of the metric."""
    table, scale = ClientTable.from_runs(part.members(method), metric), metric_of(metric).scale
    if method in table.of_method:
        gain, (least, most) = estimate_gain(table.of_method[method], table.weights), metric_of(metric).span
        low, high = (None if end is None else min(max(end, least), most) for end in (gain.low, gain.high))
        return _scale_gain(Gain(gain.mean, low, high), scale)
    row = part.of(metric).get(method)
    return None if row is None else Gain(scale * row.mean, None, None)


def _compute_tenth_worst(part: Part, method: str, metric: str) -> Gain | None:
    row = part.of(metric).get(method)
    return (
        None if row is None or row.tenth_worst is None else Gain(metric_of(metric).scale * row.tenth_worst, None, None)
    )


def _compute_domain_value(statistic: str, part: Part, method: str, metric: str) -> Gain | None:
    """Return the mean over the seeds of a statistic over the domains (``mean``, ``min`` or ``max``) of each run."""
    values = [run.summary.domains.get(metric, {}).get(statistic) for run in part.members(method) if run.summary]
    gain = _average_seeds(values)
    return None if gain is None else _scale_gain(gain, metric_of(metric).scale)


def _compute_training_seconds(part: Part, method: str, metric: str) -> Gain | None:
    return _average_seeds([run.summary.training_seconds for run in part.members(method) if run.summary])


def _average_seeds(values: Sequence[float | None]) -> Gain | None:
    """Return the mean over the seeds with the lowest and the highest value; None without values."""
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    ends = (min(known_values), max(known_values)) if len(known_values) > 1 else (None, None)
    return Gain(float(np.mean(known_values)), *ends)


def _scale_gain(gain: Gain, scale: float) -> Gain:
    low, high = (None if end is None else scale * end for end in (gain.low, gain.high))
    return Gain(scale * gain.mean, low, high)


def methods_in(parts: Sequence[Part]) -> list[str]:
    """Return the names of all methods, in the order in which they first appear."""
    return list_methods([run for part in parts for run in part.runs])
