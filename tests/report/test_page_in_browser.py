"""The page in a browser: it logs nothing and asks for nothing, and everything in it works by keyboard."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pypdfium2
import pytest
from chromium import Tab, chromium
from engines import blobs
from test_report import MEANS, write_combination, write_large, write_run
from test_report_tables import clocked

from perfed.report import load_runs, write_report
from perfed.report.page import style
from perfed.report.page.style import build_document
from perfed.report.partition import ClassTable, write_partition_page


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = [write_run(folder / f"{method}-{seed}", method, seed) for method, seed in MEANS]
    write_combination(runs[0] / "combination")
    return write_report(load_runs(runs), folder / "report.html", title="Two methods")


@pytest.mark.long
def test_pages_are_silent_and_fit_into_a_phone(tab, page, tmp_path):
    clock = write_report(load_runs(clocked(tmp_path)), tmp_path / "clock.html", title="Clock")
    partition = write_partition_page(ClassTable.from_federation(blobs()), tmp_path / "partition.html")
    for file in (page, clock, partition):
        for width in (420, 1400):
            tab.open(file, width=width, dark=width == 420)
            assert tab.run("document.documentElement.scrollWidth") == width, file
            links = tab.run("[...document.links].map(link => link.getAttribute('href'))")
            assert all(link.startswith("#") for link in links)
    tab.open(page, dark=True)
    assert tab.run("getComputedStyle(document.body).backgroundColor") == rgb(style.DARK["paper"])
    tab.open(page, dark=True, media="print")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == rgb(style.LIGHT["paper"])
    assert (tab.said, tab.asked) == ([], [])


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_a_request_of_a_page_would_be_noticed_and_is_forbidden(tab, tmp_path):
    picture = '<img src="http://localhost:9/picture.png">'
    for number, (text, seen) in enumerate(((f"<html><body>{picture}", 1), (build_document("t", "", [picture]), 0))):
        (tmp_path / f"{number}.html").write_text(text)
        tab.open(tmp_path / f"{number}.html")
        assert len(tab.asked) == seen
        tab.asked.clear()
    tab.said.clear()


def shown(tab: Tab, column: int) -> list[str]:
    return tab.run(f"[...board.tBodies[0].rows].map(row => row.cells[{column}].textContent)")


@pytest.mark.long
def test_the_leaderboard_is_sorted_and_switched_by_keyboard(tab, page):
    tab.open(page)
    assert shown(tab, 0) == ["flic", "FedAvg"] and shown(tab, 3) == ["0 / 0 / 6", "–"]
    tab.focus("#board th.mean button")
    tab.press("Enter")
    assert shown(tab, 0) == ["flic", "FedAvg"]  # the best first
    tab.press("Space")
    assert shown(tab, 0) == ["FedAvg", "flic"]
    assert tab.run("board.querySelector('[aria-sort]').ariaSort") == "ascending"
    before = shown(tab, 2)[1]
    tab.focus("select[name=reference]")
    tab.press("ArrowDown")
    assert shown(tab, 3) == ["6 / 0 / 0", "–"] and "Better than flic" in tab.run("board.tHead.textContent")
    after = shown(tab, 2)[0]
    assert re.findall(r"[\d.]+", before)[0] == re.findall(r"[\d.]+", after)[0] and after[0] == "-"
    hidden = "getComputedStyle(board.querySelector('th.p-value')).display"
    assert tab.run(hidden) == "none"
    tab.focus("input[name=p]")
    tab.press("Space")
    assert tab.run(hidden) == "table-cell" and re.fullmatch(r"0\.\d{3}", shown(tab, 9)[0])


@pytest.mark.parametrize(
    ("kind", "begins", "has"),
    [
        ("csv", "Method,", "\nflic,81.00 ± 1.41,"),
        ("markdown", "| Method |", "\n| --- | ---: |"),
        ("latex", "% needs \\usepackage{booktabs}\n\\begin{table}", "\nflic & 81.00 $\\pm$ 1.41 & "),
    ],
)
def test_the_leaderboard_is_copied_as_text(tab, page, kind, begins, has):
    tab.open(page)
    tab.focus(f"button[data-copy={kind}]")
    tab.press("Enter")
    tab.run("new Promise(done => setTimeout(done, 100))")
    text = tab.run("document.querySelector('.copy textarea').value")
    assert text.startswith(begins) and has in text and "p (Holm)" not in text
    if kind == "latex":
        assert "\\caption{Two methods: Accuracy (\\%).}\n\\label{tab:two-methods-accuracy}\n" in text
        assert text.count("{") == text.count("}") and text.endswith("\\end{tabular}\n\\end{table}\n")
    assert tab.run("document.querySelector('.copy output').textContent")


@pytest.mark.long
def test_panels_are_switched_by_keyboard(tab, page, tmp_path):
    tab.open(page)
    visible = "[...document.querySelectorAll('#combination [data-key]:not([hidden])')].map(panel => panel.dataset.key)"
    assert tab.run(visible) == ["4"]
    assert tab.run("document.querySelectorAll('#embedding [data-key]:not([hidden]) svg').length") == 3
    tab.focus("#combination input[type=range]")
    tab.press("ArrowLeft")
    assert tab.run(visible) == ["3"]
    tab.press("Home")
    assert tab.run(visible) == ["1"] and tab.run("document.querySelector('#combination output').textContent") == "1"
    tab.open(write_report(load_runs(clocked(tmp_path)), tmp_path / "clock.html", title="Clock"))
    visible = visible.replace("combination", "curves")
    assert tab.run(visible) == ["Virtual time"]
    tab.focus("#curves input")
    seen = []
    for _ in range(3):
        tab.press("ArrowRight")
        seen += tab.run(visible)
    assert seen == ["Rounds", "Wall time", "Bytes"]
    assert (tab.said, tab.asked) == ([], [])


def test_clients_are_searched_by_keyboard(tab, page):
    tab.open(page)
    ids = "[...document.querySelectorAll('#clients-table tbody tr')].map(row => row.cells[0].textContent)"
    assert tab.run(ids) == ["<b>0", "<b>1", "<b>2", "untested"]
    tab.focus("input[name=client]")
    tab.press(*"b>1")
    assert tab.run(ids) == ["<b>1"]
    assert tab.run("document.querySelector('#clients-found').textContent") == "1 of 4 clients"


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Twelve methods at thirteen clients with long names: nothing of it fits into a phone."""
    folder = tmp_path_factory.mktemp("wide")
    rng = np.random.default_rng(0)
    runs = [write_large(folder / f"a-method-{number}", f"a-method-{number}", rng, 13, 8) for number in range(12)]
    return write_report(load_runs(runs), folder / "report.html", title="Wide")


