"""Folders with one file of arrays, or one folder of such files, per client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from perfed.data.reading import reason_of
from perfed.errors import PerfedError

_BROKEN = (OSError, ValueError, KeyError, EOFError, BadZipFile)


@dataclass(frozen=True)
class ClientFolder:
    """The clients whose arrays are in a folder.

    Each client has a file ``ID.npz``, or a folder ``ID`` with files ``x_train.npy`` and so on.

    Attributes:
        places: the file or folder of each client.
    """

    places: Mapping[str, Path]

    @classmethod
    def from_path(cls, path: Path) -> ClientFolder:
        """Return the clients in a folder; other files, and files whose names start with a dot, are ignored.

        Raises:
            PerfedError: there is no such folder, it contains no clients, or a client occurs twice.
        """
        if not path.is_dir():
            raise PerfedError(f"{path}: there is no such folder")
        places: dict[str, Path] = {}
        for item in sorted(path.iterdir()):
            folder = item.is_dir() and any(item.glob("*.npy"))
            if item.name.startswith(".") or not (folder or (item.suffix == ".npz" and item.is_file())):
                continue
            client = item.name if folder else item.stem
            if client in places:
                raise PerfedError(f"{path}: client '{client}' is there twice, as a file and as a folder")
            places[client] = item
        if not places:
            raise PerfedError(f"{path}: no client is in it; a file ID.npz, or a folder ID of .npy files, is one")
        return cls(places)

    def __call__(self, client: str) -> Mapping[str, Any]:
        """Return the arrays of a client, each of which is read on access; ``.npy`` files are memory-mapped."""
        return _Arrays(self.places[client])

    def read_shapes(self, client: str) -> Mapping[str, Any]:
        """Return the arrays of a client with tensors on the device "meta", which have only a shape, as inputs."""
        return _Arrays(self.places[client], shapes_only=True)


class _Arrays(Mapping[str, Any]):
    """The arrays of one client by name, each of which is read on access.

    Args:
        place: the client's file or folder.
        shapes_only: whether inputs are replaced by tensors on the device "meta".
    """

    def __init__(self, place: Path, shapes_only: bool = False) -> None:
        self.place, self.shapes_only = place, shapes_only
        try:
            if place.is_dir():
                self._names = [file.stem for file in sorted(place.glob("*.npy"))]
            else:
                with ZipFile(place) as archive:
                    self._names = [name.removesuffix(".npy") for name in archive.namelist()]
        except _BROKEN as error:
            raise _describe_read_error(place, error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        place = self.place / f"{name}.npy" if self.place.is_dir() else self.place
        try:
            if self.shapes_only and name.startswith("x_"):
                shape, dtype = self._read_header(place, name)
                if dtype.kind in "biuf":  # arrays of other types are read and then refused
                    return torch.empty(shape, device="meta")
            array = self._read(place, name)
        except _BROKEN as error:
            raise _describe_read_error(place, error, f"'{name}' ") from None
        return array.tolist() if name == "feature_names" else array

    def _read(self, place: Path, name: str) -> NDArray[Any]:
        content = np.load(place, mmap_mode="r" if self.place.is_dir() else None, allow_pickle=False)
        if not self.place.is_dir():
            with content:
                return np.asarray(content[name])
        return np.asarray(content)

    def _read_header(self, place: Path, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and data type of an array, from its header."""
        if self.place.is_dir():
            with place.open("rb") as file:
                return _parse_header(file)
        with ZipFile(place) as archive, archive.open(f"{name}.npy") as member:
            return _parse_header(member)


def _parse_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return tuple(shape), dtype


def _describe_read_error(place: Path, error: BaseException, array: str = "") -> PerfedError:
    return PerfedError(f"{place}: {array}cannot be read: {reason_of(error)}")
