"""What each site's blend is made of: a stacked bar per site, and above them that of what all learnt together."""

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
"""Sites that are drawn; of more, evenly chosen ones."""
ROW, LEFT, TOP = 18.0, 92.0, 14.0
PALE = 0.5  # of candidates behind the first ten, whose colours others have too

READ_BLEND = (
    "A bar is a site, a colour a model, its length the model's weight there. The bar on top is what the rows of all "
    "sites say together. A site with few rows has nearly that."
)
READ_OWN = "The blend erred more on their held-out rows, so these sites keep their best own model"


def blend_section(report: ReportData) -> str:
    """The picture of the first seed, and what all sites learnt together in words; nothing without a blend."""
    found = _first(report)
    if found is None:
        return ""
    order = np.argsort(-found.pooled, kind="stable")
    listed = ", ".join(
        f"{display_name(found.names[k])} {found.pooled[k]:.2f}" for k in order if found.pooled[k] > 0.005
    )
    told = f"Weights over all sites: {listed}. {READ_BLEND}"
    if found.keep_local:
        told += f" {READ_OWN}: {shorten_list(found.keep_local)}."
    return build_section("blend", "What the blend is made of", wrap_figure(_drawn(report, found)), build_note(told))


def blend_figures(report: ReportData) -> dict[str, str]:
    """The picture by name; none without a blend."""
    found = _first(report)
    return {} if found is None else {"blend": _drawn(report, found)}


def _first(report: ReportData) -> BlendWeights | None:
    """The weights of the first seed that kept them."""
    members = report.members(BLEND) if BLEND in report.methods else []
    return next((found for run in members if run.summary and (found := run.blend) is not None), None)


def _drawn(report: ReportData, of: BlendWeights) -> str:
    own = assign_looks(of.names) | {name: report.looks[name] for name in of.names if name in report.looks}
    used = [k for k, name in enumerate(of.names) if max(of.pooled[k], of.by_site[:, k].max(initial=0)) > 0]
    entries, top = _legend([(of.names[k], own[of.names[k]]) for k in used], of.names)
    chosen = np.unique(np.linspace(0, len(of.sites) - 1, min(MOST_BARS, len(of.sites))).round().astype(int))
    rows = [("all sites", of.pooled), *((of.sites[i], of.by_site[i]) for i in chosen)]
    parts, y = [entries], top + 8
    for number, (name, weights) in enumerate(rows):
        parts.append(_bar(name, weights, y, of.names, own))
        y += ROW + (8 if number == 0 else 0)
    told = "; ".join(
        f"{name}: " + ", ".join(f"{display_name(of.names[k])} {w[k]:.2f}" for k in used if w[k] > 0) for name, w in rows
    )
    return svg.build_drawing("Weights of the blend at each site", told, *parts, height=y + 6)


def _bar(name: str, weights: NDArray[np.float64], y: float, names: Sequence[str], own: dict[str, Look]) -> str:
    """A row: the site's name, and its weights one behind the other."""
    shown = name if len(name) <= 13 else f"{name[:12]}…"
    parts = [svg.draw_text(LEFT - 6, y + 11, shown, text_anchor="end")]
    wide, x = svg.WIDTH - LEFT - 8, LEFT
    for candidate, weight in zip(names, weights, strict=True):
        if weight > 0:
            length, pale = wide * float(weight), names.index(candidate) >= len(COLOURS)
            drawn = svg.draw_bar(
                x, y, length, ROW - 4, own[candidate].colour, f"{name}: {display_name(candidate)} {weight:.2f}"
            )
            parts.append(svg.build_element("g", drawn, opacity=PALE) if pale else drawn)
            x += length
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, Look]], names: Sequence[str]) -> tuple[str, float]:
    """Names with a square of their colour, in as many rows as they need, and how far down these reach."""
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
