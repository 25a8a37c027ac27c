"""Files with tables: CSV, Parquet and Excel, one file per site or one with a column that names the site."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from perfed.data.files import optional_package
from perfed.data.names import LONGEST_NAME, compose_text
from perfed.data.problems import raise_problems
from perfed.data.reading import reason_of
from perfed.errors import PerfedError
from perfed.system import available_memory
from perfed.tables.cells import clean_frame, column_names
from perfed.tables.conversions import groups_thousands
from perfed.tables.excel import read_sheet
from perfed.tables.kinds import ParsedTable, separates_thousands
from perfed.tables.missing import MISSING_TEXTS
from perfed.tables.problems import Frame, describe_rows, describe_unknown_column, pandas, quote_names
from perfed.tables.quotes import QuoteCheck, split_line

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
_SEPARATOR = re.compile(r'"?sep=.?"?', re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]")  # characters that no text file has
_TRIED = 50  # rows that decide the delimiter
_COMMA, _POINT = (re.compile(rf"[+-]?\d+{sign}\d+([eE][+-]?\d+)?") for sign in (",", r"\."))


@dataclass(frozen=True)
class Sites:
    """The tables in files, by site.

    Attributes:
        frames: a data frame per site. Its index contains the numbers of the rows in the file, as an editor or a
            spreadsheet counts them: the header is row 1 (Parquet files have no header, and their first row is row 1).
        sources: the file of each site, for messages.
        notes: lines about what was guessed, such as an encoding or a decimal comma, and about ignored files.
    """

    frames: dict[str, Frame]
    sources: dict[str, str]
    notes: tuple[str, ...]

    @cached_property
    def parsed(self) -> dict[str, ParsedTable]:
        """The tables of the sites, which parse each column only once."""
        return {site: ParsedTable(frame) for site, frame in self.frames.items()}


def read_sites(paths: Sequence[Path], site_column: str | None = None, missing: Sequence[str] | None = None) -> Sites:
    """Return the tables of all sites.

    Args:
        paths: files, or folders whose tables are taken (:func:`tables_in`). Without ``site_column`` each file is one
            site, called as the file is, without its ending.
        site_column: names the site of every row.
        missing: values that mean a missing site name (:attr:`perfed.tables.options.TableOptions.missing`).

    Raises:
        DataProblems: files that cannot be read, two sites of one name, no such column or rows without a site.
    """
    frames: dict[str, Frame] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    codes = () if missing is None else tuple(missing) or ("",)
    notes = [note for path in paths if path.is_dir() for note in _describe_ignored_files(path)]
    for path in table_files(paths):
        try:
            frame, table_notes = read_table(path)
            if not len(frame) and _is_accompanying_text(path, paths):
                raise PerfedError("there are no rows")
            site_frames = {path.stem: frame} if site_column is None else _split_by_site(path, frame, site_column, codes)
        except PerfedError as error:
            if _is_accompanying_text(path, paths):
                notes.append(f"{path}: left out, for it is no table: {str(error).removeprefix(f'{path}: ')}")
            else:
                problems.append(str(error))
            continue
        notes += [f"{path}: {line}" for line in table_notes]
        for site, rows in site_frames.items():
            same = next((name for name in frames if compose_text(name.lower()) == compose_text(site.lower())), None)
            if same is not None:
                problems.append(f"{path}: site '{site}' is also in {sources[same]} ('{same}'); names must differ")
                continue
            frames[site] = rows
            sources[site] = str(path) if site_column is None else f"{path} ({site_column} = {site})"
    raise_problems(problems)
    return Sites(frames, sources, tuple(notes))


def tables_in(folder: Path) -> list[Path]:
    """Return the sorted table files of a folder, by their endings, without hidden files and Excel's locks (``~$``)."""
    files = (file for file in folder.iterdir() if file.suffix.lower() in ENDINGS and file.is_file())
    return sorted(file for file in files if not file.name.startswith((".", _LOCK)))


