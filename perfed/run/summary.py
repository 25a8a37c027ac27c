"""What a run says of itself at its end: the summary, the table of clients, and notes."""

from __future__ import annotations

import platform
from typing import Any

import torch

from perfed.engine.evaluate import client_table
from perfed.engine.metrics import own_metrics
from perfed.engine.server import Server
from perfed.machine import installed_version, peak_memory_mb
from perfed.model.placement import SENT
from perfed.run.evaluation import Evaluator
from perfed.run.totals import RunProgress, RunTotals


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


def summary_of(
    name: str, server: Server, evaluator: Evaluator, progress: RunProgress, notes: list[str]
) -> dict[str, Any]:
    """Return what ``summary.json`` holds, but for what callbacks add to it.

    Args:
        name: of the method.
        server, evaluator: of the run.
        progress: at its end.
        notes: of the run.
    """
    totals, plan, federation = progress.totals, server.plan, evaluator.federation
    metrics = evaluator.over_clients(totals.metrics)
    counted = [f"{what.replace('_', ' ')}: {n} (clients in rounds.jsonl)" for what, n in totals.counts.items() if n]
    oracle = {key: float(federation.notes[key]) for key in ("oracle_accuracy",) if key in federation.notes}
    return {
        "method": name,
        "dataset": federation.name,
        "seed": server.seed,
        "rounds": progress.done,
        **({"stopped_by": progress.stopped_by} if progress.stopped_by else {}),
        "metrics": metrics,
        **({"accuracy": metrics["accuracy"]} if "accuracy" in metrics else {}),
        **(_by_domain(evaluator, totals) if totals.domains else {}),
        **({"untrained_domains": evaluator.untrained} if evaluator.untrained else {}),
        "evaluation": evaluator.settings.model_dump(),
        "wall_seconds": progress.wall,
        "training_seconds": progress.training,
        "virtual_time": totals.virtual_time,
        **({"counts": totals.counts} if totals.counts else {}),
        **({} if (peak := peak_memory_mb()) is None else {"peak_memory_mb": peak}),
        "settings": server.method.all_settings,
        "plan": plan.to_dict(),
        "notes": [*plan.describe(), *notes, *counted],
        "versions": {"perfed": installed_version(), "torch": torch.__version__, "python": platform.python_version()},
        **oracle,
        **({"own_metrics": own} if (own := own_metrics(evaluator.scoring.metrics)) else {}),
    }


def _by_domain(evaluator: Evaluator, totals: RunTotals) -> dict[str, Any]:
    """Metrics by domain, and how many samples each domain has."""
    return {"domains": evaluator.with_extremes(totals.domains), "domain_samples": evaluator.domain_samples}


def table_of(server: Server, evaluator: Evaluator, totals: RunTotals) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of ``clients.csv``."""
    before, after = totals.metrics, totals.other
    if evaluator.settings.when == "after":
        before, after = after, before
    seconds = totals.seconds if server.speeds != "none" else {}
    used, domains = totals.taken_part, totals.client_domains
    return client_table(evaluator.federation, evaluator.split, before, after, used, seconds, domains)
