"""The leaderboard: a row per method; the script changes metric and reference, sorts and copies."""

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

MOST_REFERENCES = 12


def leaderboard_section(report: ReportData) -> str:
    """The table with its controls; nothing where fewer than two methods are finished."""
    if not report.metric or len({run.method for run in report.runs if run.summary}) < 2:
        return ""
    metrics, references = _metrics(report), _references(report)
    views = {f"{m}|{r}": _view(report, m, r) for m in metrics for r in references}
    first = next(iter(views.values()))
    ordered = sorted(first["rows"], key=lambda method: -report.metric_spec.direction * first["rows"][method]["sort"][0])
    controls = [
        build_select("metric", "Metric", {metric: axis_title(metric) for metric in metrics}),
        build_select("reference", "Compared with", {method: display_name(method) for method in references}),
        '<label class="pick"><input type="checkbox" name="p"> p-values</label>',
    ]
    shown = describe_reported_values(report.runs)
    return build_section(
        "leaderboard",
        "Leaderboard",
        f'<div class="picks script-only">{"".join(controls)}</div>',
        _table(report, ordered, first),
        _copy(),
        build_table(beside, looks=report.looks) if (beside := class_table(report.runs)) else "",
        build_note(
            f"{f'Which numbers: {shown}. ' if shown else ''}"
            "Differences are paired: the same client with the same seed, always so that more is better, with a 95 % "
            "interval over clients and seeds. Seeds are averaged. p-values: Wilcoxon's signed-rank test over the "
            "clients, corrected for the number of methods (Holm); below 0.05 a difference is rarely chance."
        ),
        embed_data("views", {"methods": ordered, "views": views}),
    )


def _metrics(report: ReportData) -> list[str]:
    """The main metric first, then what each finished run measured of its clients."""
    known = [run.clients for run in report.runs if run.summary and run.clients]
    names = dict.fromkeys(name for clients in known for name in clients.measured or {})
    main = str(report.metric)
    return [main, *(name for name in names if name != main and _everywhere(name, known))]


def _everywhere(name: str, known: Sequence[ClientValues]) -> bool:
    return sum(clients.select_metric(name) is not None for clients in known) > 1


def _references(report: ReportData) -> list[str]:
    others = [method for method in report.table.of_method if method != report.reference]
    return [report.reference, *others][:MOST_REFERENCES]


def _view(report: ReportData, metric: str, reference: str) -> dict[str, Any]:
    """Rows of the table under a metric, against a reference, by method: texts, numbers to sort by, places to draw."""
    found = {of.row.method: of for of in standings(report.runs, reference or None, metric)}
    gains = [of.against.gain for of in found.values() if of.against and of.against.runs]
    ends = [0.0, *(end for gain in gains for end in (gain.low, gain.mean, gain.high) if end is not None)]
    low, high = min(ends), max(ends)
    margin = 0.06 * (high - low) or 1.0
    known = metric_of(metric)
    best = max((known.direction * of.row.mean for of in found.values()), default=0.0)
    rows = {
        method: {**_row(of, low - margin, high + margin), "best": known.direction * of.row.mean == best}
        for method, of in found.items()
    }
    return {"title": directed_title(metric), "reference": display_name(reference), "rows": rows}


def _row(of: Standing, low: float, high: float) -> dict[str, Any]:
    _, seeds, mean, gain, _, worst, tenth, megabytes, seconds = format_cells(of)
    row, against = of.row, of.against
    found: dict[str, Any] = {"text": [mean, gain, worst, tenth, megabytes, seconds, seeds, _p(of.p)]}
    found["sort"] = [row.mean, None, row.worst, row.tenth_worst, of.megabytes, row.wall_seconds, len(row.seeds), of.p]
    if against is not None and against.runs:
        places = [against.gain.low, against.gain.mean, against.gain.high, 0.0]
        found["sort"][1] = against.gain.mean
        found["forest"] = [None if v is None else round(100 * (v - low) / (high - low), 1) for v in places]
        found["share"] = [against.worse, against.equal, against.better]
        found["sign"] = against.gain.sign
    return found


def _p(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}" if value >= 1e-3 else "< 0.001"


def _table(report: ReportData, methods: Sequence[str], view: dict[str, Any]) -> str:
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
    rows = "\n".join(_line(report, method, view["rows"].get(method)) for method in methods)
    inside = f'<table class="sortable" id="board"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>'
    return wrap_scrollable("Leaderboard", inside)


def _line(report: ReportData, method: str, row: dict[str, Any] | None) -> str:
    head = f'<th scope="row">{label_method(method, report.looks)}</th>'
    if row is None:
        return f'<tr data-method="{escape(method, quote=True)}">{head}</tr>'
    mean, gain, worst, tenth, *others = (escape(text) for text in row["text"])
    cells_ = [
        f"<td>{mean}</td>",
        f'<td class="gain">{_forest(row)}<small>{gain}</small></td>',
        f'<td class="counts">{draw_shares(*row["share"]) if "share" in row else ""}<small>{_counts(row)}</small></td>',
        *(f"<td>{text}</td>" for text in (worst, tenth, *others[:-1])),
        f'<td class="p-value">{others[-1]}</td>',
    ]
    best = ' class="best"' if row["best"] else ""
    return f'<tr data-method="{escape(method, quote=True)}"{best}>{head}{"".join(cells_)}</tr>'


def _counts(row: dict[str, Any]) -> str:
    return " / ".join(map(str, row["share"])) if "share" in row else UNKNOWN


def _forest(row: dict[str, Any]) -> str:
    """The interval as a line with a dot, and where no difference is."""
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


def _copy() -> str:
    kinds = {"csv": "CSV", "markdown": "Markdown", "latex": "LaTeX"}
    buttons = "".join(f'<button type="button" data-copy="{kind}">{text}</button>' for kind, text in kinds.items())
    area = '<textarea readonly hidden aria-label="The table as text"></textarea>'
    return f'<div class="copy script-only" data-of="board"><span>Copy as</span>{buttons}<output></output>{area}</div>'
