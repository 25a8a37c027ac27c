"""Heat maps: a stronger colour means a larger value; 0 has no colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.errors import shorten_list
from perfed.report.page import svg
from perfed.report.page.page_data import spread_indices
from perfed.report.page.style import css_colour

MOST_PIXELS = 160  # along a side of a picture

Box = tuple[float, float, float, float]
"""Left, top, width, height."""


def draw_cells(values: NDArray[Any], box: Box, most: float, hint: Callable[[int], str] | None = None) -> list[str]:
    """Return ``values`` ``(rows, columns)`` from 0 to ``most`` as a heat map in a box; ``hint`` is a tooltip by row."""
    left, top, width, height = box
    step = height / len(values)
    parts = [
        draw_image(svg.encode_heat_map(values / most), box),
        _draw_rectangle(box, fill="none", stroke=css_colour("line")),
    ]
    for row in range(len(values) if hint else 0):
        place = (left, top + row * step, width, step)
        parts.append(
            _draw_rectangle(place, svg.build_tooltip(hint(row)) if hint else "", fill="none", pointer_events="all")
        )
    return parts


def average_blocks(values: NDArray[Any], most: int = MOST_PIXELS) -> NDArray[Any]:
    """Return ``values`` reduced to at most ``most`` rows and columns, whose elements are means over blocks."""
    for axis in (0, 1):
        starts = np.unique(
            np.linspace(0, values.shape[axis], min(values.shape[axis], most), endpoint=False).astype(int)
        )
        counts = np.diff([*starts, values.shape[axis]])
        sums = np.add.reduceat(values, starts, axis=axis)
        values = sums / (counts[:, None] if axis == 0 else counts)
    return values


def draw_image(address: str, box: Box) -> str:
    """Return an image stretched over a box, whose pixels have sharp edges."""
    left, top, width, height = box
    place = {"x": left, "y": top, "width": width, "height": height}
    return svg.build_element(
        "image", **place, href=address, preserveAspectRatio="none", style="image-rendering:pixelated"
    )


def _draw_rectangle(box: Box, inside: str = "", **attributes: object) -> str:
    left, top, width, height = box
    return svg.build_element("rect", inside, x=left, y=top, width=width, height=height, **attributes)


def draw_colour_scale(x: float, y: float, most: float, height: float = 110.0) -> list[str]:
    """Return the colour scale from 0 to ``most``."""
    picture = draw_image(svg.encode_heat_map(np.linspace(1, 0, 32)[:, None]), (x, y, 12.0, height))
    return [
        picture,
        svg.draw_text(x + 17, y + 10, svg.format_compact(float(f"{most:.2g}"))),
        svg.draw_text(x + 17, y + height, "0"),
    ]


def draw_row_names(names: Sequence[str], box: Box, letters: int = 8) -> list[str]:
    """Return evenly spread names beside the rows of a box, as many as fit."""
    left, top, _, height = box
    step = height / len(names)
    return [
        svg.draw_text(
            left - 6,
            top + (i + 0.5) * step + 4,
            shorten_name(names[i], letters),
            text_anchor="end",
            fill=css_colour("muted"),
        )
        for i in spread_indices(len(names), max(2, int(height / 15))).tolist()
    ]


def draw_column_names(names: Sequence[str], box: Box, letters: int = 12) -> list[str]:
    """Return evenly spread names above the columns of a box, as many as fit."""
    left, top, width, _ = box
    step = width / len(names)
    longest = max(svg.estimate_width(shorten_name(name, letters)) for name in names) + 8
    return [
        svg.draw_text(
            left + (i + 0.5) * step,
            top - 7,
            shorten_name(names[i], letters),
            text_anchor="middle",
            fill=css_colour("muted"),
        )
        for i in spread_indices(len(names), max(2, int(width / longest))).tolist()
    ]


def shorten_name(name: str, letters: int) -> str:
    """Return the name, cut to ``letters`` characters if it is longer."""
    return name if len(name) <= letters else name[: letters - 1] + "…"


def draw_heat_map(title: str, rows: Sequence[str], columns: Sequence[str], counts: NDArray[Any]) -> str:
    """Return a drawing of ``counts`` ``(rows, columns)`` of clients by class or domain."""
    height = float(min(440, max(120, 15 * len(rows))))
    box, cells = (66.0, 46.0, 340.0, height), average_blocks(counts)
    most = float(cells.max()) or 1.0

    def hint(place: int) -> str:
        row = place * len(rows) // len(cells)
        nonzero = np.flatnonzero(counts[row])
        entries = shorten_list([f"{columns[j]}: {counts[row, j]:g}" for j in nonzero.tolist()], 12)
        return f"client {rows[row]}: {entries or 'no rows'}"

    parts = [
        svg.draw_text(4, 14, title, font_weight="bold"),
        *draw_cells(cells, box, most, hint),
        *draw_colour_scale(424, 46, most),
    ]
    description = f"{len(rows)} clients by {len(columns)} columns, at most {counts.max():g}"
    names = [*draw_row_names(rows, box), *draw_column_names(columns, box)]
    return svg.build_drawing(title, description, *parts, *names, height=46 + height + 12)
