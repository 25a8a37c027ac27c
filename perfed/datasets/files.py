"""Finding and reading the files of data sets; perfed ships loaders, not data."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.errors import PerfedError

HOW_TO_GET = {
    "mnist.npz": "Keras publishes MNIST under this name and in this layout.",
    "usps.npz": "Convert the USPS digits (LIBSVM's page and OpenML have them) to the layout in docs/data.md.",
    "femnist_digits.npz": "Prepare FEMNIST with LEAF and convert its digits to the layout in docs/data.md.",
    "bci_flic_common.npz": (
        "Convert bci_users40_5c_common.npz of the FLIC authors' repository (arakotom/flic) to the layout in "
        "docs/data.md."
    ),
}


def find_file(name: str, data_dir: Path | None = None) -> Path:
    """The first of ``data_dir``, ``$PERFED_DATA`` and ``~/.cache/perfed`` that holds the file ``name``.

    Raises:
        PerfedError: no folder holds it; names the folders and says how to get the file.
    """
    from_environment = os.environ.get("PERFED_DATA")
    folders = [] if data_dir is None else [data_dir]
    folders += [Path(from_environment)] if from_environment else []
    folders.append(Path.home() / ".cache" / "perfed")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    searched = ", ".join(str(folder) for folder in folders)
    how = HOW_TO_GET.get(name, "See docs/data.md for the layout.")
    raise PerfedError(
        f"file '{name}' was not found in {searched}. {how} Put it there or name its folder with "
        "--data-dir or PERFED_DATA."
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
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise PerfedError(f"file '{path}' cannot be read ({reason}); it may be truncated: get it anew") from None


def require(name: str, holds: bool, problem: str) -> None:
    """Raise a :class:`PerfedError` that names the file and the problem unless ``holds``."""
    if not holds:
        raise PerfedError(f"file '{name}': {problem} (see docs/data.md for the layout)")
