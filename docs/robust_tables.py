"""The table of dishonest clients in docs/results.md, from what ``benchmarks/robust.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from markdown_tables import table

from perfed.methods.titles import display_name

FILE = Path(__file__).parent / "results/robust.json"
COMMAND = "python benchmarks/robust.py"
KINDS = ("mean", "median", "trimmed-mean", "norm-bound")
ATTACKS = {
    "none 0 %": "no dishonest client",
    "sign 10 %": "10 %, change times -10",
    "sign 30 %": "30 %, change times -10",
    "labels 10 %": "10 %, wrong labels",
    "labels 30 %": "30 %, wrong labels",
}


def count_seeds(scores: dict[str, list[float | None]]) -> int:
    """Return the number of seeds that every cell has."""
    return min(len(values) for values in scores.values())


def markdown() -> str:
    """One row per method and attack, one column per kind of aggregation: mean ± standard deviation over the seeds."""
    scores = json.loads(FILE.read_text())
    seeds = count_seeds(scores)
    methods = dict.fromkeys(key.split(", ")[0] for key in scores)
    rows = [
        [
            display_name(method),
            meaning,
            *(_format_cell(scores[f"{method}, {kind}, {attack}"][:seeds]) for kind in KINDS),
        ]
        for method in methods
        for attack, meaning in ATTACKS.items()
    ]
    head = ["", "dishonest clients", *(f"`{kind}`" for kind in KINDS)]
    return f"`{COMMAND}`, {seeds} seeds\n\n{table(head, rows)}"


def _format_cell(values: list[float | None]) -> str:
    finite = [value for value in values if value is not None]
    if not finite:
        return "diverged"
    diverged = f" ({len(values) - len(finite)} of {len(values)} diverged)" if len(finite) < len(values) else ""
    return f"{np.mean(finite):.1f} ± {np.std(finite, ddof=1):.1f}{diverged}"
