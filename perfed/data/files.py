"""Finding and reading the files of data sets; perfed contains only the loaders of most data sets."""

from __future__ import annotations

import importlib
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.sources import describe_command
from perfed.errors import PerfedError
from perfed.system import extra_command

SHIPPED = Path(__file__).with_name("shipped")
"""Folder of the small files that come with perfed, under their own terms (its NOTICE.md)."""


def own_folder() -> Path:
    """Return the folder where perfed keeps files for this user."""
    return Path.home() / ".cache" / "perfed"


def data_folders(data_dir: Path | None = None) -> list[Path]:
    """Return the folders in which files are searched: ``data_dir``, ``$PERFED_DATA``, ``~/.cache/perfed``.

    The files that come with perfed are searched after them.
    """
    from_environment = os.environ.get("PERFED_DATA")
    folders = [] if data_dir is None else [data_dir]
    return [*folders, *([Path(from_environment)] if from_environment else []), own_folder()]


def find_file(name: str, data_dir: Path | None = None) -> Path:
    """Return the path of the file ``name`` in the first of :func:`data_folders` or of the files of perfed.

    Raises:
        PerfedError: no folder contains the file; the message lists the folders and says how to get the file.
    """
    folders = data_folders(data_dir)
    for folder in (*folders, SHIPPED):
        if (folder / name).is_file():
            # Another folder may have the file, but a wrong --data-dir must not go unnoticed.
            if data_dir is not None and not data_dir.is_dir():
                raise PerfedError(f"--data-dir {data_dir}: no such folder")
            return folder / name
    searched = ", ".join(str(folder) for folder in folders)
    raise PerfedError(
        f"file '{name}' was not found in {searched}. Name its folder with --data-dir or PERFED_DATA, or get it: "
        f"{describe_command(name)}"
    )


def load_npz(name: str, data_dir: Path | None, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays ``keys`` of the ``.npz`` file ``name`` (:func:`find_file`); pickled objects are never read.

    Raises:
        PerfedError: the file is missing, is not an ``.npz`` file, is truncated or damaged, or lacks a key.
    """
    path = find_file(name, data_dir)
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise PerfedError(f"file '{path}' is not an .npz archive")
        with file:
            for key in keys:
                if key not in file.files:
                    available = ", ".join(file.files) or "nothing"
                    raise PerfedError(f"file '{path}' has no array '{key}'; it holds {available} (see docs/data.md)")
            return {key: file[key] for key in keys}
    except PerfedError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        how = describe_command(path.name, again=True)
        raise PerfedError(
            f"file '{path}' cannot be read ({reason}); it may be truncated. Get it again: {how}"
        ) from None


def require(name: str, condition: bool, problem: str) -> None:
    """Raise a :class:`PerfedError` that names the file and the problem unless ``condition`` is true."""
    if not condition:
        raise PerfedError(f"file '{name}': {problem} (see docs/data.md for the layout)")


def load_images(
    file: str,
    data_dir: Path | None,
    size: int,
    extra: tuple[str, ...] = (),
    *,
    num_classes: int = 10,
    colour: bool = False,
) -> dict[str, NDArray[Any]]:
    """Read and check a file of square images with ``x_*`` (uint8), ``y_*`` (int64) and further integer columns.

    Grey images are ``(samples, size, size)``, and images in ``colour`` are ``(samples, size, size, 3)``.

    Raises:
        PerfedError: an array has another type, shape or range, or for the reasons of :func:`load_npz`.
    """
    keys = [f"{part}_{split}" for split in ("train", "test") for part in ("x", "y", *extra)]
    data = load_npz(file, data_dir, keys)
    shape = (size, size, 3) if colour else (size, size)
    expected_shape = ", ".join(map(str, ("samples", *shape)))
    for split in ("train", "test"):
        x, y = data[f"x_{split}"], data[f"y_{split}"]
        good = x.dtype == np.uint8 and x.shape[1:] == shape
        require(file, good, f"'x_{split}' is {x.dtype} {x.shape}, not uint8 ({expected_shape})")
        for part in ("y", *extra):
            column = data[f"{part}_{split}"]
            good = column.shape == (len(x),) and np.issubdtype(column.dtype, np.integer)
            require(file, good, f"'{part}_{split}' is {column.dtype} {column.shape}, not one integer per image")
        good = len(y) > 0 and y.min() >= 0 and y.max() < num_classes
        require(file, good, f"'y_{split}' must hold labels in 0..{num_classes - 1}")
        data[f"y_{split}"] = y.astype(np.int64)
    return data


def optional_package(module: str, needed_for: str, extra: str = "datasets") -> Any:
    """Import and return a module of the extra ``perfed[EXTRA]``.

    Raises:
        PerfedError: the module is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise PerfedError(
            f"{needed_for} needs the package '{package}', which is not installed: {extra_command(extra)}"
        ) from None
