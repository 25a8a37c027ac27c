"""The target: a column of labels of any kind, or of values."""

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
from perfed.tables.kinds import ParsedTable, describe_control_characters, split_words
from perfed.tables.problems import Series, describe_rows, pandas

_LARGEST = 1e145
"""Largest value of a target: squares of larger ones, summed over many rows, would be beyond the largest number."""
_EVENTS = {"1": 1.0, "1.0": 1.0, "true": 1.0, "yes": 1.0, "0": 0.0, "0.0": 0.0, "false": 0.0, "no": 0.0}
_EVENT_WORDS = frozenset({"event", "status", "death", "dead", "died", "censored"})
CONSTANT = "{} is the same in all rows of all sites; there is nothing to predict"
FEW = 20
"""Largest number of different whole numbers that are read as classes."""


def describe_target(name: str) -> str:
    """Return the target in messages."""
    return f"column '{name}', the target,"


@dataclass(frozen=True, eq=False)
class Labels:
    """The target in the tables of a site, or of several, as texts and as numbers (NaN where a text is no number)."""

    texts: list[Series]
    numbers: list[Series]

    @classmethod
    def from_tables(cls, tables: Iterable[ParsedTable], name: str) -> Labels:
        """Read the column ``name`` of each table."""
        texts = [table.read_texts(name)[0] for table in tables]
        return cls(texts, [pandas().to_numeric(text, errors="coerce").astype(float) for text in texts])

    @property
    def kind(self) -> LabelKind:
        """The kind of the labels: texts if some table has only texts, numbers if all are numbers, otherwise mixed."""
        kinds = {_kind(number) for number in self.numbers}
        return "texts" if "texts" in kinds else "numbers" if kinds == {"numbers"} else "mixed"

    @property
    def whole(self) -> bool:
        """Whether all labels are whole numbers."""
        return all(bool(number.notna().all()) and bool((number == number.round()).all()) for number in self.numbers)

    @property
    def names(self) -> list[NDArray[np.str_]]:
        """The labels of each table as texts."""
        return [text.to_numpy().astype(np.str_) for text in self.texts]

    @property
    def values(self) -> list[NDArray[np.float64]]:
        """The labels of each table as numbers."""
        return [number.to_numpy() for number in self.numbers]

    @property
    def whole_numbers(self) -> list[NDArray[np.int64]]:
        """The labels of each table as whole numbers."""
        return [values.astype(np.int64) for values in self.values]

    def find_unknown(self, classes: Classes) -> list[Any]:
        """Return the rows whose label is none of ``classes``."""
        columns = self.texts if any(isinstance(label, str) for label in classes) else self.numbers
        return [row for column in columns for row in column.index[~column.isin(classes)]]


def _kind(numbers: Series) -> LabelKind:
    missing = numbers.isna()
    return "numbers" if not missing.any() else "texts" if missing.all() else "mixed"


def read_targets(
    tables: Sequence[tuple[str, ParsedTable]], name: str, task: Task | None
) -> tuple[list[NDArray[Any]], Task, list[str]]:
    """Return the targets of each table as labels (whole numbers or texts) or values, the task, and the problems.

    Without ``task``, texts, booleans and at most 20 different whole numbers are labels, and other numbers are values.
    Texts that are numbers at all sites are numbers; numbers at one site and names at another are refused. No target
    may be missing.

    Args:
        tables: the source of each table in messages, and the table.
        name: the name of the target.
        task: the task if the study sets it.
    """
    labels, target = Labels.from_tables((table for _, table in tables), name), describe_target(name)
    sources = [source for source, _ in tables]
    infinite = [
        f"{source}: {target} holds infinity {describe_rows(numbers.index[np.isinf(numbers)])}"
        for source, numbers in zip(sources, labels.numbers, strict=True)
        if np.isinf(numbers).any()
    ]
    if infinite:
        return [], task or "regression", infinite
    all_numbers = all(bool(numbers.notna().all()) for numbers in labels.numbers)
    if task is None:
        values = {value for numbers in labels.numbers for value in numbers.tolist()} if all_numbers else set()
        task = "classification" if not all_numbers or (labels.whole and len(values) <= FEW) else "regression"
    rows_with_texts = [f" {describe_rows(numbers.index[numbers.isna()])}" for numbers in labels.numbers]
    if task == "regression":
        needed = "numbers are needed for regression"
        of_sites = zip(sources, labels.numbers, rows_with_texts, strict=True)
        problems = [f"{source}: {target} holds texts{rows}; {needed}" for source, n, rows in of_sites if n.isna().any()]
        problems += [
            f"{source}: {target} holds numbers beyond {_LARGEST:g} {describe_rows(numbers.index[too_large])}"
            for source, numbers in zip(sources, labels.numbers, strict=True)
            if (too_large := numbers.abs() > _LARGEST).any()
        ]
        return ([] if problems else [*labels.values]), task, problems
    problems = describe_label_conflicts(
        list(zip(sources, map(_kind, labels.numbers), rows_with_texts, strict=True)), target
    )
    for source, texts in zip(sources, labels.texts, strict=True):
        problems += [f"{source}: {line}" for line in describe_control_characters(texts, target)]
    if problems:
        return [], task, problems
    return [*(labels.whole_numbers if labels.whole else labels.names)], task, []


def looks_like_event(column: Column) -> bool:
    """Return whether a column of 1 and 0, or yes and no, has a name that suggests events."""
    return (column.kind == "boolean" or column.binary) and bool(_EVENT_WORDS & split_words(column.name))


def event_option(name: str) -> str:
    """Return the option that declares the column ``name`` to be the event."""
    if "censored" in split_words(name):
        return "--event takes a column that is 1 where the event was seen, which is the opposite"
    return f"--event {shlex.quote(name)}"


def are_constant(targets: Iterable[NDArray[Any]]) -> bool:
    """Return whether all rows of all sites have the same target."""
    return len({value for values in targets for value in values.tolist()}) < 2


def are_numbers(targets: Iterable[NDArray[Any]]) -> bool:
    """Return whether the targets of all sites are numbers with more than two different values."""
    numbers = [values for values in targets if values.ndim == 1 and values.dtype.kind in "if"]
    return bool(numbers) and len(np.unique(np.concatenate(numbers))) > 2


def read_events(tables: Sequence[tuple[str, ParsedTable]], name: str) -> tuple[list[NDArray[np.float64]], list[str]]:
    """Return the events of each table as 1 and 0, and a line for each table with other values.

    Args:
        tables: the source of each table in messages, and the table.
        name: the name of the column, which holds 1 and 0, yes and no, or true and false.
    """
    events, problems = [], []
    for source, table in tables:
        of_table = table.read_texts(name)[0].astype(str).str.strip().str.lower().map(_EVENTS)
        if len(bad := of_table.index[of_table.isna()]):
            allowed = "allowed: 1 and 0, yes and no, true and false"
            problems.append(f"{source}: column '{name}', the event, is neither {describe_rows(bad)}; {allowed}")
        events.append(of_table.to_numpy(np.float64))
    return events, problems
