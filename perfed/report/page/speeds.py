"""The section on speeds: time to an accuracy, accuracy by a client's speed, and the clients used in each round."""

from __future__ import annotations

import numpy as np

from perfed.methods.titles import display_name
from perfed.report.page import svg
from perfed.report.page.heat import average_blocks, draw_cells
from perfed.report.page.html import (
    build_grid,
    build_note,
    build_section,
    build_select,
    build_switched_panels,
    build_table,
    wrap_figure,
)
from perfed.report.page.page_data import ReportData, method_file_name, spread_indices
from perfed.report.page.style import css_colour
from perfed.report.run_results import ClientValues, Participation, RunResults
from perfed.report.tables import speed_table, target_table
from perfed.report.text import axis_title
from perfed.run.callbacks.targets import format_percent

MOST_DOTS = 400  # clients drawn for a method in the figure of speeds
LINE = 14.0
READ_USED = (
    "Clients used in each round: a row is a client, the fastest at the top, and a column is a round; first seed."
)


def speeds_section(report: ReportData) -> str:
    """Return the section; empty without targets, speeds and partial participation."""
    times, speeds = target_table(report.runs), speed_table(report.runs, report.metric)
    figures = speed_figures(report)
    used_clients = {name.removeprefix("used-"): figure for name, figure in figures.items() if name.startswith("used-")}
    other_figures = [wrap_figure(figure) for name, figure in figures.items() if not name.startswith("used-")]
    quantity = "Virtual time at the end" if any(run.has_clock for run in report.runs) else "Number"
    notes = []
    if times:
        notes.append(
            f"{quantity} of the first evaluated round whose mean accuracy was at least the target, mean ± std over the "
            "seeds that reached it. Speed-up: the base method's time divided by the method's own, per seed."
        )
    if speeds:
        notes.append(
            "Slower and faster halves: by the mean virtual seconds of a client's replies. Clients without a reply, and "
            "the middle one of an odd number of clients, belong to neither half."
        )
    if used_clients:
        notes.append(READ_USED)
    panels = {name: wrap_figure(figure) for name, figure in used_clients.items()}
    heading = "Speeds" if speeds else "Time to accuracy" if times else "Clients used in each round"
    return build_section(
        "speeds",
        heading,
        build_table(times) if times else "",
        build_grid(*other_figures),
        build_table(speeds) if speeds else "",
        build_switched_panels(
            [build_select("used", "Clients used in each round", {name: display_name(name) for name in used_clients})],
            panels,
        ),
        *map(build_note, notes),
    )


def speed_figures(report: ReportData) -> dict[str, str]:
    """Return figures by name: time to the targets, metric by speed, and the clients used in each round by method."""
    figures = {"time-to-target": _draw_targets(report), "metric-by-speed": _draw_speeds(report)}
    for method in report.methods:
        run = report.members(method)[0]
        participation = run.participation
        if participation is not None and participation.partial and run.clients is not None:
            figures[f"used-{method_file_name(method)}"] = _draw_used_clients(run, run.clients, participation)
    return {name: figure for name, figure in figures.items() if figure}


def _draw_targets(report: ReportData) -> str:
    """Return a figure with the time to each target by method; empty if no target was reached."""
    reached: dict[tuple[float, str], list[float]] = {}
    for run in report.runs:
        for target_time in (run.summary.targets or []) if run.summary else []:
            if target_time.virtual_time:
                reached.setdefault((target_time.accuracy, run.method), []).append(target_time.virtual_time)
    if not reached:
        return ""
    methods = [m for m in report.methods if any(name == m for _, name in reached)]
    entries, top = svg.draw_legend([(display_name(m), report.looks[m]) for m in methods])
    targets = sorted({target for target, _ in reached}, reverse=True)
    row = LINE * len(methods) + 10
    height = top + row * len(targets) + 50
    all_times = [time for times in reached.values() for time in times]
    x = svg.Scale(*svg.compute_axis_range(all_times, log=True), 60, svg.WIDTH - 14, log=True)
    clocked = any(run.has_clock for run in report.runs)
    frame = svg.Axes(x, svg.Scale(0, 1, height - 44, top), "Virtual time (s)" if clocked else "Round", "")
    parts = [entries, frame.draw_horizontal()]
    for place, target in enumerate(targets):
        row_top = top + row * place
        ground = svg.format_path([(60, row_top + row), (x.end, row_top + row)])
        parts += [
            svg.draw_text(4, row_top + row / 2 + 4, format_percent(target)),
            svg.build_element("path", d=ground, stroke=css_colour("line")),
        ]
        for line, method in enumerate(methods):
            times = reached.get((target, method), [])
            if times:
                height_, colour = row_top + 5 + LINE * (line + 0.5), report.looks[method].colour
                hint = (
                    f"{display_name(method)} to {format_percent(target)}: {np.mean(times):.4g}, "
                    f"seeds {min(times):.4g} to {max(times):.4g}"
                )
                parts.append(svg.draw_interval(x(min(times)), x(max(times)), height_, colour))
                parts.append(svg.draw_dot(x(float(np.mean(times))), height_, colour, hint, r=4))
    description = "Dots are means over the seeds that reached the target"
    return svg.build_drawing("Time to accuracy", description, *parts, height=height)


