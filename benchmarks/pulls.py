"""Is a pull for each column, or each site, worth it? ``mixed`` with one pull of departures against factors of it.

``python benchmarks/pulls.py`` trains ``mixed`` with each ``site_pull`` of :data:`ROWS` on :data:`SPLITS` splits of each
cell, and keeps each split's means over the sites in ``docs/results/pulls.json``; a split that is kept is not trained
again. ``python docs/build_docs.py --render`` writes the table of ``docs/results.md`` from it.

Sites are the four hospitals of heart disease and the four types of intensive care (:mod:`forests`), 42 people with
Parkinson's and seventy schools (:mod:`blend`), of whom half of the rows are trained on. It needs ``PERFED_DATA``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from blend import parkinsons, schools
from forests import federation
from usage import usage

from perfed import Evaluation, Federation, Model, Run, build_method
from perfed.model.presets import linear
from perfed.training.plan import Plan

KEPT = Path(__file__).parent.parent / "docs/results/pulls.json"
ROWS, ROUNDS, SPLITS = ("empirical", "columns", "sites", "both"), 6, 10
CELLS: dict[str, Callable[[int], Federation]] = {
    "heart disease, 10 a class": partial(federation, "heart", 10, columns="named"),
    "heart disease, all rows": partial(federation, "heart", 0, columns="named"),
    **{f"intensive care, {rows} stays": partial(federation, "icu", rows, columns="named") for rows in (100, 300)},
    "Parkinson's": parkinsons,
    "schools": schools,
}


def scored(sites: Federation, site_pull: str, split: int) -> dict[str, float]:
    """Mean over the sites of AUC and log loss, or of the squared error."""
    metrics = ("auc", "log-loss") if sites.task == "classification" else ("mse",)
    run = Run(
        sites,
        build_method("mixed", {"site_pull": site_pull}),
        Model(head=linear(sites.num_outputs)),
        rounds=ROUNDS,
        seed=split,
        evaluation=Evaluation(metrics=metrics, every=ROUNDS),
        plan=Plan(engine="stacked", threads=1),
    )
    found = run.execute()["metrics"]
    return {name: round(found[name]["mean"], 5) for name in metrics}


def main() -> None:
    """Train the splits that are not kept yet, one of every cell at a time."""
    kept: dict[str, dict[str, dict[str, list[float]]]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for split in range(SPLITS):
        for cell, make in CELLS.items():
            of = kept.setdefault(cell, {row: {} for row in ROWS})
            if all(len(values) > split for found in of.values() for values in found.values()) and of[ROWS[0]]:
                continue
            sites = make(split)
            scores = {row: scored(sites, row, split) for row in ROWS}
            for row, found in scores.items():
                for metric, value in found.items():
                    of[row].setdefault(metric, []).append(value)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            shown = {row: " ".join(f"{value:.4f}" for value in found.values()) for row, found in scores.items()}
            print(split, cell, shown, flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
