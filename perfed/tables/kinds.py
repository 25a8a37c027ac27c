"""What a column holds: numbers, categories, dates; parsed and guessed once from a site's rows, read so ever after."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfed.data.column import MISSING_CATEGORY, Column, Kind
from perfed.data.inputs import native_columns
from perfed.data.names import ALLOWED, find_control_character
from perfed.tables.cells import clean_cells, clean_frame
from perfed.tables.conversions import Conversions, groups_thousands, remove_separators
from perfed.tables.group_hashes import hash_groups
from perfed.tables.marks import are_marked_numbers, count_texts, list_texts
from perfed.tables.missing import MISSING_TEXTS
from perfed.tables.problems import Frame, Series, describe_rows, pandas

T = TypeVar("T")

_TRUTH_WORDS = (("yes", "no"), ("y", "n"), ("true", "false"), ("t", "f"))  # for true and for false
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ].*)?")
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ].*)?")
_COMMA = re.compile(r"[+-]?\d+(,\d+)?")  # whole numbers among them
_FORMATS = ("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
_TIMES = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
_BEFORE_TIME = re.compile(r"^(\S+?\d)[T ]+(?=\d)")
_LAST_DAY = 106_751  # since 1970-01-01, and before it, that pandas has in nanoseconds
_WHOLE = re.compile(r"-?\d+\.0+")
_IDS = frozenset({"id", "ids", "uid", "uuid", "guid", "mrn", "ssn"})
_MANY = 20  # different texts that a category may have in any case
_LEAST = 10  # rows from which values that all differ say something
_GROUP = 3  # digits between two separators
_MONTHS = 12
_EARLY = 12 / 30.4  # share of the days of a year that can be taken for months
_UNLIKELY = 1e-3  # chance below which the days of a column are no coincidence
_PHRASE = 3  # words that make a text of its own
_RARE = 0.02  # share of a site's training rows below which a category is rare
_TWICE = 2  # and a category that occurs less often is so in any case
_CODES = "put what means a missing value into missing"


def guess(values: Series, name: str, kind: Kind | None = None, *, swapped: bool = False) -> Column:
    """Return the column ``name`` with the kind that its cells suggest, or with the kind that the study sets.

    Numbers written as texts are numbers, even if all are 0 or 1. A column of yes and no, y and n, true and false, or t
    and f, in upper or lower case, is a boolean; words of two such pairs are categories. A column in which most values
    are numbers, or look like dates, has that kind, and :func:`read` names the rows that do not fit. Numbers with
    decimal commas have the kind "comma", and numbers most of which have a mark or a unit the kind "marked number".

    Args:
        values: the cells of the column.
        name: the name of the column.
        kind: the kind "date", "category" or "number" if the study sets it.
        swapped: whether the study lists the column among those in which a spreadsheet may have swapped day and month.
    """
    return _guess_column(clean_cells(values), name, kind, swapped=swapped)


def _guess_column(
    cells: Series,
    name: str,
    kind: Kind | None,
    *,
    swapped: bool,
    get_numbers: Callable[[], Series] | None = None,
) -> Column:
    """Return :func:`guess` of normalised cells, whose numbers ``get_numbers`` may return."""
    filled = _are_filled(cells)
    present = cells if filled.all() else cells[filled]
    if present.empty:
        return Column(name=name, kind="empty")
    if kind == "date" or pandas().api.types.is_datetime64_any_dtype(present.dtype):
        return _date_column(present, name, swapped=swapped)
    if kind == "category":
        return Column(name=name, kind="category")
    if present.dtype == bool or (words := _find_truth_words(present)):
        letters = () if present.dtype == bool else tuple(sorted(word for word in words if len(word) == 1))
        return Column(name=name, kind=kind or "boolean", binary=kind is not None, letters=letters)
    numbers = (_to_numbers(cells) if get_numbers is None else get_numbers()).to_numpy()[filled]
    share = float(np.mean(~np.isnan(numbers)))
    if share == 1:
        kind = kind or _kind_of_numbers(numbers, name)
        binary = kind == "number" and bool(((numbers == 0) | (numbers == 1)).all())
        return Column(name=name, kind=kind, binary=binary)
    return _guess_from_texts(present, name, share, kind, swapped=swapped)


def _are_filled(cells: Series) -> NDArray[np.bool_]:
    """Return a mask of the cells that are not missing."""
    return np.asarray(pandas().notna(cells.to_numpy()), bool)


def _to_numbers(cells: Series) -> Series:
    """Return cells as floats, NaN where a cell is no number."""
    numbers = pandas().to_numeric(cells, errors="coerce")
    return numbers if numbers.dtype == float else numbers.astype(float)


def _find_truth_words(cells: Series) -> set[str]:
    """Return the words of a column in lower case if all belong to one pair for true and false, otherwise no words."""
    texts = cells.to_numpy()
    first = str(texts[0]).lower()
    pair = next((words for words in _TRUTH_WORDS if first in words), ())
    return {str(text).lower() for text in texts} if all(str(text).lower() in pair for text in texts) else set()


def _kind_of_numbers(numbers: Any, name: str) -> Kind:
    all_integers = bool(np.isfinite(numbers).all()) and bool((numbers == np.round(numbers)).all())
    counted = len(numbers) >= _LEAST and bool((np.diff(numbers) == 1).all())
    return "id" if all_integers and (counted or (_called_id(name) and not set(numbers) <= {0.0, 1.0})) else "number"


def _guess_from_texts(
    cells: Series, name: str, numeric: float, chosen_kind: Kind | None = None, *, swapped: bool = False
) -> Column:
    """Return the column with the kind that its texts suggest; ``numeric`` is the share of numbers among them."""
    texts = [str(cell) for cell in cells]
    if chosen_kind is None and sum(_DATE.fullmatch(text) is not None for text in texts) > len(texts) / 2:
        return _date_column(cells, name, swapped=swapped)
    if any(separates_thousands(texts, sign) for sign in ",.'’ \u00a0\u202f"):
        return Column(name=name, kind="number", format="thousands")
    if all(map(_COMMA.fullmatch, texts)):
        return Column(name=name, kind="comma")
    if chosen_kind is not None or numeric > 0.5:
        return Column(name=name, kind=chosen_kind or "number")
    return Column(name=name, kind="marked number" if are_marked_numbers(texts) else _kind_of_texts(texts, name))


def separates_thousands(texts: Sequence[str], sign: str) -> bool:
    """Return whether ``sign``, such as a comma or a point, separates the thousands of the numbers ``texts``.

    Each number with the sign must have groups of three digits behind it, and numbers without it at most three digits.
    If the sign is a comma or a point, some number must also have exactly three digits or contain the sign twice.

    Example:
        >>> separates_thousands(["1,250", "985", "1,147"], ","), separates_thousands(["1,250", "0,985", "2"], ",")
        (True, False)
    """
    separated = [text for text in texts if sign in text]
    plain = [text.lstrip("+-") for text in texts if sign not in text]
    if not separated or not all(groups_thousands(text) for text in separated):
        return False
    if not all(text.isdecimal() and len(text) <= _GROUP and (text == "0" or text[0] != "0") for text in plain):
        return False
    return (
        sign not in ",."
        or any(text.count(sign) > 1 for text in separated)
        or any(len(text) == _GROUP for text in plain)
    )


def _kind_of_texts(texts: Sequence[str], name: str) -> Kind:
    different = len(set(texts))
    all_differ = different == len(texts) and len(texts) >= _LEAST
    if different <= max(_MANY, len(texts) / 2) and not all_differ:
        return "id" if _called_id(name) and different > 2 else "category"
    return "text" if np.mean([len(text.split()) for text in texts]) >= _PHRASE else "id"


def _called_id(name: str) -> bool:
    return bool(_IDS & split_words(name))


def split_words(name: str) -> set[str]:
    """The words of a column's name, in small letters: "patientId" and "Patient_ID" have the same."""
    return set(re.findall(r"[^\W_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()))


def _format_of(cells: Series) -> str:
    """The format in which most values are dates; "" if two read all of them, and differently."""
    if pandas().api.types.is_datetime64_any_dtype(cells.dtype):
        return "ISO8601"
    parsed = {date_format: _parse_dates(cells, date_format) for date_format in _FORMATS}
    num_parsed = {date_format: int(dates.notna().sum()) for date_format, dates in parsed.items()}
    best = max(num_parsed, key=lambda date_format: num_parsed[date_format])
    alternatives = [
        parsed[date_format]
        for date_format in _FORMATS
        if date_format != best and num_parsed[date_format] == num_parsed[best] > 0
    ]
    return "" if any(not dates.equals(parsed[best]) for dates in alternatives) else best


def _date_column(cells: Series, name: str, *, swapped: bool) -> Column:
    """Return a column of dates; ``swapped`` as in :func:`guess`."""
    form = format_of_swapped(cells)
    date_format = _format_of(cells) if form is None else form
    return Column(name=name, kind="date", format=date_format, swapped=swapped and form is not None)


def format_of_swapped(cells: Series) -> str | None:
    """Return the format of the texts in a column of dates if a spreadsheet took days for months, otherwise ``None``.

    A spreadsheet that expects the month first converts 03/04/2024 into a date and leaves 25/04/2024 as text. All dates
    that it recognised then have a day up to 12, and all texts a later one.
    """
    recognised = _are_recognised(cells)
    texts, dates = cells[~recognised], cells[recognised]
    if len(texts) == 0 or len(dates) == 0:
        return None
    date_format = _format_of(texts)
    if date_format in ("", "ISO8601"):
        return None
    days_of_texts, days_of_dates = _parse_dates(texts, date_format).dt.day, _parse_dates(dates, "ISO8601").dt.day
    swapped = (
        bool(days_of_texts.notna().all())
        and bool((days_of_texts > _MONTHS).all())
        and bool((days_of_dates <= _MONTHS).all())
    )
    chance = _EARLY ** len(dates) * (1 - _EARLY) ** len(texts)
    return date_format if swapped and chance < _UNLIKELY else None


def _are_recognised(cells: Series) -> Series:
    """Return a mask of the cells that are dates instead of texts: objects of a date type, or texts in ISO format."""
    return cells.map(lambda cell: _ISO.fullmatch(str(cell)) is not None).astype(bool)


def _swap_days(dates: Series) -> Series:
    """Return dates with day and month swapped, each with its time of day."""
    pd = pandas()
    days = dates.dt.normalize()
    parts = pd.DataFrame({"year": days.dt.year, "month": days.dt.day, "day": days.dt.month})
    return pd.to_datetime(parts, errors="coerce") + (dates - days)


def _parse_dates(cells: Series, date_format: str) -> Series:
    """Return the dates of cells in ``date_format``, with or without a time of day; NaT for other cells."""
    pd, texts = pandas(), cells.map(_normalise_category).reset_index(drop=True)  # labels may occur twice
    dates = pd.to_datetime(texts, format=date_format, errors="coerce", utc=True)
    if date_format != "ISO8601" and dates.isna().any():
        timed = texts[texts.map(lambda text: isinstance(text, str) and ":" in text).astype(bool)]
        spaced = timed.map(lambda text: _BEFORE_TIME.sub(r"\1 ", text))
        for time in _TIMES if len(timed) else ():
            dates = dates.fillna(pd.to_datetime(spaced, format=f"{date_format} {time}", errors="coerce", utc=True))
    return dates.set_axis(cells.index)


def _parse_dates_or_iso(cells: Series, date_format: str) -> Series:
    """Return the dates of cells in ``date_format``, or in ISO format, which is never ambiguous."""
    dates = _parse_dates(cells, date_format)
    iso = dates.isna() & cells.map(lambda cell: _ISO.fullmatch(str(cell)) is not None)
    return dates.where(~iso, _parse_dates(cells.where(iso, None), "ISO8601"))


def describe_format(form: str) -> str:
    """Return the ``format`` of a column of dates in the form DD.MM.YYYY."""
    return form.replace("ISO8601", "%Y-%m-%d").replace("%Y", "YYYY").replace("%m", "MM").replace("%d", "DD")


def _normalise_category(cell: Any) -> Any:
    """Return the name of a category, the same for 3, 3.0 and "3.0", as files write a column with and without gaps."""
    name = None if cell is None else str(cell)
    return name if name is None or not _WHOLE.fullmatch(name) else name.partition(".")[0]


# Reading -------------------------------------------------------------------------------------------------------


def read(values: Series, column: Column) -> tuple[Series, list[str]]:
    """Return the values of a column as its kind defines them, and a line for each problem.

    Returns:
        Floats for numbers, booleans (0 and 1) and dates (days since 1970-01-01, with fractions), NaN where missing, or
        texts for all other kinds, ``None`` where missing; and the problems.
    """
    return parse_cells(clean_cells(values), column)


def parse_cells(
    cells: Series, column: Column, get_numbers: Callable[[], Series] | None = None
) -> tuple[Series, list[str]]:
    """Return :func:`read` of normalised cells, whose numbers ``get_numbers`` may return."""
    where = f"column '{column.name}'"
    if column.kind == "date":
        return _read_dates(cells, column, where)
    if column.kind not in ("number", "boolean"):
        texts = cells.astype(object).where(cells.notna(), None).map(_normalise_category)
        texts = texts.astype(object).where(texts.notna(), None)
        return texts, describe_control_characters(texts, where) if column.kind == "category" else []
    numbers = _to_numbers(cells) if get_numbers is None else get_numbers()
    if column.format == "thousands" and cells.dtype == object:
        plain = cells.map(lambda cell: remove_separators(cell) if isinstance(cell, str) else cell)
        numbers = _to_numbers(clean_cells(plain))
    if (column.kind == "boolean" or column.binary) and cells.dtype == object:
        numbers = numbers.where(numbers.notna(), cells.map(_create_truth_reader(column.letters))).astype(float)
    values, problems = numbers.to_numpy(), []
    if (bad := np.isnan(values) & _are_filled(cells)).any():
        way = f"write numbers alone, {_CODES}, or name the column in categories"
        texts = list_texts(count_texts([str(cell) for cell in cells[bad]]))
        problems.append(
            f"{where} holds {column.kind}s, and something else {describe_rows(cells.index[bad])}{texts}; {way}"
        )
    if column.kind == "boolean" and (odd := ~(np.isnan(values) | np.isin(values, (0.0, 1.0)))).any():
        allowed = "allowed: 0, 1, yes, no, true, false"
        problems.append(f"{where} holds booleans, and other numbers {describe_rows(cells.index[odd])}; {allowed}")
    if (endless := np.isinf(values)).any():
        problems.append(
            f"{where} holds infinity {describe_rows(cells.index[endless])}; numbers must be finite, or missing"
        )
    return numbers, problems


def describe_control_characters(texts: Series, where: str) -> list[str]:
    """Return a line on the rows whose categories or classes hold control characters; empty if none do."""
    characters = {text: find_control_character(str(text)) for text in texts.dropna().unique()}
    bad = texts[texts.map(characters).notna()]
    if bad.empty:
        return []
    return [f"{where} holds the control character {characters[bad.iloc[0]]} {describe_rows(bad.index)}; {ALLOWED}"]


def _read_dates(cells: Series, column: Column, where: str) -> tuple[Series, list[str]]:
    date_format = column.format
    if date_format == "":
        way = f"write dates as {describe_format('ISO8601')}"
        return cells, [f"{where}: its dates can be read with the day or the month first; {way}"]
    filled = cells.notna().to_numpy()
    dates = cells[filled] if cells.dtype != object else _parse_dates_or_iso(cells[filled], date_format)
    if dates.dt.tz is not None:
        dates = dates.dt.tz_convert("UTC").dt.tz_localize(None)
    if column.swapped:
        recognised = _are_recognised(cells[filled])
        late = recognised & (dates.dt.day > _MONTHS)
        if late.any():
            problem = "day and month of real dates are swapped back at this site, but the day is above 12"
            return cells, [
                f"{where}: {problem} {describe_rows(dates.index[late])}; write {describe_format(date_format)} there"
            ]
        dates = dates.where(~recognised, _swap_days(dates))
    values = np.full(len(cells), np.nan)
    values[filled] = (dates.to_numpy() - np.datetime64(0, "s")) / np.timedelta64(1, "D")
    days = pandas().Series(values, index=cells.index)
    out_of_range = days.abs() > _LAST_DAY
    unreadable = days.isna() & filled
    if cells.dtype == object and unreadable.any():
        out_of_range |= unreadable & cells.map(_is_far_date)
    problems = []
    if len(rows := cells.index[unreadable & ~out_of_range]):
        formats = " or ".join(map(describe_format, dict.fromkeys((date_format, "ISO8601"))))
        problems.append(f"{where} holds dates, and something else {describe_rows(rows)}; write {formats}, or {_CODES}")
    if len(rows := cells.index[out_of_range]):
        problems.append(f"{where} holds dates outside 1677-09-22 to 2262-04-11 {describe_rows(rows)}; {_CODES}")
    return days, problems


def _is_far_date(cell: Any) -> bool:
    """Return whether a text that pandas could not parse is a date outside its range."""
    day = re.split("[T ]", str(cell))[0]
    for date_format in _FORMATS:
        with suppress(ValueError):
            year = datetime.strptime(day, "%Y-%m-%d" if date_format == "ISO8601" else date_format).year
            return not 1677 < year < 2262
    return False


def _create_truth_reader(letters: tuple[str, ...] | None) -> Callable[[Any], float]:
    """Return a function that maps a cell to 1 or 0, or to NaN; single letters count if their pair is in ``letters``."""
    pairs = [words for words in _TRUTH_WORDS if len(words[0]) > 1 or letters is None or set(letters) & set(words)]
    values = {word: value for words in pairs for word, value in zip(words, (1.0, 0.0), strict=True)}
    return lambda cell: values.get(str(cell).lower(), np.nan)


def learn_column(column: Column, values: NDArray[Any]) -> Column:
    """Return the column with its number of missing values, its categories and whether it is constant.

    Args:
        column: the column as :func:`guess` returns it.
        values: the values of the column in the training rows, as :func:`read` returns them.
    """
    is_missing = np.asarray(pandas().isna(values), bool)
    missing = int(is_missing.sum())
    present = values[~is_missing]
    constant = missing == len(values) or (missing == 0 and bool((present == present[0]).all()))
    if column.kind != "category":
        return column.replace(missing=missing, constant=constant, masked=missing > 0)
    counts = Counter(present.tolist())
    counts[MISSING_CATEGORY] += missing
    counts = +counts  # without categories that no row holds
    least = min(max(_TWICE, _RARE * len(values)), max(counts.values(), default=0))
    levels = tuple(sorted(category for category, count in counts.items() if count >= least))
    categories = tuple(sorted(counts))
    return column.replace(missing=missing, constant=constant, masked=missing > 0, categories=categories, levels=levels)


class ParsedTable:
    """A data frame whose columns are parsed when they are first needed, and only once.

    Args:
        frame: the frame as the site has it; its index names the rows in messages.
        originals: the site's spelling of each text whose composed form in ``frame`` differs from it.
        uncleaned: the frame from which :meth:`clean` created ``frame``.

    Attributes:
        frame, originals: the arguments of the same names.
    """

    def __init__(
        self, frame: Frame, originals: Mapping[str, str] | None = None, uncleaned: Frame | None = None
    ) -> None:
        self.frame = native_columns(frame)
        self._uncleaned = self.frame if uncleaned is None else uncleaned
        self.originals = dict(originals or {})
        self._results: dict[Hashable, Any] = {}

    def _compute_once(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._results:
            self._results[key] = compute()
        result: T = self._results[key]
        return result

    def cells(self, name: str) -> Series:
        """Return a column of numbers, booleans or dates as it is, any other as objects: texts, ``None`` if missing."""
        if self._uncleaned is not self.frame:
            return self.frame[name]
        return self._compute_once(("cells", name), lambda: clean_cells(self.frame[name]))

    def texts(self, name: str) -> list[str]:
        """Return the texts of the cells of a column that are not missing."""
        cells = self.cells(name)
        return [str(cell) for cell in cells.to_numpy()[_are_filled(cells)]]

    def numbers(self, name: str) -> Series:
        """Return a column as floats, NaN where a cell is no number."""
        return self._compute_once(("numbers", name), lambda: _to_numbers(self.cells(name)))

    def groups(self, name: str) -> NDArray[np.int64]:
        """Return the hash of each row's group; see :func:`perfed.tables.group_hashes.hash_groups`."""
        return self._compute_once(("groups", name), lambda: hash_groups(self.cells(name)))

    def read(self, column: Column) -> tuple[Series, list[str]]:
        """Return what :func:`read` returns for this column."""
        name = column.name
        key = ("read", name, column.kind, column.format, column.binary, column.letters, column.swapped)
        return self._compute_once(key, lambda: parse_cells(self.cells(name), column, lambda: self.numbers(name)))

    def read_texts(self, name: str) -> tuple[Series, list[str]]:
        """Return what :func:`read` returns for a column of categories, such as the target."""
        return self.read(Column(name=name, kind="category"))

    def guess(
        self, name: str, kind: Kind | None = None, test_rows: ParsedTable | None = None, *, swapped: bool = False
    ) -> Column:
        """Return what :func:`guess` returns for the column ``name`` of these rows and of ``test_rows``."""

        def guess_kind() -> Column:
            if test_rows is not None and name in test_rows.frame:
                return guess(pandas().concat([self.frame[name], test_rows.frame[name]]), name, kind, swapped=swapped)
            return _guess_column(self.cells(name), name, kind, swapped=swapped, get_numbers=lambda: self.numbers(name))

        return self._compute_once(("guess", name, kind, test_rows, swapped), guess_kind)

    def clean(self, codes: Sequence[str]) -> ParsedTable:
        """Return the rows after :func:`perfed.tables.cells.clean_frame` with these missing values."""

        def clean_rows() -> ParsedTable:
            originals: dict[str, str] = {}
            return ParsedTable(clean_frame(self.frame, tuple(codes), originals), originals, self.frame)

        return self._compute_once(("clean", tuple(codes)), clean_rows)

    def missing_texts(self, name: str) -> list[str]:
        """Return the :data:`perfed.tables.missing.MISSING_TEXTS` in a column, even if they are values there."""
        cells = clean_cells(self._uncleaned.iloc[:, list(self.frame.columns).index(name)])
        return sorted(set(MISSING_TEXTS) & set(cells.dropna())) if cells.dtype == object else []

    def converted(self, conversions: Conversions) -> ParsedTable:
        """Return the rows with converted cells (:meth:`Conversions.apply`)."""
        if not conversions.columns:
            return self
        return self._compute_once(
            ("convert", conversions),
            lambda: ParsedTable(conversions.apply(self.frame), self.originals, self._uncleaned),
        )
