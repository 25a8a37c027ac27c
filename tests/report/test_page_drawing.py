"""Drawing: where values land, which ticks an axis has, and that what is written is well-formed."""

import base64
import xml.etree.ElementTree as ElementTree
import zlib
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from perfed.report.curves import Curve
from perfed.report.page import style, svg
from perfed.report.page.curves import choose_value_range
from perfed.report.page.paper import make_standalone

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "log", "texts"),
    [
        (0, 30, False, ["0", "10", "20", "30"]),
        (35.2, 91, False, ["40", "60", "80"]),
        (-0.021, 0.04, False, ["−0.02", "0.00", "0.02", "0.04"]),
        (0, 12000, False, ["0", "2 500", "5 000", "7 500", "10 000"]),
        (0.9, 120, True, ["1", "2", "5", "10", "20", "50", "100"]),
        (0.01, 3e4, True, ["0.01", "0.1", "1", "10", "100", "1 000", "10 000"]),
        (1e-7, 2e8, True, ["1e-6", "0.001", "1", "1 000", "1e6"]),
    ],
)
def test_ticks_are_round_and_within(low, high, log, texts):
    found = svg.Scale(low, high, 0, 1, log).ticks()
    assert [text for _, text in found] == texts
    assert all(low <= value <= high for value, _ in found)


def test_values_land_where_a_computation_by_hand_puts_them():
    axes = svg.create_axes((0, 10), (0, 50), ("Round", "Accuracy (%)"), top=30)
    assert (axes.x.start, axes.x.end, axes.y.start, axes.y.end) == (34, 466, 256, 30)
    assert axes.x(2.5) == 34 + 0.25 * 432 and axes.y(50) == 30 and axes.y(12.5) == 256 - 0.25 * 226
    assert svg.Scale(0.1, 1000, 100, 500, log=True)(1) == pytest.approx(100 + 400 / 4)
    drawn = ElementTree.fromstring(
        svg.build_drawing("t", "d", str(axes), svg.draw_line([(axes.x(5), axes.y(25))], style.assign_looks("a")["a"]))
    )
    marks = {text.text: (float(text.get("x")), float(text.get("y"))) for text in drawn.iter(f"{SPACE}text")}
    assert marks["10"][0] in (466, 28) and marks["20"] == (28, pytest.approx(256 - 0.4 * 226 + 4, abs=0.05))
    assert list(drawn.iter(f"{SPACE}path"))[-1].get("d") == "M250 143"


def test_an_axis_is_never_of_no_length():
    assert (
        svg.compute_axis_range([3.0, 3.0]) == (2.85, 3.15)
        and svg.compute_axis_range([]) == (0, 1)
        and svg.compute_axis_range([0.0]) == (-1, 1)
    )
    assert svg.compute_axis_range([float("nan"), 5.0, 1.0], zero=True) == (0, pytest.approx(5.2))
    assert svg.compute_axis_range([0.0, 1.0, 100.0], log=True) == pytest.approx((1 / 1.1, 110))


def test_words_of_others_are_escaped_and_what_is_written_is_xml():
    entry, below = svg.draw_legend([('<b>&"x"', style.Look("var(--c1)", "2 3")), ("y" * 80, style.Look("red", ""))])
    parts = [
        entry,
        svg.draw_dot(1, 2, "red", "a < b & c"),
        svg.draw_interval(1, 3, 2, "red"),
        svg.fill_area([(0, 0), (1, 1)], "#ff0000"),
    ]
    root = ElementTree.fromstring(make_standalone(svg.build_drawing("<title>", "a & b", *parts)))
    assert root.get("role") == "img"
    assert [root.find(f"{SPACE}{name}").text for name in ("title", "desc")] == ["<title>", "a & b"]
    assert [text.text for text in root.iter(f"{SPACE}text")] == ['<b>&"x"', "y" * 80]
    assert root.find(f"{SPACE}circle/{SPACE}title").text == "a < b & c"
    assert below == 14 + 19 + 8  # the second name needs a row of its own


def test_a_file_of_its_own_has_light_colours_and_no_variables():
    drawn = svg.build_drawing(
        "t",
        "d",
        svg.draw_dot(1, 2, style.css_colour("c3")),
        svg.draw_text(0, 0, "w", fill=style.css_colour("muted")),
    )
    alone = make_standalone(drawn)
    assert "var(" in drawn and "var(" not in alone
    assert style.LIGHT["c3"] in alone and style.LIGHT["muted"] in alone


def test_methods_look_different_and_always_the_same():
    found = style.assign_looks([f"m{i}" for i in range(40)])
    assert len({(one.colour, one.dash) for one in found.values()}) == 40
    assert len({found[f"m{i}"].colour for i in range(10)}) == 10 == len({style.cycle_colour(i) for i in range(10)})
    assert found["m1"] == style.assign_looks(["m0", "m1"])["m1"]
    assert style.LIGHT.keys() == style.DARK.keys()


