"""Archives of pictures, in folders by class."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files, members
from perfed.errors import PerfedError

_SIDE = 28
_GROUP, _EVERY = 4, 5  # fonts of one style; of five styles the last one is for testing


def cifar10_jpeg(files: Files) -> dict[str, NDArray[Any]]:
    """``jpeg_*``, ``offset_*``, ``y_*``, ``class_names`` of ``train/CLASS/NUMBER.jpg`` and ``test/...``, by path."""
    inside = re.compile(r"(?:.*/)?(train|test)/(\w+)/(\d+)\.jpe?g")
    pictures: dict[tuple[str, str, int], bytes] = {}
    for name, content in members(files.archive("CIFAR-10-images.zip")):
        if match := inside.fullmatch(name):
            pictures[match[1], match[2], int(match[3])] = content
    classes = sorted({of for _, of, _ in pictures})
    if not classes:
        raise PerfedError("no train/CLASS/NUMBER.jpg is in the archive")
    found: dict[str, NDArray[Any]] = {"class_names": np.array(classes)}
    for split in ("train", "test"):
        own = sorted(key for key in pictures if key[0] == split)
        ends = np.cumsum([0, *(len(pictures[key]) for key in own)])
        found[f"jpeg_{split}"] = np.frombuffer(b"".join(pictures[key] for key in own), np.uint8)
        found[f"offset_{split}"] = ends.astype(np.int32)
        found[f"y_{split}"] = np.array([classes.index(of) for _, of, _ in own], dtype=np.uint8)
    return found


def font_digits(files: Files) -> dict[str, NDArray[Any]]:
    """``x_*`` ``(n, 28, 28)``, ``y_*``, ``font_*`` of ``Fnt/Sample001/img001-00001.png`` to ``Sample010``, inverted."""
    from perfed.data.files import optional_package

    pillow = optional_package("PIL.Image", "reading pictures of digits")
    inside = re.compile(r"(?:.*/)?Fnt/Sample(0\d\d)/img\1-(\d+)\.png")
    pictures: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for name, content in members(files.archive("car_plate_localization.zip")):
        match = inside.fullmatch(name)
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
    found: dict[str, NDArray[Any]] = {}
    for split, rows in (("train", keys[~test]), ("test", keys[test])):
        found[f"x_{split}"] = np.array([pictures[digit, font] for digit, font in rows.tolist()], dtype=np.uint8)
        found[f"y_{split}"], found[f"font_{split}"] = rows[:, 0].astype(np.uint8), rows[:, 1].astype(np.int16)
    return found
