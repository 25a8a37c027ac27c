"""Faults that are real: a process killed by SIGKILL, a disk that takes no more, a byte that has changed."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

_KIB = 1024


def killed(work: Callable[[int], None], seconds: float, first: int = 1) -> int:
    """Fork a child that does ``work(first)``, ``work(first + 1)`` and so on; SIGKILL it ``seconds`` after the first.

    Returns:
        The last number whose work has returned.
    """
    reading, writing = os.pipe()

    def child() -> None:
        for number in count(first):
            work(number)
            os.write(writing, struct.pack("q", number))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    os.close(writing)
    with os.fdopen(reading, "rb") as done:
        begun = done.read(8)
        time.sleep(seconds)
        process.kill()
        rest = done.read()
    process.join()
    assert begun and process.exitcode == -signal.SIGKILL, "the child ended by itself"
    return int(struct.unpack("q", (begun + rest)[-8:])[0])


@contextmanager
def full_after(kib: int) -> Iterator[None]:
    """No file grows beyond ``kib`` KiB: the system takes a part of the data, and then refuses, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kib * _KIB, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def kept_on_disk(patch: pytest.MonkeyPatch) -> list[str]:
    """In the order in which it happens from now on: contents on disk, files that get their name, folders on disk.

    Content must come before the name, and the folder after it: only then does a power cut leave all or nothing.
    """
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def noting_sync(handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        temporary = re.fullmatch(r"\.(.*)\.\d+\.tmp", name)
        done.append(f"content of {temporary[1]}" if temporary else name)
        sync(handle)

    def noting_replace(old: Path, new: Path) -> None:
        done.append(new.name)
        replace(old, new)

    patch.setattr(os, "fsync", noting_sync)
    patch.setattr(os, "replace", noting_replace)
    return done


def flip(file: Path, position: int) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def damages(data: bytes) -> Iterator[bytes]:
    """``data`` cut, lengthened, emptied and with one bit changed, at many places."""
    for position in {0, 1, 7, 8, 40, 48, 55, 56, len(data) // 2, len(data) - 1}:
        yield data[:position]
        yield data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
    yield data + b"\0"
    yield data + data
    yield bytes(len(data))
