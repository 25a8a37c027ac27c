"""The drawings of the concept pages: ``python docs/concept_pictures.py`` writes ``docs/concepts/*.svg``.

They are sketches with no measured numbers. All have one style: the report's colours and letters, light or dark as the
reader's screen is, on a sheet of their own, since a page's theme may differ from the screen's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from perfed.report.page.style import DARK, FONT, LIGHT, css_colour
from perfed.report.page.svg import build_element, draw_text

TO = Path(__file__).parent / "concepts"
WIDTH, SHOWN = 560, 1.25
"""Units of a drawing, and how many times as wide it is shown where there is room."""
INK, MUTED, LINE, PANEL = (
    css_colour("ink"),
    css_colour("muted"),
    css_colour("line"),
    css_colour("panel"),
)
SHARED, PERSONAL, DOMAIN = css_colour("accent"), css_colour("c2"), css_colour("c3")


PLACED = {"FedAvg": "sss", "FedRep": "ssp", "FLIC": "psp", "FedDAR": "ssd", "LG-FedAvg": "pps", "Local": "ppp"}
"""Of methods the first letters of their stages' placements: shared, personal, (per) domain."""


def drawing(title: str, text: str, height: int, *parts: str) -> str:
    """The file: ``title`` and ``text`` are what a screen reader says."""
    inside = "".join(parts)
    used = [name for name in LIGHT if f"var(--{name})" in inside or name in ("paper", "line", "ink", "muted")]
    light, dark = ("".join(f"--{name}:{of[name]};" for name in used) for of in (LIGHT, DARK))
    style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    head = "M0 0L8 4L0 8z"
    marker = {"viewBox": "0 0 8 8", "refX": 7, "refY": 4, "markerWidth": 7, "markerHeight": 7, "orient": "auto"}
    arrow = build_element(
        "defs", build_element("marker", build_element("path", d=head, fill=MUTED), id="arrow", **marker)
    )
    sheet = build_element(
        "rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=8, fill=css_colour("paper"), stroke=LINE
    )
    return build_element(
        "svg",
        build_element("title", title)
        + build_element("desc", text)
        + build_element("style", style)
        + arrow
        + sheet
        + inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=int(SHOWN * WIDTH),
        height=int(SHOWN * height),
        role="img",
        font_family=FONT,
        font_size=14,
        fill=INK,
    )


def box(x: float, y: float, width: float, height: float, text: str = "", colour: str = "", **more: object) -> str:
    """A rounded box, tinted in ``colour``, or a grey panel; its text is in the middle."""
    fill = {"fill": colour, "fill_opacity": 0.18, "stroke": colour} if colour else {"fill": PANEL, "stroke": LINE}
    shape = build_element("rect", x=x, y=y, width=width, height=height, stroke_width="1.5", **{"rx": 6, **fill, **more})
    return shape + (middle(x + width / 2, y + height / 2 + 5, text) if text else "")


def middle(x: float, y: float, text: str, **more: object) -> str:
    """Words around ``x``."""
    return draw_text(x, y, text, text_anchor="middle", **more)


def clear(x: float, y: float, text: str, **more: object) -> str:
    """Words around ``x`` that are not crossed by the lines behind them."""
    return middle(x, y, text, stroke=css_colour("paper"), stroke_width="5", paint_order="stroke", **more)


def bold(x: float, y: float, text: str, **more: object) -> str:
    """Words that name a part of the drawing."""
    return draw_text(x, y, text, font_weight="600", **more)


