"""Labels of any kind as numbers of classes; targets that are values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


def coded(
    targets: Sequence[tuple[str, Tensor | NDArray[np.str_]]],
    task: Task | None,
    num_classes: int | None,
    class_names: Sequence[str] | None,
) -> tuple[list[Tensor], Classes | None]:
    """Targets as floating-point values, or as numbers of classes, and what the data call these classes.

    Integers and texts are labels unless ``task`` says otherwise. The classes are the labels that occur, sorted; with
    ``num_classes``, or more ``class_names`` than labels, they are 0, 1, ...; texts among ``class_names`` are in their
    order.

    Args:
        targets: where each is from, for messages, and the targets themselves.
        task: what they are for; ``None``: what their type says.
        num_classes, class_names: as in :meth:`perfed.data.federation.Federation.from_arrays`.

    Returns:
        int64 (classification) or floating-point (regression, survival) targets, and the labels of the classes.

    Raises:
        PerfedError: targets of several kinds, labels that are no whole numbers, or floating-point targets that look
            like labels, which need ``task``.
    """
    if not targets:
        return [], None
    texts = [isinstance(y, np.ndarray) for _, y in targets]
    floats = [isinstance(y, Tensor) and torch.is_floating_point(y) for _, y in targets]
    if task not in (None, *_TARGETS):
        raise PerfedError(f"task = {task!r} is not allowed; allowed: {', '.join(_TARGETS)}")
    values = task in ("regression", "survival")
    if any(texts) and (not all(texts) or values):
        where = next(where for (where, _), text in zip(targets, texts, strict=True) if text)
        wanted = f"numbers are needed for {task}" if values else "those of others are numbers"
        raise PerfedError(f"{where} targets are texts; {wanted}")
    if task is None and any(floats) and not all(floats):
        one, other = targets[floats.index(False)][0], targets[floats.index(True)][0]
        raise PerfedError(f"{one} targets are integers and {other} targets floating-point; use one kind, or say task")
    if task is None and all(floats):
        _check_values(targets)
    if values or (task is None and all(floats)):
        return [y if torch.is_floating_point(y) else y.double() for _, y in targets if isinstance(y, Tensor)], None
    labels = [_whole(where, y) if isinstance(y, Tensor) else y for where, y in targets]
    found = np.unique(np.concatenate([y.reshape(-1) for y in labels]))
    names = len(class_names) if class_names is not None else 0
    classes: Classes
    if any(texts):
        classes = tuple(map(str, found if class_names is None else class_names))
        if num_classes not in (None, len(classes)):
            shown = ", ".join(map(str, classes))
            raise PerfedError(f"the labels are {shown}, and num_classes is {num_classes}; name all with class_names")
    elif num_classes is None and names <= len(found):
        classes = tuple(int(label) for label in found)
    else:
        classes = tuple(range(num_classes or names))
    return [positions(where, y, classes) for (where, _), y in zip(targets, labels, strict=True)], classes


def _check_values(targets: Sequence[tuple[str, Any]]) -> None:
    values = torch.cat([y.detach().reshape(-1).double().cpu() for _, y in targets])
    single = all(y[0].numel() == 1 for _, y in targets)
    found = values.unique() if single else values
    most = min(_FEW, max(2, len(values) // 2))
    whole = bool((torch.isfinite(found) & (found == found.round())).all())
    if single and 2 <= len(found) <= most and whole:
        shown = ", ".join(str(int(value)) for value in found)
        raise PerfedError(
            f"targets are floating-point numbers, but only the whole ones {shown} occur: labels (a column of integers "
            'becomes floating-point around a missing value) or values? say task="classification" or task="regression"'
        )


def _whole(where: str, y: Tensor) -> NDArray[np.int64]:
    if torch.is_floating_point(y):
        odd = y[~torch.isfinite(y) | (y != y.round())]
        if len(odd):
            raise PerfedError(f"{where} targets hold {float(odd[0]):g}; classes are whole numbers or texts")
    return y.detach().cpu().long().numpy()


def positions(where: str, y: NDArray[Any], classes: Classes) -> Tensor:
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
    labels = _whole(where, y) if isinstance(y, Tensor) else y
    if any(isinstance(label, str) for label in classes):
        labels = labels.astype(str)
    elif labels.dtype.kind == "U":
        raise PerfedError(f"{where} targets are texts; the classes are {', '.join(map(str, classes))}")
    return positions(where, labels, classes)