SCROLLED = "[...document.querySelectorAll('.wide')].filter(box => box.checkVisibility())"


@pytest.mark.long
def test_a_table_that_is_wider_than_the_screen_says_so_and_its_names_stay(tab, wide):
    for width in (390, 1400):
        tab.open(wide, width=width)
        told = tab.run(f"{SCROLLED}.map(box => getComputedStyle(box, '::before').content !== 'none')")
        assert told == tab.run(f"{SCROLLED}.map(box => box.scrollWidth > box.clientWidth + 1)")
        assert any(told) == (width == 390) or width == 1400
    tab.open(wide, width=390)
    place = "board.tBodies[0].rows[0].cells[{}].getBoundingClientRect().left"
    before = [tab.run(place.format(cell)) for cell in (0, 4)]
    tab.run("board.parentElement.scrollLeft = 200; 0")
    assert tab.run(place.format(0)) == before[0] and tab.run(place.format(4)) == before[1] - 200
    assert tab.run("board.tBodies[0].rows[0].cells[0].getBoundingClientRect().width") < 390 / 2


@pytest.mark.long
def test_clients_after_the_tenth_are_folded_and_found(tab, wide):
    tab.open(wide)
    first = "[...document.querySelectorAll('#gains .brief tbody th')].map(cell => cell.textContent)"
    assert tab.run(first) == [f"{number:04d}" for number in range(10)]
    every = "document.querySelector('#clients-table').checkVisibility()"
    assert not tab.run(every)
    tab.focus("details:has(#clients-table) summary")
    tab.press("Enter")
    assert tab.run(every) and tab.run("document.querySelectorAll('#clients-table tbody tr').length") == 13
    tab.focus("input[name=client]")
    tab.press(*"0012")
    assert tab.run("document.querySelector('#clients-found').textContent") == "1 of 13 clients"


@pytest.mark.long
def test_all_that_is_long_is_on_paper_and_nothing_is_cut(tab, wide):
    """Every word lies between the margins of its page, and every client is there once."""
    tab.open(wide)
    printed = base64.b64decode(tab.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    margin, clients = 12 * 72 / 25.4, 0
    for page in pypdfium2.PdfDocument(printed):
        text = page.get_textpage()
        words = [text.get_rect(number) for number in range(text.count_rects())]
        assert words and min(left for left, *_ in words) > margin - 1
        assert max(right for *_, right, _ in words) < page.get_width() - margin + 1
        clients += len(re.findall(r"^00\d\d\b", text.get_text_range(), re.MULTILINE))
    assert clients == 13
    assert not tab.run("document.querySelector('#clients-table').checkVisibility()")  # folded again on the screen


@pytest.mark.long
def test_many_clients_open_at_once(tab, tmp_path):
    rng = np.random.default_rng(0)
    runs = [write_large(tmp_path / f"m{number}", f"m{number}", rng) for number in range(5)]
    page = write_report(load_runs(runs), tmp_path / "report.html", title="large")
    assert min(tab.open(page) for _ in range(3)) < 2
    tab.focus("details:has(#clients-table) summary")
    tab.press("Enter")
    tab.focus("input[name=client]")
    tab.press(*"0012")
    assert tab.run("document.querySelector('#clients-found').textContent") == "1 of 2000 clients"
