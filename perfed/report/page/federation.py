"""The sections on the federation (the clients' data, metrics before and after local training) and on domains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.page import svg
from perfed.report.page.heat import draw_heat_map
from perfed.report.page.html import build_grid, build_note, build_section, build_table, wrap_figure
from perfed.report.page.page_data import ReportData, spread_indices
from perfed.report.page.style import Look, css_colour
from perfed.report.run_results import ClientData, find_federation_data
from perfed.report.tables import OVER_DOMAINS, domain_tables
from perfed.report.text import axis_title

MOST_LINES = 150  # clients of a method drawn in the figure before and after local training
READ_BEFORE_AFTER = (
    "Before → after local training: each line is a client that took part in the last round, averaged over the seeds; "
    "the thick line is their mean."
)
BARS = 60  # clients drawn as bars


def federation_section(report: ReportData) -> str:
    """Return the figures with notes; empty if the runs kept no data on the clients."""
    source = find_federation_data(report.runs)
    figures = federation_figures(report)
    notes = []
    if source is not None:
        notes.append(f"Training rows of seed {source[0].seed}; colours begin at 0. Data: {source[1].data}.")
    if "before-after" in figures:
        notes.append(READ_BEFORE_AFTER)
    return build_section(
        "federation", "The federation", build_grid(*map(wrap_figure, figures.values())), *map(build_note, notes)
    )


def federation_figures(report: ReportData) -> dict[str, str]:
    """Return figures by name: rows by class and domain, rows, columns, metrics before and after local training."""
    source, figures = find_federation_data(report.runs), {}
    if source is not None:
        federation, clients = source[1], source[1].clients
        for name, kind, names in (("classes", "class", federation.classes), ("domains", "domain", federation.domains)):
            counts = [getattr(client, name) for client in clients.values()]
            if names and any(counts):
                table = np.array([row or [0] * len(names) for row in counts], dtype=float)
                figures[f"partition-{name}"] = draw_heat_map(
                    f"Training rows by client and {kind}", list(clients), names, table
                )
        figures["rows"] = _draw_rows(clients)
        if any(client.columns for client in clients.values()):
            figures["columns"] = _draw_columns(clients)
    figures["before-after"] = _draw_before_after(report)
    return {name: figure for name, figure in figures.items() if figure}


def _draw_rows(clients: Mapping[str, ClientData]) -> str:
    """Return a bar chart of the clients' numbers of rows, the largest first."""
    splits = [split for split in ("train", "validation", "test") if any(split in c.rows for c in clients.values())]
    totals = {site: [client.rows.get(split, 0) for split in splits] for site, client in clients.items()}
    return draw_stacked_bars("Rows of each client", splits, totals)


def _draw_columns(clients: Mapping[str, ClientData]) -> str:
    """Return a bar chart of the columns that all clients, several clients, or a single client have."""
    kinds = [kind for kind in ("shared", "some", "own") if any(c.columns.get(kind) for c in clients.values())]
    totals = {site: [c.columns.get(kind, 0) for kind in kinds] for site, c in clients.items()}
    return draw_stacked_bars("Columns of each client", kinds, totals)


