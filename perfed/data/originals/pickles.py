"""Python's format: CIFAR-10 as published, and the authors' features of EEG."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files, iterate_members, load_object_arrays, load_plain_pickle
from perfed.errors import PerfedError

_EEG_CLASSES = ("left_hand", "right_hand", "feet", "tongue", "rest")


def read_cifar10(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``x_*`` ``(n, 3, 32, 32)`` uint8, ``y_*`` and ``class_names``, from five training batches and a test
    batch.
    """
    contents = {
        name.rpartition("/")[2]: content
        for name, content in iterate_members(files.archive_path("cifar-10-python.tar.gz"))
    }
    batches = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    if missing := [name for name in ("batches.meta", *batches["train"], *batches["test"]) if name not in contents]:
        raise PerfedError(f"'{missing[0]}' is not in the archive")
    arrays: dict[str, NDArray[Any]] = {}
    for split, names in batches.items():
        parts = [load_plain_pickle(contents[name]) for name in names]
        x = np.concatenate([part[b"data"] for part in parts])
        arrays[f"x_{split}"] = x.reshape(-1, 3, 32, 32)
        arrays[f"y_{split}"] = np.concatenate([part[b"labels"] for part in parts]).astype(np.uint8)
    names = load_plain_pickle(contents["batches.meta"])[b"label_names"]
    return {**arrays, "class_names": np.array([name.decode() for name in names])}


def read_bci_common(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``x_*``, ``y_*``, ``user_*`` of all users in order, and the data set and subject of each user.

    The original has two dictionaries by the user's number: ``user`` with training and test arrays, and ``meta_info``.
    """
    original = load_object_arrays(files.read("bci_users40_5c_common.npz"))
    users, metadata = (_unwrap_object(original[key]) for key in ("user", "meta_info"))
    numbers = sorted(users)
    arrays: dict[str, NDArray[Any]] = {
        "dataset_of_user": np.array([_to_text(_get_value(metadata[i], "code")) for i in numbers]),
        "subject_of_user": np.array([int(_get_value(metadata[i], "subject")) for i in numbers], dtype=np.int64),
        "class_names": np.array(_EEG_CLASSES),
    }
    for split, position in (("train", 0), ("test", 2)):
        lengths = [len(users[i][position]) for i in numbers]
        arrays[f"x_{split}"] = np.concatenate([users[i][position] for i in numbers])
        arrays[f"y_{split}"] = np.concatenate([users[i][position + 1] for i in numbers]).astype(np.uint8)
        arrays[f"user_{split}"] = np.repeat(np.arange(len(numbers)), lengths).astype(np.uint8)
    return arrays


def _unwrap_object(value: Any) -> Any:
    """Return the single object in an array of objects."""
    return value.item() if isinstance(value, np.ndarray) else value


def _get_value(metadata: Any, key: str) -> Any:
    """Return the value of a key that is text or bytes."""
    return metadata[key] if key in metadata else metadata[key.encode()]


def _to_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
