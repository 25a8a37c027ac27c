"""The page of a campaign or a sweep: tables, the verdict of each comparison, and the effect of a sweep's key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.campaign import Grid, Part, Series, grids, methods_in, series, value_of
from perfed.report.curves import ROUNDS, metric_curves
from perfed.report.intervals import Gain
from perfed.report.page import svg
from perfed.report.page.curves import DECADES, choose_value_range, draw_curves
from perfed.report.page.html import (
    build_note,
    build_radio,
    build_section,
    build_select,
    build_switched_panels,
    build_table,
    wrap_figure,
)
from perfed.report.page.page_data import method_file_name
from perfed.report.page.paper import make_standalone
from perfed.report.page.style import Look, assign_looks, write_page
from perfed.report.text import directed_title

READ_SWEEP = (
    "Dots: means over clients and seeds; bars: 95 % intervals over both, as in verdicts. "
    "For domains and times: means over the seeds, with bars from the lowest to the highest seed."
)
DODGE = 5.0  # horizontal distance between methods at the same value
BUTTONS = {
    "mean": "Mean",
    "tenth": "10 % worst clients",
    "domains": "Domains",
    "worst-domain": "Worst domain",
    "seconds": "Time",
}


@dataclass(frozen=True)
class Places(svg.Scale):
    """A scale with explicit ticks; ``marks`` are their values and texts."""

    marks: tuple[tuple[float, str], ...] = ()

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Return the ticks whose texts do not overlap with the previous one."""
        ticks: list[tuple[float, str]] = []
        end = -np.inf
        for value, text in self.marks:
            half = svg.estimate_width(text) / 2
            if self(value) - half > end:
                ticks.append((value, text))
                end = self(value) + half + 4
        return ticks


def write_campaign(parts: Sequence[Part], out: Path, *, key: str, title: str, waiting: Mapping[str, int]) -> Path:
    """Write the page of a campaign or a sweep to ``out``, and return the path.

    Args:
        parts: the comparisons that have started runs.
        out: the path of the file.
        key: the key of a sweep; empty for a campaign.
        title: the title of the page.
        waiting: the number of unfinished runs of each comparison.
    """
    kind = f"sweep over {key}" if key else "campaign"
    finished = len(waiting) - sum(1 for unfinished in waiting.values() if unfinished)
    facts = f"{kind} · {finished} of {len(waiting)} comparisons finished"
    tables, figures = grids(parts, key), _draw_figures(parts, key)
    sections = [
        build_section(
            "tables", "Means", *(build_table(grid.table, looks=assign_looks(methods_in(parts))) for grid in tables)
        ),
        build_section("sweep", f"Effect of {key}", _select_figure("sweep", figures, "sweep-"), build_note(READ_SWEEP))
        if key
        else "",
        build_section("curves", "Learning curves", _select_figure("curves", figures, "curves-")),
        build_section("verdicts", "Comparisons", *(_list_sentences(part, waiting[part.name]) for part in parts)),
    ]
    return write_page(out, title, facts, sections)


def _select_figure(name: str, figures: Mapping[str, str], start: str) -> str:
    """Return the figures whose names begin with ``start``, with a control that selects one."""
    pictures = {stem.removeprefix(start): picture for stem, picture in figures.items() if stem.startswith(start)}
    texts = {stem: BUTTONS.get(stem) or display_name(stem) for stem in pictures}
    control = (build_radio if name == "sweep" else build_select)(name, "Of" if name == "sweep" else "Method", texts)
    return build_switched_panels([control], {stem: wrap_figure(picture) for stem, picture in pictures.items()})


def _list_sentences(part: Part, waiting: int) -> str:
    """Return the name of a comparison as a link to its report, and the sentences of its verdict."""
    link = f'<a href="{escape(part.page, quote=True)}">{escape(part.name)}</a>' if part.page else escape(part.name)
    unfinished = f" ({waiting} run{'s' * (waiting > 1)} not finished)" if waiting else ""
    lines = "".join(f"<li>{escape(sentence)}</li>" for sentence in part.sentences)
    return f"<h3>{link}{unfinished}</h3>" + (f"<ul>{lines}</ul>" if lines else "")


def sweep_figures(parts: Sequence[Part], key: str) -> dict[str, str]:
    """Return standalone figures by name: each :class:`Series` of a sweep, and the curves of each method by value."""
    return {name: make_standalone(figure) for name, figure in _draw_figures(parts, key).items()}


def _draw_figures(parts: Sequence[Part], key: str) -> dict[str, str]:
    if not key:
        return {}
    figures: dict[str, str] = {}
    for grid in grids(parts, key)[:1]:
        look = assign_looks(methods_in(parts))
        figures |= {f"sweep-{quantity.name}": _draw_series(quantity, grid, look) for quantity in series(grid)}
        for method in grid.ranked:
            if figure := _draw_method_curves(grid, method):
                figures[f"curves-{method_file_name(method)}"] = figure
    return figures


