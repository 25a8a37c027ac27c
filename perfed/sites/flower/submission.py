"""The submission of runs to a SuperLink with Flower's own commands, and the log and status of submitted runs."""

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
"""The time limit in seconds for one of Flower's commands."""
MAX_SILENCE = 60.0
"""The time in seconds without an answer of the server after which a run is no longer followed."""
# The time in seconds between two queries of the status, each of which starts a process, without and with a server.
_SHORT_PAUSE, _LONG_PAUSE = 5.0, 20.0
_NAME = "perfed"
_RESUBMIT = "submit again when the SuperLink is available: the run continues where it was"
# The beginnings of lines that the command itself prints.
_COMMAND_LINES = ("Using SuperLink: ", "Starting logstream for run_id", "╭", "│", "╰")


class Submitter:
    """A client of a SuperLink that submits and follows runs.

    Args:
        home: The folder for Flower's own files; Flower's configuration is written there.
        address: The address of the SuperLink as ``host:port``.
        ca: The certificate of the authority that signed the server's certificate; ``None`` for no TLS.
    """

    def __init__(self, home: Path, address: str, ca: Path | None = None) -> None:
        self._home, self._address = home, address
        secure: dict[str, object] = {"insecure": True} if ca is None else {"root-certificates": str(ca.resolve())}
        home.mkdir(parents=True, exist_ok=True)
        tables = {"superlink": {"default": _NAME, _NAME: {"address": address, **secure}}}
        (home / "config.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")

    def submit(self, app: Path, config: Mapping[str, object]) -> int:
        """Start a run of an app and return the number of the run.

        Args:
            app: The folder of the app, with ``pyproject.toml`` and modules, of at most 10 MB.
            config: The settings of the run that replace the app's defaults.

        Raises:
            PerfedError: The server does not answer, or refuses the app.
        """
        file = self._home / "run.toml"
        file.write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
        options = ("--run-config", file) if config else ()
        return int(self._run_command("run", app, _NAME, *options)["run-id"])

    def read_status(self, run: int) -> str:
        """Return the status of a run.

        It is ``pending``, ``starting``, ``running``, or ``finished:`` with ``completed``, ``failed`` or ``stopped``.

        Raises:
            PerfedError: The server does not answer, or has no such run.
        """
        return str(self._run_command("ls", _NAME, "--run-id", run)["runs"][0]["status"])

    def stop(self, run: int) -> None:
        """Stop a run.

        Raises:
            PerfedError: The server does not answer, or the run has already ended.
        """
        self._run_command("stop", run, _NAME)

    def follow_log(
        self, run: int, write: Callable[[str], None], deadline: float, note: Callable[[str], None] = lambda line: None
    ) -> str:
        """Write the lines of a run's log as they appear until the run ends; return its final status.

        A restart of the server does not interrupt this.

        Args:
            run: The number of the run.
            write: Is called with each line of the log.
            deadline: The time limit in seconds.
            note: Is called with a line when the server stops answering, and when it answers again.

        Raises:
            PerfedError: The run has not ended after ``deadline`` seconds, or the server does not answer for a minute.
        """
        ends, last_answer, is_silent = time.monotonic() + deadline, time.monotonic(), False
        lines = _FollowedLog(build_command("flwr", "log", run, _NAME, "--stream"), self._home)
        try:
            while True:
                lines.write_until(
                    time.monotonic() + (_SHORT_PAUSE if is_silent else _LONG_PAUSE), write
                )  # or until the log ends
                try:
                    status, last_answer = self.read_status(run), time.monotonic()
                    if is_silent:
                        note("the SuperLink answers again")
                    is_silent = False
                except PerfedError as error:
                    if time.monotonic() - last_answer > MAX_SILENCE:
                        raise PerfedError(f"no answer for {MAX_SILENCE:.0f} seconds: {error}; {_RESUBMIT}") from None
                    if not is_silent:
                        note(f"the SuperLink does not answer; waiting for it, {MAX_SILENCE:.0f} seconds at most")
                    status, is_silent = "", True
                lines.resume()
                if status.startswith("finished"):
                    lines.write_until(time.monotonic() + _SHORT_PAUSE, write)
                    return status
                if time.monotonic() > ends:
                    raise PerfedError(f"run {run} has not ended after {deadline:.0f} seconds; it continues")
        finally:
            lines.close()

    def _run_command(self, *arguments: object) -> Any:
        """Run one of Flower's commands and return its output, which is JSON.

        Raises:
            PerfedError: The command fails or does not end in time.
        """
        process = FlowerProcess(build_command("flwr", *arguments, "--format", "json"), self._home)
        timer = threading.Timer(TIMEOUT, process.stop)
        timer.start()
        try:
            with process.output as output:
                text = output.read().decode(errors="replace")
        finally:
            timer.cancel()
            process.stop()
        response = _parse_last_json(text)
        if response is None or not response.get("success"):
            error = (response or {}).get("error-message") or text or f"no answer for {TIMEOUT:.0f} seconds"
            last = str(error).strip().rpartition("\n\n")[2]  # the part after the command's own preface
            raise PerfedError(f"server {self._address}: {' '.join(last.split())}")
        return response


class _FollowedLog:
    """The log of a run, which is read by a command that may be restarted; no line is written twice.

    Args:
        arguments: The command line.
        home: The folder of Flower's own files.
    """

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._arguments, self._home = arguments, home
        self._written = 0
        self._start_command()

    def _start_command(self) -> None:
        self._process = FlowerProcess(self._arguments, self._home)
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._skip, self._ended = self._written, False
        threading.Thread(target=_read_lines, args=(self._process, self._queue), daemon=True).start()

    def resume(self) -> None:
        """Start the command again if it has failed, as it does when the server stops."""
        if self._ended and self._process.exit_code() != 0:
            self._start_command()

    def write_until(self, ends: float, write: Callable[[str], None]) -> None:
        """Write the lines of the log as they appear, until the time ``ends`` or until the command ends."""
        while not self._ended and (seconds := ends - time.monotonic()) > 0:
            try:
                line = self._queue.get(timeout=seconds)
            except queue.Empty:
                return
            if line is None:
                self._ended = True
                self.close()
            elif any(sign in line for sign in _COMMAND_LINES):
                continue
            elif self._skip:
                self._skip -= 1
            else:
                self._written += 1
                write(line)

    def close(self) -> None:
        """Stop the command that reads the log."""
        self._process.stop()


def _read_lines(process: FlowerProcess, lines: queue.Queue[str | None]) -> None:
    """Put each line of a process's output into a queue, and ``None`` at the end."""
    with process.output as output:
        for line in output:
            lines.put(line.decode(errors="replace").rstrip("\n"))
    lines.put(None)


def _parse_last_json(text: str) -> dict[str, Any] | None:
    """Return the JSON object at the end of a text; ``None`` if there is none."""
    start = text.find("{")
    while start >= 0:
        try:
            value = json.loads(text[start:])
        except ValueError:
            start = text.find("{", start + 1)
            continue
        return value if isinstance(value, dict) else None
    return None
