"""Data files in tests: real ones where present, skipped where not, and made ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from perfed.data.files import find_file
from perfed.errors import PerfedError


def require_file(name: str) -> Path:
    """The path of a data file; without it the test is skipped, or fails if PERFED_REQUIRE_DATA=1."""
    try:
        return find_file(name)
    except PerfedError as error:
        if os.environ.get("PERFED_REQUIRE_DATA") == "1":
            pytest.fail(f"PERFED_REQUIRE_DATA=1 but {error}")
        pytest.skip(str(error))


def schools(columns: list[int]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Some columns and the standardised scores of the pupils of 25 schools, and which rows are each school's."""
    data = np.load(require_file("school.npz"))
    chosen = np.isin(data["school"], np.unique(data["school"])[:25])
    y, school = data["y"][chosen], data["school"][chosen]
    return (
        data["x"][chosen][:, columns].astype(float),
        (y - y.mean()) / y.std(),
        [school == s for s in np.unique(school)],
    )


def write_images(folder: Path, file: str, num_classes: int = 10, **more: np.ndarray) -> None:
    """A file like those of the image data sets: black pictures, 30 training and 6 test images of each class."""
    arrays = {}
    for split, per_class in (("train", 30), ("test", 6)):
        y = np.repeat(np.arange(num_classes), per_class)
        arrays |= {f"x_{split}": np.zeros((len(y), 28, 28), np.uint8), f"y_{split}": y.astype(np.uint8)}
        arrays[f"x_{split}"][:, 0, 0] = 255
    np.savez(folder / file, **{**arrays, **more})
