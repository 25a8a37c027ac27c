"""A comparison for papers: a LaTeX table and a CSV file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

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

_ESCAPED = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "±": r"$\pm$"}
_ESCAPED |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def csv_text(table: Sequence[ComparisonRow]) -> str:
    """One line per method and metric, with the columns :data:`CSV_COLUMNS`; what is not known is empty."""
    return csv_of(CSV_COLUMNS, csv_rows(table))


def csv_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows below a header as the text of a file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def csv_rows(table: Sequence[ComparisonRow]) -> Iterator[list[object]]:
    """The cells below :data:`CSV_COLUMNS`."""
    for row in table:
        found = row.difference
        over = found.over if found is not None and found.low is not None else None
        ends = [None] * 5 if found is None else [found.reference, found.mean, found.low, found.high, over]
        own = [row.method, row.metric, row.mean, row.mean_std, len(row.seeds), row.worst]
        yield ["" if cell is None else cell for cell in [*own, *ends, row.wall_seconds]]


def latex(table: Sequence[ComparisonRow], command: str) -> str:
    """One table per metric, for the package booktabs; the best means are bold, and comments say how it was made.

    Args:
        table: as of :func:`perfed.report.comparison.judged_table`.
        command: that made it.
    """
    each = groupby(table, key=lambda row: row.metric)
    return latex_file((_latex_table(metric, list(rows)) for metric, rows in each), command)


def latex_file(tables: Iterable[str], command: str) -> str:
    """Tables below comments that say how they were made."""
    return f"% {' '.join(command.split())}\n% \\usepackage{{booktabs}}\n" + "\n".join(tables)


def escaped(text: str) -> str:
    """Text with LaTeX's own signs written out.

    Example:
        >>> print(escaped("my_methods:a&b"), escaped("100 %"))
        my\\_methods:a\\&b 100 \\%
    """
    return re.sub(r"[\\~^–±&%$#_{}]", lambda found: _ESCAPED[found[0]], text)


def _latex_table(metric: str, rows: Sequence[ComparisonRow]) -> str:
    best, compared = best_rows(rows), any(row.difference for row in rows)
    seeds = sorted({len(row.seeds) for row in rows})
    number = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    title = axis_title(metric)
    head = ["Method", title, *([difference_title(rows, "95 %")] if compared else []), "Worst client"]
    lines = []
    for at, row in enumerate(rows):
        mean = metric_text(metric, row.mean)
        if row.mean_std is not None:
            mean += f" ± {metric_text(metric, row.mean_std)}"
        cell = escaped(mean)
        cells = [escaped(row.method), f"\\textbf{{{cell}}}" if at in best else cell]
        cells += [_difference(row)] if compared else []
        lines.append([*cells, metric_text(metric, row.worst)])
    spread = f"Mean{' ± standard deviation' if seeds[-1] > 1 else ''} over {number} seed{'s' * (seeds[-1] > 1)}"
    caption = f"{title}. {spread}; differences with 95 % intervals." if compared else f"{title}. {spread}."
    return latex_table(caption, head, lines)


def latex_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table below a caption; ``caption`` and ``head`` are plain text, the cells of ``rows`` are LaTeX."""
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{escaped(caption)}}}",
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
