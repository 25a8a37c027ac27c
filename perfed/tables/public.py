"""The values in a study's ``data.public``, with which sites need not send metadata about their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from math import isfinite
from typing import Any

from perfed.data.names import compose_text
from perfed.data.target_scale import Sums
from perfed.errors import PerfedError

NOTHING_OF_ROWS = "names of columns; of their rows nothing, but what the study says in data.public"
"""The description of the metadata that sites send with ``data.public``."""


@dataclass(frozen=True)
class Known:
    """The public values of a column, which do not depend on rows.

    Attributes:
        levels: the sorted texts of a category, classes of a target, or domains; otherwise empty.
        span: the smallest and the largest value of numbers and dates (in days since 1970); otherwise ``None``.

    Example:
        >>> Known.of("age", [20, 80], dates=False).scale
        (50.0, 30.0)
    """

    levels: tuple[str, ...] = ()
    span: tuple[float, float] | None = None

    @classmethod
    def of(cls, name: str, values: Any, *, dates: bool) -> Known:
        """Read the public values of the column ``name``, which holds dates if ``dates``.

        Raises:
            PerfedError: neither texts that differ, nor two numbers (dates) of which the second is larger.
        """
        if isinstance(values, Known):
            return values
        items = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
        texts = bool(items) and all(isinstance(value, str) for value in items)
        if texts and not dates:
            levels = tuple(sorted(map(compose_text, items)))
            if all(a != b for a, b in pairwise(levels)):
                return cls(levels=levels)
        elif (span := _read_span(items, dates)) is not None:
            return cls(span=span)
        allowed = '["1990-01-31", "2020-12-31"]' if dates else "texts that differ, or two numbers, such as [0, 100]"
        raise PerfedError(f"public.{name} = {values!r} is not allowed; allowed: {allowed}")

    @property
    def scale(self) -> tuple[float, float] | None:
        """The middle of :attr:`span` and half its width, by which it is scaled to -1 to 1."""
        if self.span is None:
            return None
        low, high = self.span
        return (low + high) / 2, (high - low) / 2

    @property
    def sums(self) -> Sums | None:
        """The sums that give the mean and deviation in :attr:`scale`, for any number of sites."""
        if self.scale is None:
            return None
        middle, half = self.scale
        return Sums(number=1, total=(middle,), squares=(half**2,))

    @property
    def of_target(self) -> dict[str, Any]:
        """The fields of a site's metadata that describe this target."""
        if self.span is not None:
            return {"sums": self.sums}
        integers = all(level.removeprefix("-").isdecimal() for level in self.levels)
        numbers = tuple(sorted(map(int, self.levels))) if integers else None
        return {"labels": "numbers" if integers else "texts", "numbers": numbers, "classes": self.levels}


def _read_span(values: Sequence[Any], dates: bool) -> tuple[float, float] | None:
    if dates:
        try:
            values = [(date.fromisoformat(value) - date(1970, 1, 1)).days for value in values]
        except (TypeError, ValueError):
            return None
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(values) != 2 or len(numbers) != 2 or not all(map(isfinite, numbers)) or numbers[0] >= numbers[1]:
        return None
    return float(numbers[0]), float(numbers[1])


def read_public(settings: Mapping[str, Any], dates: Sequence[str]) -> dict[str, Known]:
    """Read the table ``public`` of a study with the columns ``dates`` of dates.

    Raises:
        PerfedError: as :meth:`Known.of`.
    """
    return {
        compose_text(name): Known.of(name, values, dates=compose_text(name) in dates)
        for name, values in settings.items()
    }
