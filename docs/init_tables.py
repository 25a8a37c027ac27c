"""The table on what ``perfed init`` writes in docs/results.md, from the numbers of ``benchmarks/init_defaults.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markdown_tables import table

from perfed.engine.metrics import metric_of
from perfed.methods.titles import display_name
from perfed.report.text import format_metric

FILE = Path(__file__).parent / "results/init-defaults.json"
COMMAND = "python benchmarks/init_defaults.py DIR"
TITLES = {"accuracy": "accuracy in %", "log-loss": "log loss", "auc": "AUC", "mse": "mean squared error"}


def markdown() -> str:
    """How far the comparisons agree, and below it each method's means."""
    kept: dict[str, Any] = json.loads(FILE.read_text())
    agreement = [_agreement(name, metric, of) for name, study in kept.items() for metric, of in study["by"].items()]
    header = ["", "Kendall's tau", "pairs that differ when tuned", "same order with init's", "differ the other way"]
    said = [
        [name, *(_verdict(study["verdict"][place]) for place in ("init", "chosen"))] for name, study in kept.items()
    ]
    means = [_means(name, metric, of) for name, study in kept.items() for metric, of in study["by"].items()]
    verdicts = table(["verdict", "as init wrote it", "tuned"], said)
    return "\n\n".join([f"`{COMMAND}`", table(header, agreement), verdicts, *means])


def _agreement(name: str, metric: str, of: dict[str, Any]) -> list[str]:
    apart = f"{of['apart']} of {of['pairs']}"
    return [f"{name}, {TITLES[metric]}", f"{of['tau']:.2f}", apart, str(of["same"]), str(of["against"])]


def _verdict(said: dict[str, list[str]]) -> str:
    """Who of the federated methods is ahead of the reference, and who behind it."""
    (reference,) = said["reference"]
    ahead, behind = (", ".join(map(display_name, said[side])) or "nobody" for side in ("ahead", "behind"))
    return f"ahead of {display_name(reference)}: {ahead}; behind: {behind}"


def _means(name: str, metric: str, of: dict[str, Any]) -> str:
    """Best first, as when tuned."""
    order = sorted(of["tuned"], key=lambda method: -metric_of(metric).direction * of["tuned"][method])
    rows = [[display_name(m), *(format_metric(metric, of[place][m]) for place in ("init", "tuned"))] for m in order]
    return table([f"{name}, {TITLES[metric]}", "as init wrote it", "tuned"], rows)
