"""Normalisation of the names and cells of a data frame, whether it comes from CSV, Excel, Parquet or Python."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from datetime import date, timedelta
from numbers import Number
from typing import Any

import numpy as np

from perfed.data.tables.missing import without_codes
from perfed.data.tables.problems import Frame, Series, pandas

_DAY = np.timedelta64(1, "D")


def compose_text(text: str) -> str:
    """Return a text with composed accents (Unicode's form NFC), the form in which names and values are compared.

    Example:
        >>> compose_text("Ko\\u0308ln") == "K\\u00f6ln"
        True
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def column_names(frame: Frame) -> list[str]:
    """Return the column names as texts; the levels of a multi-index are joined by spaces."""
    names = frame.columns
    if getattr(names, "nlevels", 1) > 1:
        return [" ".join(str(level).strip() for level in name if str(level).strip()) for name in names]
    return [str(name) for name in names]


def clean_frame(frame: Frame, codes: Sequence[str] = (), originals: dict[str, str] | None = None) -> Frame:
    """Return the frame with composed column names and normalised cells (:func:`clean_cells`), ``None`` if missing.

    Args:
        frame: the frame as the site has it.
        codes: values that mean missing (:attr:`perfed.data.tables.options.TableOptions.missing`).
        originals: a dictionary to which each text that was not composed is added, by its composed form.
    """
    names = column_names(frame)
    composed = [compose_text(name) for name in names]
    texts = {} if originals is None else originals
    texts.update((text, name) for text, name in zip(composed, names, strict=True) if text != name)
    columns = [frame.iloc[:, position] for position in range(len(names))]
    cleaned = [clean_cells(column, texts) for column in columns]
    if any(result is not column for result, column in zip(cleaned, columns, strict=True)):
        frame = pandas().concat(cleaned, axis=1)
    return without_codes(frame.set_axis(composed, axis=1), codes)


def clean_cells(values: Series, originals: dict[str, str] | None = None) -> Series:
    """Return a column with normalised cells.

    Columns of numbers, booleans or dates are returned unchanged, and durations as numbers of days. Any other column
    becomes one of objects: numbers stay, texts are stripped and composed, dates become texts in ISO format, durations
    numbers of days, other objects their ``str``, and empty cells ``None``.

    Args:
        values: the cells of the column.
        originals: as in :func:`clean_frame`.
    """
    kinds = pandas().api.types
    numpy_kind = values.dtype.kind if isinstance(values.dtype, np.dtype) else ""
    if numpy_kind == "m":
        return pandas().Series(values.to_numpy() / _DAY, index=values.index, name=values.name)
    if numpy_kind in ("b", "i", "u", "f") or kinds.is_datetime64_any_dtype(values.dtype):
        return values
    cells = np.array(values.astype(object), object)
    cells[pandas().isna(cells)] = None
    cells[:] = [_clean_cell(cell, originals) for cell in cells]
    return pandas().Series(cells, index=values.index, dtype=object, name=values.name)


def _clean_cell(cell: Any, originals: dict[str, str] | None) -> Any:
    if isinstance(cell, str):
        text = cell.strip()
        if text.isascii():
            return text or None
        composed = compose_text(text)
        if originals is not None and composed != text:
            originals[composed] = text
        return composed
    if cell is None or isinstance(cell, Number):
        return cell
    if isinstance(cell, timedelta):
        return cell / timedelta(days=1)
    return str(cell).removesuffix(" 00:00:00") if isinstance(cell, date) else str(cell)
