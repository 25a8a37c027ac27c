"""``perfed submit``: start a deployment's run, follow it, and know how it ended; without torch."""

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
"""Folder of a run's directory: its server's program keeps it locked while it is at work."""
LINE = "perfed: "
"""What a line of a run's program for who has submitted it begins with; JSON follows."""
RESULTS = "server/run"
"""Where a run's results are in a deployment's directory."""
_HOME = "server/flwr-submit"  # Flower's files of who submits
_SUBMITTED = "submitted.json"  # beside them: by directory of results, the number of the run that was submitted last
_LONGEST = 365 * 86400.0
_LOOK = 0.2  # seconds between two looks whether a run has ended


@create_private_files()
def submit(folder: Path, config: Mapping[str, Any], show: Callable[[dict[str, Any]], None], log: Path) -> None:
    """Submit the run of the deployment in ``folder`` and follow it to its end; one that goes on already is followed.

    Args:
        folder: of the deployment.
        config: see :class:`perfed.sites.deploy.server_app.Settings`.
        show: gets what the run tells as it goes: ``stage``, ``round`` with ``rounds`` and ``accuracy``, ``done``.
        log: file for everything else that it prints.

    Raises:
        PerfedError: the server does not answer, or the run did not come to its end; says why.
    """
    submitter, out = _submitter(folder), str(config["out"])
    reasons: list[str] = []

    def line(text: str) -> None:
        at = text.find(LINE + "{")
        if at < 0:
            with log.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            return
        told = json.loads(text[at + len(LINE) :])
        if "error" in told:
            reasons.append(str(told["error"]))
        else:
            show(told)

    def followed(run: int) -> str:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"run {run}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
        return submitter.follow_log(run, line, _LONGEST, lambda text: show({"stage": text}))

    status, run = "", _submitted(folder).get(out)
    if run is not None and is_running(Path(out)):
        show({"stage": "this run goes on already; what it has said so far:"})
        status = followed(run)
    if status in ("", "finished:failed") and not reasons:  # there was none, or its SuperLink was killed
        run = submitter.submit(folder / "app", config)
        write_atomic(folder / _HOME / _SUBMITTED, json.dumps({**_submitted(folder), out: run}, indent=1) + "\n")
        status = followed(run)
    if status != "finished:completed":
        how = f"the SuperLink has ended the run ('{status}', see {log})"
        ended = "somebody has ended the run" if status == "finished:stopped" else how
        raise PerfedError(reasons[-1] if reasons else f"{ended}; submit again, and it goes on where it was")


@create_private_files()
def stop(folder: Path, out: Path) -> int:
    """End the run of the deployment in ``folder`` whose results are in ``out``; submitted again, it goes on.

    Returns:
        The last round that is done; 0 before the first.

    Raises:
        PerfedError: no such run goes on, the server does not answer, or its program is still at work a minute later.
    """
    submitter, known = _submitter(folder), _submitted(folder)
    run = known.get(str(out))
    if run is None or submitter.read_status(run).startswith("finished"):
        others = [other for other in known if is_running(Path(other))]
        raise PerfedError(
            f"{out}: no run goes on there" + (f"; one does in {shorten_list(others)} (--out)" if others else "")
        )
    submitter.stop(run)
    ends = time.monotonic() + MAX_SILENCE
    while is_running(out):
        if time.monotonic() > ends:
            raise PerfedError(f"{out}: the run was told to end, and is still at work {MAX_SILENCE:.0f} seconds later")
        time.sleep(_LOOK)
    from perfed.run.checkpoint_files import CheckpointFiles  # takes torch along

    return max(CheckpointFiles(out).newest()[0], 0)


def is_running(out: Path) -> bool:
    """Whether a server's program on this machine is at work on the run in ``out``."""
    try:
        with lock_folder(out / JOURNAL):
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True


def _submitter(folder: Path) -> Submitter:
    deployment = Deployment.read(folder)
    ca = folder / "server" / "tls" / "ca.crt" if deployment.tls else None
    return Submitter(folder / _HOME, f"127.0.0.1:{deployment.superlink_port}", ca)


def _submitted(folder: Path) -> dict[str, int]:
    """By directory of results, Flower's number of the run that was submitted last."""
    file = folder / _HOME / _SUBMITTED
    return checked(dict[str, int], read_json(file), file) if file.exists() else {}
