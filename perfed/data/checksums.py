"""Checksums of files, and the file ``SHA256SUMS`` with those of a folder, which ``sha256sum --check`` reads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from perfed.data.reading import read_text
from perfed.errors import PerfedError
from perfed.system import write_atomic

CHECKSUMS = "SHA256SUMS"
"""The name of the file with the checksums of a folder."""

_COMMENT = "# sha256 of the lines below: "


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write checksums of files in ``folder``, by file name, to ``SHA256SUMS``; remove that file if there are none."""
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items())]
    if lines:
        write_atomic(folder / CHECKSUMS, "".join(lines))
    else:
        (folder / CHECKSUMS).unlink(missing_ok=True)


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums that :func:`write_checksums` wrote, by file name; empty where there are none.

    Raises:
        PerfedError: the file cannot be read, or a line does not consist of a checksum and a name.
    """
    file = folder / CHECKSUMS
    checksums = {}
    for number, line in enumerate(read_text(file).splitlines() if file.is_file() else (), 1):
        checksum, _, name = line.partition("  ")
        if len(checksum) != 64 or not name:
            raise PerfedError(f"{file}, line {number}: is damaged; a checksum and the name of a file are needed")
        checksums[name] = checksum
    return checksums


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def find_damage(
    folder: Path, checksums: Mapping[str, str], contents: Mapping[str, bytes] | None = None
) -> dict[str, str]:
    """Return the files that are missing, unreadable or changed: a description of the problem by file name.

    Args:
        folder: the folder.
        checksums: the checksums of its files, by file name.
        contents: the contents of files that were read before, by file name; these files are not read again.
    """
    contents = contents or {}
    problems = {}
    for name, checksum in checksums.items():
        try:
            content = contents.get(name)
            if checksum != (hash_file(folder / name) if content is None else hashlib.sha256(content).hexdigest()):
                problems[name] = "has changed since it was written"
        except FileNotFoundError:
            problems[name] = "is missing"
        except OSError as error:
            problems[name] = f"cannot be read: {error.strerror}"
    return problems


def refuse_damage(folder: Path, problems: Mapping[str, str], remedy: str) -> None:
    """Raise an error if there are any ``problems`` (:func:`find_damage`).

    Raises:
        PerfedError: there are problems; the message names the first file and ends with ``remedy``.
    """
    if problems:
        name, problem = next(iter(problems.items()))
        count_note = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PerfedError(f"{folder / name}: {problem}{count_note}; {remedy}")


def write_checksums_of(folder: Path, names: Iterable[str]) -> None:
    """Compute the checksums of files in ``folder`` and write them to ``SHA256SUMS``."""
    write_checksums(folder, {name: hash_file(folder / name) for name in names})


def add_checksum(text: str) -> str:
    """Return a TOML text preceded by a comment with its SHA-256."""
    return f"{_COMMENT}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def matches_comment(text: str) -> bool:
    """Return whether a text matches the comment of :func:`add_checksum` in its first line."""
    comment, _, content = text.partition("\n")
    checksum = hashlib.sha256(content.encode()).hexdigest()
    return comment == _COMMENT + checksum


def set_aside(file: Path) -> None:
    """Rename a damaged file to ``NAME.damaged``, so that it is not read again but its content remains available."""
    os.replace(file, file.with_name(f"{file.name}.damaged"))
