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
        found: the verdict on the runs.
        page: the path of its report, relative to the page of the campaign; empty if there is none.
        sentences: the sentences of the verdict.
    """

    name: str
    runs: tuple[RunResults, ...]
    found: Verdict | None = None
    page: str = ""
    sentences: tuple[str, ...] = ()

    @cached_property
    def metric(self) -> str | None:
        """The metric by which the runs are compared; None if nothing was measured."""
        return main_metric([run for run in self.runs if run.summary])

    @cached_property
    def rows(self) -> list[ComparisonRow]:
        """The rows of the comparison, one for each metric and method."""
        return compare_with_reference(self.runs, self.found)

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
            best[part.name] = {rows[at].method for at in best_rows(rows)}
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
    """The value of a sweep's key, or the comparison's name.

    Example:
        >>> value_of(Part("uniform=20", ()), "uniform"), value_of(Part("digits", ()), "")
        ('20', 'digits')
    """
    return part.name.removeprefix(f"{key}=") if key else part.name


def grids(parts: Sequence[Part], key: str) -> list[Grid]:
    """A grid for each metric that comparisons go by."""
    metrics = dict.fromkeys(part.metric for part in parts if part.metric)
    return [Grid(metric, key, tuple(part for part in parts if part.metric == metric)) for metric in metrics]


def campaign_rows(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """A row per comparison, metric and method, as :class:`~perfed.report.comparison.ComparisonRow` has them."""
    return [{"comparison": part.name, **asdict(row)} for part in parts for row in part.rows]


def campaign_csv(parts: Sequence[Part], key: str) -> str:
    """:func:`~perfed.report.papers.csv_text` of all, with the key's value or the comparison's name in front."""
    rows = ([value_of(part, key), *row] for part in parts for row in csv_rows(part.rows))
    return csv_of([key or "comparison", *CSV_COLUMNS], rows)


@dataclass(frozen=True)
class Series:
    """What a sweep did to each method.

    Attributes:
        name: for files.
        title: of the vertical axis.
        unit: behind values.
        points: by method and place in the sweep, in the unit that is shown.
    """

    name: str
    title: str
    unit: str
    points: Mapping[str, Mapping[int, Gain]]


def series(grid: Grid) -> list[Series]:
    """The mean with its interval, the worst tenth of the clients, mean and worst over domains, the time of training."""
    known = metric_of(grid.metric)
    title, unit = directed_title(grid.metric), f" {known.unit}".rstrip()
    worst = "min" if known.higher_is_better else "max"
    every = [
        Series("mean", f"{title}, mean over the clients", unit, _points(grid, _mean)),
        Series("tenth", f"{axis_title(grid.metric)}, 10 % worst clients", unit, _points(grid, _tenth)),
        Series("domains", f"{title}, mean over the domains", unit, _points(grid, partial(_domains, "mean"))),
        Series("worst-domain", f"{title}, worst domain", unit, _points(grid, partial(_domains, worst))),
        Series("seconds", "Training (s)", " s", _points(grid, _seconds)),
    ]
    return [one for one in every if one.points]


def _points(grid: Grid, value: Any) -> dict[str, dict[int, Gain]]:
    found: dict[str, dict[int, Gain]] = {}
    for method in grid.ranked:
        of = {at: value(part, method, grid.metric) for at, part in enumerate(grid.parts)}
        if there := {at: gain for at, gain in of.items() if gain is not None}:
            found[method] = there
    return found


def _mean(part: Part, method: str, metric: str) -> Gain | None:
    """With the verdict's kind of interval, over clients and seeds, as far as the metric can have such values."""
    table, scale = ClientTable.from_runs(part.members(method), metric), metric_of(metric).scale
    if method in table.of_method:
        gain, (least, most) = estimate_gain(table.of_method[method], table.weights), metric_of(metric).span
        low, high = (None if end is None else min(max(end, least), most) for end in (gain.low, gain.high))
        return _scaled(Gain(gain.mean, low, high), scale)
    row = part.of(metric).get(method)
    return None if row is None else Gain(scale * row.mean, None, None)


def _tenth(part: Part, method: str, metric: str) -> Gain | None:
    row = part.of(metric).get(method)
    return (
        None if row is None or row.tenth_worst is None else Gain(metric_of(metric).scale * row.tenth_worst, None, None)
    )


def _domains(which: str, part: Part, method: str, metric: str) -> Gain | None:
    """Taken per run, as the tables by domain are."""
    found = [run.summary.domains.get(metric, {}).get(which) for run in part.members(method) if run.summary]
    gain = _over_seeds(found)
    return None if gain is None else _scaled(gain, metric_of(metric).scale)


def _seconds(part: Part, method: str, metric: str) -> Gain | None:
    return _over_seeds([run.summary.training_seconds for run in part.members(method) if run.summary])


def _over_seeds(values: Sequence[float | None]) -> Gain | None:
    """The mean, from the lowest to the highest seed."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    ends = (min(known), max(known)) if len(known) > 1 else (None, None)
    return Gain(float(np.mean(known)), *ends)


def _scaled(gain: Gain, scale: float) -> Gain:
    low, high = (None if end is None else scale * end for end in (gain.low, gain.high))
    return Gain(scale * gain.mean, low, high)


def methods_in(parts: Sequence[Part]) -> list[str]:
    """All methods, in the order in which they first appear."""
    return list_methods([run for part in parts for run in part.runs])
