"""Drawing: where values land, which ticks an axis has, and that what is written is well-formed."""

import base64
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np
import pytest

from perfed.report.page import style, svg
from perfed.report.page.paper import standalone

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
    axes = svg.axes((0, 10), (0, 50), ("Round", "Accuracy (%)"), top=30)
    assert (axes.x.start, axes.x.end, axes.y.start, axes.y.end) == (34, 466, 256, 30)
    assert axes.x(2.5) == 34 + 0.25 * 432 and axes.y(50) == 30 and axes.y(12.5) == 256 - 0.25 * 226
    assert svg.Scale(0.1, 1000, 100, 500, log=True)(1) == pytest.approx(100 + 400 / 4)
    drawn = ElementTree.fromstring(
        svg.drawing("t", "d", str(axes), svg.line([(axes.x(5), axes.y(25))], style.looks("a")["a"]))
    )
    marks = {text.text: (float(text.get("x")), float(text.get("y"))) for text in drawn.iter(f"{SPACE}text")}
    assert marks["10"][0] in (466, 28) and marks["20"] == (28, pytest.approx(256 - 0.4 * 226 + 4, abs=0.05))
    assert list(drawn.iter(f"{SPACE}path"))[-1].get("d") == "M250 143"


def test_an_axis_is_never_of_no_length():
    assert svg.spanned([3.0, 3.0]) == (2.85, 3.15) and svg.spanned([]) == (0, 1) and svg.spanned([0.0]) == (-1, 1)
    assert svg.spanned([float("nan"), 5.0, 1.0], zero=True) == (0, pytest.approx(5.2))
    assert svg.spanned([0.0, 1.0, 100.0], log=True) == pytest.approx((1 / 1.1, 110))


def test_words_of_others_are_escaped_and_what_is_written_is_xml():
    entry, below = svg.legend([('<b>&"x"', style.Look("var(--c1)", "2 3")), ("y" * 80, style.Look("red", ""))])
    parts = [
        entry,
        svg.dot(1, 2, "red", "a < b & c"),
        svg.interval(1, 3, 2, "red"),
        svg.area([(0, 0), (1, 1)], "#ff0000"),
    ]
    root = ElementTree.fromstring(standalone(svg.drawing("<title>", "a & b", *parts)))
    assert root.get("role") == "img"
    assert [root.find(f"{SPACE}{name}").text for name in ("title", "desc")] == ["<title>", "a & b"]
    assert [text.text for text in root.iter(f"{SPACE}text")] == ['<b>&"x"', "y" * 80]
    assert root.find(f"{SPACE}circle/{SPACE}title").text == "a < b & c"
    assert below == 14 + 19 + 8  # the second name needs a row of its own


def test_a_file_of_its_own_has_light_colours_and_no_variables():
    drawn = svg.drawing("t", "d", svg.dot(1, 2, style.paint("c3")), svg.words(0, 0, "w", fill=style.paint("muted")))
    alone = standalone(drawn)
    assert "var(" in drawn and "var(" not in alone
    assert style.LIGHT["c3"] in alone and style.LIGHT["muted"] in alone


def test_methods_look_different_and_always_the_same():
    found = style.looks([f"m{i}" for i in range(32)])
    assert len({(one.colour, one.dash) for one in found.values()}) == 32
    assert found["m1"] == style.looks(["m0", "m1"])["m1"]
    assert style.LIGHT.keys() == style.DARK.keys()


def contrast(one: str, other: str) -> float:
    """By WCAG 2's formula."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_words_and_lines_can_be_read_in_both_themes(colours):
    for ground in (colours["paper"], colours["panel"]):
        assert contrast(colours["ink"], ground) > 10 and contrast(colours["muted"], ground) > 4.5
        for name in (*style.COLOURS, "better", "worse", "accent"):
            assert contrast(colours[name], ground) > 3, name


def test_a_heat_map_is_a_png_whose_cover_is_the_value():
    address = svg.picture(np.array([[0.0, 0.5, 1.0], [1.0, 0.0, 0.2]]), "#102030")
    content = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    length = int.from_bytes(content[33:37], "big")
    rows = (
        np.frombuffer(zlib.decompress(content[41 : 41 + length]), np.uint8)
        .reshape(2, 1 + 3 * 4)[:, 1:]
        .reshape(2, 3, 4)
    )
    assert rows[..., 3].tolist() == [[0, 128, 255], [255, 0, 51]] and rows[0, 0, :3].tolist() == [16, 32, 48]