def _describe_ignored_files(folder: Path) -> list[str]:
    """Return a line about the files of a folder that are no tables, except for hidden files and experiments."""
    tables = tables_in(folder)
    other_files = (file for file in folder.iterdir() if file.is_file() and file not in tables)
    names = sorted(file.name for file in other_files if file.suffix != ".toml" and not file.name.startswith("."))
    return [f"{folder}: left out, for they are no tables: {', '.join(names)}"] if names else []


def _is_accompanying_text(path: Path, paths: Sequence[Path]) -> bool:
    """Return whether an unreadable file is a text next to the tables of a folder that the user did not name itself."""
    tables = [file for file in tables_in(path.parent) if file.suffix.lower() != NOTE]
    return path.suffix.lower() == NOTE and bool(tables) and path.parent in paths and path not in paths


def table_files(paths: Sequence[Path]) -> list[Path]:
    """Return the given files, and the tables in the given folders.

    Raises:
        PerfedError: there are no files, a file or folder does not exist, or a folder contains no table.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            tables = tables_in(path)
            if not tables:
                raise PerfedError(f"{path}: the folder holds no table; endings that are read: {_ALLOWED}")
            files += tables
        elif not path.exists():
            raise PerfedError(f"{path}: no such file or folder")
        else:
            files.append(path)
    if not files:
        raise PerfedError("no files with tables were named; at least one is needed")
    return list(dict.fromkeys(files))


def _split_by_site(path: Path, frame: Frame, column: str, codes: Sequence[str]) -> dict[str, Frame]:
    """Return the rows of each site, by the name that its first row has in ``column``."""
    position = next(
        (number for number, name in enumerate(frame.columns) if compose_text(name) == compose_text(column)), None
    )
    if position is None:
        raise PerfedError(f"{path}: {describe_unknown_column(column, list(frame.columns))}")
    names = frame.iloc[:, position]
    cleaned = clean_frame(names.to_frame(column), codes)[compose_text(column)]
    if len(empty := frame.index[cleaned.isna()]):
        raise PerfedError(f"{path}: column '{column}' names no site {describe_rows(empty)}")
    sites: dict[str, Frame] = {}
    for site, rows in frame.groupby(cleaned.astype(str), sort=True):
        first = names[rows.index[0]]
        sites[first.strip() if isinstance(first, str) else site] = rows.drop(columns=frame.columns[position])
    return sites


def read_table(path: Path) -> tuple[Frame, list[str]]:
    """Return one file as a data frame, and lines about what was guessed.

    The delimiter (comma, semicolon, tab or vertical bar), the encoding (UTF-8, UTF-16 with a mark, otherwise
    Windows-1252) and, in files that are not separated by commas, decimal commas are detected. Cells of text files
    remain texts, ``None`` if missing; :mod:`perfed.tables.kinds` decides which are numbers.

    Raises:
        PerfedError: the file is missing, damaged or of another format, a row has more or fewer cells than the header,
            or columns have the same name or none; the message names the file, row and column.
    """
    ending = path.suffix.lower()
    if not path.is_file():
        raise PerfedError(f"{path}: no such file")
    if ending in _TEXT:
        return _read_text(path)
    if ending in _PARQUET:
        return _read_parquet(path), []
    if ending in _EXCEL:
        rows, notes = read_sheet(path)
        return _create_frame(path, rows[0], rows[1:], range(2, len(rows) + 1)), notes
    raise PerfedError(f"{path}: '{path.suffix}' is not the ending of a table; allowed: {_ALLOWED}")


def _read_text(path: Path) -> tuple[Frame, list[str]]:
    text, notes = _decode(path)
    lines = list(io.StringIO(text, newline=""))
    if _SEPARATOR.fullmatch(lines[0].strip()):
        raise PerfedError(f"{path}: row 1 tells Excel the delimiter ('sep=') and is not a header; remove this row")
    delimiter = _detect_delimiter(path, lines)
    rows, numbers = _read_records(path, lines, delimiter)
    width, mark = len(rows[0]), _DELIMITERS[delimiter]
    for row, number in zip(rows, numbers, strict=True):
        if len(row) > width and not any(row[width:]):
            raise PerfedError(f"{path}: row {number} ends with a {mark} that the header lacks; remove the {mark}")
        if len(row) != width:
            raise PerfedError(
                f"{path}: row {number} is not as wide as the header ({len(row)} and {width} cells, if a {mark} "
                "separates them); quote cells that hold one"
            )
    if delimiter != "," and _has_decimal_commas(rows[1:]):
        notes += _replace_decimal_commas(rows)
    return _create_frame(path, rows[0], rows[1:], numbers[1:]), notes


def _read_records(path: Path, lines: Sequence[str], delimiter: str) -> tuple[list[list[str]], list[int]]:
    """Return the records of a CSV file that are not empty, and the number of each record's last line.

    Raises:
        PerfedError: a stray quotation mark would merge rows, or a cell is too long for the module csv.
    """
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    rows, numbers, starts = [], [], []
    error = None
    try:
        starts.append(0)
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append([cell.strip() for cell in row])
                numbers.append(reader.line_num)
            starts.append(reader.line_num)
    except csv.Error:  # a cell that is too long for csv, possibly because of a stray mark
        error = f"row {starts[-1] + 1}: a cell holds more than {csv.field_size_limit():,} characters; shorten it"
    else:
        del starts[-1]
    width = len(rows[0]) if rows else len(split_line(lines[0], delimiter))
    if problem := QuoteCheck(lines, starts, width, delimiter).find_problem() or error:
        raise PerfedError(f"{path}: {problem}")
    return rows, numbers


def _decode(path: Path) -> tuple[str, list[str]]:
    content = path.read_bytes()
    if not content.strip():
        raise PerfedError(f"{path}: the file is empty")
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    for encoding in ("utf-16",) if wide else ("utf-8-sig", "cp1252"):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        if _CONTROL.search(text) is not None:
            break
        return text, ["read as Windows-1252, since it is not UTF-8"] if encoding == "cp1252" else []
    if not wide and _is_utf16(content):
        raise PerfedError(f"{path}: this looks like UTF-16 without a byte-order mark; save it as UTF-8")
    raise PerfedError(f"{path}: is no text file; a CSV file in UTF-8, UTF-16 or Windows-1252 is needed")


def _is_utf16(content: bytes) -> bool:
    """Return whether bytes without a byte-order mark look like UTF-16 text."""
    for encoding in ("utf-16-le", "utf-16-be"):
        with suppress(UnicodeDecodeError):
            text = content.decode(encoding)
            if "\n" in text and _CONTROL.search(text) is None:
                return True
    return False


def _detect_delimiter(path: Path, lines: Sequence[str]) -> str:
    """Return the delimiter with which the first rows are as wide as the header, preferably with most columns.

    Raises:
        PerfedError: the first row has a single column with every delimiter.
    """
    sample = list(islice((line.rstrip("\r\n") for line in lines if line.strip()), _TRIED))
    fits: dict[str, tuple[bool, int]] = {}
    for delimiter in _DELIMITERS:
        widths: list[int] = []
        with suppress(csv.Error):  # a cell is too long; _read_records reports its row
            widths += (len(row) for row in csv.reader(sample, delimiter=delimiter, skipinitialspace=True))
        if widths and widths[0] > 1:
            fits[delimiter] = (len(set(widths)) == 1, widths[0])
    if not fits:
        likely = max(_DELIMITERS, key=lambda delimiter: len(split_line(lines[0], delimiter)))
        if problem := QuoteCheck(lines, [0], len(split_line(lines[0], likely)), likely).find_problem():
            raise PerfedError(f"{path}: {problem}")
        allowed = ", ".join(_DELIMITERS.values())
        raise PerfedError(f"{path}: the first row holds one column only; delimiters that are known: {allowed}")
    return max(fits, key=lambda delimiter: fits[delimiter])


def _has_decimal_commas(rows: Iterable[Sequence[str]]) -> bool:
    cells = [cell for row in rows for cell in row]
    return any(map(_COMMA.fullmatch, cells)) and not any(map(_POINT.fullmatch, cells))


def _replace_decimal_commas(rows: list[list[str]]) -> list[str]:
    """Replace decimal commas by points, except in columns whose commas separate thousands, and return notes on it.

    Args:
        rows: the header and all cells, which are changed in place.
    """
    columns = [[cell for cell in column if cell not in MISSING_TEXTS] for column in zip(*rows[1:], strict=True)]
    with_commas = [position for position, column in enumerate(columns) if any(map(_COMMA.fullmatch, column))]
    grouped = [
        position for position in with_commas if all(groups_thousands(cell) for cell in columns[position] if "," in cell)
    ]
    # One cell that can only have a decimal comma (12,5 or 0,985) decides for the whole file.
    thousands = (
        [position for position in grouped if separates_thousands(columns[position], ",")]
        if grouped == with_commas
        else []
    )
    decimals = [position for position in with_commas if position not in thousands]
    for row in rows[1:]:
        for position in decimals:
            row[position] = row[position].replace(",", ".") if _COMMA.fullmatch(row[position]) else row[position]
    if not decimals:
        return []
    note = "numbers are read with a decimal comma"
    if grouped == with_commas:  # each comma has three digits behind it
        names = quote_names(rows[0][position] for position in decimals)
        note += f"; if commas separate thousands in {names}, put these into thousands"
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
    levels = [name for name in frame.index.names if name is not None]
    frame = frame.reset_index(levels, allow_duplicates=True) if levels else frame
    names = column_names(frame)
    _check_header(path, names)
    return frame.set_axis(names, axis=1).set_axis(range(1, len(frame) + 1))


def refuse_too_large(path: Path, rows: int, columns: int) -> None:
    """Stop before a table is read that memory cannot hold: a few bytes of a packed file can stand for many rows.

    Raises:
        PerfedError: its cells would take more than this machine's memory, at :data:`CELL` bytes each.
    """
    available, needed = available_memory(), rows * columns * CELL
    if available is not None and needed > available:
        raise PerfedError(
            f"{path}: {rows:,} rows of {columns} columns need about {needed / 2**30:.3g} GiB of memory, and there are "
            f"{available / 2**30:.3g}; give fewer rows or columns"
        )


def _create_frame(path: Path, header: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: Iterable[int]) -> Frame:
    names = ["" if name is None else str(name) for name in header]
    if "" in names:
        empty = [all(row[position] in (None, "") for row in rows) for position in range(len(names))]
        raise PerfedError(f"{path}: {_explain_missing_name(names, empty)}")
    _check_header(path, names)
    cells = [[None if cell == "" else cell for cell in row] for row in rows]
    frame = pandas().DataFrame(cells, index=list(numbers), columns=names, dtype=object)
    return frame[frame.notna().any(axis=1)]


def _explain_missing_name(names: Sequence[str], empty: Sequence[bool]) -> str:
    """Return a message on columns without names and the remedy; ``empty`` flags columns without values."""
    columns = [position for position, name in enumerate(names) if not name]
    problem = f"column {columns[0] + 1} has no name"
    if all(name == "" and is_empty for name, is_empty in zip(names[columns[0] :], empty[columns[0] :], strict=True)):
        return f"{problem} and holds nothing, as where each row ends with a delimiter; remove it"
    if columns == [0]:
        return f"{problem}; name it or leave it out (pandas writes its row numbers so, unless it is told index=False)"
    return f"{problem}, as where one header cell stands for several columns; name each column, in one row"


def _check_header(path: Path, names: Sequence[str]) -> None:
    for number, name in enumerate(names, start=1):
        if not name:
            raise PerfedError(f"{path}: column {number} has no name; name it")
        if len(name) > LONGEST_NAME:
            raise PerfedError(
                f"{path}: the name of column {number} has {len(name):,} characters; allowed: {LONGEST_NAME:,}"
            )
        if re.fullmatch(r"[+-]?[\d.,]+", name):
            raise PerfedError(f"{path}: the first row must hold the names of the columns; that of {number} is a number")
    times = Counter(map(compose_text, names))
    twice = [name for name in dict.fromkeys(names) if times[compose_text(name)] > 1]
    if twice:
        raise PerfedError(f"{path}: several columns are called {quote_names(twice)}; names must differ")
