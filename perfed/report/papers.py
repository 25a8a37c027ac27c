"""A comparison for papers: a LaTeX table and a CSV file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from perfed.data.csv_text import csv_text as safe_csv
from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.comparison import ComparisonRow, best_rows, difference_title
from perfed.report.text import UNKNOWN, axis_title, format_metric

CSV_COLUMNS = (
    "method",
    "metric",
    "mean",
    "std",
    "seeds",
    "worst_client",
    "reference",
    "difference",
    "low",
    "high",
    "interval_over",
    "wall_seconds",
)
"""The columns of :func:`csv_text`; values are in the unit of the metric, accuracy is a fraction of 1."""

_ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
}
_ESCAPED |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def csv_text(table: Sequence[ComparisonRow]) -> str:
    """Return a CSV text with the columns :data:`CSV_COLUMNS` and a line per method and metric."""
    return csv_of(CSV_COLUMNS, csv_rows(table))


def csv_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a header and rows as CSV text."""
    return safe_csv([header, *rows], end="\n")


def csv_rows(table: Sequence[ComparisonRow]) -> Iterator[list[object]]:
    """Yield the cells of each row in the columns :data:`CSV_COLUMNS`."""
    for row in table:
        values = [row.method, row.metric, row.mean, row.mean_std, len(row.seeds), row.worst]
        d = row.difference
        over = None if d is None or d.low is None else d.over
        difference = [None] * 5 if d is None else [d.reference, d.mean, d.low, d.high, over]
        yield ["" if cell is None else cell for cell in [*values, *difference, row.wall_seconds]]


def latex(table: Sequence[ComparisonRow], name: str, comments: Iterable[str]) -> str:
    """Return LaTeX with a table per metric for the package booktabs; the best method is first, the best means are bold.

    Args:
        table: the rows of :func:`perfed.report.comparison.compare_with_reference`.
        name: the name of the comparison, for labels.
        comments: comment lines on how the table and the runs were produced.
    """
    groups = groupby(table, key=lambda row: row.metric)
    return latex_file((_build_latex_table(metric, list(rows), name) for metric, rows in groups), comments)


def latex_file(tables: Iterable[str], comments: Iterable[str]) -> str:
    """Return the LaTeX of several tables below comment lines on how they were produced."""
    head = [f"% {' '.join(line.split())}\n" for line in (*comments, "needs \\usepackage{booktabs}")]
    return "".join(head) + "\n".join(tables)


def make_label(*words: str) -> str:
    """Return the label of a table for references.

    Example:
        >>> make_label("digits-label-skew", "c-index", "by data.samples")
        'tab:digits-label-skew-c-index-by-data-samples'
    """
    return "tab:" + re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def escape_latex(text: str) -> str:
    """Return a text with the special characters of LaTeX escaped.

    Example:
        >>> print(escape_latex("my_methods:a&b"), escape_latex("100 %"))
        my\\_methods:a\\&b 100 \\%
    """
    return re.sub(r"[\\~^–±Δ&%$#_{}]", lambda match: _ESCAPED[match[0]], text)


def _build_latex_table(metric: str, rows: Sequence[ComparisonRow], name: str) -> str:
    side = metric_of(metric).direction
    rows = sorted(rows, key=lambda row: -side * row.mean if math.isfinite(row.mean) else math.inf)
    best, compared = best_rows(rows), any(row.difference for row in rows)
    seeds = sorted({len(row.seeds) for row in rows})
    seed_counts = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    title = axis_title(metric)
    head = ["Method", title, *(["Δ [95 %]"] if compared else []), "Worst"]
    lines = []
    for number, row in enumerate(rows):
        mean = format_metric(metric, row.mean)
        if row.mean_std is not None:
            mean += f" ± {format_metric(metric, row.mean_std)}"
        cell = escape_latex(mean)
        cells = [escape_latex(display_name(row.method)), f"\\textbf{{{cell}}}" if number in best else cell]
        cells += [_format_difference(row)] if compared else []
        lines.append([*cells, format_metric(metric, row.worst)])
    spread = f"Mean{' ± standard deviation' if seeds[-1] > 1 else ''} over {seed_counts} seed{'s' * (seeds[-1] > 1)}"
    difference = difference_title(rows, "95 % interval").removeprefix("Difference")
    legend = f" Δ: difference{difference}." if compared else ""
    return latex_table(f"{title}. {spread}.{legend} Worst: the worst client.", make_label(name, metric), head, lines)


def latex_table(caption: str, reference: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the LaTeX of a table with a caption and a label; only the cells of ``rows`` are LaTeX already."""
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{escape_latex(caption)}}}",
            f"\\label{{{reference}}}",
            f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"\toprule",
            " & ".join(map(escape_latex, head)) + r" \\",
            r"\midrule",
            *(" & ".join(cells) + r" \\" for cells in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _format_difference(row: ComparisonRow) -> str:
    d = row.difference
    if d is None:
        return escape_latex(UNKNOWN)
    mean, low, high = (None if v is None else format_metric(row.metric, v, "+") for v in (d.mean, d.low, d.high))
    # minus signs, not hyphens
    return f"${mean}$" if low is None or high is None else f"${mean}$ [${low}$, ${high}$]"