def arrow(*points: tuple[float, float]) -> str:
    """A line through ``points`` with a head at the last."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return build_element("path", d=path, fill="none", stroke=MUTED, stroke_width="1.5", marker_end="url(#arrow)")


def line(x0: float, y0: float, x1: float, y1: float, colour: str = LINE, **more: object) -> str:
    """A straight line."""
    return build_element(
        "path", d=f"M{x0:g} {y0:g}L{x1:g} {y1:g}", stroke=colour, stroke_width="1.5", fill="none", **more
    )


def step(x: float, y: float, number: int) -> str:
    """A number in a disc."""
    disc = build_element("circle", cx=x, cy=y, r=11, fill=INK)
    return disc + middle(x, y + 5, str(number), fill=css_colour("paper"), font_weight="600")


def rows(x: float, y: float, colour: str = PERSONAL) -> str:
    """A small table: what a client holds."""
    cells = "".join(f"M{x:g} {y + 9 * row:g}h46" for row in range(4))
    return build_element(
        "path", d=cells, stroke=colour, stroke_width="5", stroke_linecap="round", stroke_opacity="0.75"
    )


def federated_learning() -> str:
    """A round: sent, trained, averaged."""
    parts = [box(190, 16, 180, 56, "shared model", SHARED), bold(130, 49, "server", fill=MUTED)]
    for name, x in (("A", 70), ("B", 280), ("C", 490)):
        inner = 280 + (x - 280) * 0.32
        parts += [arrow((inner - 9, 78), (x - 9, 140)), arrow((x + 9, 140), (inner + 9, 78))]
        parts += [box(x - 58, 146, 116, 84), bold(x - 46, 168, f"client {name}"), rows(x - 44, 186)]
        parts.append(box(x + 16, 180, 32, 36, "", SHARED))
    parts += [step(252, 112, 1), step(352, 188, 2), step(308, 112, 3)]
    for x, number, said in (
        (24, 1, "is sent to all"),
        (206, 2, "trains on own rows"),
        (414, 3, "is averaged"),
    ):
        parts += [step(x + 11, 258, number), draw_text(x + 28, 263, said, font_size=13)]
    return drawing(
        "One round of federated learning",
        "A server has a shared model. It sends the model to three clients, each client trains it on its own data, "
        "and the server averages the results.",
        284,
        *parts,
    )


def four_ways() -> str:
    """Labels, features, domains, speeds: a panel each, two clients in each."""
    panels = [
        ("Labels", "same inputs, other classes", _labels),
        ("Features", "same question, other inputs", _features),
        ("Domains", "same groups, other shares", _domains),
        ("Speeds", "same work, other times", _speeds),
    ]
    parts = []
    for number, (name, said, draw) in enumerate(panels):
        x, y = 14 + 270 * (number % 2), 14 + 162 * (number // 2)
        parts += [
            box(x, y, 262, 152),
            bold(x + 14, y + 24, name),
            draw_text(x + 14, y + 43, said, fill=MUTED, font_size=13),
        ]
        for client, top in (("A", y + 56), ("B", y + 104)):
            parts += [draw_text(x + 14, top + 26, client, fill=MUTED), draw(x + 40, top, client == "A")]
    return drawing(
        "Four ways in which clients differ",
        "Two clients have different classes, different columns, different shares of two domains, or need different "
        "times for a round.",
        338,
        *parts,
    )


def _labels(x: float, y: float, first: bool) -> str:
    heights = (30, 22, 34, 4, 0, 0) if first else (0, 0, 6, 20, 34, 28)
    bars = [
        build_element(
            "rect", x=x + 33 * at, y=y + 36 - height, width=24, height=height, rx=2, fill=css_colour(f"c{1 + at}")
        )
        for at, height in enumerate(heights)
        if height
    ]
    return "".join(bars) + line(x, y + 37, x + 190, y + 37, MUTED)


def _features(x: float, y: float, first: bool) -> str:
    columns = ("age", "pressure", "sugar") if first else ("age", "pulse")
    widths = {"age": 44, "pressure": 76, "sugar": 56, "pulse": 52}
    found, at = [], x
    for column in columns:
        colour = SHARED if column == "age" else PERSONAL
        found.append(box(at, y + 8, widths[column], 28, column, colour))
        at += widths[column] + 8
    return "".join(found)


def _domains(x: float, y: float, first: bool) -> str:
    cut = 150 if first else 48
    names = ("domain 1", "2") if first else ("1", "domain 2")
    return box(x, y + 8, cut - 2, 28, names[0], SHARED) + box(x + cut + 2, y + 8, 198 - cut, 28, names[1], DOMAIN)


def _speeds(x: float, y: float, first: bool) -> str:
    width, said = (22, "1 s a round") if first else (200, "9 s a round")
    bar = box(x, y + 8, width, 28, "" if first else said, SHARED)
    return bar + (draw_text(x + width + 10, y + 27, said) if first else "")


def before_after() -> str:
    """One client's accuracy goes up in local training and down in the average."""
    before = [(70, 196), (170, 150), (270, 120), (370, 102), (470, 94)]
    after = [(130, 108), (230, 84), (330, 70), (430, 62)]
    zigzag = [point for pair in zip(before, after, strict=False) for point in pair] + [before[-1]]
    up = "".join(f"M{x:g} {y:g}L{u:g} {v:g}" for (x, y), (u, v) in pairwise(zigzag) if v < y)
    down = "".join(f"M{x:g} {y:g}L{u:g} {v:g}" for (x, y), (u, v) in pairwise(zigzag) if v > y)
    parts = [line(48, 226, 530, 226, MUTED), line(48, 226, 48, 30, MUTED)]
    parts += [draw_text(14, 22, "accuracy on a client's own data", fill=MUTED), middle(500, 246, "rounds", fill=MUTED)]
    parts += [middle(x, 246, f"t + {at}" if at else "t", fill=MUTED) for at, (x, _) in enumerate(before[:-1])]
    parts.append(build_element("path", d=up, stroke=PERSONAL, stroke_width="2.5", fill="none"))
    parts.append(build_element("path", d=down, stroke=SHARED, stroke_width="2.5", stroke_dasharray="3 4", fill="none"))
    parts += [build_element("circle", cx=x, cy=y, r=6, fill=SHARED) for x, y in before]
    parts += [
        build_element("circle", cx=x, cy=y, r=6, fill=css_colour("paper"), stroke=PERSONAL, stroke_width="2.5")
        for x, y in after
    ]
    parts += [draw_text(392, 44, "after", font_weight="600"), draw_text(482, 116, "before", font_weight="600")]
    key = [line(250, 176, 280, 176, PERSONAL), draw_text(288, 181, "a client trains on its own samples", font_size=13)]
    key += [
        line(250, 200, 280, 200, SHARED, stroke_dasharray="3 4"),
        draw_text(288, 205, "the server averages", font_size=13),
    ]
    return drawing(
        "Before and after local training",
        "In every round the accuracy of a client rises during local training, from before to after, and falls when "
        "the server averages the models. Both curves rise over the rounds.",
        260,
        *parts,
        *key,
    )


