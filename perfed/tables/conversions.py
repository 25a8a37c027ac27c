"""Conversions of cells that a study configures: replaced texts, and removed units and separators."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfed.data.names import compose_text
from perfed.errors import PerfedError
from perfed.tables.cells import clean_cells
from perfed.tables.missing import split_code
from perfed.tables.problems import Frame, Series, pandas

_PLAIN = re.compile(r"[+-]?(\d+([.,]\d+)*|[.,]\d+)([eE][+-]?\d+)?")
_GROUPS = re.compile(r"(?P<whole>[+-]?[1-9]\d{0,2}((?P<sign>[.,'’\s])\d{3})((?P=sign)\d{3})*)(?P<rest>[.,]\d+)?")
_DECIMAL = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Conversions:
    """Conversions that are applied to the cells of some columns before anything else reads them, at all sites alike.

    Attributes:
        values: triples of a column, a text and its replacement.
        units: pairs of a column and a unit or mark that is removed in front of a number or behind it.
        thousands: columns in which a comma, point, apostrophe or space before three digits separates thousands.
        decimals: columns with a decimal comma.

    Example:
        >>> import pandas as pd
        >>> conversions = Conversions.from_settings({"sex": {"female": "F"}}, ["crp=<", "crp=mg/l"])
        >>> frame = pd.DataFrame({"sex": ["F", "female"], "crp": ["<0.5 mg/l", "7.1"]})
        >>> conversions.apply(frame).to_numpy().tolist()
        [['F', '0.5'], ['F', '7.1']]
    """

    values: tuple[tuple[str, str, str], ...] = ()
    units: tuple[tuple[str, str], ...] = ()
    thousands: tuple[str, ...] = ()
    decimals: tuple[str, ...] = ()

    @classmethod
    def from_settings(
        cls,
        values: Mapping[str, Mapping[str, str]],
        numbers: Sequence[str] = (),
        thousands: Sequence[str] = (),
        decimals: Sequence[str] = (),
    ) -> Conversions:
        """Return the conversions that the settings of a study define.

        Args:
            values: the replacement of each text, by column and text.
            numbers: columns of numbers; only entries with a unit (``COLUMN=UNIT``) define a conversion.
            thousands, decimals: the columns of these attributes.
        """
        units = [(name, unit) for name, unit in map(split_code, numbers) if name is not None]
        replaced = [(name, old, new) for name, texts in values.items() for old, new in texts.items()]
        return cls(tuple(replaced), tuple(units), tuple(thousands), tuple(decimals))

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns that are converted."""
        return frozenset((*(name for name, *_ in (*self.values, *self.units)), *self.thousands, *self.decimals))

    def settings(self, columns: Collection[str]) -> dict[str, Any]:
        """Return the settings of a study that define these conversions, limited to ``columns``."""
        values: dict[str, dict[str, str]] = {}
        for name, old, new in self.values:
            if name in columns:
                values.setdefault(name, {})[old] = new
        return {
            "values": values,
            "numbers": [f"{name}={unit}" for name, unit in self.units if name in columns],
            "thousands": [name for name in self.thousands if name in columns],
            "decimals": [name for name in self.decimals if name in columns],
        }

    def replacements(self, column: str) -> dict[str, str]:
        """Return the replacement of each replaced text of a column."""
        return {old: new for name, old, new in self.values if name == column}

    def apply(self, frame: Frame) -> Frame:
        """Return a data frame, whose column names are texts, with converted cells."""
        columns = self.columns
        positions = [position for position, name in enumerate(frame.columns) if name in columns]
        if not positions:
            return frame
        parts = [frame.iloc[:, position] for position in range(frame.shape[1])]
        for position in positions:
            parts[position] = self._convert(parts[position], str(frame.columns[position]))
        return pandas().concat(parts, axis=1)

    def _convert(self, cells: Series, name: str) -> Series:
        units = sorted((unit for column, unit in self.units if column == name), key=len, reverse=True)
        converted = cells.astype(object).to_numpy(copy=True)
        texts = np.array([isinstance(cell, str) for cell in converted], bool)
        for position in np.flatnonzero(texts):
            text = converted[position].strip()
            text = remove_units(text, units)
            text = remove_separators(text) if name in self.thousands else text
            converted[position] = text.replace(",", ".") if name in self.decimals and _DECIMAL.fullmatch(text) else text
        for replaced, new in _find_cells(cells, self.replacements(name)):
            converted[replaced] = new
        return clean_cells(pandas().Series(converted, index=cells.index, name=cells.name, dtype=object))


def remove_units(text: str, units: Sequence[str]) -> str:
    """Return ``text`` without units and marks if a number remains, otherwise ``text`` itself.

    The case of letters is ignored.

    Example:
        >>> remove_units("< 5.4 mmol/l", ["mmol/l", "<"]), remove_units("none", ["<"])
        ('5.4', 'none')
    """
    number, previous = text, ""
    while number != previous:
        previous = number
        for unit in units:
            number = re.sub(rf"^{re.escape(unit)}|{re.escape(unit)}$", "", number, flags=re.IGNORECASE).strip()
    return number if _PLAIN.fullmatch(number) else text


def remove_separators(text: str) -> str:
    """Return a number with thousands separators in plain notation with a decimal point; other texts are returned as is.

    Example:
        >>> [remove_separators(text) for text in ("1,250", "1.234.567,5", "1'000.25", "985", "1.25")]
        ['1250', '1234567.5', '1000.25', '985', '1.25']
    """
    number = _GROUPS.fullmatch(text)
    if number is None or (number["rest"] or "").startswith(number["sign"]):
        return text
    return number["whole"].replace(number["sign"], "") + (number["rest"] or "").replace(",", ".")


def groups_thousands(text: str) -> bool:
    """Return whether each comma, point, apostrophe or space in ``text`` can separate the thousands of a number.

    Example:
        >>> [groups_thousands(text) for text in ("1,250", "0,985", "12,50", "985", "1 234 567")]
        [True, False, False, False, True]
    """
    number = _GROUPS.fullmatch(text)
    return number is not None and number["rest"] is None


def read_values(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Check the table ``values`` of a study, and return its texts and replacements by column.

    Raises:
        PerfedError: an entry does not map texts of a column to replacements; the message names the column.
    """
    checked = {}
    for name, texts in values.items():
        is_valid = isinstance(texts, Mapping) and all(
            isinstance(new, str | int | float) and not isinstance(new, bool) and str(new).strip()
            for new in texts.values()
        )
        if not is_valid:
            raise PerfedError(
                f"values.{name} = {texts!r} is not allowed; allowed: texts of the column and what replaces them, such "
                'as {female = "F", male = "M"}'
            )
        checked[str(name)] = {
            compose_text(str(old).strip()): compose_text(str(new).strip()) for old, new in texts.items()
        }
    return checked


def _find_cells(cells: Series, replacements: Mapping[str, str]) -> list[tuple[Any, str]]:
    """Return a mask of the cells that equal each replaced text, as texts or as numbers, and its replacement."""
    if not replacements:
        return []
    texts = np.array([compose_text(str(cell).strip()) for cell in cells.astype(object)], object)
    numbers = pandas().to_numeric(pandas().Series(texts), errors="coerce").to_numpy(float)
    matches = []
    for old, new in replacements.items():
        number = pandas().to_numeric(old, errors="coerce")
        is_equal = texts == old
        matches.append((is_equal if np.isnan(number) else is_equal | (numbers == number), new))
    return matches
