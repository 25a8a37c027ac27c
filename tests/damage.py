"""Ways in which a file can be damaged, for tests of what reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def empty(file: Path) -> None:
    """Leave nothing of the file."""
    file.write_bytes(b"")


def cut(file: Path) -> None:
    """Drop what is behind the middle of the file."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def cut_lines(file: Path) -> None:
    """Drop the lines behind the middle one; a file without lines loses its second half."""
    content = file.read_bytes()
    end = content.find(b"\n", len(content) // 3) + 1
    file.write_bytes(content[: end if 0 < end < len(content) else len(content) // 2])


def zero(file: Path) -> None:
    """Write zeros over the end of the file, as a file system does after a power cut."""
    content = file.read_bytes()
    kept = len(content) * 4 // 5
    file.write_bytes(content[:kept] + bytes(len(content) - kept))


def flip(file: Path) -> None:
    """Change the digit in the middle of the file by its lowest bit, or whatever byte is there."""
    content = bytearray(file.read_bytes())
    digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    content[digits[len(digits) // 2] if digits else len(content) // 2] ^= 1
    file.write_bytes(content)


def delete(file: Path) -> None:
    """Remove the file."""
    file.unlink()


DAMAGES: tuple[Callable[[Path], None], ...] = (empty, cut, cut_lines, zero, flip, delete)
