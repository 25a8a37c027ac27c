"""Figures for papers: a PDF shows what its SVG shows, with nothing see-through and fonts of its own."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pypdfium2
import pytest
from chromium import Tab, chromium
from command_line import Outcome, perfed
from matplotlib import get_data_path
from numpy.typing import NDArray
from PIL import Image
from test_report import MEANS, write_combination, write_run
from test_report_tables import clocked

from perfed import report as reports
from perfed.report.page import svg
from perfed.report.page.gallery import describe_reading
from perfed.report.page.paper import SPACE, make_standalone

FONTS = Path(get_data_path()) / "fonts" / "ttf"
SCALE = 2  # pixels for each unit of a drawing
BLUE = np.array([0x3B, 0x8F, 0xD0])  # of heat maps
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 100" font-family="DejaVu Sans">{}</svg>'

Pixels = NDArray[np.float64]


def held(run: Path) -> None:
    """What four clients hold of three classes."""
    clients = {f"c{i}": {"rows": {"train": 6, "test": 2 + i}, "classes": [6 - i, i, 0]} for i in range(4)}
    content = {"data": "12345678", "classes": ["ä", "β", "γ"], "domains": [], "clients": clients}
    (run / "federation.json").write_text(json.dumps(content))


def everything(folder: Path) -> list[Path]:
    """Runs of two methods that have kept samples, weights, losses, predictions and what clients hold."""
    runs = [write_run(folder / f"{method}-{seed}", method, seed) for method, seed in MEANS]
    write_combination(runs[0] / "combination")
    (runs[0] / "losses").mkdir()
    for number, names in ((1, "aab"), (2, "bb")):
        losses = np.arange(1, len(names) + 1) / number
        np.savez(runs[0] / "losses" / f"round-{number:04d}.npz", client=np.array([*names]), loss=losses)
    for run in runs:
        held(run)
        said(run)
    return runs


def said(run: Path) -> None:
    """Predictions of two classes that are not those of the run's clients."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 2))
    right = rng.random(60) < 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
    (run / "predictions").mkdir()
    of = {"ids": np.array(["c0"]), "counts": np.array([60]), "marks": np.array([1], dtype=np.uint32)}
    np.savez(run / "predictions" / "round-0001.npz", targets=right.astype(np.int64), outputs=logits, **of)


def written(folder: Path) -> Outcome:
    """The figures of two methods and of three with a clock, in two folders."""
    runs = everything(folder)
    (folder / "clock").mkdir()
    assert perfed("report", *clocked(folder / "clock"), "--figures", folder / "times", "--out", folder / "t").code == 0
    return perfed("report", *runs, "--figures", folder / "figures", "--out", folder / "r.html")


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("paper")
    return folder, written(folder)


@pytest.fixture(scope="module")
def files(told) -> list[Path]:
    return sorted(told[0].glob("*/*.pdf"))


def of_pdf(file: Path, width: int) -> Pixels:
    page = pypdfium2.PdfDocument(file)[0]
    return np.asarray(page.render(scale=width / page.get_width()).to_pil().convert("RGB"), float)


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


def of_svg(tab: Tab, file: Path, page: Path) -> Pixels:
    """As Chromium draws it with the font that it asks for, letters set without kerning as in PDFs."""
    text = file.read_text()
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', text)[0])
    faces = "".join(
        f"@font-face{{font-family:'DejaVu Sans';font-weight:{weight};src:url({(FONTS / name).as_uri()})}}"
        for weight, name in (("normal", "DejaVuSans.ttf"), ("bold", "DejaVuSans-Bold.ttf"))
    )
    style = f"{faces}body{{margin:0;font-kerning:none}}svg{{display:block;width:{width}px;height:{height}px}}"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8><style>{style}</style>{text}")
    tab.open(page)
    loaded = "Promise.all([...document.fonts].map(face => face.load()))"
    tab.run(f"{loaded}.then(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))))")
    seen = {"x": 0, "y": 0, "width": width, "height": height, "scale": SCALE}
    shot = tab.call("Page.captureScreenshot", format="png", clip=seen, captureBeyondViewport=True)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"), float)


