"""How sites' tables become a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfed.data.labels import Task
from perfed.data.tables.kinds import Kind
from perfed.data.tables.problems import listed
from perfed.data.tables.schema import Mode
from perfed.errors import PerfedError

_KINDS: dict[str, Kind] = {"numbers": "number", "dates": "date", "categories": "category"}
_LISTS = ("drop", *_KINDS)


@dataclass(frozen=True)
class TableOptions:
    """How sites' tables become a federation.

    Attributes:
        target: the column to predict; of survival the time, above 0.
        event: of survival the column that says whether the event was seen at that time (1, yes, true), or nothing is
            known beyond it (0, no, false); without it, the task is another.
        domain: column that says the domain of a row; it is no input (``domain_input`` of a data set makes it one).
        drop: columns that do not enter: ids, free text; here and below a text is one name.
        numbers, dates, categories: columns that are so, whatever they look like.
        group: column whose rows of one value (a patient's) are never on both sides of a split.
        task: "classification" or "regression"; by default what the targets look like.
        test_fraction: share of each site's rows that is tested on, by class.
        folds: k > 0: instead, one of k folds by class. Which, says ``seed``: seeds 0, ..., k - 1 test every row once,
            the next k do so with other folds.
        columns: "own": each site its own; "common": those that all have; "union": all, absent ones filled and masked.
        preprocess: a scikit-learn transformer in place of ours, as ``module:NAME`` or itself.
        seed: of the split.
    """

    target: str
    event: str | None = None
    domain: str | None = None
    drop: Sequence[str] = ()
    numbers: Sequence[str] = ()
    dates: Sequence[str] = ()
    categories: Sequence[str] = ()
    group: str | None = None
    task: Task | None = None
    test_fraction: float = 0.2
    folds: int = 0
    columns: Mode = "own"
    preprocess: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _LISTS:
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        allowed = {
            "test_fraction": ("from 0 to below 1", 0 <= self.test_fraction < 1),
            "folds": ("0, or at least 2", self.folds == 0 or self.folds >= 2),
            "columns": ("own, common, union", self.columns in ("own", "common", "union")),
            "task": ("classification, regression", self.task in (None, "classification", "regression")),
        }
        for name, (values, good) in allowed.items():
            if not good:
                raise PerfedError(f"{name} = {getattr(self, name)!r} is not allowed; allowed: {values}")
        if self.event is not None and self.task is not None:
            raise PerfedError(f"event = '{self.event}' makes it survival, but task = '{self.task}'; leave one out")
        given = (self.target, self.event, self.domain, self.group, *self.drop)
        roles = [name for name in given if name is not None]
        twice = [name for name in dict.fromkeys(roles) if roles.count(name) > 1]
        if twice:
            raise PerfedError(f"column {listed(twice)} has two roles among target, event, domain, group and drop")
        names = [name for option in _KINDS for name in dict.fromkeys(getattr(self, option))]
        if len(self.kinds) < len(names):
            twice = [name for name in self.kinds if names.count(name) > 1]
            raise PerfedError(f"column {listed(twice)} is in two of numbers, dates and categories; it has one kind")

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of columns that are said, by name."""
        return {name: kind for option, kind in _KINDS.items() for name in getattr(self, option)}

    @property
    def named(self) -> dict[str, Sequence[str]]:
        """By option, names of columns that a site may lack, and some site must have."""
        return {name: getattr(self, name) for name in _LISTS}
