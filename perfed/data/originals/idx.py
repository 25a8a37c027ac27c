"""MNIST's format: images and labels as bytes after a header with their shape."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files
from perfed.errors import PerfedError

_BYTES = 0x08  # the type code of bytes in the header


def read_images(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``x_*`` ``(n, rows, columns)`` uint8 and ``y_*`` ``(n,)`` uint8 of the four files."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        x = parse_idx(files.read(f"{name}-images-idx3-ubyte.gz"), 3)
        y = parse_idx(files.read(f"{name}-labels-idx1-ubyte.gz"), 1)
        if len(x) != len(y):
            raise PerfedError(f"{len(x)} images and {len(y)} labels in the files of '{name}'")
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    return arrays


def parse_idx(content: bytes, dimensions: int) -> NDArray[np.uint8]:
    """Return the array of an idx file.

    Raises:
        PerfedError: if it is not an idx file of bytes with ``dimensions`` dimensions, or is incomplete.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1).tolist()
        [7, 9]
    """
    header_size = 4 + 4 * dimensions
    if len(content) < header_size or content[:4] != bytes([0, 0, _BYTES, dimensions]):
        raise PerfedError(f"not an idx file of bytes with {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:header_size])
    values = np.frombuffer(content, np.uint8, offset=header_size)
    if values.size != np.prod(shape):
        raise PerfedError(f"an idx file of shape {shape} with {values.size} bytes")
    return values.reshape(shape)
