"""Quotation marks that nobody closes: no row is lost, and rows that hold line breaks are read as they are."""

from __future__ import annotations

import csv
import io
import time

import numpy as np
import pandas as pd
import pytest

from perfed.errors import PerfedError
from perfed.tables.files import read_table

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "vertical bar": "|"}


def lines(rows: int = 120, delimiter: str = ",") -> list[str]:
    """The lines of a table of texts and numbers, the header first."""
    rng = np.random.default_rng(0)
    header = delimiter.join(("ward", "age", "note", "ill"))
    body = [
        delimiter.join((f"ward {rng.integers(9)}", str(rng.integers(20, 90)), "well", "yes" if at % 3 else "no"))
        for at in range(rows)
    ]
    return [header, *body]


def with_mark(line: str, cell: int, *, end: bool = False, delimiter: str = ",") -> str:
    """The line with a quotation mark at the start or the end of a cell."""
    cells = line.split(delimiter)
    cells[cell] = f'{cells[cell]}"' if end else f'"{cells[cell]}'
    return delimiter.join(cells)


def refusal(folder, text: str | bytes) -> str:
    content = text.encode() if isinstance(text, str) else text
    (folder / "north.csv").write_bytes(content)
    with pytest.raises(PerfedError) as error:
        read_table(folder / "north.csv")
    message = str(error.value)
    assert message.startswith(f"{folder / 'north.csv'}: ") and "\n" not in message
    return message.removeprefix(f"{folder / 'north.csv'}: ")


