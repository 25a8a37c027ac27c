"""The index that ``perfed list``, help and completion read: the output of :mod:`perfed.cli.listing`, without torch.

A wheel contains it (``hatch_build.py``). In a checkout another process builds it at first use, and it is cached.
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
"""The arguments of ``perfed list``."""

_PACKAGE = Path(__file__).parents[1]
_WHEEL_INDEX = Path(__file__).with_name("index.json")
_MAX_CACHED = 8  # largest number of cached indexes, of several checkouts or states of one


@cache
def index() -> dict[str, Any]:
    """Return the lists by name, and the names that help and hints need.

    The latter are under ``engines``, ``baselines``, ``training`` and ``settings``.

    Raises:
        PerfedError: the index cannot be built, for example because a module of the checkout has an error.
    """
    digest = digest_of_sources()
    cached = _cache_folder() / f"index-{digest[:16]}.json"
    for file in (_WHEEL_INDEX, cached):
        if (content := _read_index(file, digest)) is not None:
            return content
    text = _build_index()
    _save_index(cached, text)
    content = json.loads(text)
    assert isinstance(content, dict)
    return content


def fill_index(text: str) -> str:
    """Return a help text in which ``{engines}`` and ``{baselines}`` are replaced by their names."""
    for name in ("engines", "baselines"):
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", ", ".join(index()[name]))
    return text


def digest_of_sources() -> str:
    """Return a hash of the modules, experiments and leaderboards of this package, from which the lists are built."""
    digest = hashlib.sha256()
    for file in sorted(file for file in _PACKAGE.rglob("*") if file.suffix in (".py", ".toml")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _read_index(file: Path, digest: str) -> dict[str, Any] | None:
    """Return the content of a cached index; ``None`` if it is missing, damaged or belongs to other sources."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("sources") == digest else None


def _build_index() -> str:
    """Return the index as printed by :mod:`perfed.cli.listing` in a new process, without the user's registrations."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "perfed.cli.listing"]
    process = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, encoding="utf-8")
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise PerfedError(f"{_PACKAGE}: methods and data sets cannot be listed: {reason}")
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
    with suppress(OSError):  # another process may remove them at the same time
        for old in sorted(file.parent.glob("index-*.json"), key=lambda path: path.stat().st_mtime)[:-_MAX_CACHED]:
            old.unlink()