def contrast(one: str, other: str) -> float:
    """By WCAG 2's formula."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira, Fernandes 2009: what people see who lack cones for red, and for green; of linear colours.
LACKING = {
    "none": np.eye(3),
    "red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]),
}


def far(one: str, other: str, lacking: str) -> float:
    """CIE 1976's colour difference, by its definition, as they look to who lacks cones."""

    def lab(colour: str) -> NDArray[np.float64]:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        seen = np.clip(LACKING[lacking] @ linear, 0, 1)
        to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        ratio = to_xyz @ seen / [0.9505, 1, 1.089]
        x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    return float(np.linalg.norm(lab(one) - lab(other)))


@pytest.mark.parametrize("colours", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_better_and_worse_are_no_method_s_colours_and_are_told_apart_without_red_or_green(colours):
    for lacking in LACKING:
        assert far(colours["better"], colours["worse"], lacking) > 40
        assert min(far(colours[kind], colours["equal"], lacking) for kind in ("better", "worse")) > 20
    methods = [colours[name] for name in style.COLOURS]
    assert min(far(colours[kind], own, "none") for kind in ("better", "worse") for own in methods) > 20
    assert min(far(one, other, "none") for i, one in enumerate(methods) for other in methods[:i]) > 20


@pytest.mark.parametrize("colours", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_words_and_lines_can_be_read_in_both_themes(colours):
    for ground in (colours["paper"], colours["panel"]):
        assert contrast(colours["ink"], ground) > 10 and contrast(colours["muted"], ground) > 4.5
        for name in (*style.COLOURS, "better", "worse", "accent"):
            assert contrast(colours[name], ground) > 3, name


def test_a_heat_map_is_a_png_whose_cover_is_the_value():
    address = svg.encode_heat_map(np.array([[0.0, 0.5, 1.0], [1.0, 0.0, 0.2]]), "#102030")
    content = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    length = int.from_bytes(content[33:37], "big")
    rows = (
        np.frombuffer(zlib.decompress(content[41 : 41 + length]), np.uint8)
        .reshape(2, 1 + 3 * 4)[:, 1:]
        .reshape(2, 3, 4)
    )
    assert rows[..., 3].tolist() == [[0, 128, 255], [255, 0, 51]] and rows[0, 0, :3].tolist() == [16, 32, 48]


def broken(*ends: float, **more: bool) -> int:
    """Marks of axes whose ends are these, first those of x."""
    frame = svg.create_axes(ends[:2], ends[2:], ("x", "y"), log_y=more.get("log_y", False))
    return str(replace(frame, counted=more.get("counted", False))).count(f"<title>{svg.NO_ZERO}</title>")


def test_an_axis_without_0_says_so():
    assert broken(0, 10, 0, 1) == 0 and broken(0, 10, -1, 1) == 0
    assert broken(0, 10, 0.5, 1) == 1 and broken(0, 10, -3, -1) == 1 and broken(5, 10, 0.5, 1) == 2
    assert broken(5, 10, 0.5, 1, counted=True) == 1  # of rounds nobody expects it
    assert broken(0, 10, 1, 1000, log_y=True) == 0


def test_a_line_is_cut_where_it_leaves_the_axis():
    scale = svg.Scale(0, 10, 100, 0)  # heights 0 to 100
    inside = [(0.0, 90.0), (10.0, 50.0), (20.0, 10.0)]
    assert svg.clip_line(inside, scale) == [inside]
    # From 20 below the axis up, through it, 50 above it, and back: at a fifth of the way in, half of it out and in.
    zigzag = [(0.0, 120.0), (10.0, 20.0), (20.0, -20.0), (30.0, 20.0)]
    assert svg.clip_line(zigzag, scale) == [[(2.0, 100), (10.0, 20.0), (15.0, 0)], [(25.0, 0), (30.0, 20.0)]]
    assert svg.clip_line([(0.0, 150.0), (10.0, -50.0)], scale) == [[(2.5, 100), (7.5, 0)]]
    assert svg.clip_line([(0.0, 150.0), (10.0, 130.0)], scale) == [] and svg.clip_line([(1.0, 5.0)], scale) == [
        [(1.0, 5.0)]
    ]


@pytest.mark.parametrize("values", [[-20.0, -10.0], [105.0], [-5.0, 110.0], [0.0, 100.0]])
def test_an_axis_has_values_beyond_the_limits_of_a_metric_on_it(values):
    """Metrics with noise may be below 0 or above 100 %."""
    low, high = svg.compute_axis_range(values, limits=(0.0, 100.0))
    assert low <= min(values) <= max(values) <= high and low < high


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([10, 60, 88, 90, 91, 90, 92, 93], 88, 93),  # what the rounds after the first quarter have is told apart
        ([50, 55, 60, 65, 70, 75, 80, 85], 50, 85),  # all matter
        ([9, 2, 1.1, 1.0, 1.0, 0.9, 1.0, 0.9], 0.9, 1.1),  # a loss, which falls
    ],
)
def test_a_curve_s_axis_shows_the_rounds_that_matter(values, low, high):
    curve = Curve("m", tuple(range(1, 9)), {}, np.array([values], dtype=float))
    late = [v for v in values if low <= v <= high]
    ends = choose_value_range([curve])
    assert ends[0] <= min(late) and ends[1] >= max(late)
    assert ends[0] > low - 0.1 * (high - low) and ends[1] < high + 0.1 * (high - low)
