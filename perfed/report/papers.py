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
from perfed.report.text import UNKNOWN, axis_title, metric_text

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
"""Of :func:`csv_text`; values in the metric's own unit, accuracy as a fraction of 1."""

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
    """One line per method and metric, with the columns :data:`CSV_COLUMNS`; what is not known is empty."""
    return csv_of(CSV_COLUMNS, csv_rows(table))


def csv_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows below a header as the text of a file."""
    return safe_csv([header, *rows], end="\n")


def csv_rows(table: Sequence[ComparisonRow]) -> Iterator[list[object]]:
    """The cells below :data:`CSV_COLUMNS`."""
    for row in table:
        found = row.difference
        over = found.over if found is not None and found.low is not None else None
        ends = [None] * 5 if found is None else [found.reference, found.mean, found.low, found.high, over]
        own = [row.method, row.metric, row.mean, row.mean_std, len(row.seeds), row.worst]
        yield ["" if cell is None else cell for cell in [*own, *ends, row.wall_seconds]]


def latex(table: Sequence[ComparisonRow], name: str, comments: Iterable[str]) -> str:
    """One table per metric, for the package booktabs; the best method first, the best means bold.

    Args:
        table: as of :func:`perfed.report.comparison.judged_table`.
        name: of what was compared, for labels.
        comments: lines on how the table and the runs were made.
    """
    each = groupby(table, key=lambda row: row.metric)
    return latex_file((_latex_table(metric, list(rows), name) for metric, rows in each), comments)


def latex_file(tables: Iterable[str], comments: Iterable[str]) -> str:
    """Tables below comments that say how they were made."""
    head = [f"% {' '.join(line.split())}\n" for line in (*comments, "needs \\usepackage{booktabs}")]
    return "".join(head) + "\n".join(tables)


def label(*words: str) -> str:
    """What a table is referred to by.

    Example:
        >>> label("digits-label-skew", "c-index", "by data.samples")
        'tab:digits-label-skew-c-index-by-data-samples'
    """
    return "tab:" + re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def escaped(text: str) -> str:
    """Text with LaTeX's own signs written out.

    Example:
        >>> print(escaped("my_methods:a&b"), escaped("100 %"))
        my\\_methods:a\\&b 100 \\%
    """
    return re.sub(r"[\\~^–±Δ&%$#_{}]", lambda found: _ESCAPED[found[0]], text)


def _latex_table(metric: str, rows: Sequence[ComparisonRow], name: str) -> str:
    side = metric_of(metric).direction
    rows = sorted(rows, key=lambda row: -side * row.mean if math.isfinite(row.mean) else math.inf)
    best, compared = best_rows(rows), any(row.difference for row in rows)
    seeds = sorted({len(row.seeds) for row in rows})
    number = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    title = axis_title(metric)
    head = ["Method", title, *(["Δ [95 %]"] if compared else []), "Worst"]
    lines = []
    for at, row in enumerate(rows):
        mean = metric_text(metric, row.mean)
        if row.mean_std is not None:
            mean += f" ± {metric_text(metric, row.mean_std)}"
        cell = escaped(mean)
        cells = [escaped(display_name(row.method)), f"\\textbf{{{cell}}}" if at in best else cell]
        cells += [_difference(row)] if compared else []
        lines.append([*cells, metric_text(metric, row.worst)])
    spread = f"Mean{' ± standard deviation' if seeds[-1] > 1 else ''} over {number} seed{'s' * (seeds[-1] > 1)}"
    difference = difference_title(rows, "95 % interval").removeprefix("Difference")
    told = f" Δ: difference{difference}." if compared else ""
    return latex_table(f"{title}. {spread}.{told} Worst: the worst client.", label(name, metric), head, lines)


def latex_table(caption: str, reference: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table below its caption, with a label to be referred to by; of the rest cells of ``rows`` alone are LaTeX."""
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{escaped(caption)}}}",
            f"\\label{{{reference}}}",
            f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"\toprule",
            " & ".join(map(escaped, head)) + r" \\",
            r"\midrule",
            *(" & ".join(cells) + r" \\" for cells in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _difference(row: ComparisonRow) -> str:
    found = row.difference
    if found is None:
        return escaped(UNKNOWN)
    mean, low, high = (
        None if v is None else metric_text(row.metric, v, "+") for v in (found.mean, found.low, found.high)
    )
    # minus signs, not hyphens
    return f"${mean}$" if low is None or high is None else f"${mean}$ [${low}$, ${high}$]"
