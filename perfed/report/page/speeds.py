"""SRPFL's picture: time to an accuracy, accuracy by a client's speed, and who was used when."""

from __future__ import annotations

import numpy as np

from perfed.methods.titles import display_name
from perfed.report.page import svg
from perfed.report.page.heat import heat, pooled
from perfed.report.page.html import figure, grid, note, section, select, switched, table
from perfed.report.page.page_data import Study, file_name, thinned
from perfed.report.page.style import paint
from perfed.report.run_results import ClientValues, Participation, RunResults
from perfed.report.tables import speed_table, target_table
from perfed.report.text import axis_title
from perfed.run.callbacks.targets import format_percent

MOST_DOTS = 400  # clients of a method in the figure of speeds
LINE = 14.0
READ_USED = "Who was used when: a row is a client, the fastest at the top, a column a round; first seed."


def speeds_section(study: Study) -> str:
    """What runs with targets, speeds or partial participation have data for; nothing otherwise."""
    times, speeds = target_table(study.runs), speed_table(study.runs, study.metric)
    figures = speed_figures(study)
    used = {name.removeprefix("used-"): drawn for name, drawn in figures.items() if name.startswith("used-")}
    others = [figure(drawn) for name, drawn in figures.items() if not name.startswith("used-")]
    what = "Virtual time at the end" if any(run.has_clock for run in study.runs) else "Number"
    notes = []
    if times:
        notes.append(
            f"{what} of the first evaluated round whose mean accuracy was at least the target, mean ± std over the "
            "seeds that reached it. Speed-up: the base method's time divided by the method's own, per seed."
        )
    if speeds:
        notes.append(
            "Slower and faster halves: by the mean virtual seconds of a client's replies; those without a reply, and "
            "the middle one of an odd number, belong to neither."
        )
    if used:
        notes.append(READ_USED)
    panels = {name: figure(drawn) for name, drawn in used.items()}
    heading = "Speeds" if speeds else "Time to accuracy" if times else "Who was used when"
    return section(
        "speeds",
        heading,
        table(times) if times else "",
        grid(*others),
        table(speeds) if speeds else "",
        switched(
            [select("used", "Who was used when", {name: display_name(name) for name in used})],
            panels,
        ),
        *map(note, notes),
    )


def speed_figures(study: Study) -> dict[str, str]:
    """By name: time to the targets, metric by speed, and of each method who was used when."""
    found = {"time-to-target": _targets(study), "metric-by-speed": _by_speed(study)}
    for method in study.methods:
        run = study.members(method)[0]
        of = run.participation
        if of is not None and of.partial and run.clients is not None:
            found[f"used-{file_name(method)}"] = _used(run, run.clients, of)
    return {name: drawn for name, drawn in found.items() if drawn}


def _targets(study: Study) -> str:
    """Time to each target, a line per method, on a logarithmic axis; nothing where no target was reached."""
    reached: dict[tuple[float, str], list[float]] = {}
    for run in study.runs:
        for one in (run.summary.targets or []) if run.summary else []:
            if one.virtual_time:
                reached.setdefault((one.accuracy, run.method), []).append(one.virtual_time)
    if not reached:
        return ""
    methods = [m for m in study.methods if any(name == m for _, name in reached)]
    entries, top = svg.legend([(display_name(m), study.looks[m]) for m in methods])
    targets = sorted({target for target, _ in reached}, reverse=True)
    row = LINE * len(methods) + 10
    height = top + row * len(targets) + 50
    every = [time for times in reached.values() for time in times]
    x = svg.Scale(*svg.spanned(every, log=True), 60, svg.WIDTH - 14, log=True)
    clocked = any(run.has_clock for run in study.runs)
    frame = svg.Axes(x, svg.Scale(0, 1, height - 44, top), "Virtual time (s)" if clocked else "Round", "")
    parts = [entries, frame.horizontal()]
    for place, target in enumerate(targets):
        at = top + row * place
        ground = svg.path([(60, at + row), (x.end, at + row)])
        parts += [
            svg.words(4, at + row / 2 + 4, format_percent(target)),
            svg.tag("path", d=ground, stroke=paint("line")),
        ]
        for line, method in enumerate(methods):
            times = reached.get((target, method), [])
            if times:
                height_, colour = at + 5 + LINE * (line + 0.5), study.looks[method].colour
                hint = (
                    f"{display_name(method)} to {format_percent(target)}: {np.mean(times):.4g}, "
                    f"seeds {min(times):.4g} to {max(times):.4g}"
                )
                parts.append(svg.interval(x(min(times)), x(max(times)), height_, colour))
                parts.append(svg.dot(x(float(np.mean(times))), height_, colour, hint, r=4))
    told = "Dots are means over the seeds that got there; what is missing did not"
    return svg.drawing("Time to accuracy", told, *parts, height=height)


