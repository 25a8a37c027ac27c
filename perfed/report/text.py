"""Numbers and tables as text, the same on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from perfed.engine.metrics import metric_of

UNKNOWN = "–"
SAME = "no difference on these rows"


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text; the first column names the rows.

    Attributes:
        title: what it is about.
        header: titles of the columns.
        rows: as many cells each as there are columns.
        note: a sentence below it.
        best: rows that are the best, to be printed bold.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    best: frozenset[int] = frozenset()


def axis_title(metric: str) -> str:
    """The metric's name with its unit."""
    unit = metric_of(metric).unit
    return f"{metric.capitalize()} ({unit})" if unit else metric


def directed_title(metric: str) -> str:
    """The same, and that lower is better where it is."""
    return axis_title(metric) + ("" if metric_of(metric).higher_is_better else ", lower is better")


def metric_text(metric: str, value: float, sign: str = "") -> str:
    """A metric in percent with two decimals, any other with four digits.

    ``sign`` is ``"+"`` for differences, which have as many decimals as the metric's values.
    """
    known = metric_of(metric)
    if sign and (known.percent or known.decimals is not None):
        decimals = 2 if known.percent or known.decimals is None else known.decimals
        return f"{round(known.scale * value, decimals) + 0.0:{sign}.{decimals}f}"  # no -0.00
    return f"{known.scale * value:{sign}.{'2f' if known.percent else '4g'}}"


def difference_text(metric: str, mean: float, low: float | None, high: float | None) -> str:
    """``+2.00 [+0.10, +3.90]`` as tables have it; without an interval the difference alone.

    Example:
        >>> difference_text("accuracy", 0.02, 0.001, 0.039), difference_text("c-index", 2.5e-05, None, None)
        ('+2.00 [+0.10, +3.90]', '+0.0000')
        >>> difference_text("accuracy", 0.0, 0.0, 0.0)
        'no difference on these rows'
    """
    if mean == low == high == 0:
        return SAME
    ends = [] if low is None or high is None else [metric_text(metric, end, "+") for end in (low, high)]
    return metric_text(metric, mean, "+") + (f" [{', '.join(ends)}]" if ends else "")


def short_number(metric: str, value: float, sign: str = "") -> str:
    """A difference as sentences have it: percent with one decimal, any other with a decimal or digit less than
    :func:`metric_text`. What would read as 0 has the decimals of tables, so that both have its sign.

    Example:
        >>> short_number("accuracy", 0.0123, "+"), short_number("accuracy", -0.0004, "+")
        ('+1.2', '-0.04')
    """
    known = metric_of(metric)
    if known.percent or known.decimals is not None:
        decimals = 1 if known.percent or known.decimals is None else known.decimals - 1
        decimals += round(known.scale * value, decimals) == 0 != round(known.scale * value, decimals + 1)
        return f"{round(known.scale * value, decimals) + 0.0:{sign}.{decimals}f}"  # no -0.0
    return f"{value:{sign}.3g}"


def amount(metric: str, value: float, sign: str = "") -> str:
    """:func:`short_number` with what it counts: points, or the metric.

    Example:
        >>> amount("accuracy", 0.02), amount("c-index", 0.2041)
        ('2.0 points', '0.204 of c-index')
    """
    return f"{short_number(metric, value, sign)} {'points' if metric_of(metric).percent else f'of {metric}'}"


def megabytes(size: float) -> str:
    """A number of bytes in few digits.

    Example:
        >>> megabytes(0), megabytes(4.46e6), megabytes(34.65e6), megabytes(2.5e9)
        ('nothing', '4.5 MB', '35 MB', '2500 MB')
    """
    if size < 5e4:
        return f"{size / 1e3:.2g} kB" if size else "nothing"
    return f"{size / 1e6:.1f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    Example:
        >>> listed(["a"]), listed(["a", "b", "c"])
        ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def mean_std(values: Sequence[float], text: Callable[[float], str], of: int | None = None) -> str:
    """``mean ± sample standard deviation`` over seeds; says so where fewer than ``of`` seeds have a value.

    Example:
        >>> mean_std([1.0, 3.0], "{:.1f}".format), mean_std([1.0], "{:.1f}".format, of=2), mean_std([], str)
        ('2.0 ± 1.4', '1.0 (1 of 2 seeds)', '–')
    """
    if not values:
        return UNKNOWN
    spread = f" ± {text(stdev(values))}" if len(values) > 1 else ""
    return text(fmean(values)) + spread + (f" ({len(values)} of {of} seeds)" if of and len(values) < of else "")
