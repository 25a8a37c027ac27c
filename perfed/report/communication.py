"""The virtual time that finished rounds would have taken with another cost of communication."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from perfed.errors import PerfedError
from perfed.report.runs import Run


def with_communication(run: Run, seconds: float) -> Run:
    """``run`` as if every exchange had cost ``seconds``: virtual times of rounds, targets and clients move.

    Who is used does not depend on a cost that all replies have, except under a deadline.

    Raises:
        PerfedError: a cost that is negative or not finite, a run under a deadline, or one that did not keep the number
            of exchanges of its rounds.
    """
    if not (isfinite(seconds) and seconds >= 0):
        raise PerfedError(f"--communication must be a finite number, at least 0 (given: {seconds})")
    settings = run.config
    more = seconds - settings.get("clock", {}).get("communication", 0.0)
    if settings.get("participation", {}).get("policy") == "deadline":
        raise PerfedError(f"{run.directory}: under a deadline communication changes who is used; run it anew")
    later, exchanges, rounds = {}, 0, []
    for number, line in enumerate(run.rounds, 1):
        if line.round != number:
            raise PerfedError(f"{run.directory}: rounds.jsonl lacks round {number}")
        if line.exchanges is None or line.virtual_time is None:
            raise PerfedError(f"{run.directory}: rounds.jsonl lacks exchanges or virtual_time in round {line.round}")
        exchanges += line.exchanges
        later[line.round] = more * exchanges
        rounds.append(line.model_copy(update={"virtual_time": line.virtual_time + later[line.round]}))
    summary, clients = run.summary, run.clients
    if summary is not None:
        targets = summary.targets and [
            target
            if target.round is None or target.virtual_time is None
            else target.model_copy(update={"virtual_time": target.virtual_time + later[target.round]})
            for target in summary.targets
        ]
        total = rounds[-1].virtual_time if rounds else summary.virtual_time
        summary = summary.model_copy(update={"targets": targets, "virtual_time": total})
    if clients is not None:
        clients = replace(clients, seconds=clients.seconds + more)
    return replace(run, rounds=tuple(rounds), summary=summary, clients=clients, communication=seconds)
