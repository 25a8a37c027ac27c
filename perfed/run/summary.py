"""The summary of a finished run, its table of clients, and notes."""

from __future__ import annotations

from typing import Any

import torch

from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics, client_table, few_samples, with_extremes
from perfed.engine.metrics import describe_user_metrics
from perfed.engine.server import Server
from perfed.model.placement import SENT
from perfed.run.evaluation import Evaluator
from perfed.run.totals import RunProgress, RunTotals
from perfed.system import peak_memory_mb, versions


def warn_nothing_shared(name: str, server: Server) -> list[str]:
    """Return a note if the method shares parameters but the model has none to share; otherwise an empty list.

    Args:
        name: name of the method.
        server: before the first round.
    """
    method = server.method
    stages = [stage for stage, place in method.default_placement.items() if place in SENT]
    if server.sets["shared"] or not stages:
        return []
    extensions = [extension.name for extension in method.extensions if not extension.name.endswith("-privacy")]
    same = (
        "'flic-class'"
        if extensions == ["anchors"]
        else f"'local'{' with the extensions ' if extensions else ''}{', '.join(extensions)}"
    )
    return [f"{name} shares parameters of {', '.join(stages)} only, and this model has none: it is {same}"]


def build_outline(
    name: str, federation: Federation, split: str, seed: int, rounds: int, metrics: dict[str, Any], domains: Metrics
) -> dict[str, Any]:
    """Return the first entries of every summary: the method, data, seed, rounds and metrics, also by domain if any.

    Args:
        name: name of the method.
        federation: the clients.
        split: the evaluated split.
        seed: the seed of the run.
        rounds: the number of rounds of the run.
        metrics: the metrics over clients.
        domains: metrics by domain; empty for none.
    """
    sizes = federation.domain_samples(split)
    by_domain = {"domains": with_extremes(domains, few_samples(sizes)), "domain_samples": sizes}
    return {
        "method": name,
        "dataset": federation.name,
        "seed": seed,
        "rounds": rounds,
        "metrics": metrics,
        **({"accuracy": metrics["accuracy"]} if "accuracy" in metrics else {}),
        **(by_domain if domains else {}),
    }


def build_summary(
    name: str, server: Server, evaluator: Evaluator, progress: RunProgress, notes: list[str]
) -> dict[str, Any]:
    """Return the content of ``summary.json`` without the entries of callbacks.

    Args:
        name: name of the method.
        server: the server of the run.
        evaluator: the evaluator of the run.
        progress: the progress at the end of the run.
        notes: the notes of the run.
    """
    totals, plan, federation = progress.totals, server.plan, evaluator.federation
    metrics = evaluator.summarise_clients(totals.metrics)
    counted = [f"{event.replace('_', ' ')}: {n} (clients in rounds.jsonl)" for event, n in totals.counts.items() if n]
    user_metrics = describe_user_metrics(evaluator.scoring.metrics)
    oracle = {key: float(federation.notes[key]) for key in ("oracle_accuracy",) if key in federation.notes}
    return {
        **build_outline(name, federation, evaluator.split, server.seed, progress.done, metrics, totals.domains),
        **({"stopped_by": progress.stopped_by} if progress.stopped_by else {}),
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
        "versions": versions("torch", torch.__version__),
        **oracle,
        **({"own_metrics": user_metrics} if user_metrics else {}),
    }


def build_client_table(server: Server, evaluator: Evaluator, totals: RunTotals) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of ``clients.csv``."""
    before, after = totals.metrics, totals.other
    if evaluator.settings.when == "after":
        before, after = after, before
    seconds = totals.seconds if server.speeds != "none" else {}
    num_rounds, domains = totals.taken_part, totals.client_domains
    return client_table(evaluator.federation, evaluator.split, before, after, num_rounds, seconds, domains)
