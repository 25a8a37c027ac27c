"""Formatting of numbers and tables as text for the terminal and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from perfed.engine.metrics import metric_of

UNKNOWN = "–"
SAME = "no difference on these rows"


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text; the first column has the names of the rows.

    Attributes:
        title: the title of the table.
        header: the titles of the columns.
        rows: the cells of each row, one for each column.
        note: a sentence below the table.
        best: the numbers of the best rows, which are printed bold.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    best: frozenset[int] = frozenset()


def axis_title(metric: str) -> str:
    """Return the name of a metric with its unit."""
    unit = metric_of(metric).unit
    return f"{metric.capitalize()} ({unit})" if unit else metric


def directed_title(metric: str) -> str:
    """Return the name of a metric with its unit, and a note if lower is better."""
    return axis_title(metric) + ("" if metric_of(metric).higher_is_better else ", lower is better")


def format_metric(metric: str, value: float, sign: str = "") -> str:
    """Return the value of a metric as text: percent with two decimals, other units with four digits.

    ``sign`` is ``"+"`` for differences, which have as many decimals as the metric's values.
    """
    metric_spec = metric_of(metric)
    if sign and (metric_spec.percent or metric_spec.decimals is not None):
        decimals = 2 if metric_spec.percent or metric_spec.decimals is None else metric_spec.decimals
        return f"{round(metric_spec.scale * value, decimals) + 0.0:{sign}.{decimals}f}"  # no -0.00
    return f"{metric_spec.scale * value:{sign}.{'2f' if metric_spec.percent else '4g'}}"


def format_difference(metric: str, mean: float, low: float | None, high: float | None) -> str:
    """Return a difference with its interval as text for tables, ``+2.00 [+0.10, +3.90]``, or without it if it is None.

    Example:
        >>> format_difference("accuracy", 0.02, 0.001, 0.039), format_difference("c-index", 2.5e-05, None, None)
        ('+2.00 [+0.10, +3.90]', '+0.0000')
        >>> format_difference("accuracy", 0.0, 0.0, 0.0)
        'no difference on these rows'
    """
    if mean == low == high == 0:
        return SAME
    ends = [] if low is None or high is None else [format_metric(metric, end, "+") for end in (low, high)]
    return format_metric(metric, mean, "+") + (f" [{', '.join(ends)}]" if ends else "")


def format_short(metric: str, value: float, sign: str = "") -> str:
    """Return a difference as text for sentences, with one decimal or digit less than :func:`format_metric`.

    A difference that would be printed as 0 has the decimals of tables, so that both show its sign.

    Example:
        >>> format_short("accuracy", 0.0123, "+"), format_short("accuracy", -0.0004, "+")
        ('+1.2', '-0.04')
    """
    metric_spec = metric_of(metric)
    if metric_spec.percent or metric_spec.decimals is not None:
        decimals = 1 if metric_spec.percent or metric_spec.decimals is None else metric_spec.decimals - 1
        decimals += round(metric_spec.scale * value, decimals) == 0 != round(metric_spec.scale * value, decimals + 1)
        return f"{round(metric_spec.scale * value, decimals) + 0.0:{sign}.{decimals}f}"  # no -0.0
    return f"{value:{sign}.3g}"


def format_amount(metric: str, value: float, sign: str = "") -> str:
    """Return a difference as text with its unit, which is points or the name of the metric (:func:`format_short`).

    Example:
        >>> format_amount("accuracy", 0.02), format_amount("c-index", 0.2041)
        ('2.0 points', '0.204 of c-index')
    """
    return f"{format_short(metric, value, sign)} {'points' if metric_of(metric).percent else f'of {metric}'}"


def format_megabytes(size: float) -> str:
    """Return a number of bytes as text with few digits.

    Example:
        >>> format_megabytes(0), format_megabytes(4.46e6), format_megabytes(34.65e6), format_megabytes(2.5e9)
        ('nothing', '4.5 MB', '35 MB', '2500 MB')
    """
    if size < 5e4:
        return f"{size / 1e3:.2g} kB" if size else "nothing"
    return f"{size / 1e6:.1f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"


def join_names(names: Sequence[str]) -> str:
    """Return names as an enumeration in a sentence.

    Example:
        >>> join_names(["a"]), join_names(["a", "b", "c"])
        ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def format_mean_std(values: Sequence[float], text: Callable[[float], str], total: int | None = None) -> str:
    """Return ``mean ± sample standard deviation`` over seeds, and a note if fewer than ``total`` seeds have a value.

    Example:
        >>> one_decimal = "{:.1f}".format
        >>> format_mean_std([1.0, 3.0], one_decimal), format_mean_std([1.0], one_decimal, total=2)
        ('2.0 ± 1.4', '1.0 (1 of 2 seeds)')
    """
    if not values:
        return UNKNOWN
    spread = f" ± {text(stdev(values))}" if len(values) > 1 else ""
    return (
        text(fmean(values)) + spread + (f" ({len(values)} of {total} seeds)" if total and len(values) < total else "")
    )
