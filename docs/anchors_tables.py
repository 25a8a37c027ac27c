"""The table of FLIC's anchors in docs/results.md, from the numbers that ``benchmarks/anchors.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from markdown_tables import table

FILE = Path(__file__).parent / "results/anchors.json"
COMMAND = "python benchmarks/anchors.py"


def markdown() -> str:
    """One row per kind of anchors: accuracy on each data set, and processor time over all of them."""
    kept = json.loads(FILE.read_text())
    rows = list(next(iter(kept.values())))
    seconds = {row: sum(sum(of[row]["cpu_s"]) for of in kept.values()) for row in rows}
    default = seconds[rows[1]]
    lines = []
    for row in rows:
        found = [100 * np.array(of[row]["accuracy"]) for of in kept.values()]
        cells = [f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" for values in found]
        lines.append([row, *cells, f"{seconds[row] / default:.1f}"])
    return f"`{COMMAND}`\n\n{table(['accuracy in %, five seeds', *(f'`{name}`' for name in kept), 'time'], lines)}"
