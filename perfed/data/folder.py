"""A folder with one file of arrays, or one folder of them, per client."""

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
    """The clients whose arrays are in a folder: ``ID.npz`` each, or a folder ``ID`` of files ``x_train.npy`` and so on.

    Attributes:
        places: each client's file or folder.
    """

    places: Mapping[str, Path]

    @classmethod
    def of(cls, path: Path) -> ClientFolder:
        """List a folder; other files in it, and those whose names begin with a dot, are left alone.

        Raises:
            PerfedError: no such folder, no clients in it, or a client who is there twice.
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
        """The client's arrays, each read when it is asked for; those of a folder stay on disk until they are used."""
        return _Arrays(self.places[client])

    def heads(self, client: str) -> Mapping[str, Any]:
        """The same, of inputs only the shape: tensors on the device "meta"."""
        return _Arrays(self.places[client], heads=True)


class _Arrays(Mapping[str, Any]):
    def __init__(self, place: Path, heads: bool = False) -> None:
        self.place, self.heads = place, heads
        try:
            if place.is_dir():
                self._names = [file.stem for file in sorted(place.glob("*.npy"))]
            else:
                with ZipFile(place) as archive:
                    self._names = [name.removesuffix(".npy") for name in archive.namelist()]
        except _BROKEN as error:
            raise _unreadable(place, error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        place = self.place / f"{name}.npy" if self.place.is_dir() else self.place
        try:
            if self.heads and name.startswith("x_"):
                shape, dtype = self._head(place, name)
                if dtype.kind in "biuf":  # others are read, to be refused
                    return torch.empty(shape, device="meta")
            array = self._read(place, name)
        except _BROKEN as error:
            raise _unreadable(place, error, f"'{name}' ") from None
        return array.tolist() if name == "feature_names" else array

    def _read(self, place: Path, name: str) -> NDArray[Any]:
        found = np.load(place, mmap_mode="r" if self.place.is_dir() else None, allow_pickle=False)
        if not self.place.is_dir():
            with found:
                return np.asarray(found[name])
        return np.asarray(found)

    def _head(self, place: Path, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of an array, from its header."""
        if self.place.is_dir():
            with place.open("rb") as file:
                return _header(file)
        with ZipFile(place) as archive, archive.open(f"{name}.npy") as member:
            return _header(member)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return tuple(shape), dtype


def _unreadable(place: Path, error: BaseException, what: str = "") -> PerfedError:
    return PerfedError(f"{place}: {what}cannot be read: {reason_of(error)}")
