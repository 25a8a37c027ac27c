"""Detection of columns whose numbers carry marks or units: ``<0.5``, ``ND``, ``55 %``, ``5.4 mmol/l``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from perfed.tables.problems import quote_names

FEWEST = 5
"""Least number of rows of a site that must hold a text before a message shows it or the site sends it."""

CODES = "or name the column in categories if these are codes"
"""The last of the possible answers to the question about such a column (:func:`describe_marks`)."""

_SHOWN = 4  # largest number of texts that a message shows
_LONGEST = 20  # largest number of characters of a unit
_WORDS = 3  # largest number of words of a unit
_RANGES = 0.1  # share of ranges among the distinct texts from which on a column is a category
_NUMBER = r"[+-]?(?:\d{1,3}(?:[,'’]\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?|[.,]\d+)(?:[eE][+-]?\d+)?"
_MARK = r"(?:[<>≤≥=~≈±$€£¥*]+|(?:ca|approx)\.?\s|circa\s|about\s)*"
_TEXT = re.compile(rf"(?P<mark>{_MARK})\s*(?P<number>{_NUMBER})(?P<unit>\D.*)?", re.IGNORECASE)
_NO_UNIT = re.compile(r"\s*[-–—/:.,]\s*\d.*|\s+(?:to|bis|à|a|and|und|or|of|out of|von|sur|de)\s+\d.*", re.IGNORECASE)
_RANGE = re.compile(r"[<>≤≥]?\s*\d+(?:[.,]\d+)?\s*(?:[-–—]|to|bis)\s*\d+(?:[.,]\d+)?\b.*", re.IGNORECASE)


class MarkedNumber(NamedTuple):
    """A text that consists of one number with an optional mark and unit.

    Attributes:
        mark: the text in front of the number, such as "<".
        number: the number as it is written.
        unit: the text behind the number, such as "mmol/l".
    """

    mark: str
    number: str
    unit: str

    @property
    def form(self) -> str:
        """The text with an ellipsis in place of the number."""
        return f"{self.mark}…{' ' * (self.unit[:1].isalpha() and bool(self.unit))}{self.unit}"


def parse_number(text: str) -> MarkedNumber | None:
    """Split ``text`` into a number and the mark and unit around it; return ``None`` if it is no such number.

    Codes (``I21``, ``A1``), ranges (``10-19``), times of day, fractions and phrases are no such numbers.

    Example:
        >>> parse_number("<5.4 mmol/l")
        MarkedNumber(mark='<', number='5.4', unit='mmol/l')
        >>> [parse_number(text) for text in ("I21", "10-19", "12:30", "ND")]
        [None, None, None, None]
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or not match["number"]:
        return None
    after = match["unit"] or ""
    unit = after.strip()
    if unit[:1].isdecimal() or _NO_UNIT.fullmatch(after) or len(unit) > _LONGEST or len(unit.split()) > _WORDS:
        return None
    return MarkedNumber(match["mark"].strip(), match["number"], unit)


def are_marked_numbers(texts: Iterable[str]) -> bool:
    """Return whether most distinct ``texts`` of a column hold a number and they are neither codes nor ranges.

    Example:
        >>> are_marked_numbers(["."] * 9 + ["4.4", "5.6"]), are_marked_numbers(["1A", "1B", "2A", "."])
        (True, False)
    """
    distinct = set(texts)
    if sum(_RANGE.fullmatch(text) is not None for text in distinct) >= max(1, _RANGES * len(distinct)):
        return False
    numbers = [number for number in map(parse_number, distinct) if number is not None]
    return 2 * len(numbers) > len(distinct) and not _are_codes(numbers)


def _are_codes(numbers: Sequence[MarkedNumber]) -> bool:
    """Return whether all numbers are integers followed by one letter, and the letters differ: 1A, 1B, 2A."""
    letters = {number.unit.casefold() for number in numbers}
    return len(letters) > 1 and all(
        len(number.unit) == 1 and number.unit.isalpha() and number.number.isdecimal() for number in numbers
    )


def count_texts(texts: Sequence[str]) -> Counter[str]:
    """Count the rows of each text that is not a plain number and that a message may show.

    Texts in fewer than :data:`FEWEST` rows count by their form, such as "… mmol/l", if they hold a number.

    Example:
        >>> count_texts(["ND"] * 7 + ["1 mg", "2 mg", "3 mg", "4 mg", "5 mg", "6", "rarely"])
        Counter({'ND': 7, '… mg': 5})
    """
    rows, counts = Counter(texts), Counter[str]()
    for text, count in rows.items():
        number = parse_number(text)
        if number is None or number.mark or number.unit:
            counts[text if number is None or count >= FEWEST else number.form] += count
    return Counter({text: count for text, count in counts.most_common() if count >= FEWEST})


def list_texts(counts: Counter[str]) -> str:
    """Return the most frequent texts of :func:`count_texts` in brackets, or an empty text if there are none."""
    rows = [f"'{text}' in {count} rows" for text, count in counts.most_common(_SHOWN)]
    return f" ({', '.join(rows)})" if rows else ""


def describe_marks(name: str, texts: Sequence[str]) -> str:
    """Return the question about a column of numbers with marks: its most frequent texts, and the possible answers.

    Args:
        name: the name of the column.
        texts: all texts of the column.
    """
    counts, units = count_texts(texts), Counter[str]()
    for number in filter(None, map(parse_number, texts)):
        units.update(filter(None, (number.mark, number.unit)))
    missing = next((text for text in counts if parse_number(text) is None and "…" not in text), None)
    frequent = [unit for unit, count in units.most_common() if count >= FEWEST]
    answers = [f"put what means a missing value into missing{_format_example(name, missing)}"]
    if units:
        answers.append(
            f"a unit or mark that is to be removed into numbers{_format_example(name, next(iter(frequent), None))}"
        )
    answers.append(CODES)
    different = sorted({unit.casefold() for unit in frequent if unit[0].isalpha()})
    warning = f"; its units differ ({quote_names(different)}), and removing them converts nothing"
    problem = f"column '{name}' holds numbers, and marks, units or other texts{list_texts(counts)}"
    return f"{problem}; {', '.join(answers)}{warning if len(different) > 1 else ''}"


def _format_example(name: str, text: str | None) -> str:
    return "" if text is None else f' ("{name}={text}")'
