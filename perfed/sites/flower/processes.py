"""Flower: which versions of it this is made for, and its commands as processes. Nothing here imports flwr.

Each runs under a guard (``guard.py``), so that it and all that it starts end when this process does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO

from perfed.errors import PerfedError
from perfed.sites.flower import guard
from perfed.system import extra_command

MIN_VERSION, NEXT_VERSION = (1, 41), (1, 43)
VERSION_RANGE = f"flwr >={'.'.join(map(str, MIN_VERSION))},<{'.'.join(map(str, NEXT_VERSION))}"
"""The same for people, and for pip."""


def check_flower() -> None:
    """Do nothing where a Flower is installed that perfed was tested with.

    Raises:
        PerfedError: there is none, or another version.
    """
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise PerfedError(f"a federation of sites needs {VERSION_RANGE}: {extra_command('flower')}") from None
    if not MIN_VERSION <= tuple(int(part) for part in version.split(".")[:2]) < NEXT_VERSION:
        raise PerfedError(f"flwr {version} is installed, but perfed needs {VERSION_RANGE}: {extra_command('flower')}")


STOP = guard.GRACE + 3
"""Seconds in which a process has ended after it was told so."""

FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""What keeps Flower from calling others and from installing packages."""


def build_command(name: str, *arguments: object) -> list[str]:
    """One of Flower's programs, of this Python's environment, and its arguments.

    Raises:
        PerfedError: Flower is not installed, or another version.
    """
    check_flower()
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise PerfedError(f"{path} is missing in this environment: {extra_command('flower')}")
    return [str(path), *map(str, arguments)]


def build_environment(home: Path) -> dict[str, str]:
    """This process's environment for Flower's programs, with their files in ``home``."""
    home.mkdir(parents=True, exist_ok=True)
    here = str(Path(sys.executable).parent)  # Flower starts its own programs by name
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **FLOWER_SETTINGS, "PATH": path, "FLWR_HOME": str(home.resolve())}


class FlowerProcess:
    """A command that runs until it ends by itself, is stopped, or this process ends.

    Args:
        arguments: the command.
        home: Flower's own files.
        out: an open file for its output; if not given, a pipe, which is :attr:`output`.
    """

    def __init__(self, arguments: Sequence[str], home: Path, out: int | IO[bytes] = subprocess.PIPE) -> None:
        guarded = [sys.executable, "-I", "-S", guard.__file__, *arguments]
        own = build_environment(home)
        self._popen = subprocess.Popen(guarded, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=own)

    @property
    def output(self) -> IO[bytes]:
        """What the command prints, as it comes."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._popen.poll()

    def wait(self, seconds: float) -> int | None:
        """Its exit code, ``None`` where it still runs after ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(seconds)
        return None

    def stop(self) -> None:
        """End it and all that it started."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        if self.wait(STOP) is None:
            self._popen.kill()
            self._popen.wait()
