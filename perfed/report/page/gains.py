"""The section on gains: paired differences of the clients to the reference, and a searchable table of the clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.errors import shorten_list
from perfed.methods.titles import display_name
from perfed.report.against import compare_methods, count_comparisons
from perfed.report.intervals import Gain, estimate_gains
from perfed.report.page import svg
from perfed.report.page.html import (
    build_column_head,
    build_details,
    build_grid,
    build_note,
    build_section,
    build_select,
    build_switched_panels,
    build_table,
    embed_data,
    wrap_figure,
    wrap_scrollable,
)
from perfed.report.page.page_data import ReportData, method_file_name, spread_indices
from perfed.report.page.style import Look, css_colour
from perfed.report.run_results import ClientData, FederationData, find_federation_data
from perfed.report.text import UNKNOWN, axis_title, format_metric, format_short

FIRST_ROWS = 10  # rows that are always visible; the others are folded
MOST_NAMES = 6  # of classes or domains of a client

Column = tuple[str, Callable[[str], str | None]]
"""The head of a column, and the function that returns a client's cell."""


def build_clients_table(report: ReportData) -> str:
    """Return the searchable table of the clients, which the page's script fills; empty without clients.

    The first rows are part of the HTML.
    """
    sites, metric = report.table.sites, str(report.metric)
    if not report.metric or not sites:
        return ""
    federation = find_federation_data(report.runs)
    columns: list[Column] = [
        ("Client", str),
        *(_build_data_columns(federation[1]) if federation else _build_sample_columns(report)),
    ]
    place = {site: column for column, site in enumerate(sites)}
    for method, values in report.table.of_method.items():
        columns.append((f"{display_name(method)}, {axis_title(metric)}", _build_metric_cells(metric, values, place)))
    rows = [[cell(site) for _, cell in columns] for site in sites]
    head = f"<thead><tr>{''.join(build_column_head(text) for text, _ in columns)}</tr></thead>"
    first = f"{head}<tbody>{''.join(_build_row(row) for row in rows[:FIRST_ROWS])}</tbody>"
    many = len(rows) > FIRST_ROWS
    search = (
        '<label class="pick">Search clients, classes, domains <input type="search" name="client" autocomplete="off">'
        '</label><span id="clients-found" class="note" role="status"></span>'
    )
    picks = f'<div class="picks script-only">{search}</div>'
    full_table = f'<table id="clients-table">{f"{head}<tbody></tbody>" if many else first}</table>'
    searchable_table = [picks, wrap_scrollable("All clients", full_table, "tall")]
    data_note = f" The data of the clients are those of seed {federation[0].seed}." if federation else ""
    searched_columns = len(columns) - len(report.table.of_method)
    parts = [
        "<h3>Clients</h3>" if report.reference else "",
        *([wrap_scrollable("The first clients", f"<table>{first}</table>", "brief")] if many else searchable_table),
        build_details(f"All {len(rows)} clients", *searchable_table, printed=True) if many else "",
        build_note(f"Means over the seeds.{data_note}"),
        embed_data("clients-data", {"rows": rows, "words": searched_columns}),
    ]
    return "".join(parts)


def _build_metric_cells(metric: str, values: Any, place: Mapping[str, int]) -> Callable[[str], str | None]:
    is_measured = np.isfinite(values)
    means = np.where(is_measured, values, 0).sum(0) / np.maximum(is_measured.sum(0), 1)

    def cell(site: str) -> str | None:
        return format_metric(metric, float(means[place[site]])) if is_measured[:, place[site]].any() else None

    return cell