def draw_stacked_bars(title: str, kinds: Sequence[str], totals: Mapping[str, Sequence[int]]) -> str:
    """Return a bar chart with a stacked bar per client, the tallest first.

    Args:
        title: the title of the figure.
        kinds: the names of the parts of a bar.
        totals: the length of each part by client; of more than :data:`BARS` clients, evenly spread ones are drawn.
    """
    order = sorted(totals, key=lambda site: -sum(totals[site]))
    sites = [order[i] for i in spread_indices(len(order), BARS)]
    frame = svg.create_axes(
        (0, len(sites)), svg.compute_axis_range([sum(totals[site]) for site in sites], zero=True), ("", title), top=48
    )
    entries, _ = svg.draw_legend([(kind, Look(css_colour(f"c{i + 1}"), "")) for i, kind in enumerate(kinds)])
    parts, wide = [entries, frame.draw_vertical()], 0.8 * (frame.x(1) - frame.x(0))
    for place, site in enumerate(sites):
        below = 0
        for i, count in enumerate(totals[site]):
            top, ground = frame.y(below + count), frame.y(below)
            if count:
                hint = f"client {site}: {count} {kinds[i]}"
                parts.append(svg.draw_bar(frame.x(place + 0.1), top, wide, ground - top, css_colour(f"c{i + 1}"), hint))
            below += count
    selection = "" if len(sites) == len(order) else f", {len(sites)} of them shown"
    words = f"{len(order)} clients, the largest first{selection}"
    parts.append(svg.draw_text(frame.x.end, frame.y.start + 20, words, text_anchor="end"))
    return svg.build_drawing(title, words, *parts)


def _draw_before_after(report: ReportData) -> str:
    """Return a figure with the metric before and after local training by client; empty if no run has both."""
    pairs_by_method = {}
    for method in report.methods:
        pairs: dict[str, list[tuple[float, float]]] = {}
        for run in report.members(method):
            if run.clients is not None and run.clients.metric == report.metric:
                for site, before, after in zip(run.clients.ids, run.clients.before, run.clients.after, strict=True):
                    if np.isfinite(before + after):
                        pairs.setdefault(site, []).append((before, after))
        if pairs:
            pairs_by_method[method] = report.metric_spec.scale * np.array(
                [np.mean(seed_pairs, axis=0) for seed_pairs in pairs.values()]
            )
    if not pairs_by_method:
        return ""
    title = f"{axis_title(str(report.metric))}, before → after local training"
    ends = svg.compute_axis_range(
        np.concatenate([*pairs_by_method.values()]).ravel().tolist(), limits=report.metric_spec.shown_span
    )
    entries, top = svg.draw_legend([(display_name(method), report.looks[method]) for method in pairs_by_method])
    frame = svg.create_axes((0, len(pairs_by_method)), ends, ("", title), top=top + 22)
    parts = [entries, frame.draw_vertical()]
    for place, (method, pairs_) in enumerate(pairs_by_method.items()):
        left, right = frame.x(place + 0.25), frame.x(place + 0.75)
        shown_pairs = pairs_[spread_indices(len(pairs_), MOST_LINES)]
        d = "".join(svg.format_path([(left, frame.y(a)), (right, frame.y(b))]) for a, b in shown_pairs.tolist())
        colour, (before, after) = report.looks[method].colour, pairs_.mean(0).tolist()
        moments = f"{before:.4g} before, {after:.4g} after local training"
        hint = svg.build_tooltip(f"{display_name(method)}: {moments}, {len(pairs_)} clients")
        ends_ = svg.format_path([(left, frame.y(before)), (right, frame.y(after))])
        parts.append(svg.build_element("path", d=d, stroke=colour, fill="none", opacity=0.35))
        parts.append(svg.build_element("path", hint, d=ends_, stroke=colour, stroke_width=4, stroke_linecap="round"))
    description = "; ".join(
        f"{display_name(m)}: {p.mean(0)[0]:.4g} → {p.mean(0)[1]:.4g}" for m, p in pairs_by_method.items()
    )
    return svg.build_drawing(title, description, *parts, height=svg.HEIGHT - 30)


MOST_DOMAINS = 40
READ_DOMAINS = (
    "A dot is the mean over the seeds, its line goes from the lowest to the highest seed; n: the number of evaluated "
    "samples. Gap: the difference between a method's best and worst domain; a smaller gap is fairer."
)
LINE = 9.0  # between methods of a domain


def domains_section(report: ReportData) -> str:
    """Return a dot plot of the main metric (or the first one measured by domain), and the tables of all metrics."""
    tables = domain_tables(report.runs)
    figure = "".join(domain_figures(report).values())
    return build_section(
        "domains",
        "Domains",
        build_grid(wrap_figure(figure)),
        build_note(READ_DOMAINS if figure else ""),
        *map(build_table, tables),
    )


