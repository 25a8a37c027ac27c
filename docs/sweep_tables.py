"""The tables of the papers' sweeps in docs/results.md, from the numbers that ``benchmarks/sweeps.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

from markdown_tables import table

from perfed.methods.titles import display_name
from perfed.report.text import format_metric

FILE = Path(__file__).parent / "results/sweeps.json"
# Name -> whose figure it is, in small.
TITLES = {
    "fedpac-uniform": "FedPAC, Figure 1a: percentage of uniform data",
    "fedpac-samples": "FedPAC, Figure 1b: samples of a client",
    "fedpac-epochs": "FedPAC, Figure 5: local epochs",
    "feddar-dimension": "FedDAR, Figure 2: dimension of the representation",
    "flic-clients": "FLIC, Figure 4: number of clients",
    "flic-pretraining": "FLIC, Figure S2: epochs of pre-training",
    "flic-frozen": "FLIC, Figure S2: epochs of pre-training, embeddings frozen afterwards",
}


def markdown() -> str:
    """For each sweep its command, a row per method with a column per value, and the figure."""
    kept = json.loads(FILE.read_text())
    parts = []
    for name, title in TITLES.items():
        rows = kept[name]["rows"]
        values = list(dict.fromkeys(row["comparison"] for row in rows))
        lines = []
        for method in dict.fromkeys(row["method"] for row in rows):
            of = {row["comparison"]: row for row in rows if row["method"] == method}
            lines.append([display_name(method), *(_cell(of[value]["mean"], of[value]["mean_std"]) for value in values)])
        made = table(["accuracy in %", *(f"`{value}`" for value in values)], lines)
        parts.append(f"**{title}**: `{kept[name]['command']}`\n\n{made}\n\n![{title}](sweep-{name}.svg)")
    return "\n\n".join(parts)


def _cell(mean: float, deviation: float) -> str:
    return f"{format_metric('accuracy', mean)} ± {format_metric('accuracy', deviation)}"
