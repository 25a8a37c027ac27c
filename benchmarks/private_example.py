"""The worked example of docs/privacy.md: heart disease at four hospitals, with budgets and without.

``python benchmarks/private_example.py`` runs :func:`command` for each budget and keeps the means over the hospitals of
accuracy and AUC by method and seed, and what was spent, in ``docs/results/private-example.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from usage import usage

TOML = Path(__file__).with_suffix(".toml")
FILE = Path(__file__).parent.parent / "docs/results/private-example.json"
METHODS = ("local", "fedavg-ft", "mr-mtl")
SHOWN = 3.0  # whose command the page has
BUDGETS: tuple[float | None, ...] = (1.0, 3.0, 10.0, None)


def command(budget: float | None, experiment: str = "private.toml") -> list[str]:
    """What is typed after ``perfed``; without a budget the shipped experiment, whose settings are tuned without one."""
    words = ["compare", experiment if budget else "heart-disease-union"]
    words += ["--methods", ",".join(METHODS), "--seeds", "0..4"]
    if budget is None:
        return [*words, 'evaluation.metrics=["auc"]']
    return [*words, "privacy.unit=sample", f"privacy.epsilon={budget:g}", "privacy.delta=1e-3"]


def measured(budget: float | None) -> dict[str, Any]:
    """Accuracy and AUC of each method and seed, and the largest epsilon that a hospital has spent."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*command(budget, str(TOML)), "--json", "--out", f"{folder}/out"]
        said = subprocess.run([sys.executable, "-m", "perfed", *words], capture_output=True, text=True, check=True)
        summaries = [json.loads(file.read_text()) for file in Path(folder).rglob("summary.json")]
    found: dict[str, Any] = {method: {"accuracy": [], "auc": []} for method in METHODS}
    for run in json.loads(said.stdout)["runs"]:
        for metric, values in found[run["method"]].items():
            values.append(round(run["metrics"][metric]["mean"], 6))
    spent = [value for summary in summaries for value in (summary.get("privacy") or {"spent": {}})["spent"].values()]
    return found | ({"spent": round(max(spent), 4)} if spent else {})


def main() -> None:
    """Run all and keep."""
    rows = {"none" if budget is None else f"{budget:g}": measured(budget) for budget in BUDGETS}
    kept = {"command": " ".join(["perfed", *command(SHOWN)]), "rows": rows}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    for budget, found in rows.items():
        print(budget, found)


if __name__ == "__main__":
    usage(__doc__)
    main()
