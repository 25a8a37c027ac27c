"""The tables of docs/when.md, from the numbers that ``benchmarks/maps.py``, ``maps_named.py`` and ``views.py`` keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from markdown_tables import table
from scipy import stats  # type: ignore[import-untyped]

from perfed.methods.titles import display_name
from perfed.plugins import BLEND

FOLDER = Path(__file__).parent / "results/maps"
NAMED, VIEWS = (FOLDER.with_name(f"{name}.json") for name in ("maps_named", "views"))
ALONE = {"logistic": "logistic regression", "svc": "SVC", "random-forest": "random forest"}
METHODS = ("local", "hetfedrep", "flic-class", "flic-hl", "fedavg-ft", "fedrep", "fedpac")
# The two methods whose difference a last column is; where both were trained.
PAIRS = (("flic-hl", "hetfedrep"), ("fedpac", "fedavg-ft"))
LINKS = {
    "body": "body of all images",
    "body, anchors": "with anchors of all images",
    **{f"{number} common": f"others' through {number} common images" for number in (10, 30, 100)},
    "all": "others' as one sees them oneself",
}

Cell = dict[str, Any]


def maps() -> list[str]:
    """Names of those that are kept."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def markdown(name: str) -> str:
    """One row per cell: the best model per site, what each method gains over it, and FLIC over HetFedRep."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    cells: dict[str, Cell] = kept["cells"]
    methods = [method for method in METHODS if method in next(iter(cells.values()))]
    pairs = [pair for pair in PAIRS if set(pair) <= set(methods)]
    titles = [" − ".join(map(display_name, pair)) for pair in pairs]
    header = ["", "best model per site, %", *map(display_name, methods), *titles]
    lines = []
    for title, cell in cells.items():
        best = _best(cell, "accuracy", 1)
        gains = [_gain(cell, method, best) for method in methods]
        more = [_gain(cell, *pair) for pair in pairs]
        lines.append([title, f"{100 * np.mean(cell[best]['accuracy']):.1f} ({ALONE[best]})", *gains, *more])
    return f"`{kept['command']}`\n\n{table(header, lines)}"


def named() -> dict[str, str]:
    """Return a table for each metric: the model per site that is best by it, and what each method gains over it."""
    cells: dict[str, Cell] = json.loads(NAMED.read_text())
    found = {}
    for name, metric, direction in (("AUC", "auc", 1), ("log loss", "loss", -1)):
        methods = [method for method in next(iter(cells.values())) if method not in ALONE]
        lines = []
        for title, cell in cells.items():
            best = _best(cell, metric, direction)
            gains = [_gain(cell, method, best, metric, direction) for method in methods]
            lines.append([title, f"{100 * np.mean(cell[best][metric]):.1f} ({ALONE[best]})", *gains])
        titles = ["**blend**" if method == BLEND else display_name(method) for method in methods]
        found[f"named, {name}"] = table(["", f"best model per site, {name} × 100", *titles], lines)
    return found


def views() -> str:
    """One row per cell: a model of one's own, and what each kind of knowledge on others' images gains over it."""
    lines = []
    for title, cell in json.loads(VIEWS.read_text()).items():
        gains = [_gain(cell, row, "own") for row in LINKS]
        lines.append([title, f"{100 * np.mean(cell['own']['accuracy']):.1f}", *gains])
    return f"`python benchmarks/views.py`\n\n{table(['', 'own images alone, %', *LINKS.values()], lines)}"


def _best(cell: Cell, metric: str, direction: int) -> str:
    """The model per site whose mean is best."""
    return max((model for model in ALONE if model in cell), key=lambda model: direction * np.mean(cell[model][metric]))


def _gain(cell: Cell, method: str, base: str, metric: str = "accuracy", direction: int = 1) -> str:
    """Mean difference in points and the 95 % Student interval over the seeds, bold where that has no 0."""
    difference = 100 * direction * (np.array(cell[method][metric]) - np.array(cell[base][metric]))
    mean, half = float(difference.mean()), float(stats.t.ppf(0.975, len(difference) - 1) * stats.sem(difference))
    text = f"{mean:+.1f} ± {half:.1f}".replace("-", "−")
    return f"**{text}**" if abs(mean) > half else text