def _build_data_columns(federation: FederationData) -> list[Column]:
    """Return columns on the clients' rows, classes, domains, columns and inputs, as far as they are informative."""
    clients = list(federation.clients.values())

    def make_cell(text: Callable[[ClientData], str | None]) -> Callable[[str], str | None]:
        return lambda site: text(federation.clients[site]) if site in federation.clients else None

    columns: list[Column] = [
        (f"Rows: {split}", make_cell(lambda c, split=split: str(c.rows.get(split, 0))))  # type: ignore[misc]
        for split in ("train", "validation", "test")
        if any(split in client.rows for client in clients)
    ]
    if federation.classes:
        columns.append(("Classes", make_cell(lambda c: _format_names(c.classes, federation.classes))))
    if federation.domains:
        columns.append(("Domains", make_cell(lambda c: _format_names(c.domains, federation.domains))))
    if any(client.columns for client in clients):
        columns.append(("Columns: shared", make_cell(lambda c: str(c.columns.get("shared", 0)))))
        if any(client.columns.get("some") for client in clients):
            columns.append(("Columns: some sites", make_cell(lambda c: str(c.columns.get("some", 0)))))
        columns.append(("Columns: own", make_cell(lambda c: str(c.columns.get("own", 0)))))
    if len({client.inputs for client in clients}) > 1:
        columns.append(("Inputs", make_cell(lambda c: str(c.inputs))))
    return columns


def _format_names(counts: Sequence[int], names: Sequence[str]) -> str:
    present = [name for count, name in zip(counts, names, strict=False) if count]
    if len(present) == len(names) and len(names) > MOST_NAMES:
        return f"all {len(names)}"
    return shorten_list(present, MOST_NAMES)


def _build_sample_columns(report: ReportData) -> list[Column]:
    """Return columns with the numbers of rows in ``clients.csv``, for runs without ``federation.json``."""
    columns: dict[str, dict[str, str]] = {}
    for run in report.runs:
        for name, values in (run.clients.samples or {}).items() if run.clients else ():
            numbers = columns.setdefault(f"Rows: {name.removeprefix('n_')}", {})
            for site, value in zip(run.clients.ids, values, strict=True) if run.clients else ():
                numbers.setdefault(site, f"{value:g}")
    return [(name, numbers.get) for name, numbers in columns.items()]


def _build_row(cells: Sequence[str | None]) -> str:
    first, *values = (UNKNOWN if cell is None else escape(cell) for cell in cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in values)}</tr>'


MANY = 150  # clients from which on single ones are not drawn
CELLS = 40  # along a side of the scatter of many clients

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """The values of a method and the reference by client, sorted by their difference.

    Attributes:
        method: the name of the method.
        sites: the ids of the clients that both have.
        mean, low, high: the mean, least and largest gain over the common seeds, ``(clients,)``, in points.
        value, base: the values of the method and of the reference, averaged over the common seeds.
    """

    method: str
    sites: list[str]
    mean: Numbers
    low: Numbers
    high: Numbers
    value: Numbers
    base: Numbers

    @classmethod
    def from_report(cls, report: ReportData, method: str) -> Paired:
        """Return the differences of ``method`` for the clients that both methods have."""
        table, scale = report.table, report.metric_spec.scale
        gains = scale * table.gains(method, report.reference, report.metric_spec)
        columns = np.flatnonzero(np.isfinite(gains).any(0))
        is_measured = np.isfinite(gains[:, columns])
        value, base = (
            np.where(is_measured, scale * table.of_method[name][:, columns], 0).sum(0) / is_measured.sum(0)
            for name in (method, report.reference)
        )
        mean = np.where(is_measured, gains[:, columns], 0).sum(0) / is_measured.sum(0)
        low, high = np.nanmin(gains[:, columns], axis=0), np.nanmax(gains[:, columns], axis=0)
        order = np.argsort(mean, kind="stable")
        sites = [table.sites[columns[i]] for i in order]
        return cls(method, sites, mean[order], low[order], high[order], value[order], base[order])


def three_intervals(report: ReportData, methods: Sequence[str]) -> dict[str, dict[str, Gain]]:
    """Return three gains of each method, with intervals over clients and seeds, over clients, and over seeds.

    The first interval is that of the verdict. All are corrected for the number of methods.
    """
    table, metric_spec, weights = report.table, report.metric_spec, report.table.weights
    counts = count_comparisons(report.reference, table, metric_spec)
    gains = {method: table.gains(method, report.reference, metric_spec) for method in methods}
    sites, seeds = {}, {}
    for method, cells in gains.items():
        is_measured = np.isfinite(cells)
        cell_weights, values = is_measured * weights, np.where(is_measured, cells, 0.0)
        sites[method] = np.where(is_measured.any(0), values.sum(0) / np.maximum(is_measured.sum(0), 1), np.nan)[None]
        seed_means = (values * weights).sum(1) / np.maximum(cell_weights.sum(1), 1e-300)
        seeds[method] = np.where(is_measured.any(1), seed_means, np.nan)[:, None]
    over_both = {
        method: verdict.gain for method, verdict in compare_methods(report.reference, table, metric_spec).items()
    }
    over_sites, over_seeds = estimate_gains(sites, weights, counts), estimate_gains(seeds, np.ones(1), counts)
    return {
        method: {
            "clients and seeds": over_both[method],
            "clients only": over_sites[method].limit(metric_spec.widest),
            "seeds only": over_seeds[method].limit(metric_spec.widest),
        }
        for method in methods
    }


