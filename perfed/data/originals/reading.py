"""Reading originals: by name, from files, folders and archives, packed or not; what pickles hold, and no code."""

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
    """The originals that are at hand: files, the files in folders, and what is inside of archives.

    Example:
        >>> Files([]).has("usps.bz2")
        False
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]

    def has(self, name: str) -> bool:
        """Whether a file is called ``name``, packed or not, or is in an archive under this name."""
        return self._place(name) is not None

    def path(self, name: str) -> Path | None:
        """The file itself that is called ``name``, if one is."""
        return next((path for path in self.paths if path.name == name), None)

    def read(self, name: str) -> bytes:
        """The content of ``name``, or of the only file that is given, unpacked.

        Raises:
            PerfedError: there is no such file.
        """
        place = self._place(name) or ((self.paths[0], None) if len(self.paths) == 1 else None)
        if place is None:
            raise PerfedError(f"'{name}' is not among the originals")
        path, member = place
        content = path.read_bytes() if member is None else next(c for n, c in members(path) if _called(n, name))
        return _unpacked(content)

    def archive(self, name: str) -> Path:
        """The archive ``name``, or the only file that is given.

        Raises:
            PerfedError: there is none.
        """
        found = self.path(name) or (self.paths[0] if len(self.paths) == 1 else None)
        if found is None:
            raise PerfedError(f"'{name}' is not among the originals")
        return found

    def _place(self, name: str) -> tuple[Path, str | None] | None:
        for path in self.paths:
            if _called(path.name, name):
                return path, None
        for path in self.paths:
            if zipfile.is_zipfile(path) and any(_called(n, name) for n in zipfile.ZipFile(path).namelist()):
                return path, name
        return None


def _called(path: str, name: str) -> bool:
    last = path.rpartition("/")[2]
    return name in (last, *(last.removesuffix(end) for end in _PACKED)) or last in (
        name.removesuffix(end) for end in _PACKED
    )


def _unpacked(content: bytes) -> bytes:
    if content[:2] == b"\x1f\x8b":
        return gzip.decompress(content)
    return bz2.decompress(content) if content[:3] == b"BZh" else content


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a zip or tar archive, in its order.

    Raises:
        PerfedError: it is neither.
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


class _Plain(pickle.Unpickler):
    """Makes numbers, texts, containers and numpy's arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if _NUMPY.fullmatch(module) and name in _HARMLESS:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):  # bytes in pickles of protocol 2
            return super().find_class(module, name)
        raise PerfedError(f"the file would run code ({module}.{name}), and is not read")


def unpickled(content: bytes) -> Any:
    """What a pickle of plain values and arrays holds, those of Python 2 with text as bytes.

    Raises:
        PerfedError: it holds anything else.
    """
    return _Plain(io.BytesIO(content), encoding="bytes").load()


def unpickled_arrays(content: bytes) -> dict[str, Any]:
    """The arrays of an ``.npz`` file of which some are of Python objects, read by :func:`unpickled`."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        for name in file.namelist():
            stream = io.BytesIO(file.read(name))
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            _, _, dtype = read(stream)
            if dtype.hasobject:
                found[name.removesuffix(".npy")] = unpickled(stream.read())
            else:
                stream.seek(0)
                found[name.removesuffix(".npy")] = np.lib.format.read_array(stream, allow_pickle=False)
    return found
