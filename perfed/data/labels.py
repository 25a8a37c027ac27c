"""Detection of the task from targets, and conversion of labels to class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.names import compose_text
from perfed.errors import PerfedError

Task = Literal["classification", "regression", "survival"]
Classes = tuple[int | str, ...]

_TARGETS: dict[Task, str] = {
    "classification": "class labels",
    "regression": "values (regression)",
    "survival": "times and events (survival)",
}
_FEW = 20  # the largest number of different whole numbers that may be classes


def no_labels(needs: str, task: Task) -> PerfedError:
    """Return the error for targets that are not class labels; ``needs`` is the start of its text, "X needs"."""
    return PerfedError(f"{needs} class labels; these targets are {_TARGETS[task]}")


Targets = Sequence[tuple[str, Tensor | NDArray[np.str_]]]
"""The source of targets, as error messages name it, and the targets."""


def task_of(targets: Targets, task: Task | None = None) -> Task:
    """Return the task of targets: integers and texts are labels, unless ``task`` is given.

    Raises:
        PerfedError: targets are of several kinds, or floating-point targets look like labels and there is no ``task``.
    """
    texts = [isinstance(y, np.ndarray) for _, y in targets]
    floats = [isinstance(y, Tensor) and torch.is_floating_point(y) for _, y in targets]
    if task not in (None, *_TARGETS):
        raise PerfedError(f"task = {task!r} is not allowed; allowed: {', '.join(_TARGETS)}")
    if any(texts) and (not all(texts) or task in ("regression", "survival")):
        where = next(where for (where, _), text in zip(targets, texts, strict=True) if text)
        is_mixed = task in (None, "classification")
        requirement = "those of others are numbers" if is_mixed else f"numbers are needed for {task}"
        raise PerfedError(f"{where} targets are texts; {requirement}")
    if task is not None:
        return task
    if any(floats) and not all(floats):
        first, second = targets[floats.index(False)][0], targets[floats.index(True)][0]
        raise PerfedError(
            f"{first} targets are integers and {second} targets floating-point; use one kind, or say task"
        )
    if not all(floats):
        return "classification"
    _check_values(targets)
    return "regression"


def choose_classes(labels: Classes, num_classes: int | None, class_names: Sequence[str] | None) -> Classes:
    """Return the classes of a federation from the sorted labels that occur.

    If the labels are strings, the classes are ``class_names``, or the labels if no names are given. If they are
    integers, the classes are 0, 1, ... up to ``num_classes`` or the number of ``class_names`` if one of these is larger
    than the number of labels, and otherwise the labels.

    Raises:
        PerfedError: the labels are strings, and ``num_classes`` is not the number of classes.
    """
    num_names = len(class_names) if class_names is not None else 0
    if any(isinstance(label, str) for label in labels):
        classes = tuple(compose_text(str(name)) for name in (labels if class_names is None else class_names))
        if num_classes not in (None, len(classes)):
            names = ", ".join(map(str, classes))
            raise PerfedError(f"the labels are {names}, and num_classes is {num_classes}; name all with class_names")
        return classes
    return labels if num_classes is None and num_names <= len(labels) else tuple(range(num_classes or num_names))


def _check_values(targets: Targets) -> None:
    """Raise an error if floating-point targets look like labels: few different values, all of them whole numbers."""
    tensors = [y for _, y in targets if isinstance(y, Tensor)]
    values = torch.cat([y.detach().reshape(-1).double().cpu() for y in tensors])
    is_single = all(y[0].numel() == 1 for y in tensors)
    distinct = values.unique() if is_single else values
    most = min(_FEW, max(2, len(values) // 2))
    is_whole = bool((torch.isfinite(distinct) & (distinct == distinct.round())).all())
    if is_single and 2 <= len(distinct) <= most and is_whole:
        value_list = ", ".join(str(int(value)) for value in distinct)
        raise PerfedError(
            f"targets are floating-point numbers, but only the whole numbers {value_list} occur: labels (a column of "
            "integers becomes floating-point around a missing value) or values? "
            'say task="classification" or task="regression"'
        )


def to_discrete_labels(where: str, y: Tensor | NDArray[Any]) -> NDArray[Any]:
    """Return labels as an array of whole numbers or texts.

    Raises:
        PerfedError: a label is not a whole number.
    """
    if not isinstance(y, Tensor):
        return y
    if torch.is_floating_point(y):
        odd = y[~torch.isfinite(y) | (y != y.round())]
        if len(odd):
            raise PerfedError(f"{where} targets hold {float(odd[0]):g}; classes are whole numbers or texts")
    return y.detach().cpu().long().numpy()


def _find_positions(where: str, y: NDArray[Any], classes: Classes) -> Tensor:
    """Return the position of each label in ``classes``; if these are 0, 1, ..., labels are returned unchecked."""
    if classes == tuple(range(len(classes))):
        return torch.from_numpy(y)
    names = np.array(classes)
    order = np.argsort(names)
    rank = np.searchsorted(names, y, sorter=order).clip(max=len(names) - 1)
    position = order[rank]
    if (names[position] != y).any():
        raise PerfedError(
            f"{where} label '{y[names[position] != y][0]}' is not among the classes {', '.join(map(str, classes))}"
        )
    return torch.from_numpy(position.astype(np.int64))


def as_classes(where: str, y: Tensor | NDArray[np.str_], classes: Classes | None) -> Tensor:
    """Return the targets of one client as class numbers; as floating-point values if ``classes`` is ``None``.

    Raises:
        PerfedError: targets are texts but values are needed or the classes are numbers, or a label is not among the
            classes.
    """
    if classes is None:
        if not isinstance(y, Tensor):
            raise PerfedError(f"{where} targets are texts; numbers are needed for regression")
        return y if torch.is_floating_point(y) else y.double()
    labels = to_discrete_labels(where, y)
    if any(isinstance(label, str) for label in classes):
        labels = labels.astype(str)
    elif labels.dtype.kind == "U":
        raise PerfedError(f"{where} targets are texts; the classes are {', '.join(map(str, classes))}")
    return _find_positions(where, labels, classes)
