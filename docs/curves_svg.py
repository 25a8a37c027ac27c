"""Learning curves as an SVG picture, a pure function of the numbers: nothing else decides what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#7f7f7f", "#2ca02c", "#1f77b4", "#ff7f0e", "#d62728")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 400, 300, 44, 54, 44, 24


@dataclass(frozen=True)
class Line:
    """A method: accuracies in % of every seed, ``(seeds, rounds)``, at some rounds."""

    name: str
    rounds: Sequence[int]
    seeds: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Panel:
    """Lines in one pair of axes, and a dashed horizontal one."""

    title: str
    lines: Sequence[Line]
    flat_name: str
    flat: float


def curves(panels: Sequence[Panel], lowest: float = 60.0) -> str:
    """The panels side by side: lines are means over seeds, bands go from the lowest to the highest seed.

    Args:
        panels: what is drawn.
        lowest: the vertical axes go from here to 100 %; what is lower is cut off.
    """
    width = len(panels) * (LEFT + WIDTH + GAP)
    height = TOP + HEIGHT + BOTTOM
    parts = [_panel(panel, number * (LEFT + WIDTH + GAP) + LEFT, lowest) for number, panel in enumerate(panels)]
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#1f2933"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def _panel(panel: Panel, left: float, lowest: float) -> str:
    last = max(line.rounds[-1] for line in panel.lines)

    def x(number: float) -> float:
        return left + WIDTH * number / last

    def y(value: float) -> float:
        return TOP + HEIGHT * (100 - value) / (100 - lowest)

    def points(numbers: Sequence[float], values: Sequence[float]) -> str:
        return " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in zip(numbers, values, strict=True))

    clip = f"inside-{left:.0f}"
    parts = [
        f'<text x="{left + WIDTH / 2:.0f}" y="20" text-anchor="middle" font-size="14">{escape(panel.title)}</text>',
        f'<clipPath id="{clip}"><rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/></clipPath>',
    ]
    for value in range(int(lowest), 101, 10):
        parts.append(f'<path d="M{left},{y(value):.1f}h{WIDTH}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for number in range(0, last + 1, 5):
        parts.append(f'<text x="{x(number):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{number}</text>')
    parts.append(f'<text x="{left + WIDTH / 2:.0f}" y="{TOP + HEIGHT + 36}" text-anchor="middle">Round</text>')
    parts.append(f'<text x="{left - 34}" y="{TOP - 12}">Accuracy (%)</text>')
    parts.append(f'<g clip-path="url(#{clip})" fill="none" stroke-width="2">')
    coloured = list(zip(panel.lines, COLOURS, strict=False))
    for line, colour in coloured:
        low, high = ([pick(of) for of in zip(*line.seeds, strict=True)] for pick in (min, max))
        band = points([*line.rounds, *reversed(line.rounds)], [*low, *reversed(high)])
        parts.append(f'<polygon points="{band}" fill="{colour}" fill-opacity="0.12" stroke="none"/>')
    for line, colour in coloured:
        mean = [sum(of) / len(of) for of in zip(*line.seeds, strict=True)]
        parts.append(f'<polyline points="{points(line.rounds, mean)}" stroke="{colour}"/>')
    parts.append(f'<path d="M{left},{y(panel.flat):.1f}h{WIDTH}" stroke="black" stroke-dasharray="6 4"/>')
    parts.append("</g>")
    names = [(line.name, colour, "") for line, colour in coloured]
    for row, (name, colour, dash) in enumerate([*names, (panel.flat_name, "black", ' stroke-dasharray="6 4"')]):
        height = TOP + HEIGHT - 18 * (len(names) + 1 - row)
        start = left + WIDTH - 210
        parts.append(f'<path d="M{start},{height}h26" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{start + 34}" y="{height + 4}">{escape(name)}</text>')
    return "\n".join(parts)