READ_INTERVALS = (
    "Three 95 % intervals each, corrected for the number of methods. Over clients and seeds (thick, with the dot): "
    "used by the verdict. Over clients only: the variation between clients. Over seeds only: the variation between "
    "trainings. If one of these two is wide, more clients or more seeds are needed for a clearer answer. Green: "
    "better, purple: worse, grey: no significant difference."
)
_FEW = (
    "Each bar is a client, averaged over the seeds; its line goes from the lowest to the highest seed. In the scatter, "
    "clients above the diagonal (for errors: below it) gain. A client may have different data with each seed."
)
_MANY = "Clients averaged over the seeds. Because there are many, a dot of the scatter stands for several clients."


def gains_section(report: ReportData) -> str:
    """Return the section: intervals of all methods, figures of a selectable method, and tables of the clients."""
    methods = _list_paired_methods(report)
    panels = {
        method: build_grid(*(wrap_figure(figure) for figure in _draw_method(report, method))) for method in methods
    }
    best = max(methods, key=lambda method: report.metric_spec.direction * report.table.mean(method), default=None)
    ordered = {method: display_name(method) for method in sorted(methods, key=lambda method: method != best)}
    many = bool(methods) and len(report.table.sites) > MANY
    explanation = _MANY if many else _FEW if methods else ""
    return build_section(
        "gains",
        "Who gains, who loses" if methods else "Clients",
        build_grid(wrap_figure(_draw_intervals(report, methods)), f"<div>{build_note(READ_INTERVALS)}</div>")
        if methods
        else "",
        build_switched_panels([build_select("method", "Clients of", ordered)], panels, best),
        build_note(explanation),
        _build_recommendations(report),
        build_clients_table(report),
    )


def _build_recommendations(report: ReportData) -> str:
    """Return the table of recommendations for the sites, folded after the first rows; empty without a verdict."""
    verdict = report.verdict
    if verdict is None or not verdict.sites:
        return ""
    if len(verdict.sites) > MANY:
        return build_note(f"The recommendations for the {len(verdict.sites)} sites are in comparison.json.")
    sites = verdict.site_table
    first, folded = (replace(sites, rows=rows) for rows in (sites.rows[:FIRST_ROWS], sites.rows[FIRST_ROWS:]))
    summary = f"The other {len(folded.rows)} sites"
    return build_table(first) + (
        build_details(summary, build_table(replace(folded, title="")), printed=True) if folded.rows else ""
    )


def _list_paired_methods(report: ReportData) -> list[str]:
    values = report.table.of_method
    base = values.get(report.reference)
    return [m for m in report.others if base is not None and np.isfinite(values[m] + base).any()]


def _get_unit(report: ReportData) -> str:
    return "points" if report.metric_spec.percent else str(report.metric)


