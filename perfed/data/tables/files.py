"""Files with tables: CSV, Parquet and Excel, one file per site or one with a column that names the site."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perfed.data.files import optional_package
from perfed.data.reading import reason_of, refuse_unpacked
from perfed.data.tables.conversions import groups_thousands
from perfed.data.tables.kinds import Parsed, separates_thousands
from perfed.data.tables.problems import Frame, in_rows, listed, pandas, refuse, unknown
from perfed.errors import PerfedError
from perfed.system import memory

MISSING = frozenset({"", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "?"})
"""Cells of a file that stand for a missing value."""

_TEXT, _PARQUET, _EXCEL = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".xlsx", ".xlsm")
ENDINGS = (*_TEXT, *_PARQUET, *_EXCEL)
"""Of files that are read as tables."""

_ALLOWED = ", ".join(ENDINGS)
_LOCK = "~$"  # the names of files begin so that say what Excel has open
NOTE = ".txt"
"""Ending of tables, and of notes beside them."""

CELL = 64
"""Bytes of memory that a cell of a table takes while it is read: as itself, as text, as a number and as an input."""

_DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
_TRIED = 50  # rows that decide the delimiter
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]")  # no text has these signs
_COMMA, _POINT = (re.compile(rf"[+-]?\d+{sign}\d+([eE][+-]?\d+)?") for sign in (",", r"\."))


@dataclass(frozen=True)
class Sites:
    """What files hold, by site.

    Attributes:
        frames: a data frame per site. Its index are the rows' numbers in the file, as an editor or a spreadsheet counts
            them: the header is row 1 (Parquet files have none, and their rows count from 1).
        sources: the file that each is from, for messages.
        notes: what was guessed on the way, an encoding, a decimal comma; and which files were left out.
    """

    frames: dict[str, Frame]
    sources: dict[str, str]
    notes: tuple[str, ...]

    @cached_property
    def parsed(self) -> dict[str, Parsed]:
        """The frames, each column of which is parsed once for as long as this is there."""
        return {site: Parsed(frame) for site, frame in self.frames.items()}


def read_sites(paths: Sequence[Path], site_column: str | None = None) -> Sites:
    """The tables of all sites.

    Args:
        paths: files, or folders whose tables are taken (:func:`tables_in`). Without ``site_column`` each file is one
            site, called as the file is, without its ending.
        site_column: names the site of every row.

    Raises:
        TableProblems: files that cannot be read, two sites of one name, no such column or rows without a site.
    """
    frames: dict[str, Frame] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    notes = [note for path in paths if path.is_dir() for note in _left_out(path)]
    for path in table_files(paths):
        try:
            frame, said = read_table(path)
            if not len(frame) and _is_note(path, paths):
                raise PerfedError("there are no rows")
            found = {path.stem: frame} if site_column is None else _by_site(path, frame, site_column)
        except PerfedError as error:
            if _is_note(path, paths):
                notes.append(f"{path}: left out, for it is no table: {str(error).removeprefix(f'{path}: ')}")
            else:
                problems.append(str(error))
            continue
        notes += [f"{path}: {line}" for line in said]
        for site, rows in found.items():
            same = next((name for name in frames if name.lower() == site.lower()), None)
            if same is not None:
                problems.append(f"{path}: site '{site}' is also in {sources[same]} ('{same}'); names must differ")
                continue
            frames[site] = rows
            sources[site] = str(path) if site_column is None else f"{path} ({site_column} = {site})"
    refuse(problems)
    return Sites(frames, sources, tuple(notes))


def tables_in(folder: Path) -> list[Path]:
    """The files of a folder whose names are those of tables, sorted; not hidden ones, nor Excel's locks (``~$``)."""
    files = (file for file in folder.iterdir() if file.suffix.lower() in ENDINGS and file.is_file())
    return sorted(file for file in files if not file.name.startswith((".", _LOCK)))


def _left_out(folder: Path) -> list[str]:
    """A line on the files of a folder that are not taken for tables, but for hidden ones and experiments."""
    taken = tables_in(folder)
    others = (file for file in folder.iterdir() if file.is_file() and file not in taken)
    names = sorted(file.name for file in others if file.suffix != ".toml" and not file.name.startswith("."))
    return [f"{folder}: left out, for they are no tables: {', '.join(names)}"] if names else []


def _is_note(path: Path, paths: Sequence[Path]) -> bool:
    """Whether a file that cannot be read is a text beside the tables of a folder, and none of the user's naming."""
    others = [file for file in tables_in(path.parent) if file.suffix.lower() != NOTE]
    return path.suffix.lower() == NOTE and bool(others) and path.parent in paths and path not in paths


