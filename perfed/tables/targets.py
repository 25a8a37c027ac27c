"""The column to predict: labels of any kind, or values; the same at all sites."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.column import Column
from perfed.data.federation_schema import LabelKind, describe_label_conflicts
from perfed.data.labels import Classes, Task
from perfed.tables.kinds import Cells, describe_control_characters, words
from perfed.tables.problems import Series, in_rows, pandas

_EVENTS = {"1": 1.0, "1.0": 1.0, "true": 1.0, "yes": 1.0, "0": 0.0, "0.0": 0.0, "false": 0.0, "no": 0.0}
_EVENT_WORDS = frozenset({"event", "status", "death", "dead", "died", "censored"})
CONSTANT = "{} is the same in all rows of all sites; there is nothing to predict"
FEW = 20
"""So many different whole numbers at most are taken for classes."""


def named(target: str | None) -> str:
    """What messages call the column to predict, or targets that are no column."""
    return "the target" if target is None else f"column '{target}', the target,"


@dataclass(frozen=True, eq=False)
class Labels:
    """A site's column to predict, in the parts of its rows: as texts, and as numbers where these are some."""

    texts: list[Series]
    numbers: list[Series]

    @classmethod
    def of(cls, columns: Iterable[Cells]) -> Labels:
        """The parts of the column."""
        texts = [column.read(Column(name="", kind="category"))[0] for column in columns]
        return cls(texts, [pandas().to_numeric(text, errors="coerce").astype(float) for text in texts])

    @property
    def kind(self) -> LabelKind:
        """Whether all of a part are texts, all are numbers, or neither."""
        kinds = {_kind(number) for number in self.numbers}
        return "texts" if "texts" in kinds else "numbers" if kinds == {"numbers"} else "mixed"

    @property
    def whole(self) -> bool:
        """Whether all are whole numbers."""
        return all(bool(number.notna().all()) and bool((number == number.round()).all()) for number in self.numbers)

    @property
    def names(self) -> list[NDArray[np.str_]]:
        """As texts, by part."""
        return [text.to_numpy().astype(np.str_) for text in self.texts]

    @property
    def values(self) -> list[NDArray[np.float64]]:
        """As numbers, by part."""
        return [number.to_numpy() for number in self.numbers]

    @property
    def whole_numbers(self) -> list[NDArray[np.int64]]:
        """As whole numbers, by part."""
        return [values.astype(np.int64) for values in self.values]

    def outside(self, classes: Classes) -> list[Any]:
        """The rows whose label is none of ``classes``."""
        held = self.texts if any(isinstance(label, str) for label in classes) else self.numbers
        return [row for of in held for row in of.index[~of.isin(classes)]]


def _kind(numbers: Series) -> LabelKind:
    missing = numbers.isna()
    return "numbers" if not missing.any() else "texts" if missing.all() else "mixed"


def targets_of(
    columns: Sequence[tuple[str, Cells]], name: str, task: Task | None
) -> tuple[list[NDArray[Any]], Task, list[str]]:
    """Targets of all sites as labels (whole numbers or texts) or values, the task, and what is wrong.

    Without ``task`` texts, booleans and at most 20 different whole numbers are labels, other numbers values. Texts
    that are numbers at all sites are numbers; numbers here and names there are refused. Nothing may be missing.

    Args:
        columns: where each is from, for messages, and the column.
        name: of the column.
        task: what the targets are for.
    """
    held, where = Labels.of(column for _, column in columns), named(name)
    numbers = held.numbers
    numeric = [bool(number.notna().all()) for number in numbers]
    endless = [
        f"{source}: {where} holds infinity {in_rows(number.index[np.isinf(number)])}"
        for (source, _), number in zip(columns, numbers, strict=True)
        if np.isinf(number).any()
    ]
    if endless:
        return [], task or "regression", endless
    found = {value for number in numbers for value in number.tolist()} if all(numeric) else set()
    whole = all(numeric) and all(value == round(value) for value in found)
    if task is None:
        task = "regression" if all(numeric) and not (whole and len(found) <= FEW) else "classification"
    texts = [(source, n, f" {in_rows(n.index[n.isna()])}") for (source, _), n in zip(columns, numbers, strict=True)]
    problems = describe_label_conflicts([(source, _kind(number), rows) for source, number, rows in texts], where)
    pairs = zip(columns, held.texts, strict=True)
    problems += [f"{source}: {line}" for (source, _), t in pairs for line in describe_control_characters(t, where)]
    if task == "regression":
        needed = "numbers are needed for regression"
        problems = [f"{s}: {where} holds texts{rows}; {needed}" for s, n, rows in texts if n.isna().any()]
    if problems:
        return [], task, problems
    if task == "regression":
        return [*held.values], task, []
    return [*held.whole_numbers] if whole else [*held.names], task, []


def looks_like_event(column: Column) -> bool:
    """Whether a column of 1 and 0, or yes and no, is called like one of events."""
    return (column.kind == "boolean" or column.binary) and bool(_EVENT_WORDS & words(column.name))


def event_option(name: str) -> str:
    """How the column ``name`` is said to be of events."""
    if "censored" in words(name):
        return "--event takes a column that is 1 where the event was seen, which is the opposite"
    return f"--event {shlex.quote(name)}"


def constant(targets: Iterable[NDArray[Any]]) -> bool:
    """Whether all rows of all sites have one target."""
    return len({value for values in targets for value in values.tolist()}) < 2


def numeric(targets: Iterable[NDArray[Any]]) -> bool:
    """Whether the targets of all sites are numbers, more than two different ones."""
    found = [values for values in targets if values.ndim == 1 and values.dtype.kind in "if"]
    return bool(found) and len(np.unique(np.concatenate(found))) > 2


def events_of(columns: Sequence[tuple[str, Cells]], name: str) -> tuple[list[NDArray[np.float64]], list[str]]:
    """Whether the event was seen, of all sites' rows as 1 and 0, and what is wrong: other values than these.

    Args:
        columns: where each is from, for messages, and the column: 1 and 0, yes and no, or true and false.
        name: of the column.
    """
    made, problems = [], []
    for source, column in columns:
        found = column.read(Column(name=name, kind="category"))[0].astype(str).str.strip().str.lower().map(_EVENTS)
        if len(bad := found.index[found.isna()]):
            allowed = "allowed: 1 and 0, yes and no, true and false"
            problems.append(f"{source}: column '{name}', the event, is neither {in_rows(bad)}; {allowed}")
        made.append(found.to_numpy(np.float64))
    return made, problems