@pytest.mark.parametrize("delimiter", DELIMITERS.values(), ids=DELIMITERS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("closing", [(60, 0, False), (60, 0, True), (60, 3, True), (11, 0, True), (11, 3, True), None])
@pytest.mark.parametrize("cell", [0, 2, 3])
def test_a_mark_that_opens_in_one_row_and_closes_in_a_later_one_is_refused(tmp_path, delimiter, end, closing, cell):
    """It closes at the start of a cell, before a delimiter, at the end of a row, in the next row or nowhere."""
    table = lines(delimiter=delimiter)
    table[10] = with_mark(table[10], cell, delimiter=delimiter)
    if closing is not None:
        at, other, last = closing
        table[at] = with_mark(table[at], other, end=last, delimiter=delimiter)
    assert refusal(tmp_path, end.join(table) + end).startswith("row 11: a quotation mark opens a cell ")


def test_the_message_says_where_the_cell_ends_and_what_helps(tmp_path):
    table = lines()
    table[10], table[60] = with_mark(table[10], 0), with_mark(table[60], 0)
    assert refusal(tmp_path, "\n".join(table)) == (
        "row 11: a quotation mark opens a cell that ends in row 61, in the middle of a text; remove the mark, or write "
        '"" for a mark inside a cell in quotes'
    )
    table[60] = with_mark(lines()[60], 0, end=True)
    assert refusal(tmp_path, "\n".join(table)) == (
        "row 11: a quotation mark opens a cell that ends in row 61, and the lines between look like rows; remove the "
        "mark, or take the line breaks out of the cell if it is one"
    )
    table[60] = lines()[60]
    assert refusal(tmp_path, "\n".join(table)) == (
        "row 11: a quotation mark opens a cell that never ends; remove the mark, or write "
        '"" for a mark inside a cell in quotes'
    )


@pytest.mark.parametrize("row", [0, 1, 119, 120])
def test_a_mark_in_the_header_and_in_the_last_rows_is_refused(tmp_path, row):
    table = lines()
    table[row] = with_mark(table[row], 0)
    assert refusal(tmp_path, "\n".join(table) + "\n").startswith(f"row {row + 1}: a quotation mark opens a cell that ")


@pytest.mark.parametrize("quoted", [5, 15, 80])
def test_cells_in_quotes_elsewhere_do_not_hide_it(tmp_path, quoted):
    table = lines()
    table[10], table[60] = with_mark(table[10], 2), with_mark(table[60], 2, end=True)
    table[quoted] = '"ward 1, left",44,"said ""no""",no'
    assert refusal(tmp_path, "\n".join(table)).startswith("row 11: a quotation mark opens a cell that ends in row ")


def test_a_cell_of_several_lines_before_it_does_not_hide_it(tmp_path):
    table = lines()
    table[3] = 'ward 1,44,"well\nbut tired",no'
    table[10], table[60] = with_mark(table[10], 2), with_mark(table[60], 0)
    assert refusal(tmp_path, "\n".join(table)).startswith("row 12: a quotation mark opens a cell that ends in row 62")
    table[10] = 'ward 1,44,"well\nbut tired","no'
    assert refusal(tmp_path, "\n".join(table)).startswith("row 13: a quotation mark opens a cell that ends in row 63")


@pytest.mark.parametrize("end", [False, True])
def test_more_characters_than_csv_takes_are_refused_by_their_first_row(tmp_path, end):
    """A mark in row 11 that swallows more than csv.field_size_limit(), which other libraries may change."""
    before = csv.field_size_limit(131_072)
    try:
        check_long_cells(tmp_path, end)
    finally:
        csv.field_size_limit(before)


def check_long_cells(tmp_path, end):
    table = lines(20_000)
    table[10], table[19_000] = with_mark(table[10], 0), with_mark(table[19_000], 0, end=end)
    assert refusal(tmp_path, "\n".join(table)).startswith(
        "row 11: a quotation mark opens a cell that ends in row 19001"
    )
    table = lines()
    table[10] = with_mark(table[10], 2).replace("well", "x" * 140_000 + '"')
    assert refusal(tmp_path, "\n".join(table)) == "row 11: a cell holds more than 131,072 characters; shorten it"


def test_marks_inside_a_row_are_read(tmp_path):
    (tmp_path / "north.csv").write_text(
        'tool,ward,n\n5" pipe,"old" ward,1\n6 " pipe,the "new" one,2\n"a ""b""", "c" ,3\n'
    )
    frame, _ = read_table(tmp_path / "north.csv")
    assert frame["tool"].tolist() == ['5" pipe', '6 " pipe', 'a "b"']
    assert frame["ward"].tolist() == ["old ward", 'the "new" one', "c"]


TEXTS = [
    "one line",
    "two\nlines",
    "a line, a comma\nand more, much more",
    "says ""twice"", and\nonce more",
    "a mark \" in the first line\nand none in the second",
    "ends with a break\n",
    "\n\nbegins with two",
    "many\n" * 40,
    "windows\r\nbreak",
    "7\n8",
    "44,well,no\n",
]  # fmt: skip


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("delimiter", DELIMITERS.values(), ids=DELIMITERS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_several_lines_are_read_as_python_writes_them(tmp_path, quoting, delimiter, place, end):
    rows = [[str(at), text, at * 1.5] for at, text in enumerate(TEXTS)]
    rows = [[*(cell for cell in row if cell is not row[1])] for row in rows]
    for row, text in zip(rows, TEXTS, strict=True):
        row.insert(place, text)
    text = io.StringIO(newline="")
    header = ["key", "value"]
    header.insert(place, "note")
    csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=end).writerows([header, *rows])
    (tmp_path / "north.csv").write_bytes(text.getvalue().encode())
    frame, _ = read_table(tmp_path / "north.csv")
    assert frame["note"].tolist() == [text.strip() for text in TEXTS]
    assert frame["key"].tolist() == [str(at) for at in range(len(TEXTS))]


def test_a_header_of_several_lines_is_read(tmp_path):
    (tmp_path / "north.csv").write_text('"age\n(years)",town,ill\n61,Jena,no\n48,Ems,yes\n')
    frame, _ = read_table(tmp_path / "north.csv")
    assert list(frame.columns) == ["age\n(years)", "town", "ill"] and frame.index.tolist() == [3, 4]


@pytest.mark.long
def test_many_cells_of_several_lines_are_checked_in_linear_time(tmp_path):
    rows = [f'{at},"first line {at}\nsecond ""line"" {at}\nthird","{at}\n{at}"' for at in range(20_000)]
    (tmp_path / "north.csv").write_text("\n".join(["key,note,more", *rows]))
    start = time.perf_counter()
    frame, _ = read_table(tmp_path / "north.csv")
    assert len(frame) == 20_000 and time.perf_counter() - start < 5


@pytest.mark.parametrize("seed", range(30))
def test_a_table_is_read_whole_or_refused_whatever_mark_is_put_in(tmp_path, seed):
    """Up to three marks at random places: no number of rows but that of the lines comes out."""
    rng = np.random.default_rng(seed)
    text = "\n".join(lines(60))
    for _ in range(rng.integers(1, 4)):
        at = rng.integers(len(text))
        text = f'{text[:at]}"{text[at:]}'
    (tmp_path / "north.csv").write_text(text)
    try:
        frame, _ = read_table(tmp_path / "north.csv")
    except PerfedError as error:
        assert str(error).startswith(f"{tmp_path / 'north.csv'}: ")
    else:
        assert len(frame) == 60 and isinstance(frame, pd.DataFrame)
