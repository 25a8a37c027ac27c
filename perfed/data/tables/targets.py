"""The column to predict: labels of any kind, or values; the same at all sites."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.labels import Task
from perfed.data.tables.kinds import Column, read, words
from perfed.data.tables.problems import Series, in_rows, pandas

_EVENTS = {"1": 1.0, "1.0": 1.0, "true": 1.0, "yes": 1.0, "0": 0.0, "0.0": 0.0, "false": 0.0, "no": 0.0}
_EVENT_WORDS = frozenset({"event", "status", "death", "dead", "died", "censored"})
_CLASSES = 20  # different whole numbers that are taken for classes


def targets_of(
    columns: Sequence[tuple[str, Series]], name: str, task: Task | None
) -> tuple[list[NDArray[Any]], Task, list[str]]:
    """Targets of all sites as labels (whole numbers or texts) or values, the task, and what is wrong.

    Without ``task`` texts, booleans and at most 20 different whole numbers are labels, other numbers values. Texts
    that are numbers at all sites are numbers; numbers here and names there are refused. Nothing may be missing.

    Args:
        columns: where each is from, for messages, and the column.
        name: of the column.
        task: what the targets are for.
    """
    texts = [read(column, Column(name, "category"))[0] for _, column in columns]
    numbers = [pandas().to_numeric(text, errors="coerce").astype(float) for text in texts]
    numeric = [bool(number.notna().all()) for number in numbers]
    where = f"column '{name}', the target,"
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
        task = "regression" if all(numeric) and not (whole and len(found) <= _CLASSES) else "classification"
    problems = []
    codes_and_names = any(numeric) and any(number.isna().all() for number in numbers)
    if codes_and_names or (task == "regression" and not all(numeric)):
        for (source, _), number in zip(columns, numbers, strict=True):
            if number.isna().any():
                rows = in_rows(number.index[number.isna()])
                needed = "numbers are needed for regression" if task == "regression" else "others' targets are numbers"
                problems.append(f"{source}: {where} holds texts {rows}; {needed}")
        return [], task, problems
    made: list[NDArray[Any]]
    if task == "regression":
        made = [number.to_numpy() for number in numbers]
    elif whole:
        made = [number.to_numpy().astype(np.int64) for number in numbers]
    else:
        made = [text.to_numpy().astype(np.str_) for text in texts]
    if len({value for values in made for value in values.tolist()}) < 2:
        problems.append(f"{where} is the same in all rows of all sites; there is nothing to predict")
    return made, task, problems


def looks_like_event(column: Column) -> bool:
    """Whether a column of 1 and 0, or yes and no, is called like one of events."""
    return column.kind == "boolean" and bool(_EVENT_WORDS & words(column.name))


def event_option(name: str) -> str:
    """How the column ``name`` is said to be of events."""
    if "censored" in words(name):
        return "--event takes a column that is 1 where the event was seen, which is the opposite"
    return f"--event {shlex.quote(name)}"


def numeric(targets: Iterable[NDArray[Any]]) -> bool:
    """Whether the targets of all sites are numbers, more than two different ones."""
    found = [values for values in targets if values.ndim == 1 and values.dtype.kind in "if"]
    return bool(found) and len(np.unique(np.concatenate(found))) > 2


def events_of(columns: Sequence[tuple[str, Series]], name: str) -> tuple[list[NDArray[np.float64]], list[str]]:
    """Whether the event was seen, of all sites' rows as 1 and 0, and what is wrong: other values than these.

    Args:
        columns: where each is from, for messages, and the column: 1 and 0, yes and no, or true and false.
        name: of the column.
    """
    made, problems = [], []
    for source, column in columns:
        found = read(column, Column(name, "category"))[0].astype(str).str.strip().str.lower().map(_EVENTS)
        if len(bad := found.index[found.isna()]):
            allowed = "allowed: 1 and 0, yes and no, true and false"
            problems.append(f"{source}: column '{name}', the event, is neither {in_rows(bad)}; {allowed}")
        made.append(found.to_numpy(np.float64))
    return made, problems
