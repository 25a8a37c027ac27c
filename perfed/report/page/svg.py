"""Drawing: scales and their ticks, axes, lines, dots, intervals, bars and heat maps as SVG text.

A drawing is 480 units wide, so that its words can be read on a phone. Colours are variables of the page's style sheet;
:func:`perfed.report.page.paper.standalone` puts the light ones in their place.
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

from perfed.report.page.style import FONT, Look, paint

WIDTH, HEIGHT = 480.0, 300.0
LETTER = 6.7  # width of a letter of the text in the drawing's units, on the wide side

Points = Iterable[tuple[float, float]]
"""Positions in the drawing: to the right and down."""


def tag(name: str, *content: str, **attributes: object) -> str:
    """An element; ``content`` is markup, attributes are escaped, ``_`` in their names is ``-``, None leaves one out.

    Example:
        >>> tag("text", escape("a < b"), x=1.25, text_anchor="end", fill=None)
        '<text x="1.2" text-anchor="end">a &lt; b</text>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(content)
    return f"<{name}{given}>{inside}</{name}>" if inside else f"<{name}{given}/>"


def _number(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def words(x: float, y: float, text: str, **more: object) -> str:
    """A line of text that begins (or as ``text_anchor`` says) at ``x`` with its base line at ``y``."""
    return tag("text", escape(text), x=float(x), y=float(y), **more)


def hint(text: str) -> str:
    """What a browser shows when the pointer rests on the element that has it."""
    return f"<title>{escape(text)}</title>"


def width_of(text: str) -> float:
    """About how wide ``text`` is drawn."""
    return LETTER * len(text)


@dataclass(frozen=True)
class Scale:
    """From values between ``low`` and ``high`` to positions between ``start`` and ``end``; both logarithmic if ``log``.

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
        """Where ``value`` is on the drawing."""
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + part * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values within the scale with their texts: about so many, on a logarithmic scale 1, 2, 5 or powers."""
        if self.log:
            return _log_ticks(self.low, self.high, about)
        step = nice_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        decimals += round(step * 10**decimals, 6) % 1 > 0
        return [(i * step, _grouped(i * step, decimals)) for i in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """The least of 1, 2, 2.5, 5, 10 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _grouped(value: float, decimals: int) -> str:
    return f"{value + 0.0:,.{decimals}f}".replace(",", " ").replace("-", "−")


def _log_ticks(low: float, high: float, about: int) -> list[tuple[float, str]]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = range(first, last + 1)
    factors = (1, 2, 5) if high / low <= 200 else (1,)
    every = math.ceil(len(powers) / (about + 3))
    values = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
    inside = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return [(value, compact(value)) for value in inside]


def compact(value: float) -> str:
    """A number in few letters.

    Example:
        >>> compact(0.05), compact(20000.0), compact(3e7), compact(1234.5)
        ('0.05', '20 000', '3e7', '1 234')
    """
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return _grouped(value, 0) if abs(value) >= 1000 else f"{value:.4g}".replace("-", "−")


def spanned(
    values: Iterable[float],
    *,
    zero: bool = False,
    log: bool = False,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float]:
    """Return the ends of an axis, slightly beyond the ``values`` but within ``limits``.

    Values beyond the limits, as metrics with noise may have, are on the axis too. The axis begins at 0 if ``zero`` and
    always has a positive length.
    """
    there = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not there:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(there), max(there)
    if log:
        return (low / 1.1, high * 1.1)
    low = min(low, 0.0) if zero else low
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    begin = low if zero and low == 0 else low - margin
    return (max(begin, min(limits[0], low)), min(high + margin, max(limits[1], high)))


@dataclass(frozen=True)
class Axes:
    """A horizontal and a vertical scale with their titles; a zigzag where one of measured values does not have 0 on it.

    ``counted``: what is along ``x`` is no measured value, as rounds or what was set, so that nobody expects a 0.
    """

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    counted: bool = False

    def horizontal(self) -> str:
        """Ticks, numbers and title below."""
        base = self.y.start
        places = [(self.x(value), text) for value, text in self.x.ticks()]
        parts = [words(at, base + 17, text, text_anchor="middle", fill=paint("muted")) for at, text in places]
        marks = "".join(f"M{_number(at)} {_number(base)}v4" for at, _ in places)
        title = words(self.x.end, base + 34, self.x_title, text_anchor="end")
        ground = tag("path", d=f"M{_number(self.x.start)} {_number(base)}H{_number(self.x.end)}{marks}", **_AXIS)
        broken = "" if self.counted else _zigzag(self.x, f"M{_number(self.x.start + 10)} {_number(base)}{_ZIGZAG[0]}")
        return "".join([ground, *parts, title, broken])

    def vertical(self) -> str:
        """Grid lines, numbers and the title above."""
        places = [(self.y(value), text) for value, text in self.y.ticks()]
        lines = "".join(f"M{_number(self.x.start)} {_number(at)}H{_number(self.x.end)}" for at, _ in places)
        numbers = [words(self.x.start - 6, at + 4, text, text_anchor="end", fill=paint("muted")) for at, text in places]
        title = words(4, self.y.end - 10, self.y_title)
        broken = _zigzag(self.y, f"M{_number(self.x.start)} {_number(self.y.start)}{_ZIGZAG[1]}")
        return "".join([tag("path", d=lines, **_GRID), *numbers, title, broken])

    def __str__(self) -> str:
        return self.vertical() + self.horizontal()


_ZIGZAG = ("l2.5 -4 4 8 2.5 -4", "v-2l-4 -2.5 8 -4 -4 -2.5v-2")
NO_ZERO = "The axis does not begin at 0"


def _zigzag(scale: Scale, d: str) -> str:
    """The mark of an axis without 0; of a logarithmic one nobody expects it."""
    whole = scale.log or scale.low <= 0 <= scale.high
    return "" if whole else tag("path", hint(NO_ZERO), d=d, **_AXIS)


_GRID = {"stroke": paint("line"), "fill": "none"}
_AXIS = {"stroke": paint("muted"), "fill": "none"}


def axes(
    x: tuple[float, float],
    y: tuple[float, float],
    titles: tuple[str, str],
    *,
    log: bool = False,
    log_y: bool = False,
    top: float = 34,
    height: float = HEIGHT,
) -> Axes:
    """Axes of a whole drawing, ``x`` and ``y`` from end to end; ``top`` is what legend and title above need."""
    probe = Scale(*y, 0, 1, log_y)
    left = 12 + max((width_of(text) for _, text in probe.ticks()), default=0)
    return Axes(Scale(*x, max(left, 34), WIDTH - 14, log), Scale(*y, height - 44, top, log_y), *titles)


def path(points: Points) -> str:
    """Data of a path through the points."""
    return "M" + "L".join(f"{_number(float(x))} {_number(float(y))}" for x, y in points)


def within(points: Sequence[tuple[float, float]], scale: Scale) -> list[list[tuple[float, float]]]:
    """The parts of the line through ``points`` whose height is on ``scale``, cut where it leaves the scale.

    Example:
        >>> within([(0, 20), (10, 0)], Scale(0, 1, 10, 0))
        [[(5.0, 10), (10, 0)]]
    """
    top, bottom = sorted((scale.start, scale.end))
    parts: list[list[tuple[float, float]]] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        cuts = [((end - y0) / (y1 - y0), end) for end in (top, bottom) if min(y0, y1) < end < max(y0, y1)]
        inner = [(x0 + part * (x1 - x0), end) for part, end in sorted(cuts)]
        places = [p for p in ((x0, y0), *inner, (x1, y1)) if top <= p[1] <= bottom]
        if len(places) > 1:
            joined = parts and parts[-1][-1] == places[0]
            parts = [*parts[:-1], [*parts[-1], *places[1:]]] if joined else [*parts, places]
    return parts or [[p] for p in points if top <= p[1] <= bottom]


def line(points: Points, look: Look, **more: object) -> str:
    """A method's line through the points."""
    style = {"fill": "none", "stroke": look.colour, "stroke_width": 2, "stroke_dasharray": look.dash or None}
    return tag("path", d=path(points), stroke_linejoin="round", **style, **more)


def area(points: Points, colour: str) -> str:
    """A pale area within the points."""
    return tag("path", d=path(points) + "Z", fill=colour, fill_opacity=0.13)


def outline(points: Points, colour: str) -> str:
    """The edge of an area, thin and pale."""
    return tag("path", d=path(points) + "Z", fill="none", stroke=colour, stroke_opacity=0.4, stroke_width=0.75)


def dot(x: float, y: float, colour: str | None, title: str = "", r: float = 3.5) -> str:
    """A dot, with what a pointer on it shows; None: in the colour of the group around it."""
    return tag("circle", hint(title) if title else "", cx=float(x), cy=float(y), r=float(r), fill=colour)


def dots(points: Points, colour: str, r: float = 2.5, **more: object) -> str:
    """Many dots as one element."""
    places = "".join(f"M{_number(float(x))} {_number(float(y))}h0" for x, y in points)
    return tag("path", d=places, stroke=colour, stroke_width=2 * r, stroke_linecap="round", fill="none", **more)


def interval(low: float, high: float, at: float, colour: str, *, upright: bool = False) -> str:
    """A line from ``low`` to ``high`` with its ends marked."""
    if upright:
        d = f"M{_number(at)} {_number(low)}V{_number(high)}"
    else:
        d = f"M{_number(low)} {_number(at - 3)}v6m0 -3H{_number(high)}m0 -3v6"
    return tag("path", d=d, stroke=colour, stroke_width=1.5, fill="none")


def bar(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    """A filled rectangle, with what a pointer on it shows."""
    inside = hint(title) if title else ""
    return tag("rect", inside, x=float(x), y=float(y), width=float(width), height=float(height), fill=colour)


def rule(scale: Scale, value: float, ends: tuple[float, float], *, upright: bool, label: str = "") -> str:
    """A dashed line across the axes at ``value``, with a word at its end."""
    at, (first, last) = scale(value), ends
    d = path([(at, first), (at, last)] if upright else [(first, at), (last, at)])
    mark = tag("path", d=d, stroke=paint("muted"), stroke_dasharray="4 4", fill="none")
    place = {"x": last if not upright else at + 4, "y": at - 4 if not upright else last + 10}
    anchor = None if upright else "end"
    return mark + (words(place["x"], place["y"], label, text_anchor=anchor, fill=paint("muted")) if label else "")


def picture(values: NDArray[np.float64], colour: str = "#3b8fd0") -> str:
    """A heat map as the address of a PNG: ``values`` ``(rows, columns)`` from 0 to 1 say how much ``colour`` covers."""
    pixels = np.empty((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = tuple(bytes.fromhex(colour[1:]))
    pixels[..., 3] = np.round(255 * np.clip(values, 0, 1))
    return png(pixels)


def png(pixels: NDArray[np.uint8]) -> str:
    """The address of a PNG of ``pixels`` ``(rows, columns, 3 or 4)``: red, green, blue and how much they cover."""
    rows, columns, channels = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", columns, rows, 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    content = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return _PNG + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()


def pixels_of(address: str) -> NDArray[np.uint8]:
    """The pixels that :func:`png` made the address of, ``(rows, columns, 3 or 4)``."""
    content = base64.b64decode(address.removeprefix(_PNG))
    columns, rows, length = struct.unpack(">II9xI", content[16:37])
    lines = np.frombuffer(zlib.decompress(content[41 : 41 + length]), np.uint8).reshape(rows, -1)
    return lines[:, 1:].reshape(rows, columns, -1)  # the first of each line is its filter: none


_PNG = "data:image/png;base64,"


def legend(entries: Sequence[tuple[str, Look]], top: float = 14, left: float = 4) -> tuple[str, float]:
    """Names with their lines in as many rows as they need; and how far down the rows reach."""
    parts, x, y = [], left, top
    for name, look in entries:
        wide = 36 + width_of(name)
        if x + wide > WIDTH and x > left:
            x, y = left, y + 19
        parts.append(line([(x, y - 4), (x + 24, y - 4)], look) + words(x + 29, y, name))
        x += wide + 8
    return "".join(parts), y + 8 if entries else top - 8


def drawing(title: str, description: str, *parts: str, height: float = HEIGHT, width: float = WIDTH) -> str:
    """The parts as one picture that says in words what it shows."""
    name = tag("title", escape(title)) + tag("desc", escape(description))
    more = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "font_family": FONT, "font_size": 12}
    return tag("svg", name, *parts, xmlns="http://www.w3.org/2000/svg", fill=paint("ink"), **more)
