"""What a column holds: numbers, categories, dates; parsed and guessed once from a site's rows, read so ever after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from perfed.data.inputs import native_columns
from perfed.data.tables.missing import without_codes
from perfed.data.tables.problems import Frame, Series, in_rows, pandas

Kind = Literal["number", "boolean", "category", "date", "id", "text", "comma", "empty"]

MISSING_CATEGORY = "missing"
"""What a category column holds where the value is missing."""

_TRUE, _FALSE = frozenset({"true", "yes", "y", "t"}), frozenset({"false", "no", "n", "f"})
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ].*)?")
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ].*)?")
_COMMA = re.compile(r"[+-]?\d+(,\d+)?")  # whole numbers among them
_FORMATS = ("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
_TIMES = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
_BEFORE_TIME = re.compile(r"^(\S+?\d)[T ]+(?=\d)")
_WHOLE = re.compile(r"-?\d+\.0+")
_IDS = frozenset({"id", "ids", "uid", "uuid", "guid", "mrn", "ssn"})
_MANY = 20  # different texts that a category may have in any case
_LEAST = 10  # rows from which values that all differ say something
_PHRASE = 3  # words that make a text of its own
_CODES = "put what means a missing value into missing"


@dataclass(frozen=True)
class Column:
    """One column of a site.

    Attributes:
        name: in the site's table.
        kind: what it holds; "empty" where every value is missing.
        format: of dates, as pandas reads it; "" where it could be read in two ways.
        missing: values that are missing in the training rows.
        constant: whether the training rows hold one value alone.
        categories: of a category, those that occur in the training rows, sorted.
        levels: those of them that have an input of their own; all others share having none.
        masked: whether a further input says that the value is missing.
        absent: whether the site does not have it (``columns = "union"``): it is missing in every row.
        binary: of numbers, whether all are 0 or 1; yes, no, true and false are then read as these.
        silent: of one that is absent, whether its inputs are 0 in place of that (``columns = "named"``).
        scale: of numbers and dates, mean and deviation over all sites, by which they are scaled; ``None`` for the
            site's own.
    """

    name: str
    kind: Kind
    format: str = ""
    missing: int = 0
    constant: bool = False
    categories: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    masked: bool = False
    absent: bool = False
    binary: bool = False
    silent: bool = False
    scale: tuple[float, float] | None = None

    @property
    def filling(self) -> str | float:
        """What stands in every row of a column that is absent."""
        if self.kind == "category":
            return "".join(self.levels) + "'" if self.silent else MISSING_CATEGORY
        return (0.0 if self.scale is None else self.scale[0]) if self.silent else np.nan


class Cells:
    """A column of a site, of which everything is made once, whoever asks for it.

    Args:
        values: as the site has them.

    Attributes:
        found: the column as it is if of numbers, booleans or dates, else as objects: texts stripped, ``None`` missing.
    """

    def __init__(self, values: Series) -> None:
        self.found = _stripped(values)
        self._read: dict[tuple[Kind, str, bool], tuple[Series, list[str]]] = {}

    @cached_property
    def numbers(self) -> Series:
        """As floats, NaN where a cell is no number."""
        return pandas().to_numeric(self.found, errors="coerce").astype(float)

    def read(self, column: Column) -> tuple[Series, list[str]]:
        """Return what :func:`read` does."""
        key = column.kind, column.format, column.binary
        if key not in self._read:
            self._read[key] = _read(self, column)
        return self._read[key]


def _stripped(values: Series) -> Series:
    kinds = pandas().api.types
    plain = isinstance(values.dtype, np.dtype) and values.dtype.kind in "biuf"
    if plain or kinds.is_datetime64_any_dtype(values.dtype):
        return values
    cells = np.array(values.astype(object), object)
    cells[pandas().isna(cells)] = None
    cells[:] = [(cell.strip() or None) if isinstance(cell, str) else cell for cell in cells]
    return pandas().Series(cells, index=values.index, dtype=object, name=values.name)


def guess(values: Series | Cells, name: str, said: Kind | None = None) -> Column:
    """What the column ``name`` holds, unless it is ``said``: "date", "category" or "number".

    Numbers written as texts are numbers, also where all are 0 or 1; true and false, yes and no are booleans. A column
    where most values are numbers, or look like dates, is taken for that, and :func:`read` then names the rows that are
    not. Numbers with decimal commas are "comma".
    """
    cells = values if isinstance(values, Cells) else Cells(values)
    filled = cells.found.notna().to_numpy()
    found = cells.found[filled]
    if found.empty:
        return Column(name, "empty")
    if said == "date" or pandas().api.types.is_datetime64_any_dtype(found.dtype):
        return Column(name, "date", _format_of(found))
    if said == "category":
        return Column(name, "category")
    if found.dtype == bool or all(str(cell).lower() in _TRUE | _FALSE for cell in found):
        return Column(name, "boolean") if said is None else Column(name, said, binary=True)
    numbers = cells.numbers.to_numpy()[filled]
    share = float(np.mean(~np.isnan(numbers)))
    if share == 1:
        kind = said or _kind_of_numbers(numbers, name)
        return Column(name, kind, binary=kind == "number" and bool(np.isin(numbers, (0.0, 1.0)).all()))
    return Column(name, said) if said else _of_texts(found, name, share)


def _kind_of_numbers(numbers: Any, name: str) -> Kind:
    whole = bool(np.isfinite(numbers).all()) and bool((numbers == np.round(numbers)).all())
    counted = len(numbers) >= _LEAST and bool((np.diff(numbers) == 1).all())
    return "id" if whole and (counted or (_called_id(name) and not set(numbers) <= {0.0, 1.0})) else "number"


def _of_texts(found: Series, name: str, numeric: float) -> Column:
    """What a column holds of which only the part ``numeric`` are numbers."""
    texts = [str(cell) for cell in found]
    if sum(_DATE.fullmatch(text) is not None for text in texts) > len(texts) / 2:
        return Column(name, "date", _format_of(found))
    if all(map(_COMMA.fullmatch, texts)):
        return Column(name, "comma")
    return Column(name, "number" if numeric > 0.5 else _kind_of_texts(texts, name))


def _kind_of_texts(texts: Sequence[str], name: str) -> Kind:
    different = len(set(texts))
    all_differ = different == len(texts) and len(texts) >= _LEAST
    if different <= max(_MANY, len(texts) / 2) and not all_differ:
        return "id" if _called_id(name) and different > 2 else "category"
    return "text" if np.mean([len(text.split()) for text in texts]) >= _PHRASE else "id"


def _called_id(name: str) -> bool:
    return bool(_IDS & words(name))


def words(name: str) -> set[str]:
    """The words of a column's name, in small letters: "patientId" and "Patient_ID" have the same."""
    return set(re.findall(r"[^\W_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()))


def _format_of(found: Series) -> str:
    """The format in which most values are dates; "" if two read all of them, and differently."""
    if pandas().api.types.is_datetime64_any_dtype(found.dtype):
        return "ISO8601"
    parsed = {each: _dates(found, each) for each in _FORMATS}
    good = {each: int(dates.notna().sum()) for each, dates in parsed.items()}
    best = max(good, key=lambda each: good[each])
    others = [parsed[each] for each in _FORMATS if each != best and good[each] == good[best] > 0]
    return "" if any(not other.equals(parsed[best]) for other in others) else best


def _dates(found: Series, form: str) -> Series:
    """Dates in ``form``, with a time of day or without."""
    pd, texts = pandas(), found.map(_text).reset_index(drop=True)  # labels may occur twice
    dates = pd.to_datetime(texts, format=form, errors="coerce", utc=True)
    if form != "ISO8601" and dates.isna().any():
        timed = texts[texts.map(lambda text: isinstance(text, str) and ":" in text).astype(bool)]
        spaced = timed.map(lambda text: _BEFORE_TIME.sub(r"\1 ", text))
        for time in _TIMES if len(timed) else ():
            dates = dates.fillna(pd.to_datetime(spaced, format=f"{form} {time}", errors="coerce", utc=True))
    return dates.set_axis(found.index)


def _dates_or_iso(found: Series, form: str) -> Series:
    """Dates in ``form``; 2024-03-31 can be read in one way alone, and is so in any case."""
    dates = _dates(found, form)
    iso = dates.isna() & found.map(lambda cell: _ISO.fullmatch(str(cell)) is not None)
    return dates.where(~iso, _dates(found.where(iso, None), "ISO8601"))


def date_shown(form: str) -> str:
    """How dates of a column's ``format`` are written, such as DD.MM.YYYY."""
    return form.replace("ISO8601", "%Y-%m-%d").replace("%Y", "YYYY").replace("%m", "MM").replace("%d", "DD")


def _text(cell: Any) -> Any:
    """A category's name: 3, 3.0 and "3.0" are the same one, as files write a column with and without gaps."""
    name = None if cell is None else str(cell)
    return name if name is None or not _WHOLE.fullmatch(name) else name.partition(".")[0]


# Reading -------------------------------------------------------------------------------------------------------


def read(values: Series, column: Column) -> tuple[Series, list[str]]:
    """The values as the column's kind has them, and what is wrong with them, a line each.

    Returns:
        floats (numbers; booleans as 0 and 1; dates as days since 1970-01-01, with fractions), NaN where missing, or
        texts (all other kinds), ``None`` where missing; and the problems.
    """
    return Cells(values).read(column)


def _read(cells: Cells, column: Column) -> tuple[Series, list[str]]:
    found, where = cells.found, f"column '{column.name}'"
    if column.kind == "date":
        return _read_dates(found, column.format, where)
    if column.kind not in ("number", "boolean"):
        texts = found.astype(object).where(found.notna(), None).map(_text)
        return texts.astype(object).where(texts.notna(), None), []
    numbers = cells.numbers
    if (column.kind == "boolean" or column.binary) and found.dtype == object:
        numbers = numbers.where(numbers.notna(), found.map(_truth)).astype(float)
    values, problems = numbers.to_numpy(), []
    if (bad := np.isnan(values) & found.notna().to_numpy()).any():
        way = f"write numbers alone, {_CODES}, or name the column in categories"
        problems.append(f"{where} holds {column.kind}s, and something else {in_rows(found.index[bad])}; {way}")
    odd = ~(np.isnan(values) | np.isin(values, (0.0, 1.0)))
    if column.kind == "boolean" and odd.any():
        allowed = "allowed: 0, 1, yes, no, true, false"
        problems.append(f"{where} holds booleans, and other numbers {in_rows(found.index[odd])}; {allowed}")
    if (endless := np.isinf(values)).any():
        problems.append(f"{where} holds infinity {in_rows(found.index[endless])}; numbers must be finite, or missing")
    return numbers, problems


def _read_dates(found: Series, form: str, where: str) -> tuple[Series, list[str]]:
    if form == "":
        way = f"write dates as {date_shown('ISO8601')}"
        return found, [f"{where}: its dates can be read with the day or the month first; {way}"]
    filled = found.notna().to_numpy()
    dates = found[filled] if found.dtype != object else _dates_or_iso(found[filled], form)
    if dates.dt.tz is not None:
        dates = dates.dt.tz_convert("UTC").dt.tz_localize(None)
    bad = dates.index[dates.isna()]
    ways = " or ".join(map(date_shown, dict.fromkeys((form, "ISO8601"))))
    problems = []
    if len(bad):
        problems.append(f"{where} holds dates, and something else {in_rows(bad)}; write {ways}, or {_CODES}")
    pd = pandas()
    days = np.full(len(found), np.nan)
    days[filled] = (dates - pd.Timestamp(0)) / pd.Timedelta(days=1)
    return pd.Series(days, index=found.index), problems


def _truth(cell: Any) -> float:
    word = str(cell).lower()
    return 1.0 if word in _TRUE else 0.0 if word in _FALSE else np.nan


class Parsed:
    """A data frame whose columns are parsed when they are first asked for, and kept.

    Args:
        frame: as the site has it; its index names the rows in messages.

    Attributes:
        frame: the same, with texts as names.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = native_columns(frame).set_axis([str(name) for name in frame.columns], axis=1)
        self._cells: dict[str, Cells] = {}
        self._guessed: dict[tuple[str, Kind | None, Parsed | None], Column] = {}
        self._without: dict[tuple[str, ...], Parsed] = {}

    def __getitem__(self, name: str) -> Cells:
        if name not in self._cells:
            self._cells[name] = Cells(self.frame[name])
        return self._cells[name]

    def without(self, codes: Sequence[str]) -> Parsed:
        """The same rows, missing where a cell holds one of ``codes``."""
        key = tuple(codes)
        if key and key not in self._without:
            self._without[key] = Parsed(without_codes(self.frame, key))
        return self._without[key] if key else self

    def guess(self, name: str, said: Kind | None = None, more: Parsed | None = None) -> Column:
        """What the column ``name`` holds, by its rows and those of ``more``: :func:`perfed.data.tables.kinds.guess`."""
        key = name, said, more
        if key not in self._guessed:
            both = more is not None and name in more.frame
            cells = Cells(pandas().concat([self.frame[name], more.frame[name]])) if more and both else self[name]
            self._guessed[key] = guess(cells, name, said)
        return self._guessed[key]
