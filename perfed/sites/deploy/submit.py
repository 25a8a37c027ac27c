"""The command ``perfed submit``: start a deployment's run, follow it to its end, or stop it; needs no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfed.data.reading import checked, read_json
from perfed.errors import PerfedError, shorten_list
from perfed.sites.deploy.deployment import Deployment
from perfed.sites.flower.submission import MAX_SILENCE, Submitter
from perfed.system import create_private_files, lock_folder, write_atomic

JOURNAL = "journal"
"""The folder of a run's directory that the server's program locks while it is running."""
LINE = "perfed: "
"""The prefix of the lines that a run's program prints for its submitter; JSON follows."""
RESULTS = "server/run"
"""The default folder of a run's results in a deployment's directory."""
_HOME = "server/flwr-submit"  # the folder of Flower's files on the submitter's side
_SUBMITTED = "submitted.json"  # in _HOME: the number of the last submitted run of each directory of results
_LONGEST = 365 * 86400.0
_LOOK = 0.2  # seconds between two checks of whether a run has ended


@create_private_files()
def submit(folder: Path, config: Mapping[str, Any], show: Callable[[dict[str, Any]], None], log: Path) -> None:
    """Submit the run of the deployment in ``folder``, and follow it to its end; a running one is only followed.

    Args:
        folder: the folder of the deployment.
        config: the fields of :class:`perfed.sites.deploy.server_app.Settings`.
        show: called with each progress report of the run: ``stage``; ``round`` with ``rounds`` and ``accuracy``; or
            ``done``.
        log: the file for everything else that the run prints.

    Raises:
        PerfedError: the server does not answer, or the run ended early; the message says why.
    """
    submitter, out = _open_submitter(folder), str(config["out"])
    reasons: list[str] = []

    def read_line(text: str) -> None:
        position = text.find(LINE + "{")
        if position < 0:
            with log.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            return
        report = json.loads(text[position + len(LINE) :])
        if "error" in report:
            reasons.append(str(report["error"]))
        else:
            show(report)

    def follow_run(run: int) -> str:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"run {run}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
        return submitter.follow_log(run, read_line, _LONGEST, lambda text: show({"stage": text}))

    status, run = "", _read_submitted_runs(folder).get(out)
    if run is not None and is_running(Path(out)):
        show({"stage": "this run goes on already; what it has said so far:"})
        status = follow_run(run)
    if status in ("", "finished:failed") and not reasons:  # nothing was running, or its SuperLink was killed
        run = submitter.submit(folder / "app", config)
        write_atomic(
            folder / _HOME / _SUBMITTED, json.dumps({**_read_submitted_runs(folder), out: run}, indent=1) + "\n"
        )
        status = follow_run(run)
    if status != "finished:completed":
        by_superlink = f"the SuperLink has ended the run ('{status}', see {log})"
        end = "somebody has ended the run" if status == "finished:stopped" else by_superlink
        raise PerfedError(reasons[-1] if reasons else f"{end}; submit again, and it goes on where it was")


@create_private_files()
def stop(folder: Path, out: Path) -> int:
    """Stop the run of the deployment in ``folder`` whose results are in ``out``; submitted again, it continues.

    Returns:
        the number of the last completed round; 0 before the first.

    Raises:
        PerfedError: no such run is running, the server does not answer, or its program has not ended after a minute.
    """
    submitter, submitted_runs = _open_submitter(folder), _read_submitted_runs(folder)
    run = submitted_runs.get(str(out))
    if run is None or submitter.read_status(run).startswith("finished"):
        running = [directory for directory in submitted_runs if is_running(Path(directory))]
        raise PerfedError(
            f"{out}: no run goes on there" + (f"; one does in {shorten_list(running)} (--out)" if running else "")
        )
    submitter.stop(run)
    ends = time.monotonic() + MAX_SILENCE
    while is_running(out):
        if time.monotonic() > ends:
            raise PerfedError(f"{out}: the run was told to end, and is still at work {MAX_SILENCE:.0f} seconds later")
        time.sleep(_LOOK)
    from perfed.run.checkpoint_files import CheckpointFiles  # imports torch

    return max(CheckpointFiles(out).newest()[0], 0)


def is_running(out: Path) -> bool:
    """Return whether a server's program on this machine is running the run in ``out``."""
    try:
        with lock_folder(out / JOURNAL):
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True


def _open_submitter(folder: Path) -> Submitter:
    deployment = Deployment.read(folder)
    ca = folder / "server" / "tls" / "ca.crt" if deployment.tls else None
    return Submitter(folder / _HOME, f"127.0.0.1:{deployment.superlink_port}", ca)


def _read_submitted_runs(folder: Path) -> dict[str, int]:
    """Return Flower's number of the last submitted run of each directory of results."""
    file = folder / _HOME / _SUBMITTED
    return checked(dict[str, int], read_json(file), file) if file.exists() else {}