def table_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and those with tables in the folders.

    Raises:
        PerfedError: none, a file or folder that is not there, or a folder without tables.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = tables_in(path)
            if not found:
                raise PerfedError(f"{path}: the folder holds no table; endings that are read: {_ALLOWED}")
            files += found
        elif not path.exists():
            raise PerfedError(f"{path}: no such file or folder")
        else:
            files.append(path)
    if not files:
        raise PerfedError("no files with tables were named; at least one is needed")
    return list(dict.fromkeys(files))


def _by_site(path: Path, frame: Frame, column: str) -> dict[str, Frame]:
    if column not in frame.columns:
        raise PerfedError(f"{path}: {unknown(column, list(frame.columns))}")
    empty = frame.index[frame[column].isna()]
    if len(empty):
        raise PerfedError(f"{path}: column '{column}' names no site {in_rows(empty)}")
    sites = frame[column].astype(str).str.strip()
    return {str(site): rows.drop(columns=column) for site, rows in frame.groupby(sites, sort=True)}


def read_table(path: Path) -> tuple[Frame, list[str]]:
    """One file as a data frame, and what was guessed about it.

    Delimiter (comma, semicolon, tab or vertical bar), encoding (UTF-8, UTF-16 with a mark, else Windows-1252) and, in
    files not separated by commas, decimal commas are found out. Cells of text files are texts here, missing ones
    ``None``; :mod:`perfed.data.tables.kinds` says which are numbers.

    Raises:
        PerfedError: missing, damaged or of another format; rows with more or fewer cells than the header, columns of
            one name or without a name; names file, row and column.
    """
    ending = path.suffix.lower()
    if not path.is_file():
        raise PerfedError(f"{path}: no such file")
    if ending in _TEXT:
        return _read_text(path)
    if ending in _PARQUET:
        return _read_parquet(path), []
    if ending in _EXCEL:
        return _read_excel(path), []
    raise PerfedError(f"{path}: '{path.suffix}' is not the ending of a table; allowed: {_ALLOWED}")


