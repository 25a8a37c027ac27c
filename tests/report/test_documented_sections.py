"""Sections and tables of the report are called in the documents what they are called on the page."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from test_figures_on_paper import everything
from test_report_tables import clocked, domain_values

from perfed.report import load_runs, write_report

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Two reports that have every section between them."""
    folder = tmp_path_factory.mktemp("page")
    timed = clocked(folder)
    summary = timed[0] / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"domains": {"accuracy": domain_values(0.1, 0.5)}}))
    each = [
        write_report(load_runs(runs), folder / "r.html", title="t").read_text() for runs in (everything(folder), timed)
    ]
    return "".join(each)


def heads(page: str, levels: str) -> set[str]:
    return {unescape(head).lower() for head in re.findall(rf"<({levels})[^>]*>([^<]+)</", page) for head in head[1:]}


@pytest.mark.long
def test_the_page_on_the_report_names_every_section(page):
    text = (DOCS / "howto" / "report.md").read_text().partition("## The sections\n")[2].partition("## ")[0]
    named = {
        name.lower()
        for line in re.findall(r"^\* (.*)", text, re.MULTILINE)
        for name in re.findall(r"\*\*(.+?)\*\*", line)
    }
    assert named == heads(page, "h2")


def test_the_tutorial_names_what_is_on_the_page(page):
    text = (DOCS / "tutorials" / "tables.md").read_text()
    named = re.findall(r"the table \*([^*]+)\*|\*([^*]+)\* in the report", text)
    found = [name.lower() for pair in named for name in pair if name]
    assert len(found) >= 2 and set(found) <= heads(page, "h2|h3|caption|summary")
