"""The table of pulls by column and by site in docs/results.md, from what ``benchmarks/pulls.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from markdown_tables import table
from named_tables import gain

FILE = Path(__file__).parent / "results/pulls.json"
COMMAND = "python benchmarks/pulls.py"
COMMON, VARIED = "empirical", ("columns", "sites", "both")


def markdown() -> str:
    """One row per cell and metric: its mean with the common pull, and how far that is changed by each other."""
    lines = []
    for cell, rows in json.loads(FILE.read_text()).items():
        for metric, common in rows[COMMON].items():
            scale, shown = (
                (1, "MSE") if metric == "mse" else (100, "AUC × 100" if metric == "auc" else "log loss × 100")
            )
            changes = [gain(scale * (np.array(rows[row][metric]) - common)) for row in VARIED]
            lines.append([cell, shown, f"{scale * np.mean(common):.2f}", *changes])
    head = ["", "", '`site_pull = "empirical"`', *(f'`"{row}"`, change' for row in VARIED)]
    return f"`{COMMAND}`\n\n{table(head, lines)}"