def _read_text(path: Path) -> tuple[Frame, list[str]]:
    text, notes = _decoded(path)
    delimiter = _delimiter(path, text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    rows, numbers = [], []
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append([cell.strip() for cell in row])
                numbers.append(reader.line_num)
    except csv.Error as error:
        raise PerfedError(f"{path}: row {reader.line_num} is no CSV ({error})") from None
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != len(rows[0]):
            raise PerfedError(
                f"{path}: row {number} is not as wide as the header ({len(row)} and {len(rows[0])} cells, if a "
                f"{_DELIMITERS[delimiter]} separates them); quote cells that hold one"
            )
    if delimiter != "," and _has_decimal_commas(rows[1:]):
        notes += _replace_decimal_commas(rows)
    return _frame(path, rows[0], rows[1:], numbers[1:]), notes


def _decoded(path: Path) -> tuple[str, list[str]]:
    content = path.read_bytes()
    if not content.strip():
        raise PerfedError(f"{path}: the file is empty")
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    for encoding in ("utf-16",) if wide else ("utf-8-sig", "cp1252"):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        if _CONTROL.search(text):
            break
        return text, ["read as Windows-1252, since it is not UTF-8"] if encoding == "cp1252" else []
    raise PerfedError(f"{path}: is no text file; a CSV file in UTF-8, UTF-16 or Windows-1252 is needed")


def _delimiter(path: Path, text: str) -> str:
    """The delimiter with which the first rows are all as wide as the header; of several the one with most columns."""
    sample = [line for line in text.splitlines() if line.strip()][:_TRIED]
    fits: dict[str, tuple[bool, int]] = {}
    for delimiter in _DELIMITERS:
        try:
            widths = [len(row) for row in csv.reader(sample, delimiter=delimiter, skipinitialspace=True)]
        except csv.Error:
            continue
        if widths[0] > 1:
            fits[delimiter] = (len(set(widths)) == 1, widths[0])
    if not fits:
        allowed = ", ".join(_DELIMITERS.values())
        raise PerfedError(f"{path}: the first row holds one column only; delimiters that are known: {allowed}")
    return max(fits, key=lambda delimiter: fits[delimiter])


def _has_decimal_commas(rows: Iterable[Sequence[str]]) -> bool:
    cells = [cell for row in rows for cell in row]
    return any(map(_COMMA.fullmatch, cells)) and not any(map(_POINT.fullmatch, cells))


def _replace_decimal_commas(rows: list[list[str]]) -> list[str]:
    """Write decimal commas as points, but in columns whose commas separate thousands; return what was guessed.

    Args:
        rows: the header and all cells; they are changed.
    """
    columns = [[cell for cell in column if cell not in MISSING] for column in zip(*rows[1:], strict=True)]
    with_commas = [at for at, column in enumerate(columns) if any(map(_COMMA.fullmatch, column))]
    grouped = [at for at in with_commas if all(groups_thousands(cell) for cell in columns[at] if "," in cell)]
    # One cell that can only have a decimal comma (12,5 or 0,985) decides for the whole file.
    thousands = [at for at in grouped if separates_thousands(columns[at], ",")] if grouped == with_commas else []
    decimals = [at for at in with_commas if at not in thousands]
    for row in rows[1:]:
        for at in decimals:
            row[at] = row[at].replace(",", ".") if _COMMA.fullmatch(row[at]) else row[at]
    if not decimals:
        return []
    note = "numbers are read with a decimal comma"
    if grouped == with_commas:  # each has three digits behind it
        note += f"; if commas separate thousands in {listed(rows[0][at] for at in decimals)}, put these into thousands"
    return [note]


def _read_parquet(path: Path) -> Frame:
    parquet = optional_package("pyarrow.parquet", "reading Parquet files", extra="tables")
    try:
        footer = parquet.read_metadata(path)
        refuse_too_large(path, footer.num_rows, footer.num_columns)
        frame = pandas().read_parquet(path)
    except PerfedError:
        raise
    except Exception as error:  # whatever pyarrow and its parsers raise
        raise PerfedError(f"{path}: cannot be read as Parquet ({reason_of(error)})") from None
    frame = frame if frame.index.name is None else frame.reset_index()
    _check_header(path, [str(name) for name in frame.columns])
    return frame.set_axis(range(1, len(frame) + 1))


def refuse_too_large(path: Path, rows: int, columns: int) -> None:
    """Stop before a table is read that memory cannot hold: a few bytes of a packed file can stand for many rows.

    Raises:
        PerfedError: its cells would take more than this machine's memory, at :data:`CELL` bytes each.
    """
    there, needed = memory(), rows * columns * CELL
    if there is not None and needed > there:
        raise PerfedError(
            f"{path}: {rows:,} rows of {columns} columns need about {needed / 2**30:.3g} GiB of memory, and there are "
            f"{there / 2**30:.3g}; give fewer rows or columns"
        )


def _read_excel(path: Path) -> Frame:
    optional_package("openpyxl", "reading Excel files", extra="tables")
    try:
        refuse_unpacked(path)
        sheets = pandas().read_excel(path, sheet_name=None, header=None, dtype=object, keep_default_na=False)
    except PerfedError:
        raise
    except Exception as error:  # openpyxl lets through whatever zipfile and its own parsers raise
        raise PerfedError(f"{path}: cannot be read as Excel ({str(error).splitlines()[0]})") from None
    filled = {name: sheet for name, sheet in sheets.items() if len(sheet)}
    if len(filled) != 1:
        held = f"holds several sheets ({', '.join(map(str, filled))})" if filled else "holds no cells"
        raise PerfedError(f"{path}: {held}; one sheet with the table is needed")
    ((_, sheet),) = filled.items()
    rows = [[cell.strip() if isinstance(cell, str) else cell for cell in row] for row in sheet.itertuples(index=False)]
    return _frame(path, rows[0], rows[1:], range(2, len(rows) + 1))


def _frame(path: Path, header: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: Iterable[int]) -> Frame:
    names = ["" if name is None else str(name) for name in header]
    _check_header(path, names)
    cells = [[None if isinstance(cell, str) and cell in MISSING else cell for cell in row] for row in rows]
    frame = pandas().DataFrame(cells, index=list(numbers), columns=names, dtype=object)
    return frame[frame.notna().any(axis=1)]


def _check_header(path: Path, names: Sequence[str]) -> None:
    for number, name in enumerate(names, start=1):
        if name in MISSING:
            raise PerfedError(
                f"{path}: column {number} has no name; name it or leave it out (pandas writes its row numbers so, "
                "unless it is told index=False)"
            )
        if re.fullmatch(r"[+-]?[\d.,]+", name):
            raise PerfedError(f"{path}: the first row must hold the names of the columns; that of {number} is a number")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise PerfedError(f"{path}: several columns are called {listed(twice)}; names must differ")