def verdict() -> str:
    """Three intervals beside zero."""
    zero = 280.0
    cases = [
        (60, "behind", 70, 150, 230, "worse"),
        (116, "no significant difference", 205, 262, 330, "muted"),
        (172, "ahead", 330, 410, 490, "better"),
    ]
    parts = [line(zero, 26, zero, 206, MUTED, stroke_dasharray="4 4"), line(30, 206, 530, 206, MUTED)]
    parts += [middle(zero, 225, "0", font_weight="600"), draw_text(30, 225, "reference is better", fill=MUTED)]
    parts.append(draw_text(530.0, 225, "method is better", fill=MUTED, text_anchor="end"))
    for y, said, low, mean, high, colour in cases:
        ends = f"M{low} {y - 8}v16M{low} {y}H{high}M{high} {y - 8}v16"
        parts.append(build_element("path", d=ends, stroke=css_colour(colour), stroke_width="3", fill="none"))
        parts += [
            build_element("circle", cx=mean, cy=y, r=7, fill=css_colour(colour)),
            clear(mean, y - 18, said, font_weight="600"),
        ]
    parts.append(middle(280, 250, "gain over the reference, with its 95 % interval", fill=MUTED))
    return drawing(
        "The three answers of the verdict",
        "An interval below 0 means behind, one with 0 in it no significant difference, one above 0 ahead.",
        264,
        *parts,
    )


def participation() -> str:
    """Four clients' seconds, and when a round ends under two policies."""
    left, second = 96.0, 42.0
    times = (("A", 1.0), ("B", 1.6), ("C", 3.5), ("D", 10.0))
    parts = []
    for at, (name, time) in enumerate(times):
        y, used = 46 + 38 * at, time <= 3.5
        parts += [
            draw_text(20, y + 18, f"client {name}"),
            box(left, y, second * time, 26, "", SHARED if used else PERSONAL),
        ]
    parts += [middle(left + 6.75 * second, 178, "still at work, not used", font_size=13)]
    for time, said, y, anchor in (
        (3.5, "first three replies: 3.5 s", 34, "start"),
        (10, "everybody: 10 s", 102, "end"),
    ):
        x = left + second * time
        parts += [line(x, 24, x, 204, INK, stroke_dasharray="4 4")]
        parts += [draw_text(x + (8 if anchor == "start" else -8), y, said, text_anchor=anchor, font_weight="600")]
    parts += [line(left, 204, 530, 204, MUTED)]
    parts += [middle(left + second * time, 222, str(time), fill=MUTED) for time in range(0, 11, 2)]
    parts += [middle(280, 244, "virtual seconds of one round", fill=MUTED)]
    return drawing(
        "How long a round takes",
        "Four clients need 1, 1.6, 3.5 and 10 seconds. A round of the first three replies takes 3.5 seconds, one of "
        "everybody 10.",
        258,
        *parts,
    )


