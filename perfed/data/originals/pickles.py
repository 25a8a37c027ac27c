"""Python's own format: CIFAR-10 as published, and the authors' features of EEG."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files, members, unpickled, unpickled_arrays
from perfed.errors import PerfedError

_EEG_CLASSES = ("left_hand", "right_hand", "feet", "tongue", "rest")


def cifar10(files: Files) -> dict[str, NDArray[Any]]:
    """``x_*`` ``(n, 3, 32, 32)`` uint8, ``y_*`` and ``class_names``, of five training batches and a test batch."""
    read = {name.rpartition("/")[2]: content for name, content in members(files.archive("cifar-10-python.tar.gz"))}
    batches = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    if missing := [name for name in ("batches.meta", *batches["train"], *batches["test"]) if name not in read]:
        raise PerfedError(f"'{missing[0]}' is not in the archive")
    found: dict[str, NDArray[Any]] = {}
    for split, names in batches.items():
        parts = [unpickled(read[name]) for name in names]
        x = np.concatenate([part[b"data"] for part in parts])
        found[f"x_{split}"] = x.reshape(-1, 3, 32, 32)
        found[f"y_{split}"] = np.concatenate([part[b"labels"] for part in parts]).astype(np.uint8)
    names = unpickled(read["batches.meta"])[b"label_names"]
    return {**found, "class_names": np.array([name.decode() for name in names])}


def bci_common(files: Files) -> dict[str, NDArray[Any]]:
    """``x_*``, ``y_*``, ``user_*`` of all users one after the other, and whose they are.

    The original holds two dictionaries by the user's number: ``user`` of training and test arrays, ``meta_info``.
    """
    read = unpickled_arrays(files.read("bci_users40_5c_common.npz"))
    users, about = (_item(read[key]) for key in ("user", "meta_info"))
    numbers = sorted(users)
    found: dict[str, NDArray[Any]] = {
        "dataset_of_user": np.array([_text(_of(about[i], "code")) for i in numbers]),
        "subject_of_user": np.array([int(_of(about[i], "subject")) for i in numbers], dtype=np.int64),
        "class_names": np.array(_EEG_CLASSES),
    }
    for split, at in (("train", 0), ("test", 2)):
        lengths = [len(users[i][at]) for i in numbers]
        found[f"x_{split}"] = np.concatenate([users[i][at] for i in numbers])
        found[f"y_{split}"] = np.concatenate([users[i][at + 1] for i in numbers]).astype(np.uint8)
        found[f"user_{split}"] = np.repeat(np.arange(len(numbers)), lengths).astype(np.uint8)
    return found


def _item(held: Any) -> Any:
    """The one object in an array of objects."""
    return held.item() if isinstance(held, np.ndarray) else held


def _of(about: Any, key: str) -> Any:
    return about[key] if key in about else about[key.encode()]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