def blurred(pixels: Pixels, side: int = 8) -> Pixels:
    """Means of squares: edges are smoothed in another way by another program."""
    rows, columns = (length // side for length in pixels.shape[:2])
    return pixels[: rows * side, : columns * side].reshape(rows, side, columns, side, 3).mean((1, 3))


@pytest.mark.long
def test_a_pdf_and_a_png_show_what_the_svg_shows(tab, files, tmp_path):
    for file in files:
        expected = of_svg(tab, file.with_suffix(".svg"), tmp_path / "page.html")
        found = of_pdf(file, expected.shape[1])
        assert abs(len(found) - len(expected)) <= 1, file
        rows = min(len(found), len(expected))
        gap = np.abs(blurred(found[:rows]) - blurred(expected[:rows])).max()
        assert gap < 45, (file, gap)  # at most 28; 95 and more where fonts or colours are others
        picture = Image.open(file.with_suffix(".png")).convert("RGB")
        assert picture.width == 1500  # five inches, of 300 dots each
        small = np.asarray(picture.resize((expected.shape[1], len(expected))), float)
        assert np.abs(blurred(small[:rows]) - blurred(expected[:rows])).max() < 45, file


@pytest.mark.long
def test_every_kind_of_figure_is_there(files):
    kinds = {"gains", "gains-sorted-", "gains-scatter-", "curves-", "losses-", "before-after", "rows", "partition-"}
    kinds |= {"embedding-", "combination-", "time-to-target", "metric-by-speed"}
    assert all(any(file.stem.startswith(kind) for file in files) for kind in kinds)


@pytest.mark.long
def test_colours_of_heat_maps_are_the_weights_in_both_files(files):
    (file,) = [file for file in files if file.stem == "combination-fedavg-round-1"]
    pixels = of_pdf(file, 480 * SCALE)
    (address,) = re.findall(
        r'<image x="66" [^>]*href="data:image/png;base64,([^"]+)"', file.with_suffix(".svg").read_text()
    )
    picture = Image.open(io.BytesIO(base64.b64decode(address)))
    assert picture.mode == "RGB"
    middle = SCALE * (75 * np.arange(4) + 75 / 2)
    for row, column in np.ndindex(4, 4):
        weight = 0.25 * (row == column) + 0.75 / 4  # of the largest one, 1 in the last round
        expected = weight * BLUE + (1 - weight) * 255
        there = pixels[int(44 * SCALE + middle[row]), int(66 * SCALE + middle[column])]
        np.testing.assert_allclose(there, expected, atol=2)
        own = picture.getpixel(((2 * column + 1) * picture.width // 8, (2 * row + 1) * picture.height // 8))
        np.testing.assert_allclose(own, expected, atol=1)


@pytest.mark.long
def test_nothing_in_the_files_is_see_through(files):
    for file in files:
        drawn, page = file.with_suffix(".svg").read_text(), file.read_bytes()
        assert not re.search("opacity|transparent|rgba", drawn), file
        assert {float(share) for share in re.findall(rb"/(?:ca|CA) ([\d.]+)", page)} <= {1.0}, file
        assert b"/SMask" not in page, file


@pytest.mark.long
def test_fonts_are_in_the_pdfs(files):
    for file in files:
        page = file.read_bytes()
        names = set(re.findall(rb"/BaseFont /([^\s/]+)", page))
        assert names and all(re.fullmatch(rb"[A-Z]{6}\+DejaVuSans(-Bold)?", name) for name in names), (file, names)
        assert len(re.findall(rb"/FontFile2 ", page)) == len(names)
        document = pypdfium2.PdfDocument(file)
        texts = [part for part in document[0].get_objects() if isinstance(part, pypdfium2.PdfTextObj)]
        assert texts and all(part.get_font().is_embedded for part in texts), file


def words_of(file: Path) -> str:
    return str(pypdfium2.PdfDocument(file)[0].get_textpage().get_text_range())


@pytest.mark.long
def test_words_in_pdfs_can_be_read_and_searched(files):
    by_name = {(file.parent.name, file.stem): file for file in files}
    assert "Accuracy (%), before → after local training" in words_of(by_name["figures", "before-after"])
    assert {"ä", "β", "γ"} <= set(words_of(by_name["figures", "partition-classes"]).split())


def test_colours_that_cover_a_part_are_what_they_are_on_white():
    """By hand: 255 - share * (255 - colour); shares of groups multiply, those of fills are inherited."""
    parts = [
        svg.build_element("g", svg.draw_dot(1, 1, "#ff0000"), svg.draw_dot(1, 1, None), opacity=0.5, fill="#000000"),
        svg.build_element("g", svg.draw_dot(1, 1, "#00ff00"), fill_opacity=0.2),
        svg.build_element("path", d="M0 0", fill="none", stroke="#0000ff", stroke_opacity=0.5, opacity=0.4),
        svg.draw_text(1, 1, "plain"),
    ]
    root = ElementTree.fromstring(make_standalone(svg.build_drawing("t", "d", *parts)))
    circles, (line,) = [*root.iter(f"{{{SPACE}}}circle")], root.iter(f"{{{SPACE}}}path")
    assert [circle.get("fill") for circle in circles] == ["#ff8080", "#808080", "#ccffcc"]
    assert (line.get("fill"), line.get("stroke")) == ("none", "#ccccff")
    assert next(root.iter(f"{{{SPACE}}}text")).get("fill") is None
    assert [root.findtext(f"{{{SPACE}}}{name}") for name in ("title", "desc")] == ["t", "d"]


@pytest.mark.long
def test_a_band_on_paper_hides_no_line(files):
    """What covers is drawn before what is thin: grid and methods."""
    (file,) = [file for file in files if (file.parent.name, file.stem) == ("figures", "curves-mean")]
    paths = [*ElementTree.parse(file.with_suffix(".svg")).getroot().iter(f"{{{SPACE}}}path")]
    bands = [
        place for place, path in enumerate(paths) if path.get("d", "").endswith("Z") and path.get("fill") != "none"
    ]
    thin = [place for place, path in enumerate(paths) if "H" in path.get("d", "") or path.get("stroke-width") == "2"]
    keys = 2  # the legend's lines are where no band is
    assert len(bands) == 2 and len(thin) == 2 + keys + 2 and max(bands) < min(thin[keys:])


@pytest.mark.long
def test_what_the_font_lacks_and_what_svglib_says_is_told(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", "fedavg", 0)
    quiet = perfed("report", run, "--figures", tmp_path / "quiet")
    assert quiet.code == 0 and ".pdf: " not in quiet.out and quiet.err == ""
    drawn = {
        "one": SVG.format('<text x="9" y="20">北 ok 京</text>'),
        "two": SVG.format('<path d="M0 0" fill="bluish"/>'),
    }
    monkeypatch.setattr(reports, "figures", lambda runs: drawn)
    told = perfed("report", run, "--figures", tmp_path / "told")
    assert told.code == 0
    assert "one.pdf: DejaVu Sans lacks 北, 京: boxes in their place; the SVG has them" in told.said
    assert "two.pdf: Can't handle color: bluish" in told.said


@pytest.mark.long
def test_an_index_shows_every_figure_and_says_how_it_is_read(tab, told, tmp_path):
    folder, outcome = told
    assert f"written: {folder / 'figures' / 'index.html'}" in outcome.out.splitlines()
    for place in (folder / "figures", folder / "times"):
        stems = {file.stem for file in place.glob("*.svg")}
        assert stems and all(describe_reading(stem) for stem in stems)
        tab.open(place / "index.html")
        tab.run("[...document.images].forEach(image => { image.loading = 'eager' })")
        tab.run("Promise.all([...document.images].map(image => image.decode())).then(() => 0)")
        assert sorted(tab.run("[...document.images].map(image => image.getAttribute('src'))")) == sorted(
            f"{stem}.svg" for stem in stems
        )
        assert tab.run("[...document.images].every(image => image.naturalWidth > 0)")
        links = tab.run("[...document.links].map(link => decodeURIComponent(link.getAttribute('href')))")
        assert sorted(links) == sorted(file.name for file in place.iterdir() if file.name != "index.html")
        text = tab.run("document.body.innerText")
        assert "perfed report" in text and (describe_reading("before-after") in text or place.name == "times")
    assert (tab.said, tab.asked) == ([], [])
