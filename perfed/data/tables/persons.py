"""Whose values the texts of a column are: how many rows hold each, and whether they look like names of persons."""

from __future__ import annotations

from typing import Any

from perfed.data.tables.problems import Series, pandas

FEWEST = 5
"""Rows of a site that hold a category at least before the site tells it to anybody."""
_MANY = 10  # different texts up to which a column is none of names


def holders(values: Series, groups: Series | None = None) -> Series:
    """By value how many rows hold it; where rows have ``groups`` (patients), how many of these do."""
    if groups is None:
        return values.value_counts()
    pairs = pandas().DataFrame({"value": values.to_numpy(), "group": groups.to_numpy()}).drop_duplicates()
    return pairs["value"].value_counts()


def like_persons(name: str, values: Series, groups: Series | None = None) -> str:
    """Why the texts of the column ``name`` may be names or codes of persons; empty where they are no such."""
    found: Any = holders(values, groups)
    different, rare, rows = len(found), int((found < FEWEST).sum()), int(found.sum())
    if different <= _MANY or (2 * rare <= different and rows >= FEWEST * different):
        return ""
    of = "rows" if groups is None else f"values of '{groups.name}'"
    return (
        f"column '{name}' looks like names or codes of persons: {different} different texts in {rows} {of}, {rare} of "
        f"them in fewer than {FEWEST}; leave it out of the file, or name it in the study's drop, or in its categories "
        "if they are none"
    )
