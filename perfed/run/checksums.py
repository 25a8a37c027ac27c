"""``SHA256SUMS``: the checksums of the files in a folder, as ``sha256sum --check`` reads them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from perfed.data.reading import read_text
from perfed.errors import PerfedError
from perfed.system import write_atomic

CHECKSUMS = "SHA256SUMS"
"""The file with the checksums."""

_COMMENT = "# sha256 of the lines below: "


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write the SHA-256 of files by their names in ``folder``; without any, the file is removed."""
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items())]
    if lines:
        write_atomic(folder / CHECKSUMS, "".join(lines))
    else:
        (folder / CHECKSUMS).unlink(missing_ok=True)


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums that :func:`write_checksums` wrote; none where an older perfed wrote the folder.

    Raises:
        PerfedError: the file cannot be read, or has a line that is no checksum and name.
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
    """Return the SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def find_damage(folder: Path, checksums: Mapping[str, str]) -> dict[str, str]:
    """Return the files that are not as they were written: their names, and what is wrong with each."""
    problems = {}
    for name, checksum in checksums.items():
        try:
            if hash_file(folder / name) != checksum:
                problems[name] = "has changed since it was written"
        except FileNotFoundError:
            problems[name] = "is missing"
        except OSError as error:
            problems[name] = f"cannot be read: {error.strerror}"
    return problems


def refuse_damage(folder: Path, problems: Mapping[str, str], remedy: str) -> None:
    """Raise an error where ``problems``, as from :func:`find_damage`, are not empty.

    Raises:
        PerfedError: names the first of the files, and ends with ``remedy``.
    """
    if problems:
        name, problem = next(iter(problems.items()))
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PerfedError(f"{folder / name}: {problem}{others}; {remedy}")


def write_checksums_of(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of the files with these names as they are now."""
    write_checksums(folder, {name: hash_file(folder / name) for name in names})


def add_checksum(text: str) -> str:
    """Return a text in TOML behind a comment with its SHA-256."""
    return f"{_COMMENT}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def matches_comment(text: str) -> bool:
    """Return whether a text is as :func:`add_checksum` wrote it; one of an older version, without the comment, is."""
    comment, _, rest = text.partition("\n")
    checksum = hashlib.sha256(rest.encode()).hexdigest()
    return not comment.startswith(_COMMENT) or comment == _COMMENT + checksum


def set_aside(file: Path) -> None:
    """Rename a damaged file to ``NAME.damaged``, so that it is not read again and what is in it can still be had."""
    os.replace(file, file.with_name(f"{file.name}.damaged"))
