"""The log of the messages that have left or reached a site, in which each line contains the hash of the line before.

A line that was changed, removed or moved is therefore detected. Reading the log does not need torch, so that
``perfed site log`` starts quickly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfed.errors import PerfedError

BEGINNING = "0" * 64
"""The value that takes the place of the previous hash in the first line."""
LOG = "outgoing.jsonl"
"""The name of the log file in a site's folder."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log in order, up to the first line that breaks the chain (see :func:`verify_log`).

    The line of a message that has left contains ``run``, ``round`` and ``program``, ``header`` (the other fields of the
    header), ``entries`` (the ``name``, ``shape`` and ``dtype`` of each tensor), and the ``bytes`` and ``sha256`` of the
    message. The line of a message that has arrived contains ``arrived``, the fields ``kind``, ``run``, ``round``,
    ``program``, ``sequence`` and ``measure`` if the message has them, ``bytes`` and ``sha256``. The line of a note
    contains ``note``. All lines contain ``time`` (UTC), ``previous`` and ``hash``.

    Raises:
        PerfedError: The log does not exist.
    """
    return [json.loads(line) for _, line, problem in iterate_lines(path) if not problem]


def verify_log(path: Path, head: str | None = None) -> str | None:
    """Return a description of the first place where the chain is broken; ``None`` if it is intact.

    Args:
        path: The file of the log.
        head: The hash of a line that the log once had. Without it, the removal of lines at the end is not detected.

    Raises:
        PerfedError: The log does not exist.
    """
    hashes = {BEGINNING}
    for number, line, problem in iterate_lines(path):
        if problem:
            return f"{path}: line {number} {problem}"
        hashes.add(json.loads(line)["hash"])
    if head is not None and head not in hashes:
        return f"{path}: lines at the end were removed: none of the {len(hashes) - 1} has the hash {head}"
    return None


def iterate_lines(path: Path) -> Iterator[tuple[int, bytes, str]]:
    """Yield the number, bytes and problem of each line, up to the first problem; an empty text means no problem.

    Raises:
        PerfedError: The log does not exist.
    """
    previous, number = BEGINNING, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                problem = _find_line_problem(line, previous)
                yield number, line, problem
                if problem:
                    return
                previous = json.loads(line)["hash"]
    except FileNotFoundError:
        raise PerfedError(f"{path}: there is no log of messages") from None


def _find_line_problem(line: bytes, previous: str) -> str:
    if not line.endswith(b"\n"):
        return "is incomplete after a crash (opening the log removes it); its message has not left"
    try:
        entry = json.loads(line)
        entry.pop("hash")
        if format_line(entry)[1] != line:
            return "has been changed"
        previous_hash = entry["previous"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "has been changed"
    if previous_hash != previous:
        return "does not follow the line before it: lines were removed, added or reordered"
    return ""


def format_line(entry: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the hash of an entry, and its line in the log."""
    digest = hashlib.sha256(_encode_entry(entry)).hexdigest()
    return digest, _encode_entry({**entry, "hash": digest}) + b"\n"


def _encode_entry(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
