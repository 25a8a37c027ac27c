"""``perfed submit``: start a deployment's run, follow it, and know how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfed.deploy.deployment import Deployment
from perfed.deploy.program import LINE
from perfed.engine.flower.submission import Submitter
from perfed.errors import PerfedError

RESULTS = "server/run"
"""Where a run's results are in a deployment's directory."""
_LONGEST = 365 * 86400.0


def submit(folder: Path, config: Mapping[str, Any], show: Callable[[dict[str, Any]], None], log: Path) -> None:
    """Submit the run of the deployment in ``folder`` and follow it to its end.

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
    submitter = Submitter(folder / "server" / "flwr-submit", f"127.0.0.1:{deployment.superlink_port}", ca)
    run = submitter.submit(folder / "app", config)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"run {run}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
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

    status = submitter.follow(run, line, _LONGEST, lambda text: show({"stage": text}))
    if status != "finished:completed":
        ended = f"the SuperLink has ended the run ('{status}', see {log}); submit again, and it goes on where it was"
        raise PerfedError(reasons[-1] if reasons else ended)
