"""Reading of CSV files with events or times of clients in rounds."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from perfed.errors import PerfedError


def _make_absolute(value: str) -> str:
    try:
        return str(Path(value).expanduser().absolute()) if value else value
    except RuntimeError as error:  # the home directory of "~user" does not exist
        raise ValueError(str(error)) from None


CsvPath = Annotated[str, AfterValidator(_make_absolute)]
"""A path, relative to the current folder, which is converted to an absolute one."""


def read_csv_rows(file: str, where: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a CSV file with a heading.

    Args:
        file: the path.
        where: the setting in error messages.
        columns: the columns that the file must have; others are ignored.

    Yields:
        The place of each row for error messages, and its cells by column.

    Raises:
        PerfedError: the file cannot be read, lacks a column, or a row has too few or too many cells.
    """
    try:
        with Path(file).open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            heading = list(reader.fieldnames or ())
            missing = [column for column in columns if heading.count(column) != 1]
            if missing:
                rule = (
                    f"the first line must be {','.join(columns)}"
                    if len(heading) <= len(columns)
                    else (f"the first line must have the column '{missing[0]}' once")
                )
                raise PerfedError(f"{where}: {rule} (given: {','.join(heading)[:60]})")
            for row in reader:
                place = f"{where}: line {reader.line_num}"
                if None in row.values() or any(row.get(None, ())):
                    raise PerfedError(f"{place} needs {' and '.join([', '.join(heading[:-1]), heading[-1]])}")
                yield place, {column: row[column] for column in columns}
    except PerfedError:
        raise
    except (OSError, ValueError, csv.Error) as error:  # ValueError: a name with a zero byte, or not text
        reason = error.strerror if isinstance(error, OSError) else "it is not CSV text"
        raise PerfedError(f"{where}: cannot be read: {reason}") from None
