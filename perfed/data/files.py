"""Finding and reading the files of data sets; of most perfed ships the loader alone."""

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
    """Return where files are looked for, in this order: ``data_dir``, ``$PERFED_DATA``, ``~/.cache/perfed``.

    What comes with perfed is looked for behind them.
    """
    from_environment = os.environ.get("PERFED_DATA")
    folders = [] if data_dir is None else [data_dir]
    return [*folders, *([Path(from_environment)] if from_environment else []), own_folder()]


def find_file(name: str, data_dir: Path | None = None) -> Path:
    """The first of :func:`data_folders`, and of what comes with perfed, that holds the file ``name``.

    Raises:
        PerfedError: no folder holds it; names the folders and says how to get the file.
    """
    folders = data_folders(data_dir)
    for folder in (*folders, SHIPPED):
        if (folder / name).is_file():
            if data_dir is not None and not data_dir.is_dir():  # a slip that another folder would hide
                raise PerfedError(f"--data-dir {data_dir}: no such folder")
            return folder / name
    searched = ", ".join(str(folder) for folder in folders)
    raise PerfedError(
        f"file '{name}' was not found in {searched}. Name its folder with --data-dir or PERFED_DATA, or get it: "
        f"{describe_command(name)}"
    )


def load_npz(name: str, data_dir: Path | None, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The arrays ``keys`` of the file ``name`` (see :func:`find_file`); pickled objects are never read.

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
                    held = ", ".join(file.files) or "nothing"
                    raise PerfedError(f"file '{path}' has no array '{key}'; it holds {held} (see docs/data.md)")
            return {key: file[key] for key in keys}
    except PerfedError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        how = describe_command(path.name, again=True)
        raise PerfedError(
            f"file '{path}' cannot be read ({reason}); it may be truncated. Get it again: {how}"
        ) from None


def require(name: str, holds: bool, problem: str) -> None:
    """Raise a :class:`PerfedError` that names the file and the problem unless ``holds``."""
    if not holds:
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
    """``x_*`` (uint8), ``y_*`` (int64) and further integer columns of a file of square images, checked.

    Grey images are ``(samples, size, size)``, with ``colour`` they are ``(samples, size, size, 3)``.

    Raises:
        PerfedError: as :func:`load_npz`, or arrays of another type, shape or range.
    """
    keys = [f"{part}_{split}" for split in ("train", "test") for part in ("x", "y", *extra)]
    data = load_npz(file, data_dir, keys)
    shape = (size, size, 3) if colour else (size, size)
    wanted = ", ".join(map(str, ("samples", *shape)))
    for split in ("train", "test"):
        x, y = data[f"x_{split}"], data[f"y_{split}"]
        good = x.dtype == np.uint8 and x.shape[1:] == shape
        require(file, good, f"'x_{split}' is {x.dtype} {x.shape}, not uint8 ({wanted})")
        for part in ("y", *extra):
            column = data[f"{part}_{split}"]
            good = column.shape == (len(x),) and np.issubdtype(column.dtype, np.integer)
            require(file, good, f"'{part}_{split}' is {column.dtype} {column.shape}, not one integer per image")
        good = len(y) > 0 and y.min() >= 0 and y.max() < num_classes
        require(file, good, f"'y_{split}' must hold labels in 0..{num_classes - 1}")
        data[f"y_{split}"] = y.astype(np.int64)
    return data


def optional_package(module: str, needed_for: str, extra: str = "datasets") -> Any:
    """A module of the extra ``perfed[EXTRA]``.

    Raises:
        PerfedError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise PerfedError(
            f"{needed_for} needs the package '{package}', which is not installed: {extra_command(extra)}"
        ) from None
