"""The table of named columns in docs/results.md, from what ``benchmarks/named_columns.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from markdown_tables import table
from scipy.stats import t  # type: ignore[import-untyped]

FILE = Path(__file__).parent / "results/named-columns.json"
COMMAND = "python benchmarks/named_columns.py"
RIVALS = ("sklearn:logistic", "logistic, cross-validated")


def markdown() -> str:
    """One row per setting: mean AUC over the sites, what it gains over both rivals, and the log losses."""
    lines = []
    for name, found in json.loads(FILE.read_text()).items():
        auc, loss = ({row: np.array(of[metric]) for row, of in found.items()} for metric in ("auc", "loss"))
        levels = [f"{100 * auc[row].mean():.1f}" for row in ("mixed", *RIVALS)]
        losses = [f"{loss[row].mean():.3f}" for row in ("mixed", *RIVALS)]
        gains = [gain(100 * (auc["mixed"] - auc[rival])) for rival in RIVALS]
        lines.append([name, *levels, *gains, " / ".join(losses)])
    head = ["AUC in %, mean over sites", "`mixed`", f"`{RIVALS[0]}`", RIVALS[1]]
    head += ["gain on the first", "gain on the second", "log loss of the three"]
    return f"`{COMMAND}`\n\n{table(head, lines)}"


def gain(values: np.ndarray) -> str:
    """Mean and half the width of the 95 % interval over the splits."""
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.2f} ± {half:.2f}"
