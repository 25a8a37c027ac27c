"""The lines of the log of what has left a site and what has arrived: each has the hash of the one before it.

A line that was changed, removed or moved shows. Reading needs no torch, so that ``perfed site log`` is there at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfed.errors import PerfedError

BEGINNING = "0" * 64
"""What stands for the hash of a line before the first."""
LOG = "outgoing.jsonl"
"""File of a site's folder that has the lines."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log in their order, up to the first that is broken (see :func:`verify_log`).

    A line of a message has ``run``, ``round`` and ``program``, ``header`` (the other fields that went with it),
    ``entries`` (``name``, ``shape`` and ``dtype`` of each tensor), ``bytes`` and ``sha256`` of the message as it left.
    One of a message that arrived has ``arrived``, what it asked (``kind``, ``run``, ``round``, ``program``,
    ``sequence`` and ``measure``, where it said so), ``bytes`` and ``sha256``. One that
    something had to be noted in has ``note``. All have ``time`` (UTC), ``previous`` and ``hash``.

    Raises:
        PerfedError: there is no log.
    """
    return [json.loads(line) for _, line, problem in iterate_lines(path) if not problem]


def verify_log(path: Path, head: str | None = None) -> str | None:
    """Where the chain is broken first, in one line; ``None`` where it is whole.

    That lines at the end were removed shows only to who gives a ``head`` that the log had.

    Raises:
        PerfedError: there is no log.
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
    """Number, bytes and problem (empty if there is none) of every line; the first problem ends it.

    Raises:
        PerfedError: there is no log.
    """
    previous, number = BEGINNING, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                problem = _problem(line, previous)
                yield number, line, problem
                if problem:
                    return
                previous = json.loads(line)["hash"]
    except FileNotFoundError:
        raise PerfedError(f"{path}: there is no log of what has left") from None


def _problem(line: bytes, previous: str) -> str:
    if not line.endswith(b"\n"):
        return "is torn, as a crash leaves it (opening the log mends it); its message has not left"
    try:
        entry = json.loads(line)
        entry.pop("hash")
        if format_line(entry)[1] != line:
            return "has been changed"
        found = entry["previous"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "has been changed"
    if found != previous:
        return "does not follow the line before it: lines were removed, added or reordered"
    return ""


def format_line(entry: Mapping[str, Any]) -> tuple[str, bytes]:
    """The hash of an entry, and its line."""
    digest = hashlib.sha256(_text(entry)).hexdigest()
    return digest, _text({**entry, "hash": digest}) + b"\n"


def _text(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
