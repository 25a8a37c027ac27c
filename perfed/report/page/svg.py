"""Functions that draw figures as SVG text: scales with ticks, axes, lines, dots, intervals, bars and heat maps.

A drawing is 480 units wide, so that its text can be read on a phone. Colours are variables of the page's style sheet;
:func:`perfed.report.page.paper.make_standalone` replaces them by the light colours.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from perfed.report.page.style import FONT, Look, css_colour

WIDTH, HEIGHT = 480.0, 300.0
LETTER = 6.7  # a generous width of a letter in the drawing's units

Points = Iterable[tuple[float, float]]
"""Positions ``(x, y)`` in the drawing; x grows to the right, y downwards."""


def build_element(name: str, *content: str, **attributes: object) -> str:
    """Return an SVG element as text.

    Args:
        name: the name of the element.
        content: the markup inside the element.
        attributes: the attributes; their values are escaped, ``_`` in a name becomes ``-``, and None omits one.

    Example:
        >>> build_element("text", escape("a < b"), x=1.25, text_anchor="end", fill=None)
        '<text x="1.2" text-anchor="end">a &lt; b</text>'
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_format_attribute(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(content)
    return f"<{name}{attribute_text}>{inside}</{name}>" if inside else f"<{name}{attribute_text}/>"


def _format_attribute(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def draw_text(x: float, y: float, text: str, **attributes: object) -> str:
    """Return a line of text with its base line at ``y``, which starts at ``x`` unless ``text_anchor`` differs."""
    return build_element("text", escape(text), x=float(x), y=float(y), **attributes)


def build_tooltip(text: str) -> str:
    """Return the ``title`` of an element, which a browser shows while the pointer is on the element."""
    return f"<title>{escape(text)}</title>"


def estimate_width(text: str) -> float:
    """Return the approximate width of ``text`` in the drawing's units."""
    return LETTER * len(text)


@dataclass(frozen=True)
class Scale:
    """A map from values between ``low`` and ``high`` to positions between ``start`` and ``end``.

    Attributes:
        low, high: the ends of the axis as values.
        start, end: the positions of these ends in the drawing.
        log: whether the axis is logarithmic.

    Example:
        >>> Scale(0, 10, 100, 200)(2.5), Scale(1, 100, 0, 50, log=True)(10)
        (125.0, 25.0)
        >>> [text for _, text in Scale(0.35, 0.91, 0, 1).ticks()]
        ['0.4', '0.6', '0.8']
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of ``value`` in the drawing."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Return about ``count`` round values within the scale, with their texts.

        On a logarithmic scale these are powers of ten, and their multiples by 2 and 5 if the scale is short.
        """
        if self.log:
            return _place_log_ticks(self.low, self.high, count)
        step = round_up_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        decimals += round(step * 10**decimals, 6) % 1 > 0
        return [(i * step, _group_digits(i * step, decimals)) for i in range(first, last + 1)]


def round_up_step(rough: float) -> float:
    """Return the least of 1, 2, 2.5, 5 and 10 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _group_digits(value: float, decimals: int) -> str:
    return f"{value + 0.0:,.{decimals}f}".replace(",", " ").replace("-", "−")


def _place_log_ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = range(first, last + 1)
    factors = (1, 2, 5) if high / low <= 200 else (1,)
    step = math.ceil(len(powers) / (count + 3))
    values = [factor * 10.0**power for power in powers if power % step == 0 for factor in factors]
    inside = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return [(value, format_compact(value)) for value in inside]


def format_compact(value: float) -> str:
    """Return a number as text with few characters.

    Example:
        >>> format_compact(0.05), format_compact(20000.0), format_compact(3e7), format_compact(1234.5)
        ('0.05', '20 000', '3e7', '1 234')
    """
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return _group_digits(value, 0) if abs(value) >= 1000 else f"{value:.4g}".replace("-", "−")


def compute_axis_range(
    values: Iterable[float],
    *,
    zero: bool = False,
    log: bool = False,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float]:
    """Return the ends of an axis, slightly beyond the ``values`` but within ``limits``.

    The axis also covers values beyond the limits, which occur if noise is added to a metric. It begins at 0 if
    ``zero``, and always has a positive length. Values that are not finite (with ``log``: or not positive) are ignored.
    """
    usable = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not usable:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(usable), max(usable)
    if log:
        return (low / 1.1, high * 1.1)
    low = min(low, 0.0) if zero else low
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    begin = low if zero and low == 0 else low - margin
    return (max(begin, min(limits[0], low)), min(high + margin, max(limits[1], high)))


@dataclass(frozen=True)
class Axes:
    """A horizontal and a vertical axis with their titles.

    A zigzag marks an axis that does not include 0, unless it is logarithmic.

    Attributes:
        x, y: the scales.
        x_title, y_title: the titles.
        counted: whether the values along ``x`` are not measured (rounds, or values of a setting), so that the
            horizontal axis needs no zigzag.
    """

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    counted: bool = False

    def draw_horizontal(self) -> str:
        """Return the horizontal axis with ticks, numbers and the title below them."""
        base = self.y.start
        places = [(self.x(value), text) for value, text in self.x.ticks()]
        parts = [
            draw_text(position, base + 17, text, text_anchor="middle", fill=css_colour("muted"))
            for position, text in places
        ]
        marks = "".join(f"M{_format_attribute(position)} {_format_attribute(base)}v4" for position, _ in places)
        title = draw_text(self.x.end, base + 34, self.x_title, text_anchor="end")
        ground = build_element(
            "path",
            d=f"M{_format_attribute(self.x.start)} {_format_attribute(base)}H{_format_attribute(self.x.end)}{marks}",
            **_AXIS,
        )
        broken = (
            ""
            if self.counted
            else _draw_zigzag(self.x, f"M{_format_attribute(self.x.start + 10)} {_format_attribute(base)}{_ZIGZAG[0]}")
        )
        return "".join([ground, *parts, title, broken])

    def draw_vertical(self) -> str:
        """Return the grid lines, the numbers of the vertical axis, and its title above them."""
        places = [(self.y(value), text) for value, text in self.y.ticks()]
        lines = "".join(
            f"M{_format_attribute(self.x.start)} {_format_attribute(position)}H{_format_attribute(self.x.end)}"
            for position, _ in places
        )
        numbers = [
            draw_text(self.x.start - 6, position + 4, text, text_anchor="end", fill=css_colour("muted"))
            for position, text in places
        ]
        title = draw_text(4, self.y.end - 10, self.y_title)
        broken = _draw_zigzag(
            self.y, f"M{_format_attribute(self.x.start)} {_format_attribute(self.y.start)}{_ZIGZAG[1]}"
        )
        return "".join([build_element("path", d=lines, **_GRID), *numbers, title, broken])

    def __str__(self) -> str:
        return self.draw_vertical() + self.draw_horizontal()


_ZIGZAG = ("l2.5 -4 4 8 2.5 -4", "v-2l-4 -2.5 8 -4 -4 -2.5v-2")
NO_ZERO = "The axis does not begin at 0"


def _draw_zigzag(scale: Scale, d: str) -> str:
    """Return the path ``d`` as a mark if the axis does not include 0; empty otherwise, or if it is logarithmic."""
    is_complete = scale.log or scale.low <= 0 <= scale.high
    return "" if is_complete else build_element("path", build_tooltip(NO_ZERO), d=d, **_AXIS)


_GRID = {"stroke": css_colour("line"), "fill": "none"}
_AXIS = {"stroke": css_colour("muted"), "fill": "none"}


def create_axes(
    x: tuple[float, float],
    y: tuple[float, float],
    titles: tuple[str, str],
    *,
    log: bool = False,
    log_y: bool = False,
    top: float = 34,
    height: float = HEIGHT,
) -> Axes:
    """Return the axes of a drawing.

    Args:
        x, y: the ends of the axes as values.
        titles: the titles of the horizontal and the vertical axis.
        log, log_y: whether the horizontal and the vertical axis are logarithmic.
        top: the height above the axes that the legend and the title need.
        height: the height of the drawing.
    """
    probe = Scale(*y, 0, 1, log_y)
    left = 12 + max((estimate_width(text) for _, text in probe.ticks()), default=0)
    return Axes(Scale(*x, max(left, 34), WIDTH - 14, log), Scale(*y, height - 44, top, log_y), *titles)


def format_path(points: Points) -> str:
    """Return the attribute ``d`` of a path through the points."""
    return "M" + "L".join(f"{_format_attribute(float(x))} {_format_attribute(float(y))}" for x, y in points)


def clip_line(points: Sequence[tuple[float, float]], scale: Scale) -> list[list[tuple[float, float]]]:
    """Return the parts of the line through ``points`` that lie within the vertical ``scale``, cut at its ends.

    Example:
        >>> clip_line([(0, 20), (10, 0)], Scale(0, 1, 10, 0))
        [[(5.0, 10), (10, 0)]]
    """
    top, bottom = sorted((scale.start, scale.end))
    parts: list[list[tuple[float, float]]] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        cuts = [((end - y0) / (y1 - y0), end) for end in (top, bottom) if min(y0, y1) < end < max(y0, y1)]
        inner = [(x0 + share * (x1 - x0), end) for share, end in sorted(cuts)]
        places = [p for p in ((x0, y0), *inner, (x1, y1)) if top <= p[1] <= bottom]
        if len(places) > 1:
            joined = parts and parts[-1][-1] == places[0]
            parts = [*parts[:-1], [*parts[-1], *places[1:]]] if joined else [*parts, places]
    return parts or [[p] for p in points if top <= p[1] <= bottom]


def draw_line(points: Points, look: Look, **attributes: object) -> str:
    """Return a line through the points in the style of a method."""
    style = {"fill": "none", "stroke": look.colour, "stroke_width": 2, "stroke_dasharray": look.dash or None}
    return build_element("path", d=format_path(points), stroke_linejoin="round", **style, **attributes)


def fill_area(points: Points, colour: str) -> str:
    """Return the pale area enclosed by the points."""
    return build_element("path", d=format_path(points) + "Z", fill=colour, fill_opacity=0.13)


def draw_outline(points: Points, colour: str) -> str:
    """Return the thin, pale outline of an area."""
    return build_element(
        "path", d=format_path(points) + "Z", fill="none", stroke=colour, stroke_opacity=0.4, stroke_width=0.75
    )


def draw_dot(x: float, y: float, colour: str | None, title: str = "", r: float = 3.5) -> str:
    """Return a dot with the tooltip ``title``; without a ``colour`` it has that of the group that contains it."""
    return build_element(
        "circle", build_tooltip(title) if title else "", cx=float(x), cy=float(y), r=float(r), fill=colour
    )


def draw_dots(points: Points, colour: str, r: float = 2.5, **attributes: object) -> str:
    """Return many dots as one element."""
    places = "".join(f"M{_format_attribute(float(x))} {_format_attribute(float(y))}h0" for x, y in points)
    return build_element(
        "path", d=places, stroke=colour, stroke_width=2 * r, stroke_linecap="round", fill="none", **attributes
    )


def draw_interval(low: float, high: float, position: float, colour: str, *, upright: bool = False) -> str:
    """Return a line from ``low`` to ``high`` at the height ``position`` with marks at its ends.

    If ``upright``, the line is vertical at the horizontal ``position``, and has no marks.
    """
    if upright:
        d = f"M{_format_attribute(position)} {_format_attribute(low)}V{_format_attribute(high)}"
    else:
        d = f"M{_format_attribute(low)} {_format_attribute(position - 3)}v6m0 -3H{_format_attribute(high)}m0 -3v6"
    return build_element("path", d=d, stroke=colour, stroke_width=1.5, fill="none")


def draw_bar(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    """Return a filled rectangle with the tooltip ``title``."""
    inside = build_tooltip(title) if title else ""
    return build_element("rect", inside, x=float(x), y=float(y), width=float(width), height=float(height), fill=colour)


def draw_rule(scale: Scale, value: float, ends: tuple[float, float], *, upright: bool, label: str = "") -> str:
    """Return a dashed line at ``value`` of ``scale``, between the positions ``ends``, with a label at its end."""
    position, (first, last) = scale(value), ends
    d = format_path([(position, first), (position, last)] if upright else [(first, position), (last, position)])
    mark = build_element("path", d=d, stroke=css_colour("muted"), stroke_dasharray="4 4", fill="none")
    place = {"x": last if not upright else position + 4, "y": position - 4 if not upright else last + 10}
    anchor = None if upright else "end"
    return mark + (
        draw_text(place["x"], place["y"], label, text_anchor=anchor, fill=css_colour("muted")) if label else ""
    )


def encode_heat_map(values: NDArray[np.float64], colour: str = "#3b8fd0") -> str:
    """Return a heat map as the data URL of a PNG; ``values`` ``(rows, columns)`` are opacities from 0 to 1."""
    pixels = np.empty((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = tuple(bytes.fromhex(colour[1:]))
    pixels[..., 3] = np.round(255 * np.clip(values, 0, 1))
    return encode_png(pixels)


def encode_png(pixels: NDArray[np.uint8]) -> str:
    """Return the data URL of a PNG of ``pixels`` ``(rows, columns, 3 or 4)``: red, green, blue and opacity."""
    rows, columns, channels = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", columns, rows, 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    content = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return _PNG + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()


def decode_png(address: str) -> NDArray[np.uint8]:
    """Return the pixels ``(rows, columns, 3 or 4)`` of a data URL that :func:`encode_png` returned."""
    content = base64.b64decode(address.removeprefix(_PNG))
    columns, rows, length = struct.unpack(">II9xI", content[16:37])
    lines = np.frombuffer(zlib.decompress(content[41 : 41 + length]), np.uint8).reshape(rows, -1)
    return lines[:, 1:].reshape(rows, columns, -1)  # the first byte of each line is its filter, which is 0


_PNG = "data:image/png;base64,"


def draw_legend(entries: Sequence[tuple[str, Look]], top: float = 14, left: float = 4) -> tuple[str, float]:
    """Return the names with their lines, in as many rows as they need, and the height at which the rows end."""
    parts, x, y = [], left, top
    for name, look in entries:
        wide = 36 + estimate_width(name)
        if x + wide > WIDTH and x > left:
            x, y = left, y + 19
        parts.append(draw_line([(x, y - 4), (x + 24, y - 4)], look) + draw_text(x + 29, y, name))
        x += wide + 8
    return "".join(parts), y + 8 if entries else top - 8


def build_drawing(title: str, description: str, *parts: str, height: float = HEIGHT, width: float = WIDTH) -> str:
    """Return the parts as one SVG with a title and a description."""
    name = build_element("title", escape(title)) + build_element("desc", escape(description))
    attributes = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "font_family": FONT, "font_size": 12}
    return build_element("svg", name, *parts, xmlns="http://www.w3.org/2000/svg", fill=css_colour("ink"), **attributes)
