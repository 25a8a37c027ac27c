"""The supported versions of Flower, and its commands as processes. This module does not import flwr.

Each command runs under a guard (``guard.py``), so that the command and all its children end when this process ends.
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
"""The supported versions as a requirement for pip."""


def check_flower() -> None:
    """Check that a supported version of Flower is installed.

    Raises:
        PerfedError: Flower is not installed, or its version is not supported.
    """
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise PerfedError(f"a federation of sites needs {VERSION_RANGE}: {extra_command('flower')}") from None
    if not MIN_VERSION <= tuple(int(part) for part in version.split(".")[:2]) < NEXT_VERSION:
        raise PerfedError(f"flwr {version} is installed, but perfed needs {VERSION_RANGE}: {extra_command('flower')}")


STOP_SECONDS = guard.GRACE + 3
"""The time in seconds that a process has to end after it was stopped."""

FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""The environment variables that keep Flower from contacting other hosts and from installing packages."""


def build_command(name: str, *arguments: object) -> list[str]:
    """Return the command line of one of Flower's programs, which is looked up in this Python environment.

    Raises:
        PerfedError: Flower is not installed, or its version is not supported.
    """
    check_flower()
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise PerfedError(f"{path} is missing in this environment: {extra_command('flower')}")
    return [str(path), *map(str, arguments)]


def build_environment(home: Path) -> dict[str, str]:
    """Return the environment variables for Flower's programs, which keep their files in ``home``; create ``home``."""
    home.mkdir(parents=True, exist_ok=True)
    programs = str(Path(sys.executable).parent)  # Flower starts its own programs by name
    path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **FLOWER_SETTINGS, "PATH": path, "FLWR_HOME": str(home.resolve())}


class FlowerProcess:
    """A running command of Flower, which ends by itself, when it is stopped, or when this process ends.

    Args:
        arguments: The command line.
        home: The folder of Flower's own files.
        out: An open file for the output of the command; by default a pipe, whose other end is :attr:`output`.
    """

    def __init__(self, arguments: Sequence[str], home: Path, out: int | IO[bytes] = subprocess.PIPE) -> None:
        guarded = [sys.executable, "-I", "-S", guard.__file__, *arguments]
        self._popen = subprocess.Popen(
            guarded, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=build_environment(home)
        )

    @property
    def output(self) -> IO[bytes]:
        """The pipe from which the output of the command can be read while it runs."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    def exit_code(self) -> int | None:
        """Return the exit code of the command; ``None`` while it runs."""
        return self._popen.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for the command and return its exit code; ``None`` if it still runs after ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(seconds)
        return None

    def stop(self) -> None:
        """Stop the command and all processes that it has started."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        if self.wait(STOP_SECONDS) is None:
            self._popen.kill()
            self._popen.wait()
