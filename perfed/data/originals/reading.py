"""Readers of originals: files by name, in folders and archives, compressed or not, and pickles without running code."""

from __future__ import annotations

import bz2
import gzip
import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perfed.errors import PerfedError

_PACKED = (".gz", ".bz2")
_NUMPY = re.compile(r"numpy(\._?core)?\.(multiarray|numeric)|numpy")
_HARMLESS = {"_reconstruct", "_frombuffer", "scalar", "ndarray", "dtype"}


class Files:
    """The available originals: files, the files in folders, and the contents of archives.

    Example:
        >>> Files([]).has("usps.bz2")
        False
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]

    def has(self, name: str) -> bool:
        """Return whether a file has this name, compressed or not, directly or in an archive."""
        return self._find_place(name) is not None

    def path(self, name: str) -> Path | None:
        """Return the path of the file ``name``, or ``None`` if there is none."""
        return next((path for path in self.paths if path.name == name), None)

    def read(self, name: str) -> bytes:
        """Return the decompressed content of ``name``, or of the only file.

        Raises:
            PerfedError: if there is no such file.
        """
        place = self._find_place(name) or ((self.paths[0], None) if len(self.paths) == 1 else None)
        if place is None:
            raise PerfedError(f"'{name}' is not among the originals")
        path, member = place
        content = (
            path.read_bytes() if member is None else next(c for n, c in iterate_members(path) if _has_name(n, name))
        )
        return _decompress(content)

    def archive_path(self, name: str) -> Path:
        """Return the path of the archive ``name``, or of the only file.

        Raises:
            PerfedError: if there is none.
        """
        path = self.path(name) or (self.paths[0] if len(self.paths) == 1 else None)
        if path is None:
            raise PerfedError(f"'{name}' is not among the originals")
        return path

    def _find_place(self, name: str) -> tuple[Path, str | None] | None:
        for path in self.paths:
            if _has_name(path.name, name):
                return path, None
        for path in self.paths:
            if zipfile.is_zipfile(path) and any(_has_name(n, name) for n in zipfile.ZipFile(path).namelist()):
                return path, name
        return None


def _has_name(path: str, name: str) -> bool:
    last = path.rpartition("/")[2]
    return name in (last, *(last.removesuffix(end) for end in _PACKED)) or last in (
        name.removesuffix(end) for end in _PACKED
    )


def _decompress(content: bytes) -> bytes:
    if content[:2] == b"\x1f\x8b":
        return gzip.decompress(content)
    return bz2.decompress(content) if content[:3] == b"BZh" else content


def iterate_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files in a zip or tar archive, in its order.

    Raises:
        PerfedError: if it is neither.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            yield from ((item.filename, file.read(item)) for item in file.infolist() if not item.is_dir())
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isfile() and (content := tar.extractfile(member)) is not None:
                    yield member.name, content.read()
    else:
        raise PerfedError(f"file '{path}' is neither a zip nor a tar archive")


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of numbers, texts, containers and numpy's arrays that refuses anything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if _NUMPY.fullmatch(module) and name in _HARMLESS:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):  # bytes in pickles of protocol 2
            return super().find_class(module, name)
        raise PerfedError(f"the file would run code ({module}.{name}), and is not read")


def load_plain_pickle(content: bytes) -> Any:
    """Return the content of a pickle of plain values and arrays, with text of Python 2 as bytes.

    Raises:
        PerfedError: if it has anything else.
    """
    return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()


def load_object_arrays(content: bytes) -> dict[str, Any]:
    """Return the arrays of an ``.npz`` file, some of Python objects, which :func:`load_plain_pickle` reads."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        for name in file.namelist():
            stream = io.BytesIO(file.read(name))
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            _, _, dtype = read(stream)
            if dtype.hasobject:
                arrays[name.removesuffix(".npy")] = load_plain_pickle(stream.read())
            else:
                stream.seek(0)
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays
