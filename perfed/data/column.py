"""A column of a site's table: its kind and format, statistics of its training rows, and its role in models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from perfed.data.names import LONGEST_NAME, check_name
from perfed.data.target_scale import Sums

Kind = Literal["number", "boolean", "category", "date", "id", "text", "comma", "marked number", "empty"]

MISSING_CATEGORY = "missing"
"""The category of rows in which the value of a category column is missing."""

Name = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(check_name)]
Names = Annotated[tuple[Name, ...], Field(max_length=100_000)]


class Column(BaseModel):
    """A column of a table.

    The attributes on the format are set when the kind is detected, the statistics are computed from the training rows,
    and the attributes on its role in models are set by the agreement of all sites.

    Attributes:
        name: the name in the site's table.
        kind: the kind of its values; "empty" if every value is missing.
        missing: the number of missing values in the training rows; in metadata that a site sends, whether there are
            any.
        constant: whether all training rows hold the same value.
        binary: whether all numbers are 0 or 1; yes, no, true and false are then read as these.
        masked: whether a further input is 1 where the value is missing.
        levels: the categories that have an input of their own. In metadata that a site sends also the words of a
            boolean column.
        scale: the mean and the standard deviation over all sites by which numbers and dates are scaled; ``None`` for
            those of the site.
        sums: in metadata that a site sends, the sums of the values from which ``scale`` is computed.
        format: the format of dates for pandas, "" if it is ambiguous; "thousands" for numbers with separators.
        categories: the categories in the training rows, sorted.
        absent: whether the site lacks the column, which is then missing in every row.
        silent: whether the inputs of an absent column are 0 instead of missing (``columns = "named"``).
        letters: the single letters of this column that stand for truth values, "y" and "n" or "t" and "f"; other
            letters are refused. ``None``, in columns saved before perfed 0.2, allows all four.
        swapped: whether day and month of the dates that a spreadsheet recognised are swapped back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Name
    kind: Kind
    missing: bool | Annotated[int, Field(ge=0)] = 0
    constant: bool = False
    binary: bool = False
    masked: bool = False
    levels: Names = ()
    scale: tuple[float, Annotated[float, Field(gt=0)]] | None = None
    sums: Sums | None = None
    format: str = ""
    categories: tuple[str, ...] = ()
    absent: bool = False
    silent: bool = False
    letters: tuple[str, ...] | None = ()
    swapped: bool = False

    def replace(self, **changes: Any) -> Self:
        """Return the column with other values of some attributes."""
        return self.model_copy(update=changes)

    def with_kind(self, kind: Kind) -> Self:
        """Return the column with another kind."""
        return self if kind == self.kind else self.replace(kind=kind)

    @property
    def truth_letters(self) -> tuple[str, ...]:
        """The single letters of a boolean column, as the site detected them or as it sent them."""
        return self.letters or tuple(level.lower() for level in self.levels if len(level) == 1)

    @property
    def filling(self) -> str | float:
        """The value of an absent column in every row."""
        if self.kind == "category":
            return "".join(self.levels) + "'" if self.silent else MISSING_CATEGORY
        return (0.0 if self.scale is None else self.scale[0]) if self.silent else np.nan
