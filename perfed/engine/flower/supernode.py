"""A site's SuperNode under supervision: started again when it ends, and plain words for why it cannot connect."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from perfed.engine.flower.probe import Server, Unreachable, probe
from perfed.engine.flower.processes import Process, command
from perfed.errors import PerfedError

LONGEST = 30.0
"""Seconds between two attempts, at most."""
LEASE = 10.0
"""Seconds between two attempts while the server still holds the connection of a SuperNode that was killed."""
_STEADY = 60.0  # after so many seconds a SuperNode that ends has not failed to start
_LOOK = 0.2
_QUICK = {
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"
}  # seconds between looks for a message here: Flower's own is a second, which adds up
_SAYS = {
    "SuperNode ID: ": "connected to server {0}",
    "Connection successful after ": "connected to server {0}",
    "Connection attempt failed, retrying ": "server {0} does not answer; trying again",
}
"""What lines of Flower's log mean for the site; where another version says it otherwise, nothing is said."""
_NO_KEY, _NOT_ACTIVATED = "[code: 2001]", "[code: 2004]"  # in the log: Flower's exit code is 1 whatever happened


def supervise(
    server: Server, config: Mapping[str, str], folder: Path, note: Callable[[str], None], stop: threading.Event
) -> None:
    """Keep a SuperNode of this site running until ``stop``.

    Args:
        server: where the SuperLink is, and how it is reached.
        config: the SuperNode's node config: the site's name and the socket of its worker.
        folder: for ``supernode.log`` and Flower's own files.
        note: gets one line for each thing that a person may want to know; the same line only once in a row.
        stop: ends the SuperNode and this function within seconds.

    Raises:
        PerfedError: what another attempt would not mend: see :func:`~perfed.engine.flower.probe.probe`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last, wait = "", 1.0

    def say(line: str) -> None:
        nonlocal last
        if line != last:
            note(line)
            last = line

    while not stop.is_set():
        began = time.monotonic()
        try:
            probe(server)
            line, again = _once(server, config, folder, say, stop)
        except Unreachable as error:
            line, again = f"{error}; trying again", 0.0
        if stop.is_set():
            return
        wait = 1.0 if time.monotonic() - began > _STEADY else min(2 * wait, LONGEST)
        say(line)
        stop.wait(again or wait)


def _once(
    server: Server, config: Mapping[str, str], folder: Path, say: Callable[[str], None], stop: threading.Event
) -> tuple[str, float]:
    """Run a SuperNode until it ends: why it did, and the seconds to wait (0: as the back-off says)."""
    process = Process(_command(server, config), folder / "flwr", folder / "supernode.log", _QUICK)
    try:
        while (code := process.wait(_LOOK)) is None:
            if stop.is_set():
                return "", 0.0
            for line in process.news():
                for said in (meaning for sign, meaning in _SAYS.items() if sign in line):
                    say(said.format(server.address))
    finally:
        process.stop()
    said = process.said()
    if _NO_KEY in said:
        raise PerfedError(f"server {server.address} authenticates its sites: this site needs its key (--key)")
    if _NOT_ACTIVATED in said:
        held = "the server still holds a connection with this site's key: the last one, for up to a minute"
        return f"{held}, or that of another 'perfed site' with the key; trying again", LEASE
    return f"the SuperNode ended with exit code {code} (see {process.log}); starting it again", 0.0


def _command(server: Server, config: Mapping[str, str]) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secure = ["--insecure"] if server.ca is None else ["--root-certificates", server.ca]
    key = [] if server.key is None else ["--auth-supernode-private-key", server.key]
    words = " ".join(f'{name}="{_plain(value)}"' for name, value in sorted(config.items()))
    here = ("--host", "127.0.0.1", "--port", port)
    return command("flower-supernode", "--superlink", server.address, *secure, *key, *here, "--node-config", words)


def _plain(value: str) -> str:
    if any(sign in value for sign in "\"'\\\n"):
        raise PerfedError(f"{value!r}: quotes, backslashes and line breaks cannot be in a node config")
    return value
