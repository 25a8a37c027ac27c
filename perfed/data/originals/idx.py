"""MNIST's format: images and labels as bytes behind a head that says their shape."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files
from perfed.errors import PerfedError

_BYTES = 0x08  # the type that the head names


def images(files: Files) -> dict[str, NDArray[Any]]:
    """``x_*`` ``(n, rows, columns)`` uint8 and ``y_*`` ``(n,)`` uint8 of the four files."""
    found: dict[str, NDArray[Any]] = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        x = array(files.read(f"{name}-images-idx3-ubyte.gz"), 3)
        y = array(files.read(f"{name}-labels-idx1-ubyte.gz"), 1)
        if len(x) != len(y):
            raise PerfedError(f"{len(x)} images and {len(y)} labels in the files of '{name}'")
        found |= {f"x_{split}": x, f"y_{split}": y}
    return found


def array(content: bytes, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file.

    Raises:
        PerfedError: it is no idx file of bytes with so many dimensions, or is not whole.

    Example:
        >>> array(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1).tolist()
        [7, 9]
    """
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes([0, 0, _BYTES, dimensions]):
        raise PerfedError(f"not an idx file of bytes with {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    found = np.frombuffer(content, np.uint8, offset=head)
    if found.size != np.prod(shape):
        raise PerfedError(f"an idx file of shape {shape} with {found.size} bytes")
    return found.reshape(shape)
