"""Excel files: what a reader of the sheet does not see is refused with its reason, or said."""

from __future__ import annotations

import zipfile
from datetime import datetime, timedelta

import openpyxl
import pytest

from perfed.errors import PerfedError
from perfed.tables.files import read_table

ROWS = [["age", "town", "bmi"], [61, "Jena", 22.5], [48, " Ems ", 31], [70, None, 19.0]]


@pytest.fixture
def sheet(tmp_path):
    """A sheet with a table; ``sheet.parent`` is its workbook."""
    made = openpyxl.Workbook().active
    made.title = "table"
    for row in ROWS:
        made.append(row)
    return made


@pytest.fixture
def read(tmp_path, sheet):
    def reading():
        sheet.parent.save(tmp_path / "north.xlsx")
        return read_table(tmp_path / "north.xlsx")

    return reading


def test_cells_are_as_they_were_written(read, sheet):
    sheet.append([])
    sheet.append([None, "Ulm", True])
    sheet.append([datetime(2024, 3, 31), timedelta(hours=36), "#N/A"])
    sheet.append([])
    frame, notes = read()
    assert frame.index.tolist() == [2, 3, 4, 6, 7] and list(frame.columns) == ROWS[0] and notes == []
    assert frame["town"].tolist() == ["Jena", "Ems", None, "Ulm", timedelta(hours=36)]
    assert frame["bmi"].tolist() == [22.5, 31, 19, True, None] and frame["age"].tolist()[-1] == datetime(2024, 3, 31)


def test_merged_headers_are_refused(read, sheet):
    sheet.insert_rows(1)
    sheet["A1"] = "Values of 2024"
    sheet.merge_cells("A1:C1")
    with pytest.raises(PerfedError, match="cells A1:C1 of the header are merged; write one row with a name for every"):
        read()


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (["lab", None, "bmi"], "column 2 has no name, as where one header cell stands for several columns"),
        ([None, "town", "bmi"], "column 1 has no name; name it or leave it out"),
        (["age", "town", "bmi", "", None], None),
    ],
)
def test_headers_with_gaps(read, sheet, header, says):
    for place, name in enumerate(header, start=1):
        sheet.cell(1, place).value = name
    if says is None:
        return read()
    with pytest.raises(PerfedError, match=says):
        read()


def test_formulas_without_values_are_refused_and_those_that_give_an_empty_text_are_read(tmp_path, read, sheet):
    sheet["D1"], sheet["D2"], sheet["D3"] = "sum", "=A2+C2", "=A3+C3"
    with pytest.raises(PerfedError, match=r"2 cells hold formulas without stored values \(D2, D3\); open the file in"):
        read()
    file = tmp_path / "north.xlsx"
    with zipfile.ZipFile(file) as packed:
        parts = {name: packed.read(name) for name in packed.namelist()}
    xml = parts["xl/worksheets/sheet1.xml"]
    xml = xml.replace(b'<c r="D2"><f>A2+C2</f><v></v>', b'<c r="D2"><f>A2+C2</f><v>83.5</v>')
    xml = xml.replace(b'<c r="D3"><f>A3+C3</f><v></v>', b'<c r="D3" t="str"><f>A3+C3</f><v></v>')
    with zipfile.ZipFile(file, "w") as packed:
        for name, content in parts.items():
            packed.writestr(name, xml if name == "xl/worksheets/sheet1.xml" else content)
    assert read_table(file)[0]["sum"].tolist() == [83.5, None, None]


def test_hidden_sheets_are_named(read, sheet):
    other = sheet.parent.create_sheet("codes")
    assert len(read()[0]) == 3
    other.append(["code", "name"])
    other.sheet_state = "hidden"
    with pytest.raises(PerfedError, match=r"holds several sheets \(table, codes, which is hidden\); one sheet"):
        read()
    sheet.delete_rows(1, 4)
    with pytest.raises(PerfedError, match="holds cells only in the sheet codes, which is hidden; unhide it"):
        read()
    other.delete_rows(1)
    with pytest.raises(PerfedError, match="holds no cells"):
        read()


def test_hidden_rows_and_columns_and_merged_cells_are_said(read, sheet):
    sheet.row_dimensions[3].hidden = True
    sheet.row_dimensions[9].hidden = True
    sheet.column_dimensions["B"].hidden = True
    sheet.merge_cells("B3:B4")
    frame, notes = read()
    assert len(frame) == 3 and notes == [
        "1 rows are hidden in the sheet and are read like the others, in row 3",
        "columns are hidden in the sheet and are read like the others: 'town'",
        "of merged cells only the first holds a value, the others are missing: B3:B4",
    ]


def test_an_empty_first_row_is_refused(read, sheet):
    sheet.insert_rows(1)
    with pytest.raises(PerfedError, match="row 1 of the sheet is empty; write one row with a name for every column"):
        read()
