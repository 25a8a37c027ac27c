"""CIFAR-10 from JPEG images: decoded once, then read from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.files import find_file, load_npz, optional_package, require
from perfed.errors import PerfedError

FILE = "cifar10_jpeg.npz"
ORIGINAL = "cifar10_original.npz"
SHAPE = (3, 32, 32)


def read_jpeg_images(data_dir: Path | None) -> dict[str, NDArray[Any]]:
    """Return ``x_*`` ``(samples, 3, 32, 32)`` uint8, ``y_*`` int64 and ``class_names`` ``(10,)``.

    Decoded pixels are cached in ``~/.cache/perfed`` under a name with the checksum of the JPEG file. A cache that is
    damaged or belongs to another file is ignored, and a cache that cannot be written is not an error.

    Raises:
        PerfedError: if the file is missing or broken, or Pillow is not installed.
    """
    data = load_npz(FILE, data_dir, ["y_train", "y_test", "class_names"])
    require(FILE, len(data["class_names"]) == 10, "'class_names' must hold 10 names")
    for split in ("train", "test"):
        y = data[f"y_{split}"]
        good = y.ndim == 1 and np.issubdtype(y.dtype, np.integer) and len(y) > 0 and 0 <= y.min() <= y.max() <= 9
        require(FILE, good, f"'y_{split}' must hold labels in 0..9")
        data[f"y_{split}"] = y.astype(np.int64)
    digest = hashlib.sha256(find_file(FILE, data_dir).read_bytes()).hexdigest()
    cache = Path.home() / ".cache" / "perfed" / f"cifar10_pixels-{digest[:16]}.npz"
    lengths = {split: len(data[f"y_{split}"]) for split in ("train", "test")}
    pixels = _read_cache(cache, lengths)
    if pixels is None:
        pixels = _decode_images(data_dir, lengths)
        _write_cache(cache, pixels)
    return data | pixels


def read_original_images(data_dir: Path | None) -> dict[str, NDArray[Any]]:
    """Return the same arrays as :func:`read_jpeg_images`, for the images as they were published.

    Raises:
        PerfedError: if the file is missing or broken.
    """
    data = load_npz(ORIGINAL, data_dir, ["x_train", "y_train", "x_test", "y_test", "class_names"])
    require(ORIGINAL, len(data["class_names"]) == 10, "'class_names' must hold 10 names")
    for split in ("train", "test"):
        x, y = data[f"x_{split}"], data[f"y_{split}"]
        good = x.dtype == np.uint8 and x.shape == (len(y), *SHAPE)
        require(ORIGINAL, good, f"'x_{split}' is {x.dtype} {x.shape}, not uint8 (samples, 3, 32, 32)")
        good = y.ndim == 1 and np.issubdtype(y.dtype, np.integer) and len(y) > 0 and 0 <= y.min() <= y.max() <= 9
        require(ORIGINAL, good, f"'y_{split}' must hold labels in 0..9")
        data[f"y_{split}"] = y.astype(np.int64)
    return data


def _decode_images(data_dir: Path | None, lengths: dict[str, int]) -> dict[str, NDArray[np.uint8]]:
    pillow = optional_package("PIL.Image", f"decoding '{FILE}'")
    keys = [f"{part}_{split}" for split in lengths for part in ("jpeg", "offset")]
    data = load_npz(FILE, data_dir, keys)
    pixels = {}
    for split, length in lengths.items():
        stream, offset = data[f"jpeg_{split}"].tobytes(), data[f"offset_{split}"].tolist()
        good = len(offset) == length + 1 and offset[-1] == len(stream)
        require(FILE, good, f"'offset_{split}' does not fit 'y_{split}' and 'jpeg_{split}'")
        images = np.empty((length, 32, 32, 3), dtype=np.uint8)
        for i in range(length):
            try:
                with pillow.open(io.BytesIO(stream[offset[i] : offset[i + 1]]), formats=("JPEG",)) as image:
                    images[i] = image
            except (OSError, ValueError) as error:
                raise PerfedError(f"file '{FILE}': {split} image {i} cannot be decoded ({error})") from None
        pixels[f"x_{split}"] = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return pixels


def _read_cache(cache: Path, lengths: dict[str, int]) -> dict[str, NDArray[np.uint8]] | None:
    """Return the pixels in the cache; ``None`` if it is missing, damaged (zip files have checksums) or does not fit."""
    try:
        with np.load(cache, allow_pickle=False) as file:
            pixels = {f"x_{split}": file[f"x_{split}"] for split in lengths}
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    fits = all(pixels[f"x_{s}"].shape == (n, *SHAPE) and pixels[f"x_{s}"].dtype == np.uint8 for s, n in lengths.items())
    return pixels if fits else None


def _write_cache(cache: Path, pixels: dict[str, NDArray[np.uint8]]) -> None:
    """Write the cache atomically.

    A folder that cannot be written is not an error, because the cache only saves time.
    """
    unfinished = cache.with_name(f".{cache.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                np.savez(file, allow_pickle=False, **pixels)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, cache)
        finally:
            unfinished.unlink(missing_ok=True)
