"""``perfed submit``: start a deployment's run, follow it, and know how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfed.deploy.deployment import Deployment
from perfed.deploy.program import LINE, goes_on
from perfed.engine.flower.submission import Submitter
from perfed.errors import PerfedError
from perfed.machine import write_atomic

RESULTS = "server/run"
"""Where a run's results are in a deployment's directory."""
_SUBMITTED = "submitted.json"  # beside Flower's files: the last run's number, and where its results are
_LONGEST = 365 * 86400.0


def submit(folder: Path, config: Mapping[str, Any], show: Callable[[dict[str, Any]], None], log: Path) -> None:
    """Submit the run of the deployment in ``folder`` and follow it to its end; one that goes on already is followed.

    Args:
        folder: of the deployment.
        config: see :class:`perfed.deploy.program.Settings`.
        show: gets what the run tells as it goes: ``stage``, ``round`` with ``rounds`` and ``accuracy``, ``done``.
        log: file for everything else that it prints.

    Raises:
        PerfedError: the server does not answer, or the run did not come to its end; says why.
    """
    deployment = Deployment.read(folder)
    ca = folder / "server" / "tls" / "ca.crt" if deployment.tls else None
    home = folder / "server" / "flwr-submit"
    submitter = Submitter(home, f"127.0.0.1:{deployment.superlink_port}", ca)
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
        return submitter.follow(run, line, _LONGEST, lambda text: show({"stage": text}))

    status, run = "", _going_on(home / _SUBMITTED, str(config["out"]))
    if run is not None:
        show({"stage": "this run goes on already; what it has said so far:"})
        status = followed(run)
    if status != "finished:completed" and not reasons:  # there was none, or its SuperLink was killed
        run = submitter.submit(folder / "app", config)
        write_atomic(home / _SUBMITTED, json.dumps({"run": run, "out": str(config["out"])}) + "\n")
        status = followed(run)
    if status != "finished:completed":
        ended = f"the SuperLink has ended the run ('{status}', see {log}); submit again, and it goes on where it was"
        raise PerfedError(reasons[-1] if reasons else ended)


def _going_on(file: Path, out: str) -> int | None:
    """Flower's number of the run in ``out``, where the server's program is at work on it and ``file`` knows it."""
    if not goes_on(Path(out)) or not file.exists():
        return None
    known = json.loads(file.read_text(encoding="utf-8"))
    return int(known["run"]) if known["out"] == out else None
