"""Clients' states in memory up to a number of bytes, and beyond it in files.

In a round every state that is used is followed by a new one. So those that were made first are those that nobody has
used for longest: they go to disk.
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
    """A tree that does not change, in memory or in a file; made by :meth:`States.keep`.

    Reading it from its file leaves it there. Its file goes when nobody refers to it any longer.

    Attributes:
        size: bytes of its tensors.
    """

    __slots__ = ("_number", "_owner", "size")

    def __init__(self, owner: States, number: int, size: int) -> None:
        self._owner, self._number, self.size = owner, number, size

    def read(self) -> Tree:
        """All of it.

        Raises:
            PerfedError: its file is gone or damaged.
        """
        return self._owner.read(self._number)

    def __getitem__(self, name: str) -> Any:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def items(self) -> ItemsView[str, Any]:
        """Names and what they stand for, read once."""
        return self.read().items()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self.items()),)  # another process has no part in these files

    def __del__(self) -> None:
        self._owner.drop(self._number, self.size)


class States:
    """Holds states in memory up to ``limit`` bytes of tensors; beyond that those made first are in files.

    The files are in a folder that is made when it is needed, and removed with this object or at the end of the process.

    Args:
        limit: bytes.
        device: where tensors are in memory.

    Attributes:
        place: folder in which that of the files is made; ``None``: where the system has temporary files.
        bytes: of what is in memory.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.place: Path | None = None
        self.bytes = 0
        self._limit, self._device = limit, device
        self._trees: dict[int, Tree] = {}  # in the order in which they were made
        self._count = 0
        self._folder: Path | None = None
        self._process = os.getpid()

    def keep(self, state: Tree) -> Tree:
        """What stands for ``state`` from here on, which must not be changed; one without tensors is left as it is.

        Raises:
            PerfedError: another state should go to disk and cannot be written; all are as before.
        """
        size = 0 if isinstance(state, State) else tree.count_bytes(state)
        if size == 0:
            return state
        self._count += 1
        self._trees[self._count] = self._placed(state)
        self.bytes += size
        kept = State(self, self._count, size)
        while self.bytes > self._limit:
            self._put_away()
        return kept

    def read(self, number: int) -> Tree:
        """The state of this number; see :meth:`State.read`."""
        if number in self._trees:
            return self._trees[number]
        file = self._file(number)
        try:
            found = decode(file.read_bytes())
        except (OSError, PerfedError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise PerfedError(f"{file}: the state of a client that was put there cannot be read: {reason}") from None
        return self._placed(found)

    @property
    def overflowed(self) -> bool:
        """Whether a state has ever had to go to disk."""
        return self._folder is not None

    def drop(self, number: int, size: int) -> None:
        """Forget the state of this number, which nobody refers to any longer."""
        if self._trees.pop(number, None) is not None:
            self.bytes -= size
        elif self.overflowed and os.getpid() == self._process:  # in a fork the parent still needs the file
            with suppress(OSError):
                self._file(number).unlink()

    def _placed(self, state: Tree) -> Tree:
        return tree.map_leaves(state, lambda _, tensor: tensor.to(self._device))

    def _put_away(self) -> None:
        """Write the state that was made first, and hold it no longer."""
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
        if self._trees.pop(number, None) is not None:  # else it was dropped while it was written
            self.bytes -= tree.count_bytes(state)

    def _file(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number}.safetensors"
