"""The tables of attacks and audits in docs/privacy.md, from what ``benchmarks/attacks.py`` and ``audit.py`` keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from markdown_tables import table
from scipy import stats  # type: ignore[import-untyped]

from perfed.methods.titles import display_name

RESULTS = Path(__file__).parent / "results"
UNITS = {"sample": "rows", "client": "clients"}


def attacks() -> str:
    """One row per attack: area under the ROC curve without privacy and with it, mean and 95 % interval over seeds."""
    kept = _kept("attacks")
    number = len(next(iter(kept["areas"].values()))["plain"])
    lines = [[name, *(_interval(of[what]) for what in ("plain", "private"))] for name, of in kept["areas"].items()]
    header = [
        f"area under the ROC curve, {number} seeds",
        "without privacy",
        f"epsilon {kept['epsilon']:g}, delta {kept['delta']:g}",
    ]
    return f"`python benchmarks/attacks.py`\n\n{table(header, lines)}"


def audits() -> str:
    """One row per method: the budget and what audits prove of it, with the noise and without."""
    kept = _kept("audit")
    cells: dict[str, list[str]] = {}
    header = ["method", "protects", "canaries", "guesses"]
    for row in kept["rows"]:
        method, _, part = row["method"].partition(" ")
        first = [
            display_name(method) + (f", its {part}" if part else ""),
            UNITS[row["unit"]],
            str(row["canaries"]),
            str(row["guesses"]),
        ]
        said = f"{np.mean(row['bounds']):.2f} (most {max(row['bounds']):.2f})"
        cells.setdefault(row["method"], first).append(said)
    for row in kept["rows"]:
        title = f"budget {row['epsilon']:g}" + (", noise switched off" if row["off"] else "")
        if title not in header:
            header.append(title)
    number = len(kept["rows"][0]["bounds"])
    words = f"epsilon at least, at 95 % and delta {kept['delta']:g}; mean of {number} runs"
    return f"`python benchmarks/audit.py` ({words})\n\n{table(header, cells.values())}"


def _kept(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return kept


def _interval(values: list[float]) -> str:
    error = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return f"{np.mean(values):.2f} ± {error:.2f}"


TABLES: dict[str, dict[str, Callable[[], str]]] = {"docs/privacy.md": {"attacks": attacks, "audits": audits}}
"""Document -> table's name -> the table."""
