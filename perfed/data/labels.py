"""Labels of any kind as numbers of classes; targets that are values."""

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
_FEW = 20  # whole numbers that may be classes


def no_labels(needs: str, task: Task) -> PerfedError:
    """What to raise where ``needs`` ("WHAT needs") class labels and the targets of ``task`` are others."""
    return PerfedError(f"{needs} class labels; these targets are {_TARGETS[task]}")


Targets = Sequence[tuple[str, Tensor | NDArray[np.str_]]]
"""Where targets are from, for messages, and the targets themselves."""


def task_of(targets: Targets, task: Task | None = None) -> Task:
    """Say what targets are for: integers and texts are labels, unless ``task`` says otherwise.

    Raises:
        PerfedError: targets of several kinds, or floating-point ones that look like labels, which need ``task``.
    """
    texts = [isinstance(y, np.ndarray) for _, y in targets]
    floats = [isinstance(y, Tensor) and torch.is_floating_point(y) for _, y in targets]
    if task not in (None, *_TARGETS):
        raise PerfedError(f"task = {task!r} is not allowed; allowed: {', '.join(_TARGETS)}")
    if any(texts) and (not all(texts) or task in ("regression", "survival")):
        where = next(where for (where, _), text in zip(targets, texts, strict=True) if text)
        wanted = "those of others are numbers" if task in (None, "classification") else f"numbers are needed for {task}"
        raise PerfedError(f"{where} targets are texts; {wanted}")
    if task is not None:
        return task
    if any(floats) and not all(floats):
        one, other = targets[floats.index(False)][0], targets[floats.index(True)][0]
        raise PerfedError(f"{one} targets are integers and {other} targets floating-point; use one kind, or say task")
    if not all(floats):
        return "classification"
    _check_values(targets)
    return "regression"


def classes_of(found: Classes, num_classes: int | None, class_names: Sequence[str] | None) -> Classes:
    """Name the classes: the labels that were ``found``, sorted.

    With ``num_classes``, or more ``class_names`` than labels, they are 0, 1, ...; texts among ``class_names`` are in
    their order.

    Raises:
        PerfedError: another number of texts than ``num_classes``.
    """
    names = len(class_names) if class_names is not None else 0
    if any(isinstance(label, str) for label in found):
        classes = tuple(compose_text(str(name)) for name in (found if class_names is None else class_names))
        if num_classes not in (None, len(classes)):
            shown = ", ".join(map(str, classes))
            raise PerfedError(f"the labels are {shown}, and num_classes is {num_classes}; name all with class_names")
        return classes
    return found if num_classes is None and names <= len(found) else tuple(range(num_classes or names))


def _check_values(targets: Targets) -> None:
    found_in = [y for _, y in targets if isinstance(y, Tensor)]
    values = torch.cat([y.detach().reshape(-1).double().cpu() for y in found_in])
    single = all(y[0].numel() == 1 for y in found_in)
    found = values.unique() if single else values
    most = min(_FEW, max(2, len(values) // 2))
    whole = bool((torch.isfinite(found) & (found == found.round())).all())
    if single and 2 <= len(found) <= most and whole:
        shown = ", ".join(str(int(value)) for value in found)
        raise PerfedError(
            f"targets are floating-point numbers, but only the whole ones {shown} occur: labels (a column of integers "
            'becomes floating-point around a missing value) or values? say task="classification" or task="regression"'
        )


def whole(where: str, y: Tensor | NDArray[Any]) -> NDArray[Any]:
    """Labels as whole numbers or texts.

    Raises:
        PerfedError: other numbers.
    """
    if not isinstance(y, Tensor):
        return y
    if torch.is_floating_point(y):
        odd = y[~torch.isfinite(y) | (y != y.round())]
        if len(odd):
            raise PerfedError(f"{where} targets hold {float(odd[0]):g}; classes are whole numbers or texts")
    return y.detach().cpu().long().numpy()


def _positions(where: str, y: NDArray[Any], classes: Classes) -> Tensor:
    """The position of each label in ``classes``; labels 0, 1, ... stay, even outside of them."""
    if classes == tuple(range(len(classes))):
        return torch.from_numpy(y)
    known = np.array(classes)
    order = np.argsort(known)
    at = np.searchsorted(known, y, sorter=order).clip(max=len(known) - 1)
    position = order[at]
    if (known[position] != y).any():
        raise PerfedError(
            f"{where} label '{y[known[position] != y][0]}' is not among the classes {', '.join(map(str, classes))}"
        )
    return torch.from_numpy(position.astype(np.int64))


def as_classes(where: str, y: Tensor | NDArray[np.str_], classes: Classes | None) -> Tensor:
    """Targets of one client as numbers of ``classes`` that are known already; as values where there are none.

    Raises:
        PerfedError: texts where values are needed or the classes are numbers, or a label that is not among the classes.
    """
    if classes is None:
        if not isinstance(y, Tensor):
            raise PerfedError(f"{where} targets are texts; numbers are needed for regression")
        return y if torch.is_floating_point(y) else y.double()
    labels = whole(where, y)
    if any(isinstance(label, str) for label in classes):
        labels = labels.astype(str)
    elif labels.dtype.kind == "U":
        raise PerfedError(f"{where} targets are texts; the classes are {', '.join(map(str, classes))}")
    return _positions(where, labels, classes)