def _draw_intervals(report: ReportData, methods: Sequence[str]) -> str:
    """Return a figure with the three intervals of every method."""
    intervals, base = three_intervals(report, methods), display_name(report.reference)
    scale, most = report.metric_spec.scale, report.metric_spec.scale * report.metric_spec.widest
    ends = [
        v
        for method_gains in intervals.values()
        for g in method_gains.values()
        for v in (g.low, g.mean, g.high)
        if v is not None
    ]
    left = 14 + max(svg.estimate_width(display_name(method)) for method in methods)
    height = 84 + 40 * len(methods)
    axis_ends = svg.compute_axis_range([0.0, *(scale * v for v in ends)], limits=(-most, most))
    x = svg.Scale(*axis_ends, min(left, 200), svg.WIDTH - 14)
    frame = svg.Axes(x, svg.Scale(0, 1, height - 44.0, 26), f"Better than {base} by ({_get_unit(report)})", "")
    parts = [_draw_key(), frame.draw_horizontal(), svg.draw_rule(x, 0.0, (26.0, height - 44.0), upright=True)]
    for row, (method, method_gains) in enumerate(intervals.items()):
        row_top = 44 + 40.0 * row
        parts.append(svg.draw_text(4, row_top + 11, display_name(method)))
        for line, (over, gain) in enumerate(method_gains.items()):
            parts.append(_draw_gain(report, f"{display_name(method)}, over {over}", gain, x, row_top + 8 * line))
    description = (
        "Of each method three intervals: over clients and seeds (with the dot), over clients only, over seeds only"
    )
    return svg.build_drawing(f"How much better than {base}", description, *parts, height=height)


def _draw_key() -> str:
    """Return the legend of the three kinds of intervals."""
    parts, x = [], 4.0
    for text, width, dash in (
        ("clients and seeds", 3.5, None),
        ("clients only", 1.5, None),
        ("seeds only", 1.5, "5 3"),
    ):
        ends = svg.format_path([(x, 10), (x + 22, 10)])
        parts.append(
            svg.build_element("path", d=ends, stroke=css_colour("muted"), stroke_width=width, stroke_dasharray=dash)
        )
        parts.append(svg.draw_text(x + 28, 14, text, fill=css_colour("muted")))
        x += 46 + svg.estimate_width(text)
    return "".join(parts)


def _draw_gain(report: ReportData, name: str, gain: Gain, x: svg.Scale, y: float) -> str:
    is_main = name.endswith("clients and seeds")
    colour = css_colour({1: "better", 0: "muted", -1: "worse"}[gain.sign])
    parts = [svg.build_tooltip(f"{name}: {_format_gain(report, gain)}")]
    if gain.low is not None and gain.high is not None:
        ends = [(x(report.metric_spec.scale * end), y) for end in (gain.low, gain.high)]
        dash = "5 3" if name.endswith("seeds only") else ""
        width = {"stroke_width": 3.5 if is_main else 1.5, "stroke_linecap": "round"}
        parts.append(
            svg.build_element("path", d=svg.format_path(ends), stroke=colour, stroke_dasharray=dash or None, **width)
        )
    if is_main:
        parts.append(svg.draw_dot(x(report.metric_spec.scale * gain.mean), y, colour, r=5))
    return svg.build_element("g", *parts)


def _format_gain(report: ReportData, gain: Gain) -> str:
    metric = str(report.metric)
    if gain.low is None or gain.high is None:
        return f"{format_short(metric, gain.mean, '+')} (no interval)"
    mean, low, high = (format_short(metric, value, "+") for value in (gain.mean, gain.low, gain.high))
    return f"{mean} ({low} to {high})"


def _draw_method(report: ReportData, method: str) -> tuple[str, str]:
    paired = Paired.from_report(report, method)
    return _draw_sorted(report, paired), _draw_scatter(report, paired)


