"""What ``perfed list``, help and completion say: what :mod:`perfed.cli.listing` makes of these sources, without torch.

A wheel has it (``hatch_build.py``). A checkout makes it at first use, in another process, and keeps it for the user.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from perfed.errors import PerfedError
from perfed.system import write_atomic

LISTS = ("methods", "datasets", "experiments", "extensions", "leaderboards", "policies", "aggregations")
"""What can be listed."""

_PACKAGE = Path(__file__).parents[1]
_OF_WHEEL = Path(__file__).with_name("index.json")
_KEPT = 8  # checkouts, and states of one, whose index the cache holds


@cache
def index() -> dict[str, Any]:
    """Return the lists by name, and what help and hints need: ``engines``, ``baselines``, ``training``, ``settings``.

    Raises:
        PerfedError: they cannot be made, as in a checkout with a mistake in it.
    """
    digest = digest_of_sources()
    kept = _cache_folder() / f"index-{digest[:16]}.json"
    for file in (_OF_WHEEL, kept):
        if (found := _read(file, digest)) is not None:
            return found
    text = _build_index()
    _save_index(kept, text)
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def fill_index(text: str) -> str:
    """Return a help text in which ``{engines}`` and ``{baselines}`` are replaced by their names."""
    for name in ("engines", "baselines"):
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", ", ".join(index()[name]))
    return text


def digest_of_sources() -> str:
    """Return a hash of the modules, experiments and leaderboards of this package, from which the lists are built."""
    found = hashlib.sha256()
    for file in sorted(file for file in _PACKAGE.rglob("*") if file.suffix in (".py", ".toml")):
        content = file.read_bytes()
        found.update(f"{file.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _read(file: Path, digest: str) -> dict[str, Any] | None:
    """Return the content of a cached index; ``None`` if it is missing, damaged or belongs to other sources."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("sources") == digest else None


def _build_index() -> str:
    """Return the index as printed by :mod:`perfed.cli.listing` in a new process, without the user's registrations."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "perfed.cli.listing"]
    process = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, encoding="utf-8")
    if process.returncode:
        why = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise PerfedError(f"{_PACKAGE}: methods and data sets cannot be listed: {why}")
    return process.stdout


def _cache_folder() -> Path:
    with suppress(RuntimeError):  # a user without a home
        return Path.home() / ".cache" / "perfed"
    return Path(os.devnull)


def _save_index(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    except OSError as error:
        print(f"perfed: {file}: cannot be kept ({error.strerror}); lists take seconds each time", file=sys.stderr)
        return
    with suppress(OSError):  # another process removes them too
        for old in sorted(file.parent.glob("index-*.json"), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            old.unlink()
