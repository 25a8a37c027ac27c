"""What a run says of itself at its end: ``summary.json``, ``clients.csv`` and notes."""

from __future__ import annotations

import platform
from typing import Any

import torch

from perfed.engine.evaluate import client_table
from perfed.engine.metrics import own_metrics
from perfed.engine.server import Server
from perfed.machine import installed_version, peak_memory_mb
from perfed.model.placement import SENT
from perfed.run.checkpoint import Standing
from perfed.run.directory import RunDirectory
from perfed.run.evaluation import Evaluator
from perfed.run.holdings import holdings, sites
from perfed.run.memory import Memory
from perfed.run.tally import Tally


def nothing_shared(name: str, server: Server) -> list[str]:
    """What a method that shares parameters is on a model without them: a note, or none.

    Args:
        name: of the method.
        server: before the first round.
    """
    method = server.method
    stages = [stage for stage, place in method.default_placement.items() if place in SENT]
    if server.sets["shared"] or not stages:
        return []
    terms = [term.name for term in method.terms]
    same = "'flic-class'" if terms == ["anchors"] else f"'local'{' with the terms ' if terms else ''}{', '.join(terms)}"
    return [f"{name} shares parameters of {', '.join(stages)} only, and this model has none: it is {same}"]


def summary_of(name: str, server: Server, evaluator: Evaluator, standing: Standing, notes: list[str]) -> dict[str, Any]:
    """Content of ``summary.json``.

    Args:
        name: of the method.
        server, evaluator: of the run.
        standing: at its end.
        notes: of the run.
    """
    tally, plan, federation = standing.tally, server.plan, evaluator.federation
    metrics = evaluator.over_clients(tally.metrics)
    counted = [f"{what.replace('_', ' ')}: {n} (clients in rounds.jsonl)" for what, n in tally.counts.items() if n]
    oracle = {key: float(federation.notes[key]) for key in ("oracle_accuracy",) if key in federation.notes}
    return {
        "method": name,
        "dataset": federation.name,
        "seed": server.seed,
        "rounds": standing.done,
        "metrics": metrics,
        **({"accuracy": metrics["accuracy"]} if "accuracy" in metrics else {}),
        **(_by_domain(evaluator, tally) if tally.domains else {}),
        **({"untrained_domains": evaluator.untrained} if evaluator.untrained else {}),
        **({"targets": tally.targets} if tally.targets else {}),
        "evaluation": evaluator.settings.model_dump(),
        "wall_seconds": standing.wall,
        "training_seconds": standing.training,
        "virtual_time": tally.virtual_time,
        **({"counts": tally.counts} if tally.counts else {}),
        **({} if standing.taken is None else {"taken_rounds": standing.taken.rounds}),
        **({} if (peak := peak_memory_mb()) is None else {"peak_memory_mb": peak}),
        "settings": server.method.all_settings,
        "plan": plan.to_dict(),
        "notes": [*plan.describe(), *notes, *_taken(standing, evaluator.rounds), *counted],
        "versions": {"perfed": installed_version(), "torch": torch.__version__, "python": platform.python_version()},
        **oracle,
        **({"own_metrics": own} if (own := own_metrics(evaluator.scoring.metrics)) else {}),
    }


def _by_domain(evaluator: Evaluator, tally: Tally) -> dict[str, Any]:
    """Metrics by domain, and how many samples each domain has."""
    return {"domains": evaluator.with_extremes(tally.domains), "domain_samples": evaluator.domain_samples}


def _taken(standing: Standing, rounds: int) -> list[str]:
    """Which rounds the models are of, where the run stops by validation, or that all targets ended it."""
    if standing.tally.stopped:
        return [f"every target was reached: training ended after round {standing.done} of at most {rounds}"]
    if standing.taken is None or not standing.taken.rounds:
        return []
    first, last = min(standing.taken.rounds.values()), max(standing.taken.rounds.values())
    which = f"round {first}" if first == last else f"rounds {first} to {last}"
    ended = f"; training ended after round {standing.done} of at most {rounds}" if standing.taken.stopped else ""
    return [f"each client's model is that with the least loss on its validation data: of {which}{ended}"]


def table_of(server: Server, evaluator: Evaluator, tally: Tally) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of ``clients.csv``."""
    before, after = tally.metrics, tally.other
    if evaluator.settings.when == "after":
        before, after = after, before
    seconds = tally.seconds if server.speeds != "none" else {}
    used, domains = tally.taken_part, tally.client_domains
    return client_table(evaluator.federation, evaluator.split, before, after, used, seconds, domains)


def leave(
    directory: RunDirectory | Memory, server: Server, evaluator: Evaluator, tally: Tally, summary: dict[str, Any]
) -> None:
    """Write ``clients.csv``, ``federation.json``, of tables ``sites.json``, and, with which the run is finished,
    ``summary.json``.
    """
    directory.write_clients(*table_of(server, evaluator, tally))
    directory.write_holdings(holdings(evaluator.federation))
    if (found := sites(evaluator.federation)) is not None:
        directory.write_sites(found)
    directory.write_summary(summary)
