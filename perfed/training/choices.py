"""What trials on this machine have chosen, kept for the user: the same work is tried once, whichever run it is in.

Each choice is a file of its own, named by a hash of what it was made for, so that processes that write at the same time
lose nothing. A file that is damaged, or cannot be read or written, is as one that is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfed.data.files import own_folder
from perfed.system import write_atomic

_KEPT = 1000  # choices that the folder holds; the oldest go


def folder() -> Path | None:
    """Return ``$PERFED_PLANS``, or ``~/.cache/perfed/plans``; ``None`` where the variable is empty: nothing is kept."""
    if (given := os.environ.get("PERFED_PLANS")) is not None:
        return Path(given) if given else None
    with suppress(RuntimeError):  # a user without a home
        return own_folder() / "plans"
    return None


def find(work: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the chunk and the threads that were chosen for ``work``, plain values; ``None`` if nothing is kept."""
    place = _file(work)
    if place is None:
        return None
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("work") != json.loads(_text(work)):
        return None
    chunk, threads = found.get("chunk"), found.get("threads")
    return (chunk, threads) if type(chunk) is int is type(threads) and chunk >= 0 and threads >= 1 else None


def keep(work: Mapping[str, Any], chunk: int, threads: int) -> None:
    """Keep a choice for ``work``; nothing happens where it cannot be written: then it is tried again."""
    place = _file(work)
    if place is None:
        return
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, json.dumps({"work": work, "chunk": chunk, "threads": threads}, indent=1))
        for old in sorted(place.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-_KEPT]:
            old.unlink()


def _text(work: Mapping[str, Any]) -> str:
    return json.dumps(work, sort_keys=True)


def _file(work: Mapping[str, Any]) -> Path | None:
    where = folder()
    return where and where / f"{hashlib.sha256(_text(work).encode()).hexdigest()[:32]}.json"
