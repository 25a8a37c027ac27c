"""Text files of labelled vectors: LIBSVM's format, and Weka's ARFF."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files
from perfed.errors import PerfedError

_SIZE = 16
_TRAIN = 7291  # number of training rows in an ARFF file with both splits


def read_usps(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``x_*`` ``(n, 16, 16)`` uint8, bright on black, and ``y_*`` 0 to 9, from pixels -1 to 1 and labels 1 to
    10.
    """
    arff = next((path for path in files.paths if path.suffix == ".arff"), None)
    if arff is not None:
        all_rows = _parse_arff(arff.read_text(encoding="utf-8", errors="replace"))
        parts = {"train": tuple(a[:_TRAIN] for a in all_rows), "test": tuple(a[_TRAIN:] for a in all_rows)}
    else:
        parts = {
            split: parse_libsvm(files.read(name).decode(), _SIZE**2)
            for split, name in (("train", "usps.bz2"), ("test", "usps.t.bz2"))
        }
    arrays: dict[str, NDArray[Any]] = {}
    for split, (pixels, labels) in parts.items():
        if not len(pixels) or abs(pixels).max() > 1 or labels.min() < 1 or labels.max() > 10:
            raise PerfedError(f"{split}: pixels from -1 to 1 and labels from 1 to 10 are needed")
        x = np.round((pixels + 1) / 2 * 255).astype(np.uint8)
        arrays |= {f"x_{split}": x.reshape(-1, _SIZE, _SIZE), f"y_{split}": (labels - 1).astype(np.uint8)}
    return arrays


def parse_libsvm(text: str, features: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return rows ``(n, features)``, 0 where no value is written, and labels ``(n,)``.

    Example:
        >>> parse_libsvm("3 1:0.5 2:-1", 2)[0].tolist()
        [[0.5, -1.0]]
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    x = np.zeros((len(lines), features))
    for row, (_, *pairs) in zip(x, lines, strict=True):
        for pair in pairs:
            place, _, value = pair.partition(":")
            row[int(place) - 1] = float(value)
    return x, np.array([int(float(line[0])) for line in lines], dtype=np.int64)


def _parse_arff(text: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    from scipy.io import arff  # type: ignore[import-untyped]

    rows, metadata = arff.loadarff(io.StringIO(text))
    *columns, label = metadata.names()
    x = np.stack([rows[column] for column in columns], axis=1).astype(np.float64)
    return x, np.array([int(float(value)) for value in rows[label]], dtype=np.int64)