def _draw_sorted(report: ReportData, paired: Paired) -> str:
    """Return a figure with a bar for each client's gain and a line over the seeds; for many clients, an outline."""
    many = len(paired.mean) > MANY
    values = paired.mean if many else np.concatenate([paired.low, paired.high])
    title = f"{display_name(paired.method)} better than {display_name(report.reference)} by ({_get_unit(report)})"
    most = report.metric_spec.scale * report.metric_spec.widest
    frame = svg.create_axes(
        (0, len(paired.mean)), svg.compute_axis_range([0.0, *values.tolist()], limits=(-most, most)), ("", title)
    )
    zero, parts = frame.y(0), [frame.draw_vertical()]
    if many:
        places = spread_indices(len(paired.mean), 300)
        for sign, colour in ((-1, "worse"), (1, "better")):
            tops = [(frame.x(i + 0.5), frame.y(max(0.0, sign * paired.mean[i]) * sign)) for i in places]
            ends = [(tops[-1][0], zero), (tops[0][0], zero)]
            parts.append(svg.build_element("path", d=svg.format_path([*tops, *ends]) + "Z", fill=css_colour(colour)))
    else:
        wide, seed_line = (frame.x(1) - frame.x(0)) * 0.8, css_colour("ink" if len(paired.mean) <= 50 else "muted")
        for i, value in enumerate(paired.mean.tolist()):
            top, middle = frame.y(value), frame.x(i + 0.5)
            seeds = f" (seeds {paired.low[i]:+.4g} to {paired.high[i]:+.4g})" if paired.low[i] < paired.high[i] else ""
            hint = f"client {paired.sites[i]}: {value:+.4g} {_get_unit(report)}{seeds}"
            colour = css_colour("better" if value > 0 else "worse" if value < 0 else "equal")
            box = (middle - wide / 2, min(top, zero), wide, max(abs(top - zero), 1.0))
            parts.append(svg.draw_bar(*box, colour, hint))
            parts.append(
                svg.draw_interval(frame.y(paired.low[i]), frame.y(paired.high[i]), middle, seed_line, upright=True)
            )
    parts.append(svg.draw_line([(frame.x.start, zero), (frame.x.end, zero)], _GROUND))
    worse, equal, better = (int(mask.sum()) for mask in (paired.mean < 0, paired.mean == 0, paired.mean > 0))
    words = f"{len(paired.mean)} clients, sorted: {worse} worse, {equal} equal, {better} better"
    parts.append(svg.draw_text(frame.x.end, frame.y.start + 20, words, text_anchor="end"))
    return svg.build_drawing(title, words, *parts)


_GROUND = Look(css_colour("muted"), "")


def _draw_scatter(report: ReportData, paired: Paired) -> str:
    """Return a scatter plot of the clients: the value of the method against the value of the reference."""
    ends = svg.compute_axis_range([*paired.value.tolist(), *paired.base.tolist()], limits=report.metric_spec.shown_span)
    title, name, base = axis_title(str(report.metric)), display_name(paired.method), display_name(report.reference)
    frame = svg.create_axes(ends, ends, (f"{base}: {title}", f"{name}: {title}"))
    across = [(frame.x(end), frame.y(end)) for end in ends]
    parts = [
        str(frame),
        svg.build_element("path", d=svg.format_path(across), stroke=css_colour("muted"), stroke_dasharray="4 4"),
    ]
    better = report.metric_spec.direction * (paired.value - paired.base)
    colours = [css_colour("better" if b > 0 else "worse" if b < 0 else "muted") for b in better]
    if len(paired.value) <= MANY:
        for i, site in enumerate(paired.sites):
            hint = f"client {site}: {name} {paired.value[i]:.4g}, {base} {paired.base[i]:.4g}"
            parts.append(svg.draw_dot(frame.x(paired.base[i]), frame.y(paired.value[i]), colours[i], hint, r=4))
    else:
        parts += _draw_binned(frame, paired)
    return svg.build_drawing(f"Clients with {name} and with {base}", f"{len(paired.value)} clients", *parts)


def _draw_binned(frame: svg.Axes, paired: Paired) -> list[str]:
    """Return dots that stand for several clients with similar values, in four sizes by their number."""
    counts, ends, _ = np.histogram2d(paired.base, paired.value, bins=CELLS, range=[[frame.x.low, frame.x.high]] * 2)
    middles, parts = (ends[1:] + ends[:-1]) / 2, []
    sizes = np.ceil(4 * np.sqrt(counts / counts.max())).astype(int)
    for size in range(1, 5):
        places = [(frame.x(middles[i]), frame.y(middles[j])) for i, j in np.argwhere(sizes == size).tolist()]
        if places:
            most = int(counts[sizes == size].max())
            hint = svg.build_tooltip(f"up to {most} client{'s' if most > 1 else ''} each")
            parts.append(svg.build_element("g", hint, svg.draw_dots(places, css_colour("c1"), r=1.2 * size)))
    return parts


def gain_figures(report: ReportData) -> dict[str, str]:
    """Return figures by name: the intervals, and the sorted clients and the scatter of each method."""
    methods = _list_paired_methods(report)
    figures = {"gains": _draw_intervals(report, methods)} if methods else {}
    for method in methods:
        name = method_file_name(method)
        figures[f"gains-sorted-{name}"], figures[f"gains-scatter-{name}"] = _draw_method(report, method)
    return figures
