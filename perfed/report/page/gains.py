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
    data,
    details,
    figure,
    grid,
    heading,
    note,
    scrolled,
    section,
    select,
    switched,
    table,
)
from perfed.report.page.page_data import Study, file_name, thinned
from perfed.report.page.style import Look, paint
from perfed.report.run_results import ClientData, FederationData, find_federation_data
from perfed.report.text import UNKNOWN, axis_title, format_metric, format_short

FIRST_ROWS = 10  # that are shown; the others are folded away
MOST_NAMES = 6  # of classes or domains of a client

Column = tuple[str, Callable[[str], str | None]]
"""Head of a column, and its cell of a client."""


def clients_table(study: Study) -> str:
    """The table with its search; the script fills it, the first rows are there without. Nothing without clients."""
    sites, metric = study.table.sites, str(study.metric)
    if not study.metric or not sites:
        return ""
    kept = find_federation_data(study.runs)
    columns: list[Column] = [("Client", str), *(_held_columns(kept[1]) if kept else _sample_columns(study))]
    place = {site: column for column, site in enumerate(sites)}
    for method, values in study.table.of_method.items():
        columns.append((f"{display_name(method)}, {axis_title(metric)}", _measured(metric, values, place)))
    rows = [[cell(site) for _, cell in columns] for site in sites]
    head = f"<thead><tr>{''.join(heading(text) for text, _ in columns)}</tr></thead>"
    first = f"{head}<tbody>{''.join(_line(row) for row in rows[:FIRST_ROWS])}</tbody>"
    many = len(rows) > FIRST_ROWS
    search = (
        '<label class="pick">Search clients, classes, domains <input type="search" name="client" autocomplete="off">'
        '</label><span id="clients-found" class="note" role="status"></span>'
    )
    picks = f'<div class="picks script-only">{search}</div>'
    every = f'<table id="clients-table">{f"{head}<tbody></tbody>" if many else first}</table>'
    whole = [picks, scrolled("All clients", every, "tall")]
    said = f" What clients hold is that of seed {kept[0].seed}." if kept else ""
    words = len(columns) - len(study.table.of_method)
    parts = [
        "<h3>Clients</h3>" if study.reference else "",
        *([scrolled("The first clients", f"<table>{first}</table>", "brief")] if many else whole),
        details(f"All {len(rows)} clients", *whole, printed=True) if many else "",
        note(f"Means over the seeds.{said}"),
        data("clients-data", {"rows": rows, "words": words}),
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


def _sample_columns(study: Study) -> list[Column]:
    """Rows as ``clients.csv`` has them, of runs that kept no more."""
    found: dict[str, dict[str, str]] = {}
    for run in study.runs:
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
    def of(cls, study: Study, method: str) -> Paired:
        """Of the clients that both have, from the worst to the best difference."""
        table, scale = study.table, study.known.scale
        gains = scale * table.gains(method, study.reference, study.known)
        there = np.flatnonzero(np.isfinite(gains).any(0))
        known = np.isfinite(gains[:, there])
        own, base = (
            np.where(known, scale * table.of_method[name][:, there], 0).sum(0) / known.sum(0)
            for name in (method, study.reference)
        )
        mean = np.where(known, gains[:, there], 0).sum(0) / known.sum(0)
        low, high = np.nanmin(gains[:, there], axis=0), np.nanmax(gains[:, there], axis=0)
        order = np.argsort(mean, kind="stable")
        sites = [table.sites[there[i]] for i in order]
        return cls(method, sites, mean[order], low[order], high[order], own[order], base[order])


def three_intervals(study: Study, methods: Sequence[str]) -> dict[str, dict[str, Gain]]:
    """Return three gains of each method, with intervals over clients and seeds, over clients, and over seeds.

    The first interval is that of the verdict. All are corrected for the number of methods.
    """
    table, known, weights = study.table, study.known, study.table.weights
    counts = count_comparisons(study.reference, table, known)
    gains = {method: table.gains(method, study.reference, known) for method in methods}
    sites, seeds = {}, {}
    for method, cells in gains.items():
        is_measured = np.isfinite(cells)
        cell_weights, values = is_measured * weights, np.where(is_measured, cells, 0.0)
        sites[method] = np.where(is_measured.any(0), values.sum(0) / np.maximum(is_measured.sum(0), 1), np.nan)[None]
        seed_means = (values * weights).sum(1) / np.maximum(cell_weights.sum(1), 1e-300)
        seeds[method] = np.where(is_measured.any(1), seed_means, np.nan)[:, None]
    over_both = {method: verdict.gain for method, verdict in compare_methods(study.reference, table, known).items()}
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


def gains_section(study: Study) -> str:
    """Intervals of all methods, then of one that a reader picks the sorted clients and a scatter; then the clients."""
    others = _paired_methods(study)
    panels = {method: grid(*(figure(drawn) for drawn in _of_method(study, method))) for method in others}
    best = max(others, key=lambda method: study.known.direction * study.table.mean(method), default=None)
    ordered = {method: display_name(method) for method in sorted(others, key=lambda method: method != best)}
    many = bool(others) and len(study.table.sites) > MANY
    told = _MANY if many else _FEW if others else ""
    return section(
        "gains",
        "Who gains, who loses" if others else "Clients",
        grid(figure(_forest(study, others)), f"<div>{note(READ_INTERVALS)}</div>") if others else "",
        switched([select("method", "Clients of", ordered)], panels, best),
        note(told),
        _sites(study),
        clients_table(study),
    )


def _sites(study: Study) -> str:
    """What to use at each site, as the verdict says, all but the first ones folded away; nothing without a verdict."""
    found = study.found
    if found is None or not found.sites:
        return ""
    if len(found.sites) > MANY:
        return note(f"What to use at each of the {len(found.sites)} sites is in comparison.json.")
    own = found.site_table
    first, rest = (replace(own, rows=rows) for rows in (own.rows[:FIRST_ROWS], own.rows[FIRST_ROWS:]))
    summary = f"The other {len(rest.rows)} sites"
    return table(first) + (details(summary, table(replace(rest, title="")), printed=True) if rest.rows else "")


def _paired_methods(study: Study) -> list[str]:
    there = study.table.of_method
    base = there.get(study.reference)
    return [m for m in study.others if base is not None and np.isfinite(there[m] + base).any()]


def _unit(study: Study) -> str:
    return "points" if study.known.percent else str(study.metric)


def _forest(study: Study, methods: Sequence[str]) -> str:
    """The three intervals of every method, one below the other."""
    found, base = three_intervals(study, methods), display_name(study.reference)
    scale, most = study.known.scale, study.known.scale * study.known.widest
    ends = [v for of in found.values() for g in of.values() for v in (g.low, g.mean, g.high) if v is not None]
    left = 14 + max(svg.width_of(display_name(method)) for method in methods)
    height = 84 + 40 * len(methods)
    axis_ends = svg.spanned([0.0, *(scale * v for v in ends)], limits=(-most, most))
    x = svg.Scale(*axis_ends, min(left, 200), svg.WIDTH - 14)
    frame = svg.Axes(x, svg.Scale(0, 1, height - 44.0, 26), f"Better than {base} by ({_unit(study)})", "")
    parts = [_key(), frame.horizontal(), svg.rule(x, 0.0, (26.0, height - 44.0), upright=True)]
    for row, (method, three) in enumerate(found.items()):
        at = 44 + 40.0 * row
        parts.append(svg.words(4, at + 11, display_name(method)))
        for line, (over, gain) in enumerate(three.items()):
            parts.append(_interval(study, f"{display_name(method)}, over {over}", gain, x, at + 8 * line))
    told = "Of each method three intervals: over clients and seeds (with the dot), over clients alone, over seeds alone"
    return svg.drawing(f"How much better than {base}", told, *parts, height=height)


def _key() -> str:
    """What the three lines are, above them."""
    parts, at = [], 4.0
    for text, width, dash in (
        ("clients and seeds", 3.5, None),
        ("clients alone", 1.5, None),
        ("seeds alone", 1.5, "5 3"),
    ):
        ends = svg.path([(at, 10), (at + 22, 10)])
        parts.append(svg.tag("path", d=ends, stroke=paint("muted"), stroke_width=width, stroke_dasharray=dash))
        parts.append(svg.words(at + 28, 14, text, fill=paint("muted")))
        at += 46 + svg.width_of(text)
    return "".join(parts)


def _interval(study: Study, name: str, gain: Gain, x: svg.Scale, at: float) -> str:
    both = name.endswith("clients and seeds")
    colour = paint({1: "better", 0: "muted", -1: "worse"}[gain.sign])
    parts = [svg.hint(f"{name}: {_gain(study, gain)}")]
    if gain.low is not None and gain.high is not None:
        ends = [(x(study.known.scale * end), at) for end in (gain.low, gain.high)]
        dash = "5 3" if name.endswith("seeds alone") else ""
        width = {"stroke_width": 3.5 if both else 1.5, "stroke_linecap": "round"}
        parts.append(svg.tag("path", d=svg.path(ends), stroke=colour, stroke_dasharray=dash or None, **width))
    if both:
        parts.append(svg.dot(x(study.known.scale * gain.mean), at, colour, r=5))
    return svg.tag("g", *parts)


def _gain(study: Study, gain: Gain) -> str:
    metric = str(study.metric)
    if gain.low is None or gain.high is None:
        return f"{format_short(metric, gain.mean, '+')} (no interval)"
    mean, low, high = (format_short(metric, value, "+") for value in (gain.mean, gain.low, gain.high))
    return f"{mean} ({low} to {high})"


def _of_method(study: Study, method: str) -> tuple[str, str]:
    paired = Paired.of(study, method)
    return _sorted(study, paired), _scatter(study, paired)


def _sorted(study: Study, of: Paired) -> str:
    """A bar per client from no difference to its own, with a line over the seeds; of many clients their outline."""
    many = len(of.mean) > MANY
    values = of.mean if many else np.concatenate([of.low, of.high])
    title = f"{display_name(of.method)} better than {display_name(study.reference)} by ({_unit(study)})"
    most = study.known.scale * study.known.widest
    frame = svg.axes((0, len(of.mean)), svg.spanned([0.0, *values.tolist()], limits=(-most, most)), ("", title))
    zero, parts = frame.y(0), [frame.vertical()]
    if many:
        places = thinned(len(of.mean), 300)
        for sign, colour in ((-1, "worse"), (1, "better")):
            tops = [(frame.x(i + 0.5), frame.y(max(0.0, sign * of.mean[i]) * sign)) for i in places]
            ends = [(tops[-1][0], zero), (tops[0][0], zero)]
            parts.append(svg.tag("path", d=svg.path([*tops, *ends]) + "Z", fill=paint(colour)))
    else:
        wide, seed_line = (frame.x(1) - frame.x(0)) * 0.8, paint("ink" if len(of.mean) <= 50 else "muted")
        for i, value in enumerate(of.mean.tolist()):
            top, middle = frame.y(value), frame.x(i + 0.5)
            seeds = f" (seeds {of.low[i]:+.4g} to {of.high[i]:+.4g})" if of.low[i] < of.high[i] else ""
            hint = f"client {of.sites[i]}: {value:+.4g} {_unit(study)}{seeds}"
            colour = paint("better" if value > 0 else "worse" if value < 0 else "equal")
            box = (middle - wide / 2, min(top, zero), wide, max(abs(top - zero), 1.0))
            parts.append(svg.bar(*box, colour, hint))
            parts.append(svg.interval(frame.y(of.low[i]), frame.y(of.high[i]), middle, seed_line, upright=True))
    parts.append(svg.line([(frame.x.start, zero), (frame.x.end, zero)], _GROUND))
    worse, equal, better = (int(found.sum()) for found in (of.mean < 0, of.mean == 0, of.mean > 0))
    words = f"{len(of.mean)} clients, sorted: {worse} worse, {equal} equal, {better} better"
    parts.append(svg.words(frame.x.end, frame.y.start + 20, words, text_anchor="end"))
    return svg.drawing(title, words, *parts)


_GROUND = Look(paint("muted"), "")


def _scatter(study: Study, of: Paired) -> str:
    """Each client: the method's value over the reference's; above the diagonal it gains, of errors below it."""
    ends = svg.spanned([*of.own.tolist(), *of.base.tolist()], limits=study.known.shown_span)
    title, name, base = axis_title(str(study.metric)), display_name(of.method), display_name(study.reference)
    frame = svg.axes(ends, ends, (f"{base}: {title}", f"{name}: {title}"))
    across = [(frame.x(end), frame.y(end)) for end in ends]
    parts = [str(frame), svg.tag("path", d=svg.path(across), stroke=paint("muted"), stroke_dasharray="4 4")]
    better = study.known.direction * (of.own - of.base)
    colours = [paint("better" if b > 0 else "worse" if b < 0 else "muted") for b in better]
    if len(of.own) <= MANY:
        for i, site in enumerate(of.sites):
            hint = f"client {site}: {name} {of.own[i]:.4g}, {base} {of.base[i]:.4g}"
            parts.append(svg.dot(frame.x(of.base[i]), frame.y(of.own[i]), colours[i], hint, r=4))
    else:
        parts += _binned(frame, of)
    return svg.drawing(f"Clients with {name} and with {base}", f"{len(of.own)} clients", *parts)


def _binned(frame: svg.Axes, of: Paired) -> list[str]:
    """Clients that are near each other as one dot, in four sizes, the larger the more they are."""
    counts, ends, _ = np.histogram2d(of.base, of.own, bins=CELLS, range=[[frame.x.low, frame.x.high]] * 2)
    middles, parts = (ends[1:] + ends[:-1]) / 2, []
    sizes = np.ceil(4 * np.sqrt(counts / counts.max())).astype(int)
    for size in range(1, 5):
        places = [(frame.x(middles[i]), frame.y(middles[j])) for i, j in np.argwhere(sizes == size).tolist()]
        if places:
            most = int(counts[sizes == size].max())
            hint = svg.hint(f"up to {most} client{'s' if most > 1 else ''} each")
            parts.append(svg.tag("g", hint, svg.dots(places, paint("c1"), r=1.2 * size)))
    return parts


def gain_figures(study: Study) -> dict[str, str]:
    """By name: the intervals, and of each method the sorted clients and the scatter."""
    methods = _paired_methods(study)
    found = {"gains": _forest(study, methods)} if methods else {}
    for method in methods:
        name = file_name(method)
        found[f"gains-sorted-{name}"], found[f"gains-scatter-{name}"] = _of_method(study, method)
    return found
