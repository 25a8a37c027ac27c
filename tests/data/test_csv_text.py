"""CSV that a spreadsheet may open: what others have named is text in it."""

from __future__ import annotations

import csv
import random
import re

import numpy as np
import pytest

from perfed.data.csv_text import csv_text, escape_cell, unescape_cell
from perfed.report.papers import csv_of
from perfed.report.run_results import load_clients
from perfed.run.directory import RunDirectory

FORMULAS = [
    "a;=1+1",
    " =1+1",
    "\u00a0=1",
    "\ufeff=1",
    '"=1',
    "a;b; @x",
    "a|+1",
    "a\n-x",
    "a\t=1",
    "＝1+1",
    "a\u2028=1",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "'=1",
    "''@x",
    "-",
    "=",
    "--1",
]
TEXTS = ["", "north", "'north'", "a=b", "-0.5", "+3", "-1e-3", ".5", "a\nb", "a\u2028b", 'a"b', "a,b", "'", "'-0.5"]


@pytest.mark.parametrize("before", ["", "x"])
@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_text_with_any_separator(text, before):
    """A spreadsheet splits lines at commas, or at something else, and may leave spaces and quotes out."""
    line = csv_text([[before, text, "x"]])
    for separators in ("[,\r\n]", "[;\r\n]", "[\t\r\n]", "[|\r\n]", "[,;|\t\r\n\u2028]"):
        for cell in re.split(separators, line):
            assert not re.match(r'[\s"\ufeff]*[=+\-@＝]', cell), (cell, line)


def test_random_texts_are_no_formulas_and_come_back():
    draw = random.Random(0)
    for _ in range(3000):
        text = "".join(draw.choices("=+-@;'\" \t\na1.,|", k=draw.randint(0, 8)))
        assert unescape_cell(escape_cell(text)) == text
        cells = re.split(r"[;|\t\n]", str(escape_cell(text)))
        numeric = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", text)
        assert numeric or not any(re.match(r'[ "]*[=+@-]', cell) for cell in cells), text


@pytest.mark.parametrize("cell", [-0.5, 3, None, np.float64(-2.0), True, "-0.5", "north", "+3", "-1e-3"])
def test_numbers_and_other_texts_stay_as_they_are(cell):
    assert escape_cell(cell) is cell


@pytest.mark.parametrize("text", [*FORMULAS, *TEXTS])
def test_what_is_read_back_is_what_was_written(text):
    assert unescape_cell(escape_cell(text)) == text


def test_ids_of_clients_come_back_and_their_file_holds_no_formula(tmp_path):
    ids = [*FORMULAS, *TEXTS[1:]]
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_clients(["id", "accuracy_before", "accuracy_after"], [[name, -0.5, None] for name in ids])
    found = load_clients(tmp_path / "run" / "clients.csv", {})
    assert found is not None and found.ids == tuple(ids) and (found.before == -0.5).all()
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        written = [row["id"] for row in csv.DictReader(file)]
    assert [name for name in written if name.strip('\ufeff" \t\r\n')[:1] in "=+-@"] == ["-0.5", "+3", "-1e-3"]


def test_tables_for_papers_are_written_so_too():
    assert csv_of(["method"], [["=1+1"], [-0.5]]) == "method\n'=1+1\n-0.5\n"
