"""Reading of Excel files: the cells of the one sheet with a table, and notes on what the sheet hides."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perfed.data.files import optional_package
from perfed.data.reading import reason_of, refuse_unpacked
from perfed.errors import PerfedError, shorten_list
from perfed.tables.problems import describe_rows, quote_names

_ONE_HEADER = "write one row with a name for every column"


def read_sheet(path: Path) -> tuple[list[list[Any]], list[str]]:
    """Return the cells of an Excel file, row 1 first, and notes on what the sheet hides.

    Texts are stripped; an empty cell and an error such as #N/A are ``None``.

    Raises:
        PerfedError: the file is damaged, holds no table or several, has a merged header, or has formulas without stored
            values.
    """
    openpyxl = optional_package("openpyxl", "reading Excel files", extra="tables")
    try:
        refuse_unpacked(path)
        book = openpyxl.load_workbook(path, data_only=True)
        formulas = openpyxl.load_workbook(path) if _has_formulas(path) else None
    except PerfedError:
        raise
    except Exception as error:  # openpyxl passes on the errors of zipfile and of its parsers
        raise PerfedError(f"{path}: cannot be read as Excel ({reason_of(error)})") from None
    sheet = _select_sheet(path, book.worksheets)
    rows = [[_read_cell(cell) for cell in row] for row in sheet.iter_rows()]
    while not _has_values(rows[-1]):
        del rows[-1]
    while not _has_values(row[-1] for row in rows):  # columns of cells that have a format but no value
        rows = [row[:-1] for row in rows]
    if not _has_values(rows[0]):
        raise PerfedError(f"{path}: row 1 of the sheet is empty; {_ONE_HEADER} in row 1")
    for cells in sorted(sheet.merged_cells.ranges, key=lambda cells: (cells.min_row, cells.min_col)):
        if cells.min_row == 1:
            raise PerfedError(f"{path}: cells {cells.coord} of the header are merged; {_ONE_HEADER}")
    if formulas is not None and (cells := list(_find_missing_values(sheet, formulas[sheet.title]))):
        raise PerfedError(
            f"{path}: {len(cells)} cells hold formulas without stored values ({shorten_list(cells, 5)}); open the file "
            "in Excel or LibreOffice and save it there, or replace the formulas by their values"
        )
    return rows, list(_describe_hidden_cells(sheet, rows))


def _select_sheet(path: Path, sheets: Sequence[Any]) -> Any:
    """Return the only sheet that holds cells; raise an error if there are several, or if it is hidden."""
    filled = [sheet for sheet in sheets if any(_has_values(map(_read_cell, row)) for row in sheet.iter_rows())]
    if not filled:
        raise PerfedError(f"{path}: holds no cells; one sheet with the table is needed")
    visible = [sheet for sheet in filled if sheet.sheet_state == "visible"]
    if len(filled) == 1 and visible:
        return filled[0]
    names = ", ".join(sheet.title if sheet in visible else f"{sheet.title}, which is hidden" for sheet in filled)
    if len(filled) > 1:
        raise PerfedError(f"{path}: holds several sheets ({names}); one sheet with the table is needed")
    raise PerfedError(f"{path}: holds cells only in the sheet {names}; unhide it, or put the table on a visible sheet")


def _has_values(cells: Any) -> bool:
    return any(cell is not None for cell in cells)


def _read_cell(cell: Any) -> Any:
    value = cell.value
    if isinstance(value, str):
        return None if cell.data_type == "e" else value.strip() or None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _has_formulas(path: Path) -> bool:
    with zipfile.ZipFile(path) as file:
        sheets = [name for name in file.namelist() if name.startswith("xl/worksheets/")]
        return any(b"<f>" in (content := file.read(name)) or b"<f " in content for name in sheets)


def _find_missing_values(values: Any, formulas: Any) -> Iterator[str]:
    """Yield the coordinates of cells whose formula has no stored value; an empty text is a value."""
    for row in formulas.iter_rows():
        for cell in row:
            if cell.data_type == "f":
                stored = values.cell(cell.row, cell.column)
                if stored.value is None and stored.data_type == "n":
                    yield cell.coordinate


def _describe_hidden_cells(sheet: Any, rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield a note each on hidden rows, hidden columns and merged cells, all of which are read."""
    filled = [number for number, row in enumerate(rows, start=1) if _has_values(row)]
    hidden = [number for number in filled if sheet.row_dimensions[number].hidden]
    if hidden:
        yield f"{len(hidden)} rows are hidden in the sheet and are read like the others, {describe_rows(hidden)}"
    groups = [group for group in sheet.column_dimensions.values() if group.hidden]
    places = {number for group in groups for number in range(group.min, group.max + 1)}
    if names := [str(name) for number, name in enumerate(rows[0], start=1) if number in places and name is not None]:
        yield f"columns are hidden in the sheet and are read like the others: {quote_names(names)}"
    if merged := [cells.coord for cells in sheet.merged_cells.ranges]:
        yield f"of merged cells only the first holds a value, the others are missing: {shorten_list(merged, 5)}"
