"""A SuperLink and a SuperExec as processes of this machine, which benchmarks and tests start.

A deployment starts them with scripts of its own (``perfed/sites/deploy/templates``).
"""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.processes import FlowerProcess, build_command, build_environment

READY = 60.0
"""Seconds that a SuperLink may take to start."""


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


def superlink(folder: Path, address: str, certificate: Certificate | None = None) -> FlowerProcess:
    """Start a SuperLink with its database and log in ``folder``, and wait until it answers.

    With a certificate it speaks TLS and takes only sites whose keys are registered. A run outlives it: it is started
    again with the same arguments, while :func:`superexec` keeps running.

    Args:
        folder: for ``superlink.db``, ``flower-superlink.log`` and Flower's own files.
        address: ``host:port`` to listen at.
        certificate: for TLS.
    """
    server = ServerAddress(address)
    secure = ["--insecure"] if certificate is None else [
        *("--ssl-ca-certfile", certificate.ca, "--ssl-certfile", certificate.certificate),
        *("--ssl-keyfile", certificate.key, "--enable-supernode-auth"),
    ]  # fmt: skip
    where = ("--host", server.host, "--port", server.port, "--database", folder / "superlink.db")
    process = _started(folder, "flower-superlink", *where, *secure, "--isolation", "process")
    ends = time.monotonic() + READY
    while time.monotonic() < ends and process.exit_code() is None:
        with suppress(OSError), socket.create_connection((server.host, server.port), 1):
            return process
        time.sleep(0.05)
    process.stop()
    raise RuntimeError((folder / "flower-superlink.log").read_text()[-2000:])


def superexec(folder: Path, address: str, ca: Path | None = None) -> FlowerProcess:
    """Start what starts the server program of each run; it goes on while the SuperLink is away."""
    secure = ["--insecure"] if ca is None else ["--root-certificates", ca]
    return _started(folder, "flower-superexec", "--runtime-api-address", address, *secure)


def register(home: Path, connection: str, public_key: Path, name: str) -> None:
    """Let the site with this key take part under ``name``, at the SuperLink that ``config.toml`` in ``home`` names."""
    words = build_command("flwr", "supernode", "register", public_key, connection, "--name", name)
    subprocess.run(words, env=build_environment(home), check=True, capture_output=True)


def _started(folder: Path, name: str, *arguments: object) -> FlowerProcess:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.log").open("ab") as log:
        return FlowerProcess(build_command(name, *arguments), folder / "flwr", log)
