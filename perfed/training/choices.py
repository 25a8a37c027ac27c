"""A cache of the choices that trials on this machine have made, so that the same work is tried once per user.

Each choice is a separate file, named by a hash of its work, so that concurrent processes lose nothing. A file that is
damaged, or cannot be read or written, is treated as absent.
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

_MOST_CHOICES = 1000  # number of choices in the folder; the oldest are deleted


def cache_folder() -> Path | None:
    """Return ``$PERFED_PLANS``, or ``~/.cache/perfed/plans``.

    It is ``None`` if the variable is empty, which disables the cache.
    """
    if (variable := os.environ.get("PERFED_PLANS")) is not None:
        return Path(variable) if variable else None
    with suppress(RuntimeError):  # the user has no home directory
        return own_folder() / "plans"
    return None


def find_choice(work: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the chunk and threads that were chosen for ``work`` (plain values), or ``None`` if there is no choice."""
    path = _choice_path(work)
    if path is None:
        return None
    try:
        choice = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(choice, dict) or choice.get("work") != json.loads(_serialise_work(work)):
        return None
    chunk, threads = choice.get("chunk"), choice.get("threads")
    return (chunk, threads) if type(chunk) is int is type(threads) and chunk >= 0 and threads >= 1 else None


def save_choice(work: Mapping[str, Any], chunk: int, threads: int) -> None:
    """Save a choice for ``work``; if the file cannot be written, the work is tried again next time."""
    path = _choice_path(work)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"work": work, "chunk": chunk, "threads": threads}, indent=1))
        for oldest in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-_MOST_CHOICES]:
            oldest.unlink()


def _serialise_work(work: Mapping[str, Any]) -> str:
    return json.dumps(work, sort_keys=True)


def _choice_path(work: Mapping[str, Any]) -> Path | None:
    folder = cache_folder()
    return folder and folder / f"{hashlib.sha256(_serialise_work(work).encode()).hexdigest()[:32]}.json"
