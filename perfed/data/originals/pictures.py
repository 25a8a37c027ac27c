"""Archives of images in folders by class."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files, iterate_members
from perfed.errors import PerfedError

_SIDE = 28
_GROUP, _EVERY = 4, 5  # number of fonts of a style; every fifth style is for testing


def read_cifar10_jpeg(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``jpeg_*``, ``offset_*``, ``y_*``, ``class_names`` of ``train/CLASS/NUMBER.jpg`` and ``test/...``, by
    path.
    """
    pattern = re.compile(r"(?:.*/)?(train|test)/(\w+)/(\d+)\.jpe?g")
    pictures: dict[tuple[str, str, int], bytes] = {}
    for name, content in iterate_members(files.archive_path("CIFAR-10-images.zip")):
        if match := pattern.fullmatch(name):
            pictures[match[1], match[2], int(match[3])] = content
    classes = sorted({label for _, label, _ in pictures})
    if not classes:
        raise PerfedError("no train/CLASS/NUMBER.jpg is in the archive")
    arrays: dict[str, NDArray[Any]] = {"class_names": np.array(classes)}
    for split in ("train", "test"):
        keys = sorted(key for key in pictures if key[0] == split)
        ends = np.cumsum([0, *(len(pictures[key]) for key in keys)])
        arrays[f"jpeg_{split}"] = np.frombuffer(b"".join(pictures[key] for key in keys), np.uint8)
        arrays[f"offset_{split}"] = ends.astype(np.int32)
        arrays[f"y_{split}"] = np.array([classes.index(label) for _, label, _ in keys], dtype=np.uint8)
    return arrays


def read_font_digits(files: Files) -> dict[str, NDArray[Any]]:
    """Return ``x_*`` ``(n, 28, 28)``, ``y_*``, ``font_*`` of ``Fnt/Sample001/img001-00001.png`` to ``Sample010``,
    inverted.
    """
    from perfed.data.files import optional_package

    pillow = optional_package("PIL.Image", "reading pictures of digits")
    pattern = re.compile(r"(?:.*/)?Fnt/Sample(0\d\d)/img\1-(\d+)\.png")
    pictures: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for name, content in iterate_members(files.archive_path("car_plate_localization.zip")):
        match = pattern.fullmatch(name)
        if match and 1 <= int(match[1]) <= 10:
            with pillow.open(io.BytesIO(content), formats=("PNG",)) as picture:
                pixels = np.asarray(picture.convert("L"))
            if pixels.shape != (_SIDE, _SIDE):
                raise PerfedError(f"'{name}' is {pixels.shape}, not {(_SIDE, _SIDE)}")
            pictures[int(match[1]) - 1, int(match[2]) - 1] = 255 - pixels
    if not pictures:
        raise PerfedError("no Fnt/Sample001/img001-00001.png is in the archive")
    keys = np.array(sorted(pictures))
    test = keys[:, 1] // _GROUP % _EVERY == _EVERY - 1
    arrays: dict[str, NDArray[Any]] = {}
    for split, rows in (("train", keys[~test]), ("test", keys[test])):
        arrays[f"x_{split}"] = np.array([pictures[digit, font] for digit, font in rows.tolist()], dtype=np.uint8)
        arrays[f"y_{split}"], arrays[f"font_{split}"] = rows[:, 0].astype(np.uint8), rows[:, 1].astype(np.int16)
    return arrays