def domain_figures(report: ReportData) -> dict[str, str]:
    """Return the dot plot by name; empty if nothing was measured by domain."""
    runs = [run.summary for run in report.runs if run.summary and run.summary.domains]
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.domains))
    if not metrics:
        return {}
    metric = str(report.metric) if report.metric in metrics else metrics[0]
    by_method = {m: [r.domains[metric] for r in runs if r.method == m and metric in r.domains] for m in report.methods}
    values = {method: by_seed for method, by_seed in by_method.items() if by_seed}
    sizes = {name: count for run in runs for name, count in run.domain_samples.items()}
    names = dict.fromkeys(
        name for by_seed in values.values() for by_domain in by_seed for name in by_domain if name not in OVER_DOMAINS
    )
    return {"domains": _draw_domains(report, metric, values, {n: sizes.get(n) for n in list(names)[:MOST_DOMAINS]})}


def _draw_domains(
    report: ReportData, metric: str, values: dict[str, list[dict[str, float]]], sizes: dict[str, int | None]
) -> str:
    metric_spec, looks = metric_of(metric), report.looks
    gaps = {
        m: metric_spec.scale * float(np.mean([by_domain["max"] - by_domain["min"] for by_domain in by_seed]))
        for m, by_seed in values.items()
    }
    entries, top = svg.draw_legend([(f"{display_name(m)} (gap {gaps[m]:.3g})", looks[m]) for m in values])
    labels = {n: n if size is None else f"{n} (n = {size})" for n, size in sizes.items()}
    row = LINE * len(values) + 12
    height = top + row * len(sizes) + 54
    all_values = [
        metric_spec.scale * by_domain[n]
        for by_seed in values.values()
        for by_domain in by_seed
        for n in sizes
        if n in by_domain
    ]
    log = bool(not metric_spec.percent and min(all_values) > 0 and max(all_values) / min(all_values) >= 100)
    left = min(190.0, 14 + max(svg.estimate_width(label) for label in labels.values()))
    x = svg.Scale(*svg.compute_axis_range(all_values, log=log), left, svg.WIDTH - 14, log)
    frame = svg.Axes(x, svg.Scale(0, 1, height - 44, top), axis_title(metric), "")
    parts = [entries, frame.draw_horizontal()]
    for place, (name, label) in enumerate(labels.items()):
        row_top = top + 6 + row * place
        ends = svg.format_path([(x.start, row_top + row - 6), (x.end, row_top + row - 6)])
        parts += [
            svg.build_element("path", d=ends, stroke=css_colour("line")),
            svg.draw_text(4, row_top + row / 2, label[:26]),
        ]
        for line, (method, by_seed) in enumerate(values.items()):
            seed_values = [
                metric_spec.scale * by_domain[name] for by_domain in by_seed if np.isfinite(by_domain.get(name, np.nan))
            ]
            if seed_values:
                height_ = row_top + 4 + LINE * (line + 0.5)
                lowest, mean, highest = min(seed_values), float(np.mean(seed_values)), max(seed_values)
                hint = f"{display_name(method)}, {label}: {mean:.4g}, seeds {lowest:.4g} to {highest:.4g}"
                colour = looks[method].colour
                spread = svg.format_path([(x(min(seed_values)), height_), (x(max(seed_values)), height_)])
                parts.append(svg.build_element("path", d=spread, stroke=colour, stroke_width=1.5))
                parts.append(svg.draw_dot(x(float(np.mean(seed_values))), height_, colour, hint, r=4))
    description = "; ".join(f"{display_name(m)}: gap {gap:.3g}" for m, gap in gaps.items())
    return svg.build_drawing(f"{axis_title(metric)} by domain", description, *parts, height=height)
