"""Numbers and tables as text, the same on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from perfed.engine.metrics import metric_of
from perfed.plugins import POOLED

UNKNOWN = "–"


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


def method_text(method: str) -> str:
    """A method's name in tables, marked where no federation can have what it is.

    Example:
        >>> method_text("fedpac"), method_text("pooled:logistic")
        ('fedpac', 'pooled:logistic (data brought together)')
    """
    return f"{method} (data brought together)" if method.startswith(POOLED) else method


def axis_title(metric: str) -> str:
    """The metric's name with its unit."""
    unit = metric_of(metric).unit
    return f"{metric.capitalize()} ({unit})" if unit else metric


def metric_text(metric: str, value: float, sign: str = "") -> str:
    """A metric in percent with two decimals, any other with four digits; ``sign`` is ``"+"`` for differences."""
    known = metric_of(metric)
    return f"{known.scale * value:{sign}.{'2f' if known.percent else '4g'}}"


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
