"""Who gains and who loses: paired differences of clients to the reference, and a table of the clients to search."""

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

FIRST_ROWS = 10  # that are shown; the others are folded away
MOST_NAMES = 6  # of classes or domains of a client

Column = tuple[str, Callable[[str], str | None]]
"""Head of a column, and its cell of a client."""


def clients_table(report: ReportData) -> str:
    """The table with its search; the script fills it, the first rows are there without. Nothing without clients."""
    sites, metric = report.table.sites, str(report.metric)
    if not report.metric or not sites:
        return ""
    kept = find_federation_data(report.runs)
    columns: list[Column] = [("Client", str), *(_held_columns(kept[1]) if kept else _sample_columns(report))]
    place = {site: column for column, site in enumerate(sites)}
    for method, values in report.table.of_method.items():
        columns.append((f"{display_name(method)}, {axis_title(metric)}", _measured(metric, values, place)))
    rows = [[cell(site) for _, cell in columns] for site in sites]
    head = f"<thead><tr>{''.join(build_column_head(text) for text, _ in columns)}</tr></thead>"
    first = f"{head}<tbody>{''.join(_line(row) for row in rows[:FIRST_ROWS])}</tbody>"
    many = len(rows) > FIRST_ROWS
    search = (
        '<label class="pick">Search clients, classes, domains <input type="search" name="client" autocomplete="off">'
        '</label><span id="clients-found" class="note" role="status"></span>'
    )
    picks = f'<div class="picks script-only">{search}</div>'
    every = f'<table id="clients-table">{f"{head}<tbody></tbody>" if many else first}</table>'
    whole = [picks, wrap_scrollable("All clients", every, "tall")]
    said = f" What clients hold is that of seed {kept[0].seed}." if kept else ""
    words = len(columns) - len(report.table.of_method)
    parts = [
        "<h3>Clients</h3>" if report.reference else "",
        *([wrap_scrollable("The first clients", f"<table>{first}</table>", "brief")] if many else whole),
        build_details(f"All {len(rows)} clients", *whole, printed=True) if many else "",
        build_note(f"Means over the seeds.{said}"),
        embed_data("clients-data", {"rows": rows, "words": words}),
    ]
    return "".join(parts)


def _measured(metric: str, values: Any, place: Mapping[str, int]) -> Callable[[str], str | None]:
    there = np.isfinite(values)
    means = np.where(there, values, 0).sum(0) / np.maximum(there.sum(0), 1)

    def cell(site: str) -> str | None:
        return format_metric(metric, float(means[place[site]])) if there[:, place[site]].any() else None

    return cell


def _held_columns(held: FederationData) -> list[Column]:
    """Rows, classes, domains, columns and inputs; what no client has, or all have the same of, is left out."""
    clients = list(held.clients.values())

    def of(text: Callable[[ClientData], str | None]) -> Callable[[str], str | None]:
        return lambda site: text(held.clients[site]) if site in held.clients else None

    found: list[Column] = [
        (f"Rows: {split}", of(lambda c, split=split: str(c.rows.get(split, 0))))  # type: ignore[misc]
        for split in ("train", "validation", "test")
        if any(split in client.rows for client in clients)
    ]
    if held.classes:
        found.append(("Classes", of(lambda c: _named(c.classes, held.classes))))
    if held.domains:
        found.append(("Domains", of(lambda c: _named(c.domains, held.domains))))
    if any(client.columns for client in clients):
        found.append(("Columns: shared", of(lambda c: str(c.columns.get("shared", 0)))))
        if any(client.columns.get("some") for client in clients):
            found.append(("Columns: some sites", of(lambda c: str(c.columns.get("some", 0)))))
        found.append(("Columns: own", of(lambda c: str(c.columns.get("own", 0)))))
    if len({client.inputs for client in clients}) > 1:
        found.append(("Inputs", of(lambda c: str(c.inputs))))
    return found


def _named(counts: Sequence[int], names: Sequence[str]) -> str:
    there = [name for count, name in zip(counts, names, strict=False) if count]
    if len(there) == len(names) and len(names) > MOST_NAMES:
        return f"all {len(names)}"
    return shorten_list(there, MOST_NAMES)


def _sample_columns(report: ReportData) -> list[Column]:
    """Rows as ``clients.csv`` has them, of runs that kept no more."""
    found: dict[str, dict[str, str]] = {}
    for run in report.runs:
        for name, values in (run.clients.samples or {}).items() if run.clients else ():
            numbers = found.setdefault(f"Rows: {name.removeprefix('n_')}", {})
            for site, value in zip(run.clients.ids, values, strict=True) if run.clients else ():
                numbers.setdefault(site, f"{value:g}")
    return [(name, numbers.get) for name, numbers in found.items()]


