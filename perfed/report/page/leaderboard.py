"""The leaderboard section: a table with a row per method; the page's script changes, sorts and copies it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.leaderboard import Standing, format_cells, standings
from perfed.report.page.html import (
    build_column_head,
    build_note,
    build_section,
    build_select,
    build_table,
    embed_data,
    label_method,
    wrap_scrollable,
)
from perfed.report.page.page_data import ReportData
from perfed.report.page.verdict import draw_shares
from perfed.report.run_results import ClientValues, describe_reported_values
from perfed.report.tables import class_table
from perfed.report.text import UNKNOWN, axis_title, directed_title

MOST_REFERENCES = 12  # methods that can be selected as reference


def leaderboard_section(report: ReportData) -> str:
    """Return the table with its controls; empty if fewer than two methods have finished."""
    if not report.metric or len({run.method for run in report.runs if run.summary}) < 2:
        return ""
    metrics, references = _list_metrics(report), _list_references(report)
    views = {f"{m}|{r}": _build_view(report, m, r) for m in metrics for r in references}
    first = next(iter(views.values()))
    ordered = sorted(first["rows"], key=lambda method: -report.metric_spec.direction * first["rows"][method]["sort"][0])
    controls = [
        build_select("metric", "Metric", {metric: axis_title(metric) for metric in metrics}),
        build_select("reference", "Compared with", {method: display_name(method) for method in references}),
        '<label class="pick"><input type="checkbox" name="p"> p-values</label>',
    ]
    reported = describe_reported_values(report.runs)
    return build_section(
        "leaderboard",
        "Leaderboard",
        f'<div class="picks script-only">{"".join(controls)}</div>',
        _build_board(report, ordered, first),
        _build_copy_buttons(),
        build_table(classes, looks=report.looks) if (classes := class_table(report.runs)) else "",
        build_note(
            f"{f'Reported values: {reported}. ' if reported else ''}"
            "Differences are paired by client and seed; positive differences are better. Intervals (95 %) are over "
            "clients and seeds. Means are averaged over the seeds. p-values: Wilcoxon's signed-rank test over the "
            "clients, corrected for the number of methods (Holm)."
        ),
        embed_data("views", {"methods": ordered, "views": views}),
    )


def _list_metrics(report: ReportData) -> list[str]:
    """Return the main metric, and then the metrics by client that at least two finished runs have."""
    tables = [run.clients for run in report.runs if run.summary and run.clients]
    names = dict.fromkeys(name for clients in tables for name in clients.measured or {})
    main = str(report.metric)
    return [main, *(name for name in names if name != main and _has_two_tables(name, tables))]


def _has_two_tables(metric: str, tables: Sequence[ClientValues]) -> bool:
    return sum(clients.select_metric(metric) is not None for clients in tables) > 1


def _list_references(report: ReportData) -> list[str]:
    further_methods = [method for method in report.table.of_method if method != report.reference]
    return [report.reference, *further_methods][:MOST_REFERENCES]


def _build_view(report: ReportData, metric: str, reference: str) -> dict[str, Any]:
    """Return the rows of the table for a metric and a reference, by method, as the page's script reads them.

    A row has texts, numbers to sort by, and positions of the drawn interval in percent.
    """
    methods = {standing.row.method: standing for standing in standings(report.runs, reference or None, metric)}
    gains = [s.against.gain for s in methods.values() if s.against and s.against.runs]
    ends = [0.0, *(end for gain in gains for end in (gain.low, gain.mean, gain.high) if end is not None)]
    low, high = min(ends), max(ends)
    margin = 0.06 * (high - low) or 1.0
    metric_spec = metric_of(metric)
    best = max((metric_spec.direction * s.row.mean for s in methods.values()), default=0.0)
    rows = {
        method: {**_build_row(s, low - margin, high + margin), "best": metric_spec.direction * s.row.mean == best}
        for method, s in methods.items()
    }
    return {"title": directed_title(metric), "reference": display_name(reference), "rows": rows}


def _build_row(standing: Standing, low: float, high: float) -> dict[str, Any]:
    """Return the row of a method; ``low`` and ``high`` are the ends of the axis of the drawn intervals."""
    _, seeds, mean, gain, _, worst, tenth, megabytes, seconds = format_cells(standing)
    row, against, p = standing.row, standing.against, standing.p
    sent = standing.megabytes
    entries: dict[str, Any] = {"text": [mean, gain, worst, tenth, megabytes, seconds, seeds, _format_p_value(p)]}
    entries["sort"] = [row.mean, None, row.worst, row.tenth_worst, sent, row.wall_seconds, len(row.seeds), p]
    if against is not None and against.runs:
        places = [against.gain.low, against.gain.mean, against.gain.high, 0.0]
        entries["sort"][1] = against.gain.mean
        entries["forest"] = [None if v is None else round(100 * (v - low) / (high - low), 1) for v in places]
        entries["share"] = [against.worse, against.equal, against.better]
        entries["sign"] = against.gain.sign
    return entries


def _format_p_value(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}" if value >= 1e-3 else "< 0.001"


def _build_board(report: ReportData, methods: Sequence[str], view: dict[str, Any]) -> str:
    heads = [
        ("", "Method"),
        ("mean", f"{view['title']}, mean ± std over seeds"),
        ("gain", f"Better than {view['reference']} by, 95 % interval over clients and seeds"),
        ("counts", "Client-runs worse, equal, better"),
        ("worst", "Worst client"),
        ("tenth", "10 % worst"),
        ("sent", "Sent (MB)"),
        ("time", "Wall time (s)"),
        ("seeds", "Seeds"),
        ("p-value", "p (Holm)"),
    ]
    head = "".join(build_column_head(text, sortable=True, name=name) for name, text in heads)
    rows = "\n".join(_build_board_row(report, method, view["rows"].get(method)) for method in methods)
    inside = f'<table class="sortable" id="board"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>'
    return wrap_scrollable("Leaderboard", inside)


def _build_board_row(report: ReportData, method: str, row: dict[str, Any] | None) -> str:
    head = f'<th scope="row">{label_method(method, report.looks)}</th>'
    if row is None:
        return f'<tr data-method="{escape(method, quote=True)}">{head}</tr>'
    mean, gain, worst, tenth, *further_texts = (escape(text) for text in row["text"])
    shares = draw_shares(*row["share"]) if "share" in row else ""
    cells = [
        f"<td>{mean}</td>",
        f'<td class="gain">{_draw_interval(row)}<small>{gain}</small></td>',
        f'<td class="counts">{shares}<small>{_format_counts(row)}</small></td>',
        *(f"<td>{text}</td>" for text in (worst, tenth, *further_texts[:-1])),
        f'<td class="p-value">{further_texts[-1]}</td>',
    ]
    best = ' class="best"' if row["best"] else ""
    return f'<tr data-method="{escape(method, quote=True)}"{best}>{head}{"".join(cells)}</tr>'


def _format_counts(row: dict[str, Any]) -> str:
    return " / ".join(map(str, row["share"])) if "share" in row else UNKNOWN


def _draw_interval(row: dict[str, Any]) -> str:
    """Return the interval as a line with a dot, and a mark at 0; empty without a difference."""
    if "forest" not in row:
        return ""
    low, mid, high, zero = row["forest"]
    ends = "" if low is None else f"--low:{low};--high:{high};"
    line = '<i class="range"></i>' if low is not None else ""
    colour = {1: "better", 0: "muted", -1: "worse"}[row["sign"]]
    style = f"{ends}--mid:{mid};--zero:{zero};color:var(--{colour})"
    return (
        f'<span class="forest" style="{style}" aria-hidden="true"><i class="zero"></i>{line}<i class="mid"></i></span>'
    )


def _build_copy_buttons() -> str:
    kinds = {"csv": "CSV", "markdown": "Markdown", "latex": "LaTeX"}
    buttons = "".join(f'<button type="button" data-copy="{kind}">{text}</button>' for kind, text in kinds.items())
    area = '<textarea readonly hidden aria-label="The table as text"></textarea>'
    return f'<div class="copy script-only" data-of="board"><span>Copy as</span>{buttons}<output></output>{area}</div>'