def placement() -> str:
    """Methods by stages."""
    kinds = {"s": ("shared", SHARED), "p": ("personal", PERSONAL), "d": ("per domain", DOMAIN)}
    columns = (118, 264, 410)
    parts = []
    for x, name in zip(columns, ("embedding", "body", "head"), strict=True):
        parts += [middle(x + 65, 32, name, font_weight="600")]
    parts += [draw_text(20, 32, "inputs", fill=MUTED), arrow((68, 27), (130, 27))]
    parts += [arrow((234, 27), (298, 27)), arrow((356, 27), (446, 27)), arrow((502, 27), (538, 27))]
    for at, (method, stages) in enumerate(PLACED.items()):
        y = 48 + 38 * at
        parts.append(bold(20, y + 20, method))
        parts += [box(x, y, 130, 30, *kinds[kind]) for x, kind in zip(columns, stages, strict=True)]
    return drawing(
        "Where six methods place the stages of a model",
        "; ".join(f"{method}: {', '.join(kinds[kind][0] for kind in stages)}" for method, stages in PLACED.items()),
        286,
        *parts,
    )


def privacy() -> str:
    """What stays, what leaves, and where three protections act."""
    parts = [box(16, 24, 150, 176), bold(30, 48, "client"), rows(34, 76), draw_text(92, 94, "rows")]
    parts += [box(30, 138, 122, 44, "personal part", PERSONAL), box(414, 24, 130, 176), bold(428, 48, "server")]
    parts += [box(426, 70, 106, 44, "shared model", SHARED)]
    parts += [arrow((166, 92), (410, 92)), arrow((414, 160), (170, 160))]
    parts += [middle(290, 58, "parameters, counts"), middle(290, 182, "shared model")]
    for x, name in ((214, "policy"), (284, "noise"), (354, "masks")):
        parts.append(box(x - 29, 76, 58, 32, fill=css_colour("paper"), stroke=DOMAIN) + middle(x, 97, name))
    parts += [middle(91, 226, "stays", font_weight="600"), middle(290, 226, "leaves", font_weight="600")]
    parts += [middle(479, 226, "sees replies,", font_weight="600"), middle(479, 244, "or sums", font_weight="600")]
    return drawing(
        "What stays at a client and what leaves it",
        "Rows and the personal part of the model stay at the client. Parameters and counts leave it after a "
        "policy, noise and masks have been applied, if these are set. The server sees replies, or only sums of "
        "replies.",
        262,
        *parts,
    )


def engines() -> str:
    """Four clients under three engines."""
    size = 44
    parts = [bold(20, 54, "sequential"), bold(20, 130, "stacked"), bold(20, 222, "ray")]
    for at, name in enumerate("ABCD"):
        parts.append(box(130 + at * 76, 28, size, size, name, SHARED))
        parts.append(arrow((176 + at * 76, 50), (202 + at * 76, 50)))
        parts.append(box(130 + at * size, 104, size, size, name, SHARED, rx=0))
        parts.append(box(130 + at % 2 * size, 180 + at // 2 * 42, size, 34, name, SHARED, rx=0))
    parts += [arrow((308, 126), (340, 126)), draw_text(348, 131, "one tensor program")]
    for worker in (1, 2):
        y = 155 + 42 * worker
        parts += [arrow((220, y), (252, y)), draw_text(260, y + 5, f"worker {worker}")]
    parts += [draw_text(440, 55, "one at a time"), draw_text(348, 218, "chunks, side by side")]
    parts.append(middle(280, 290, "The same seed: the same participants and mini-batches everywhere.", fill=MUTED))
    return drawing(
        "Three engines train the same four clients",
        "Sequential trains one client after another, stacked all in one tensor program, ray in chunks on workers.",
        306,
        *parts,
    )


PICTURES: dict[str, Callable[[], str]] = {
    "federated-learning": federated_learning,
    "four-ways": four_ways,
    "before-after": before_after,
    "verdict": verdict,
    "participation": participation,
    "placement": placement,
    "privacy": privacy,
    "engines": engines,
}
"""A drawing for each page of ``docs/concepts``, by the page's name."""


def main() -> None:
    """Write all of them."""
    for name, draw in PICTURES.items():
        (TO / f"{name}.svg").write_text(draw() + "\n")
        print(TO / f"{name}.svg")


if __name__ == "__main__":
    main()
