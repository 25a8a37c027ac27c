"""The section on blends: a stacked bar with the weights of each site, and one with the weights over all sites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfed.errors import shorten_list
from perfed.methods.titles import display_name
from perfed.plugins import BLEND
from perfed.report.page import svg
from perfed.report.page.html import build_note, build_section, wrap_figure
from perfed.report.page.page_data import ReportData
from perfed.report.page.style import COLOURS, Look, assign_looks
from perfed.report.run_results import BlendWeights

MOST_BARS = 60
"""The number of sites that are drawn; of more sites, evenly spread ones are drawn."""
ROW, LEFT, TOP = 18.0, 92.0, 14.0
PALE = 0.5  # opacity of candidates after the first ten, whose colours repeat

READ_BLEND = (
    "A bar is a site, a colour a model, its length the model's weight there. The bar on top has the weights over "
    "the rows of all sites. A site with few rows has nearly these weights."
)
READ_OWN = "The blend had larger errors on their held-out rows, so these sites keep their best local model"


def blend_section(report: ReportData) -> str:
    """Return the figure of the first seed, and the weights over all sites as text; empty without a blend."""
    blend = _find_weights(report)
    if blend is None:
        return ""
    order = np.argsort(-blend.pooled, kind="stable")
    listed = ", ".join(
        f"{display_name(blend.names[k])} {blend.pooled[k]:.2f}" for k in order if blend.pooled[k] > 0.005
    )
    description = f"Weights over all sites: {listed}. {READ_BLEND}"
    if blend.keep_local:
        description += f" {READ_OWN}: {shorten_list(blend.keep_local)}."
    return build_section(
        "blend", "What the blend is made of", wrap_figure(_draw_blend(report, blend)), build_note(description)
    )


def blend_figures(report: ReportData) -> dict[str, str]:
    """Return the figure by name; empty without a blend."""
    blend = _find_weights(report)
    return {} if blend is None else {"blend": _draw_blend(report, blend)}


def _find_weights(report: ReportData) -> BlendWeights | None:
    """Return the weights of the first seed that kept them; None if there are none."""
    members = report.members(BLEND) if BLEND in report.methods else []
    return next((weights for run in members if run.summary and (weights := run.blend) is not None), None)


def _draw_blend(report: ReportData, blend: BlendWeights) -> str:
    styles = assign_looks(blend.names) | {name: report.looks[name] for name in blend.names if name in report.looks}
    used_candidates = [
        k for k, name in enumerate(blend.names) if max(blend.pooled[k], blend.by_site[:, k].max(initial=0)) > 0
    ]
    entries, top = _draw_legend([(blend.names[k], styles[blend.names[k]]) for k in used_candidates], blend.names)
    site_indices = np.unique(np.linspace(0, len(blend.sites) - 1, min(MOST_BARS, len(blend.sites))).round().astype(int))
    rows = [("all sites", blend.pooled), *((blend.sites[i], blend.by_site[i]) for i in site_indices)]
    parts, y = [entries], top + 8
    for number, (name, weights) in enumerate(rows):
        parts.append(_draw_bar(name, weights, y, blend.names, styles))
        y += ROW + (8 if number == 0 else 0)
    description = "; ".join(
        f"{name}: " + ", ".join(f"{display_name(blend.names[k])} {w[k]:.2f}" for k in used_candidates if w[k] > 0)
        for name, w in rows
    )
    return svg.build_drawing("Weights of the blend at each site", description, *parts, height=y + 6)


def _draw_bar(name: str, weights: NDArray[np.float64], y: float, names: Sequence[str], styles: dict[str, Look]) -> str:
    """Return a row: the name of the site, and a stacked bar of its weights."""
    label = name if len(name) <= 13 else f"{name[:12]}…"
    parts = [svg.draw_text(LEFT - 6, y + 11, label, text_anchor="end")]
    wide, x = svg.WIDTH - LEFT - 8, LEFT
    for candidate, weight in zip(names, weights, strict=True):
        if weight > 0:
            length, pale = wide * float(weight), names.index(candidate) >= len(COLOURS)
            segment = svg.draw_bar(
                x, y, length, ROW - 4, styles[candidate].colour, f"{name}: {display_name(candidate)} {weight:.2f}"
            )
            parts.append(svg.build_element("g", segment, opacity=PALE) if pale else segment)
            x += length
    return "".join(parts)


def _draw_legend(entries: Sequence[tuple[str, Look]], names: Sequence[str]) -> tuple[str, float]:
    """Return the names with squares of their colours, and the height at which the rows end."""
    parts, x, y = [], 4.0, TOP
    for name, look in entries:
        text = display_name(name)
        wide = 22 + svg.estimate_width(text)
        if x + wide > svg.WIDTH and x > 4:
            x, y = 4.0, y + 19
        square = svg.draw_bar(x, y - 10, 12, 12, look.colour)
        pale = names.index(name) >= len(COLOURS)
        parts += [svg.build_element("g", square, opacity=PALE) if pale else square, svg.draw_text(x + 17, y, text)]
        x += wide + 10
    return "".join(parts), y + 6