def _by_speed(study: Study) -> str:
    """Each client's metric over its mean seconds; nothing where all clients have one speed."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for run in study.runs:
        values = run.clients.select_metric(str(study.metric)) if run.clients and study.metric else None
        if values is not None and values.has_speeds:
            there = np.flatnonzero(np.isfinite(values.seconds) & np.isfinite(values.reported) & (values.seconds > 0))
            own = found.setdefault(run.method, [])
            own += [
                (values.seconds[i], study.known.scale * values.reported[i], f"{values.ids[i]}, seed {run.seed}")
                for i in there
            ]
    found = {method: points for method, points in found.items() if points}
    if not found:
        return ""
    every = [point for points in found.values() for point in points]
    entries, top = svg.legend([(display_name(method), study.looks[method]) for method in found])
    limits = study.known.shown_span
    ends = svg.spanned([p[0] for p in every], log=True), svg.spanned([p[1] for p in every], limits=limits)
    frame = svg.axes(
        *ends, ("Mean virtual seconds of a client's replies", axis_title(str(study.metric))), log=True, top=top + 22
    )
    parts = [entries, str(frame)]
    for method, points in found.items():
        kept, colour = [points[i] for i in thinned(len(points), MOST_DOTS)], study.looks[method].colour
        places = [(frame.x(seconds), frame.y(value)) for seconds, value, _ in kept]
        if len(points) > MOST_DOTS:
            parts.append(svg.dots(places, colour, opacity=0.7))
            continue
        for place, (seconds, value, name) in zip(places, kept, strict=True):
            hint = f"{display_name(method)}, client {name}: {value:.4g}, {seconds:.3g} s"
            parts.append(svg.dot(*place, colour, hint, r=3))
    return svg.drawing("Clients by their speed", f"{len(every)} clients of all methods and seeds", *parts)


def _used(run: RunResults, clients: ClientValues, of: Participation) -> str:
    """Rounds across, clients down by speed; coloured where a client's reply was used."""
    order = np.argsort(np.where(np.isfinite(clients.seconds), clients.seconds, np.inf), kind="stable")
    left, top, width, height = 44.0, 40.0, svg.WIDTH - 58, 200.0
    x = svg.Scale(of.rounds[0] - 0.5, of.rounds[-1] + 0.5, left, left + width)
    frame = svg.Axes(x, svg.Scale(0, 1, top + height, top), "Round", "", counted=True)
    timed, shown = clients.has_speeds, pooled(of.used[:, order].T.astype(float))
    parts = [
        svg.words(4, 14, f"{display_name(run.method)}: used in which rounds", font_weight="bold"),
        *heat(shown, (left, top, width, height), float(shown.max()) or 1.0),
        svg.words(4, top + 12, "fast" if timed else "first", fill=paint("muted")),
        svg.words(4, top + height - 4, "slow" if timed else "last", fill=paint("muted")),
        frame.horizontal(),
    ]
    share = 100 * float(of.used.mean())
    told = f"On average {share:.0f} % of {len(of.ids)} clients were used in a round"
    return svg.drawing(f"{display_name(run.method)}: who was used when", told, *parts, height=top + height + 44)
