"""Samples in memory, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from perfed.data.client import Split
from perfed.errors import PerfedError

HOLD = 256 << 20
"""Bytes of samples that a federation holds by default."""


class Held:
    """The splits used last, up to a number of bytes; threads may share it, and a copy for another process is empty.

    Args:
        limit: bytes. A split that alone is larger is handed out and not held.

    Attributes:
        bytes: of what is held.
        reads: how often a split was not there and had to be read.
    """

    def __init__(self, limit: int = HOLD) -> None:
        if limit < 0:
            raise PerfedError(f"hold is {limit} bytes; at least 0 is needed")
        self.limit, self.bytes, self.reads = limit, 0, 0
        self._splits: OrderedDict[Hashable, Split] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Split | None:
        """What is held under ``key``."""
        with self._lock:
            if key in self._splits:
                self._splits.move_to_end(key)
            return self._splits.get(key)

    def keep(self, key: Hashable, split: Split) -> None:
        """Hold ``split``, which has just been read, in place of those that were not used for longest."""
        size = _size(split)
        with self._lock:
            self.reads += 1
            if size <= self.limit and key not in self._splits:
                self._splits[key] = split
                self.bytes += size
                while self.bytes > self.limit:
                    self.bytes -= _size(self._splits.popitem(last=False)[1])

    def __reduce__(self) -> tuple[type[Held], tuple[int]]:
        return Held, (self.limit,)


def _size(split: Split) -> int:
    return sum(t.numel() * t.element_size() for t in (split.x, split.y, split.domain) if t is not None)
