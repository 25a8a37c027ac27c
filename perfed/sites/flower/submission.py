"""Submitting a run to a SuperLink with Flower's own commands: the run's log, its true status."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from perfed.errors import PerfedError
from perfed.sites.flower.processes import FlowerProcess, build_command

TIMEOUT = 30.0
"""Seconds that one of Flower's commands may take."""
MAX_SILENCE = 60.0
"""Seconds without an answer of the server after which following a run ends."""
_LOOK, _SELDOM = 5.0, 20.0  # seconds between two looks for the status, each a process: server gone, and there
_NAME = "perfed"
_AGAIN = "when the SuperLink is there again, submit again: the run goes on where it was"
_OWN = ("Using SuperLink: ", "Starting logstream for run_id", "╭", "│", "╰")  # what the command itself says


class Submitter:
    """One who may submit runs to a server.

    Args:
        home: a folder for Flower's own files; its configuration is written there.
        address: ``host:port`` of the SuperLink.
        ca: certificate of the authority that signed the server's; ``None``: no TLS.
    """

    def __init__(self, home: Path, address: str, ca: Path | None = None) -> None:
        self._home, self._address = home, address
        secure: dict[str, object] = {"insecure": True} if ca is None else {"root-certificates": str(ca.resolve())}
        home.mkdir(parents=True, exist_ok=True)
        tables = {"superlink": {"default": _NAME, _NAME: {"address": address, **secure}}}
        (home / "config.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")

    def submit(self, app: Path, config: Mapping[str, object]) -> int:
        """Start a run of the app in a folder; its number.

        Args:
            app: a folder with ``pyproject.toml`` and modules, at most 10 MB.
            config: what the run's configuration has in place of the app's defaults.

        Raises:
            PerfedError: the server does not answer, or refuses the app.
        """
        file = self._home / "run.toml"
        file.write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
        changed = ("--run-config", file) if config else ()
        return int(self._ask("run", app, _NAME, *changed)["run-id"])

    def read_status(self, run: int) -> str:
        """``pending``, ``starting``, ``running``, or ``finished:`` with ``completed``, ``failed`` or ``stopped``.

        Raises:
            PerfedError: the server does not answer, or has no such run.
        """
        return str(self._ask("ls", _NAME, "--run-id", run)["runs"][0]["status"])

    def stop(self, run: int) -> None:
        """End a run.

        Raises:
            PerfedError: the server does not answer, or the run has ended already.
        """
        self._ask("stop", run, _NAME)

    def follow_log(
        self, run: int, write: Callable[[str], None], deadline: float, note: Callable[[str], None] = lambda line: None
    ) -> str:
        """Write the lines of the run's log as they come, until it ends; its status then.

        A server that is started again meanwhile interrupts nothing; ``note`` gets a line when it has gone, and one when
        it is back.

        Raises:
            PerfedError: the run has not ended after ``deadline`` seconds, or the server does not answer for a minute.
        """
        ends, heard, gone = time.monotonic() + deadline, time.monotonic(), False
        lines = _Lines(build_command("flwr", "log", run, _NAME, "--stream"), self._home)
        try:
            while True:
                lines.write_until(time.monotonic() + (_LOOK if gone else _SELDOM), write)  # or until the log ends
                try:
                    status, heard = self.read_status(run), time.monotonic()
                    if gone:
                        note("the SuperLink answers again")
                    gone = False
                except PerfedError as error:
                    if time.monotonic() - heard > MAX_SILENCE:
                        raise PerfedError(f"no answer for {MAX_SILENCE:.0f} seconds: {error}; {_AGAIN}") from None
                    if not gone:
                        note(f"the SuperLink does not answer; waiting for it, {MAX_SILENCE:.0f} seconds at most")
                    status, gone = "", True
                lines.resume()
                if status.startswith("finished"):
                    lines.write_until(time.monotonic() + _LOOK, write)
                    return status
                if time.monotonic() > ends:
                    raise PerfedError(f"run {run} has not ended after {deadline:.0f} seconds; it goes on")
        finally:
            lines.close()

    def _ask(self, *arguments: object) -> Any:
        process = FlowerProcess(build_command("flwr", *arguments, "--format", "json"), self._home)
        timer = threading.Timer(TIMEOUT, process.stop)
        timer.start()
        try:
            with process.output as output:
                text = output.read().decode(errors="replace")
        finally:
            timer.cancel()
            process.stop()
        found = _last_json(text)
        if found is None or not found.get("success"):
            said = (found or {}).get("error-message") or text or f"no answer for {TIMEOUT:.0f} seconds"
            last = str(said).strip().rpartition("\n\n")[2]  # behind what the command says of itself
            raise PerfedError(f"server {self._address}: {' '.join(last.split())}")
        return found


class _Lines:
    """A log that a command follows; what was written is not written again by a second command."""

    def __init__(self, following: list[str], home: Path) -> None:
        self._following, self._home = following, home
        self._written = 0
        self._open()

    def _open(self) -> None:
        self._process = FlowerProcess(self._following, self._home)
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._skip, self._ended = self._written, False
        threading.Thread(target=_read, args=(self._process, self._queue), daemon=True).start()

    def resume(self) -> None:
        """Start the command again if it has failed, as it does when the server goes away."""
        if self._ended and self._process.exit_code() != 0:
            self._open()

    def write_until(self, ends: float, write: Callable[[str], None]) -> None:
        """Write what comes, until ``ends`` or until the command ends."""
        while not self._ended and (left := ends - time.monotonic()) > 0:
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                return
            if line is None:
                self._ended = True
                self.close()
            elif any(sign in line for sign in _OWN):
                continue
            elif self._skip:
                self._skip -= 1
            else:
                self._written += 1
                write(line)

    def close(self) -> None:
        """End the command that follows the log."""
        self._process.stop()


def _read(process: FlowerProcess, into: queue.Queue[str | None]) -> None:
    with process.output as output:
        for line in output:
            into.put(line.decode(errors="replace").rstrip("\n"))
    into.put(None)


def _last_json(text: str) -> dict[str, Any] | None:
    start = text.find("{")
    while start >= 0:
        try:
            found = json.loads(text[start:])
        except ValueError:
            start = text.find("{", start + 1)
            continue
        return found if isinstance(found, dict) else None
    return None