def _line(cells: Sequence[str | None]) -> str:
    first, *others = (UNKNOWN if cell is None else escape(cell) for cell in cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'


MANY = 150  # clients from which on single ones are not drawn
CELLS = 40  # along a side of the scatter of many clients

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """A method against the reference, per client: arrays ``(clients,)``, averaged over the common seeds; in points."""

    method: str
    sites: list[str]
    mean: Numbers
    low: Numbers
    high: Numbers
    own: Numbers
    base: Numbers

    @classmethod
    def of(cls, report: ReportData, method: str) -> Paired:
        """Of the clients that both have, from the worst to the best difference."""
        table, scale = report.table, report.metric_spec.scale
        gains = scale * table.gains(method, report.reference, report.metric_spec)
        there = np.flatnonzero(np.isfinite(gains).any(0))
        known = np.isfinite(gains[:, there])
        own, base = (
            np.where(known, scale * table.of_method[name][:, there], 0).sum(0) / known.sum(0)
            for name in (method, report.reference)
        )
        mean = np.where(known, gains[:, there], 0).sum(0) / known.sum(0)
        low, high = np.nanmin(gains[:, there], axis=0), np.nanmax(gains[:, there], axis=0)
        order = np.argsort(mean, kind="stable")
        sites = [table.sites[there[i]] for i in order]
        return cls(method, sites, mean[order], low[order], high[order], own[order], base[order])


def three_intervals(report: ReportData, methods: Sequence[str]) -> dict[str, dict[str, Gain]]:
    """Return three gains of each method, with intervals over clients and seeds, over clients, and over seeds.

    The first interval is that of the verdict. All are corrected for the number of methods.
    """
    table, known, weights = report.table, report.metric_spec, report.table.weights
    counts = count_comparisons(report.reference, table, known)
    gains = {method: table.gains(method, report.reference, known) for method in methods}
    sites, seeds = {}, {}
    for method, cells in gains.items():
        is_measured = np.isfinite(cells)
        cell_weights, values = is_measured * weights, np.where(is_measured, cells, 0.0)
        sites[method] = np.where(is_measured.any(0), values.sum(0) / np.maximum(is_measured.sum(0), 1), np.nan)[None]
        seed_means = (values * weights).sum(1) / np.maximum(cell_weights.sum(1), 1e-300)
        seeds[method] = np.where(is_measured.any(1), seed_means, np.nan)[:, None]
    over_both = {method: verdict.gain for method, verdict in compare_methods(report.reference, table, known).items()}
    over_sites, over_seeds = estimate_gains(sites, weights, counts), estimate_gains(seeds, np.ones(1), counts)
    return {
        method: {
            "clients and seeds": over_both[method],
            "clients alone": over_sites[method].limit(known.widest),
            "seeds alone": over_seeds[method].limit(known.widest),
        }
        for method in methods
    }


READ_INTERVALS = (
    "Three 95 % intervals each, corrected for the number of methods. Over clients and seeds (thick, with the dot): "
    "what the verdict goes by. Over clients alone: would other clients say the same? Over seeds alone: would other "
    "random numbers? Where one of them is the wide one, more of that kind is what a clearer answer needs. Green: "
    "better, purple: worse, grey: no significant difference."
)
_FEW = (
    "Each bar is a client, averaged over the seeds; its line goes from the lowest to the highest seed. In the scatter, "
    "clients above the diagonal (of errors: below it) gain. With other seeds a client may hold other data."
)
_MANY = "Clients averaged over the seeds. There are so many that a dot of the scatter stands for several."


def gains_section(report: ReportData) -> str:
    """Intervals of all methods, then of one that a reader picks the sorted clients and a scatter; then the clients."""
    others = _paired_methods(report)
    panels = {method: build_grid(*(wrap_figure(drawn) for drawn in _of_method(report, method))) for method in others}
    best = max(others, key=lambda method: report.metric_spec.direction * report.table.mean(method), default=None)
    ordered = {method: display_name(method) for method in sorted(others, key=lambda method: method != best)}
    many = bool(others) and len(report.table.sites) > MANY
    told = _MANY if many else _FEW if others else ""
    return build_section(
        "gains",
        "Who gains, who loses" if others else "Clients",
        build_grid(wrap_figure(_forest(report, others)), f"<div>{build_note(READ_INTERVALS)}</div>") if others else "",
        build_switched_panels([build_select("method", "Clients of", ordered)], panels, best),
        build_note(told),
        _sites(report),
        clients_table(report),
    )


def _sites(report: ReportData) -> str:
    """What to use at each site, as the verdict says, all but the first ones folded away; nothing without a verdict."""
    found = report.found
    if found is None or not found.sites:
        return ""
    if len(found.sites) > MANY:
        return build_note(f"What to use at each of the {len(found.sites)} sites is in comparison.json.")
    own = found.site_table
    first, rest = (replace(own, rows=rows) for rows in (own.rows[:FIRST_ROWS], own.rows[FIRST_ROWS:]))
    summary = f"The other {len(rest.rows)} sites"
    return build_table(first) + (
        build_details(summary, build_table(replace(rest, title="")), printed=True) if rest.rows else ""
    )


def _paired_methods(report: ReportData) -> list[str]:
    there = report.table.of_method
    base = there.get(report.reference)
    return [m for m in report.others if base is not None and np.isfinite(there[m] + base).any()]


def _unit(report: ReportData) -> str:
    return "points" if report.metric_spec.percent else str(report.metric)


def _forest(report: ReportData, methods: Sequence[str]) -> str:
    """The three intervals of every method, one below the other."""
    found, base = three_intervals(report, methods), display_name(report.reference)
    scale, most = report.metric_spec.scale, report.metric_spec.scale * report.metric_spec.widest
    ends = [v for of in found.values() for g in of.values() for v in (g.low, g.mean, g.high) if v is not None]
    left = 14 + max(svg.estimate_width(display_name(method)) for method in methods)
    height = 84 + 40 * len(methods)
    axis_ends = svg.compute_axis_range([0.0, *(scale * v for v in ends)], limits=(-most, most))
    x = svg.Scale(*axis_ends, min(left, 200), svg.WIDTH - 14)
    frame = svg.Axes(x, svg.Scale(0, 1, height - 44.0, 26), f"Better than {base} by ({_unit(report)})", "")
    parts = [_key(), frame.draw_horizontal(), svg.draw_rule(x, 0.0, (26.0, height - 44.0), upright=True)]
    for row, (method, three) in enumerate(found.items()):
        at = 44 + 40.0 * row
        parts.append(svg.draw_text(4, at + 11, display_name(method)))
        for line, (over, gain) in enumerate(three.items()):
            parts.append(_interval(report, f"{display_name(method)}, over {over}", gain, x, at + 8 * line))
    told = "Of each method three intervals: over clients and seeds (with the dot), over clients alone, over seeds alone"
    return svg.build_drawing(f"How much better than {base}", told, *parts, height=height)


def _key() -> str:
    """What the three lines are, above them."""
    parts, at = [], 4.0
    for text, width, dash in (
        ("clients and seeds", 3.5, None),
        ("clients alone", 1.5, None),
        ("seeds alone", 1.5, "5 3"),
    ):
        ends = svg.format_path([(at, 10), (at + 22, 10)])
        parts.append(
            svg.build_element("path", d=ends, stroke=css_colour("muted"), stroke_width=width, stroke_dasharray=dash)
        )
        parts.append(svg.draw_text(at + 28, 14, text, fill=css_colour("muted")))
        at += 46 + svg.estimate_width(text)
    return "".join(parts)


def _interval(report: ReportData, name: str, gain: Gain, x: svg.Scale, at: float) -> str:
    both = name.endswith("clients and seeds")
    colour = css_colour({1: "better", 0: "muted", -1: "worse"}[gain.sign])
    parts = [svg.build_tooltip(f"{name}: {_gain(report, gain)}")]
    if gain.low is not None and gain.high is not None:
        ends = [(x(report.metric_spec.scale * end), at) for end in (gain.low, gain.high)]
        dash = "5 3" if name.endswith("seeds alone") else ""
        width = {"stroke_width": 3.5 if both else 1.5, "stroke_linecap": "round"}
        parts.append(
            svg.build_element("path", d=svg.format_path(ends), stroke=colour, stroke_dasharray=dash or None, **width)
        )
    if both:
        parts.append(svg.draw_dot(x(report.metric_spec.scale * gain.mean), at, colour, r=5))
    return svg.build_element("g", *parts)


def _gain(report: ReportData, gain: Gain) -> str:
    metric = str(report.metric)
    if gain.low is None or gain.high is None:
        return f"{format_short(metric, gain.mean, '+')} (no interval)"
    mean, low, high = (format_short(metric, value, "+") for value in (gain.mean, gain.low, gain.high))
    return f"{mean} ({low} to {high})"


def _of_method(report: ReportData, method: str) -> tuple[str, str]:
    paired = Paired.of(report, method)
    return _sorted(report, paired), _scatter(report, paired)


def _sorted(report: ReportData, of: Paired) -> str:
    """A bar per client from no difference to its own, with a line over the seeds; of many clients their outline."""
    many = len(of.mean) > MANY
    values = of.mean if many else np.concatenate([of.low, of.high])
    title = f"{display_name(of.method)} better than {display_name(report.reference)} by ({_unit(report)})"
    most = report.metric_spec.scale * report.metric_spec.widest
    frame = svg.create_axes(
        (0, len(of.mean)), svg.compute_axis_range([0.0, *values.tolist()], limits=(-most, most)), ("", title)
    )
    zero, parts = frame.y(0), [frame.draw_vertical()]
    if many:
        places = spread_indices(len(of.mean), 300)
        for sign, colour in ((-1, "worse"), (1, "better")):
            tops = [(frame.x(i + 0.5), frame.y(max(0.0, sign * of.mean[i]) * sign)) for i in places]
            ends = [(tops[-1][0], zero), (tops[0][0], zero)]
            parts.append(svg.build_element("path", d=svg.format_path([*tops, *ends]) + "Z", fill=css_colour(colour)))
    else:
        wide, seed_line = (frame.x(1) - frame.x(0)) * 0.8, css_colour("ink" if len(of.mean) <= 50 else "muted")
        for i, value in enumerate(of.mean.tolist()):
            top, middle = frame.y(value), frame.x(i + 0.5)
            seeds = f" (seeds {of.low[i]:+.4g} to {of.high[i]:+.4g})" if of.low[i] < of.high[i] else ""
            hint = f"client {of.sites[i]}: {value:+.4g} {_unit(report)}{seeds}"
            colour = css_colour("better" if value > 0 else "worse" if value < 0 else "equal")
            box = (middle - wide / 2, min(top, zero), wide, max(abs(top - zero), 1.0))
            parts.append(svg.draw_bar(*box, colour, hint))
            parts.append(svg.draw_interval(frame.y(of.low[i]), frame.y(of.high[i]), middle, seed_line, upright=True))
    parts.append(svg.draw_line([(frame.x.start, zero), (frame.x.end, zero)], _GROUND))
    worse, equal, better = (int(found.sum()) for found in (of.mean < 0, of.mean == 0, of.mean > 0))
    words = f"{len(of.mean)} clients, sorted: {worse} worse, {equal} equal, {better} better"
    parts.append(svg.draw_text(frame.x.end, frame.y.start + 20, words, text_anchor="end"))
    return svg.build_drawing(title, words, *parts)


_GROUND = Look(css_colour("muted"), "")


def _scatter(report: ReportData, of: Paired) -> str:
    """Each client: the method's value over the reference's; above the diagonal it gains, of errors below it."""
    ends = svg.compute_axis_range([*of.own.tolist(), *of.base.tolist()], limits=report.metric_spec.shown_span)
    title, name, base = axis_title(str(report.metric)), display_name(of.method), display_name(report.reference)
    frame = svg.create_axes(ends, ends, (f"{base}: {title}", f"{name}: {title}"))
    across = [(frame.x(end), frame.y(end)) for end in ends]
    parts = [
        str(frame),
        svg.build_element("path", d=svg.format_path(across), stroke=css_colour("muted"), stroke_dasharray="4 4"),
    ]
    better = report.metric_spec.direction * (of.own - of.base)
    colours = [css_colour("better" if b > 0 else "worse" if b < 0 else "muted") for b in better]
    if len(of.own) <= MANY:
        for i, site in enumerate(of.sites):
            hint = f"client {site}: {name} {of.own[i]:.4g}, {base} {of.base[i]:.4g}"
            parts.append(svg.draw_dot(frame.x(of.base[i]), frame.y(of.own[i]), colours[i], hint, r=4))
    else:
        parts += _binned(frame, of)
    return svg.build_drawing(f"Clients with {name} and with {base}", f"{len(of.own)} clients", *parts)


def _binned(frame: svg.Axes, of: Paired) -> list[str]:
    """Clients that are near each other as one dot, in four sizes, the larger the more they are."""
    counts, ends, _ = np.histogram2d(of.base, of.own, bins=CELLS, range=[[frame.x.low, frame.x.high]] * 2)
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
    """By name: the intervals, and of each method the sorted clients and the scatter."""
    methods = _paired_methods(report)
    found = {"gains": _forest(report, methods)} if methods else {}
    for method in methods:
        name = method_file_name(method)
        found[f"gains-sorted-{name}"], found[f"gains-scatter-{name}"] = _of_method(report, method)
    return found