def _place_values(texts: Sequence[str]) -> tuple[list[float], bool]:
    """Return the positions of the values of a key, and whether the scale is logarithmic.

    Values that are not all numbers are placed at 0, 1, 2, ...
    """
    try:
        positions = [float(text) for text in texts]
    except ValueError:
        positions = [float(number) for number in range(len(texts))]
    return positions, min(positions) > 0 and max(positions) / min(positions) >= DECADES


def _draw_series(shown_series: Series, grid: Grid, look: Mapping[str, Look]) -> str:
    """Return a figure of a series with a line per method and intervals."""
    entries, top = svg.draw_legend([(display_name(method), look[method]) for method in shown_series.points])
    gains = [gain for points in shown_series.points.values() for gain in points.values()]
    heights = [end for gain in gains for end in (gain.mean, gain.low, gain.high) if end is not None]
    log_y = "%" not in shown_series.unit and min(heights) > 0 and max(heights) / min(heights) >= DECADES
    positions, log = _place_values(grid.columns)
    ends, titles = svg.compute_axis_range(positions, log=log), (grid.key, shown_series.title)
    limits = (0.0, 100.0) if "%" in shown_series.unit else (-np.inf, np.inf)
    frame = svg.create_axes(
        ends, svg.compute_axis_range(heights, log=log_y, limits=limits), titles, log=log, log_y=log_y, top=top + 22
    )
    scale = Places(*ends, frame.x.start, frame.x.end, log, tuple(sorted(zip(positions, grid.columns, strict=True))))
    parts = [entries, str(replace(frame, x=scale, counted=True))]
    for number, (method, points) in enumerate(shown_series.points.items()):
        offset = DODGE * (number - (len(shown_series.points) - 1) / 2)
        dots = sorted((scale(positions[i]) + offset, grid.columns[i], gain) for i, gain in points.items())
        colour = look[method].colour
        for across, _, gain in dots:
            if gain.low is not None and gain.high is not None:
                parts.append(svg.draw_interval(frame.y(gain.low), frame.y(gain.high), across, colour, upright=True))
        parts.append(svg.draw_line([(across, frame.y(gain.mean)) for across, _, gain in dots], look[method]))
        for across, value, gain in dots:
            mean = f"{gain.mean:.4g}{shown_series.unit}{_format_interval(gain)}"
            tooltip = f"{display_name(method)}, {grid.key} = {value}: {mean}"
            parts.append(svg.draw_dot(across, frame.y(gain.mean), colour, tooltip))
    description = "; ".join(
        f"{display_name(m)}: " + ", ".join(f"{g.mean:.4g}" for g in p.values()) for m, p in shown_series.points.items()
    )
    return svg.build_drawing(f"{shown_series.title} by {grid.key}", description, *parts)


def _format_interval(gain: Gain) -> str:
    return "" if gain.low is None or gain.high is None else f" ({gain.low:.4g} to {gain.high:.4g})"


def _draw_method_curves(grid: Grid, method: str) -> str:
    """Return a figure of the method's mean over rounds with a line per value; empty if it has no rounds."""
    curves = {}
    for part in grid.parts:
        for curve in metric_curves(part.members(method), grid.metric):
            value = value_of(part, grid.key)
            curves[value] = replace(curve, method=f"{display_name(method)}, {grid.key} = {value}")
    if not curves:
        return ""
    look = assign_looks(grid.columns)
    entries, top = svg.draw_legend([(value, look[value]) for value in curves])
    values = np.concatenate([curve.values.ravel() for curve in curves.values()])
    title = f"{display_name(method)}: {directed_title(grid.metric)}"
    log_y = not metric_of(grid.metric).percent and values.min() > 0 and values.max() / values.min() >= DECADES
    last = max(float(curve.x[ROUNDS.button][-1]) for curve in curves.values())
    heights = choose_value_range([*curves.values()], log=bool(log_y), limits=metric_of(grid.metric).shown_span)
    frame = svg.create_axes((0.0, last), heights, (ROUNDS.title, title), log_y=bool(log_y), top=top + 22)
    unit = f" {metric_of(grid.metric).unit}".rstrip()
    below, above = draw_curves([(curve, look[value]) for value, curve in curves.items()], ROUNDS, frame, unit)
    description = "; ".join(
        f"{value} ends at {curve.values[:, -1].mean():.4g}{unit}" for value, curve in curves.items()
    )
    return svg.build_drawing(f"{title} by {grid.key}", description, entries, *below, str(frame), *above)
