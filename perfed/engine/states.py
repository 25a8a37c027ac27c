"""Storage of clients' states, in memory up to a number of bytes and otherwise in files.

A round replaces every state that it uses by a new one. The oldest states are therefore the least recently used ones,
and they are the first to be written to disk.
"""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from perfed import tree
from perfed.codec import decode, encode
from perfed.errors import PerfedError
from perfed.system import create_scratch_folder
from perfed.tree import Tree


class State(Mapping[str, Any]):
    """An immutable tree in memory or in a file, created by :meth:`States.keep`.

    The file is deleted when there is no reference to the object any more; reading does not delete it.

    Attributes:
        size: the number of bytes of its tensors.
    """

    __slots__ = ("_number", "_owner", "size")

    def __init__(self, owner: States, number: int, size: int) -> None:
        self._owner, self._number, self.size = owner, number, size

    def read(self) -> Tree:
        """Return the complete tree.

        Raises:
            PerfedError: the file is missing or damaged.
        """
        return self._owner.read(self._number)

    def __getitem__(self, name: str) -> Any:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def items(self) -> ItemsView[str, Any]:
        """Return the names and values, after reading the state once."""
        return self.read().items()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self.items()),)  # another process must not depend on the files of this one

    def __del__(self) -> None:
        self._owner.drop(self._number, self.size)


class States:
    """A store of states with at most ``limit`` bytes of tensors in memory; the oldest states beyond that are in files.

    The folder of the files is created when it is needed, and removed with this object or at the end of the process.

    Args:
        limit: the largest number of bytes in memory.
        device: the device of tensors in memory.

    Attributes:
        place: the folder in which the folder of the files is created; ``None`` for the system's temporary folder.
        bytes: the number of bytes in memory.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.place: Path | None = None
        self.bytes = 0
        self._limit, self._device = limit, device
        self._trees: dict[int, Tree] = {}  # the oldest first
        self._count = 0
        self._folder: Path | None = None
        self._process = os.getpid()

    def keep(self, state: Tree) -> Tree:
        """Add ``state`` to the store and return the object that represents it; a state without tensors is returned.

        The tensors of ``state`` must not be changed afterwards.

        Raises:
            PerfedError: an older state cannot be written to disk. The store is not changed in this case.
        """
        size = 0 if isinstance(state, State) else tree.count_bytes(state)
        if size == 0:
            return state
        self._count += 1
        self._trees[self._count] = self._to_device(state)
        self.bytes += size
        stored = State(self, self._count, size)
        while self.bytes > self._limit:
            self._write_oldest()
        return stored

    def read(self, number: int) -> Tree:
        """Return the state with this number; see :meth:`State.read`."""
        if number in self._trees:
            return self._trees[number]
        file = self._file(number)
        try:
            state = decode(file.read_bytes())
        except (OSError, PerfedError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise PerfedError(f"{file}: the state of a client that was put there cannot be read: {reason}") from None
        return self._to_device(state)

    @property
    def overflowed(self) -> bool:
        """Whether any state has been written to disk."""
        return self._folder is not None

    def drop(self, number: int, size: int) -> None:
        """Remove the state with this number, to which there is no reference any more."""
        if self._trees.pop(number, None) is not None:
            self.bytes -= size
        elif self.overflowed and os.getpid() == self._process:  # in a fork the parent still needs the file
            with suppress(OSError):
                self._file(number).unlink()

    def _to_device(self, state: Tree) -> Tree:
        return tree.map_leaves(state, lambda _, tensor: tensor.to(self._device))

    def _write_oldest(self) -> None:
        """Write the oldest state in memory to disk, and remove it from memory."""
        number, state = next(iter(self._trees.items()))
        try:
            if self._folder is None:
                self._folder = create_scratch_folder(self, self.place)
            self._file(number).write_bytes(encode(state))
        except OSError as error:
            if self.overflowed:
                with suppress(OSError):
                    self._file(number).unlink()
            raise PerfedError(
                f"{self._folder or self.place}: clients' states beyond plan.hold_megabytes = {self._limit >> 20} "
                f"cannot be written there: {error.strerror}"
            ) from None
        if self._trees.pop(number, None) is not None:  # it may have been dropped while it was written
            self.bytes -= tree.count_bytes(state)

    def _file(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number}.safetensors"