def _draw_speeds(report: ReportData) -> str:
    """Return a figure with each client's metric over its mean seconds; empty if all clients have the same speed."""
    points_by_method: dict[str, list[tuple[float, float, str]]] = {}
    for run in report.runs:
        values = run.clients.select_metric(str(report.metric)) if run.clients and report.metric else None
        if values is not None and values.has_speeds:
            usable = np.flatnonzero(np.isfinite(values.seconds) & np.isfinite(values.reported) & (values.seconds > 0))
            method_points = points_by_method.setdefault(run.method, [])
            method_points += [
                (values.seconds[i], report.metric_spec.scale * values.reported[i], f"{values.ids[i]}, seed {run.seed}")
                for i in usable
            ]
    points_by_method = {method: points for method, points in points_by_method.items() if points}
    if not points_by_method:
        return ""
    all_points = [point for points in points_by_method.values() for point in points]
    entries, top = svg.draw_legend([(display_name(method), report.looks[method]) for method in points_by_method])
    limits = report.metric_spec.shown_span
    ends = (
        svg.compute_axis_range([p[0] for p in all_points], log=True),
        svg.compute_axis_range([p[1] for p in all_points], limits=limits),
    )
    frame = svg.create_axes(
        *ends, ("Mean virtual seconds of a client's replies", axis_title(str(report.metric))), log=True, top=top + 22
    )
    parts = [entries, str(frame)]
    for method, points in points_by_method.items():
        shown_points, colour = [points[i] for i in spread_indices(len(points), MOST_DOTS)], report.looks[method].colour
        places = [(frame.x(seconds), frame.y(value)) for seconds, value, _ in shown_points]
        if len(points) > MOST_DOTS:
            parts.append(svg.draw_dots(places, colour, opacity=0.7))
            continue
        for place, (seconds, value, name) in zip(places, shown_points, strict=True):
            hint = f"{display_name(method)}, client {name}: {value:.4g}, {seconds:.3g} s"
            parts.append(svg.draw_dot(*place, colour, hint, r=3))
    return svg.build_drawing("Clients by their speed", f"{len(all_points)} clients of all methods and seeds", *parts)


def _draw_used_clients(run: RunResults, clients: ClientValues, participation: Participation) -> str:
    """Return a heat map of the rounds (columns) in which the replies of clients (rows, by speed) were used."""
    order = np.argsort(np.where(np.isfinite(clients.seconds), clients.seconds, np.inf), kind="stable")
    left, top, width, height = 44.0, 40.0, svg.WIDTH - 58, 200.0
    x = svg.Scale(participation.rounds[0] - 0.5, participation.rounds[-1] + 0.5, left, left + width)
    frame = svg.Axes(x, svg.Scale(0, 1, top + height, top), "Round", "", counted=True)
    timed, shares = clients.has_speeds, average_blocks(participation.used[:, order].T.astype(float))
    parts = [
        svg.draw_text(4, 14, f"{display_name(run.method)}: used in which rounds", font_weight="bold"),
        *draw_cells(shares, (left, top, width, height), float(shares.max()) or 1.0),
        svg.draw_text(4, top + 12, "fast" if timed else "first", fill=css_colour("muted")),
        svg.draw_text(4, top + height - 4, "slow" if timed else "last", fill=css_colour("muted")),
        frame.draw_horizontal(),
    ]
    share = 100 * float(participation.used.mean())
    description = f"On average {share:.0f} % of {len(participation.ids)} clients were used in a round"
    return svg.build_drawing(
        f"{display_name(run.method)}: clients used in each round", description, *parts, height=top + height + 44
    )
