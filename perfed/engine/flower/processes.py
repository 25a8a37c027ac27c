"""Flower's programs as processes: a server's SuperLink and SuperExec, and its commands. Nothing here imports flwr.

Each runs under a guard (``guard.py``), so that it and all that it starts end when this process does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from perfed.engine.flower import guard
from perfed.engine.flower.probe import Server
from perfed.engine.flower.version import check_flower
from perfed.errors import PerfedError

READY = 60.0
"""Seconds that a SuperLink may take to start."""
STOP = guard.GRACE + 3
"""Seconds in which a process has ended after it was told so."""

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""What keeps Flower from calling others and from installing packages."""

_TAIL = 2**16  # bytes of a log


@dataclass(frozen=True)
class Certificate:
    """What a server needs for TLS.

    Attributes:
        ca: certificate of the authority that signed it.
        certificate: the server's.
        key: its private key.
    """

    ca: Path
    certificate: Path
    key: Path


def command(name: str, *arguments: object) -> list[str]:
    """One of Flower's programs, of this Python's environment, and its arguments.

    Raises:
        PerfedError: Flower is not installed, or another version.
    """
    check_flower()
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise PerfedError(f"{path} is missing: pip install 'perfed[flower]' in this environment")
    return [str(path), *map(str, arguments)]


def environment(home: Path) -> dict[str, str]:
    """This process's environment for Flower's programs, with their files in ``home``."""
    home.mkdir(parents=True, exist_ok=True)
    here = str(Path(sys.executable).parent)  # Flower starts its own programs by name
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **SWITCHES, "PATH": path, "FLWR_HOME": str(home.resolve())}


class Process:
    """A command that runs until it ends by itself, is stopped, or this process ends.

    Args:
        arguments: the command.
        home: Flower's own files.
        log: where its output is added; ``None``: to a pipe, as :attr:`output`.
    """

    def __init__(self, arguments: Sequence[str], home: Path, log: Path | None) -> None:
        guarded = [sys.executable, "-I", "-S", guard.__file__, *arguments]
        own = environment(home)
        self.log = log
        out = subprocess.PIPE if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._begin = 0 if log is None else log.stat().st_size
        try:
            self._popen = subprocess.Popen(
                guarded, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=own
            )
        finally:
            if log is not None:
                os.close(out)

    @property
    def output(self) -> IO[bytes]:
        """What the command prints, as it comes."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    @property
    def pid(self) -> int:
        """Number of the guard's process."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._popen.poll()

    def wait(self, seconds: float) -> int | None:
        """Its exit code, ``None`` where it still runs after ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(seconds)
        return None

    def said(self) -> str:
        """The last of what it has written into its log, without lines that are empty."""
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self._begin, self.log.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace")
        return "\n".join(line for line in text.splitlines() if line.strip())

    def stop(self) -> None:
        """End it and all that it started."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        if self.wait(STOP) is None:
            self._popen.kill()
            self._popen.wait()


def superlink(folder: Path, address: str, certificate: Certificate | None = None) -> Process:
    """Start a SuperLink with its database and log in ``folder``, and wait until it answers.

    With a certificate it speaks TLS and takes only sites whose keys are registered. A run outlives it: it is started
    again with the same arguments, while :func:`superexec` keeps running.

    Args:
        folder: for ``superlink.db``, ``superlink.log`` and Flower's own files.
        address: ``host:port`` to listen at.
        certificate: for TLS.

    Raises:
        PerfedError: the port is in use, or it did not start.
    """
    server = Server(address)
    _free(server)
    secure = ["--insecure"] if certificate is None else [
        *("--ssl-ca-certfile", certificate.ca, "--ssl-certfile", certificate.certificate),
        *("--ssl-keyfile", certificate.key, "--enable-supernode-auth"),
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    arguments = command(
        "flower-superlink", *("--host", server.host, "--port", server.port), *secure,
        *("--database", folder / "superlink.db", "--isolation", "process"),
    )  # fmt: skip
    process = Process(arguments, folder / "flwr", folder / "superlink.log")
    ends = time.monotonic() + READY
    while not _listens(server):
        if process.exit_code() is not None or time.monotonic() > ends:
            process.stop()
            last = process.said().splitlines()[-1:]
            raise PerfedError(f"the SuperLink at {address} did not start: {' '.join(last)} (see {process.log})")
        time.sleep(0.05)
    return process


def superexec(folder: Path, address: str, ca: Path | None = None) -> Process:
    """Start what starts the server program of each run; it goes on while the SuperLink is away."""
    folder.mkdir(parents=True, exist_ok=True)
    secure = ["--insecure"] if ca is None else ["--root-certificates", ca]
    arguments = command("flower-superexec", "--runtime-api-address", address, *secure)
    return Process(arguments, folder / "flwr", folder / "superexec.log")


def _free(server: Server) -> None:
    with socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET) as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind((server.host, server.port))
        except OSError as error:
            raise PerfedError(f"cannot listen at {server.address}: {error.strerror}; choose another port") from None


def _listens(server: Server) -> bool:
    with suppress(OSError), socket.create_connection((server.host, server.port), 1):
        return True
    return False
