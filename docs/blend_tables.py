"""The table of blends in docs/results.md, from the numbers that ``benchmarks/blend.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from markdown_tables import table

FILE = Path(__file__).parent / "results/blend.json"
COMMAND = "python benchmarks/blend.py DIR"
COMBINED = ("best own", "picked", "blend", "without guard")


def markdown() -> str:
    """One row per data set: mean loss (AUC or C-index) of four rows, and the sites that lose and win with the blend.

    At how many sites the guard acted stands where it was kept: of values, for of others there is none.
    """
    lines = []
    for name, seeds in json.loads(FILE.read_text()).items():
        runs = list(seeds.values())
        single = [row for row in runs[0]["rows"] if row not in COMBINED]
        best = min(single, key=lambda row: _mean(runs, row, "loss"))
        lost, won = (sum(run["rows"]["blend"][side] for run in runs) for side in ("loses", "wins"))
        worst = max(sum(run["rows"][row]["loses"] for run in runs) for row in single if not row.startswith("sklearn:"))
        sites = f"{lost} / {won} of {sum(run['sites'] for run in runs)}"
        told = f"{name} ({len(runs)} split{'s' if len(runs) > 1 else ''})"
        kept = str(sum(run["keep_own"] for run in runs)) if all("keep_own" in run for run in runs) else "–"
        cells = (_cell(runs, row) for row in ("best own", best, "picked", "blend"))
        lines.append([told, *cells, sites, kept, str(worst)])
        lines[-1][2] += f" {best}"
    header = ["", "best own", "best single method", "picked", "**blend**", "lose / win with it"]
    header += ["keep own", "lose with a method"]
    return f"`{COMMAND}`\n\n{table(header, lines)}"


def _mean(runs: list[dict[str, Any]], row: str, what: str) -> float:
    return float(np.mean([run["rows"][row][what] for run in runs]))


def _cell(runs: list[dict[str, Any]], row: str) -> str:
    loss = _mean(runs, row, "loss")
    shown = f"{loss:.1f}" if loss >= 10 else f"{loss:.3f}"
    return shown if runs[0]["rows"][row]["ranked"] is None else f"{shown} ({_mean(runs, row, 'ranked'):.3f})"
