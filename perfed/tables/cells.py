"""Normalisation of the names and cells of a data frame, whether it comes from CSV, Excel, Parquet or Python."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.names import compose_text
from perfed.tables.missing import find_codes
from perfed.tables.problems import Frame, Series, pandas

_DAY = np.timedelta64(1, "D")


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
        codes: values that mean missing (:attr:`perfed.tables.options.TableOptions.missing`).
        originals: a dictionary to which each text that was not composed is added, by its composed form.
    """
    names = column_names(frame)
    composed = [compose_text(name) for name in names]
    texts = {} if originals is None else originals
    texts.update((text, name) for text, name in zip(composed, names, strict=True) if text != name)
    is_typed = np.array([_is_typed(dtype) for dtype in frame.dtypes], bool)
    # All texts are cleaned in one array: wide tables would spend most of their time on a Series for each column.
    cells = _clean_objects(frame.loc[:, ~is_typed].astype(object).to_numpy(), texts)
    for column, position in zip(cells.T, np.flatnonzero(~is_typed), strict=True):
        column[find_codes(column, composed[position], codes)] = None
    if not is_typed.any():
        return pandas().DataFrame(cells, index=frame.index, columns=composed, dtype=object)
    typed = [(name, column) for (_, column), name in zip(frame.items(), composed, strict=True)]
    columns = iter(cells.T)
    parts = [
        _clean_typed(column, name, codes) if has_type else _object_series(next(columns), column)
        for (name, column), has_type in zip(typed, is_typed, strict=True)
    ]
    if all(part is column for part, (_, column) in zip(parts, typed, strict=True)):
        return frame.set_axis(composed, axis=1)
    return pandas().concat(parts, axis=1).set_axis(composed, axis=1)


def clean_cells(values: Series) -> Series:
    """Return a column with normalised cells.

    Columns of numbers, booleans or dates are returned unchanged, and durations as numbers of days. Any other column
    becomes one of objects: numbers stay, texts are stripped and composed, dates become texts in ISO format, durations
    numbers of days, other objects their ``str``, and empty cells ``None``.
    """
    if _is_typed(values.dtype):
        return _clean_typed(values)
    return _object_series(_clean_objects(values.astype(object).to_numpy(), {}), values)


def _is_typed(dtype: Any) -> bool:
    """Return whether the cells of a column are all numbers, booleans, dates or durations, or missing."""
    if isinstance(dtype, np.dtype):
        return dtype.kind in "biufmM"
    return bool(pandas().api.types.is_datetime64_any_dtype(dtype))


def _clean_typed(cells: Series, name: str = "", codes: Sequence[str] = ()) -> Series:
    if cells.dtype.kind == "m":
        cells = pandas().Series(cells.to_numpy() / _DAY, index=cells.index, name=cells.name)
    is_missing = find_codes(cells, name, codes) if codes else np.zeros(1, bool)
    return clean_cells(cells.where(~is_missing)) if is_missing.any() else cells


def _clean_objects(cells: NDArray[Any], originals: dict[str, str]) -> NDArray[Any]:
    """Return normalised cells; texts that were not composed are added to ``originals``, column by column."""
    flat = cells.flatten(order="F")
    flat[pandas().isna(flat)] = None
    flat[:] = [_clean_cell(cell, originals) for cell in flat]
    return flat.reshape(cells.shape, order="F")


def _object_series(cells: NDArray[Any], values: Series) -> Series:
    return pandas().Series(cells, index=values.index, dtype=object, name=values.name)


def _clean_cell(cell: Any, originals: dict[str, str]) -> Any:
    if isinstance(cell, str):
        text = cell.strip()
        if text.isascii():
            return text or None
        composed = compose_text(text)
        if composed != text:
            originals[composed] = text
        return composed
    if cell is None or isinstance(cell, Number):
        return cell
    if isinstance(cell, timedelta):
        return cell / timedelta(days=1)
    return str(cell).removesuffix(" 00:00:00") if isinstance(cell, date) else str(cell)
