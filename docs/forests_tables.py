"""The table of forests across sites in docs/results.md, from the numbers that ``benchmarks/forests.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from markdown_tables import table
from scipy.stats import t  # type: ignore[import-untyped]

FILE = Path(__file__).parent / "results/forests.json"
COMMAND = "python benchmarks/forests.py"
METRICS = {"accuracy": 100, "auc": 100, "log-loss": 1}


def markdown() -> str:
    """One row per cell and kind of trees: what the forest per site has, and how much more the others have."""
    lines = []
    for cell, rows in json.loads(FILE.read_text()).items():
        (first, base), *others = rows.items()
        means = [f"{scale * np.mean(base[name]):.{3 if scale == 1 else 1}f}" for name, scale in METRICS.items()]
        lines.append([f"{cell} ({len(base['accuracy'])} splits)", first, *means])
        for row, found in others:
            cells = [
                _interval(scale * (np.array(found[name]) - base[name]), 3 if scale == 1 else 1)
                for name, scale in METRICS.items()
            ]
            lines.append(["", row, *cells])
    header = ["", "row", "accuracy, %", "AUC, %", "log loss"]
    return f"`{COMMAND}`\n\n{table(header, lines)}"


def _interval(differences: np.ndarray[tuple[int], np.dtype[np.float64]], digits: int) -> str:
    """Mean and half of Student's 95 % interval; bold where the interval has no 0."""
    half = float(t.ppf(0.975, len(differences) - 1)) * differences.std(ddof=1) / np.sqrt(len(differences))
    mean = float(differences.mean())
    said = f"{mean:+.{digits}f} ± {half:.{digits}f}".replace("-", "−")
    return f"**{said}**" if abs(mean) > half else said
