"""Matlab's format: features of Wikipedia articles."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files
from perfed.errors import PerfedError

_IMAGE, _TEXT, _CLASSES = 128, 100, 10


def read_wiki_crossmodal(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``image`` ``(n, 128)``, ``text`` ``(n, 100)``, ``y``, and the rows of both splits, counted from 0.

    Arrays are identified by their shapes, with samples in rows or in columns: the larger of the two lists of positions
    is for training; labels are one-hot or 1 to 10.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]
    from scipy.io.matlab import MatReadError  # type: ignore[import-untyped]

    try:
        arrays = list(_iterate_arrays(loadmat(io.BytesIO(files.archive_path("wiki.mat").read_bytes()))))
    except MatReadError as error:
        raise ValueError(error) from None
    image, text = (_find_features(arrays, width) for width in (_IMAGE, _TEXT))
    samples = len(image)
    if len(text) != samples:
        raise PerfedError(f"{samples} images and {len(text)} texts")
    lists = [a.ravel() for a in arrays if 1 < a.size == max(a.shape) < samples and a.min() >= 1 and a.max() <= samples]
    if len(lists) != 2 or sum(map(len, lists)) != samples:
        raise PerfedError("no two lists of positions that make up all articles")
    test, train = sorted(lists, key=len)
    return {
        "image": image.astype(np.float32),
        "text": text.astype(np.float32),
        "y": _find_labels(arrays, samples),
        "train_index": (train - 1).astype(np.int16),
        "test_index": (test - 1).astype(np.int16),
    }


def _iterate_arrays(data: Any) -> Iterator[NDArray[Any]]:
    """Yield all numeric arrays in Matlab's data, also inside structs and cells."""
    if isinstance(data, dict):
        for key, value in data.items():
            if not key.startswith("__"):
                yield from _iterate_arrays(value)
    elif isinstance(data, np.ndarray) and data.dtype.names:
        for name in data.dtype.names:
            yield from _iterate_arrays(data[name])
    elif isinstance(data, np.ndarray) and data.dtype == object:
        for item in data.ravel():
            yield from _iterate_arrays(item)
    elif isinstance(data, np.ndarray) and data.dtype.kind in "biuf":
        yield data


def _find_features(arrays: list[NDArray[Any]], width: int) -> NDArray[Any]:
    candidates = [
        a if a.shape[1] == width else a.T for a in arrays if a.ndim == 2 and width in a.shape and a.size > width
    ]
    if len(candidates) != 1:
        raise PerfedError(f"{len(candidates)} arrays have {width} features, not one")
    return candidates[0]


def _find_labels(arrays: list[NDArray[Any]], samples: int) -> NDArray[np.uint8]:
    for a in arrays:
        if sorted(a.shape) == sorted((_CLASSES, samples)):
            return np.asarray((a if a.shape[1] == _CLASSES else a.T).argmax(axis=1), dtype=np.uint8)
        if a.size == samples and a.min() >= 1 and a.max() == _CLASSES:
            return (a.ravel() - 1).astype(np.uint8)
    raise PerfedError("no labels of ten classes")
