"""What others' trees bring: ``forest`` against a random forest per site, on repeated splits of hospitals' tables.

``python benchmarks/forests.py`` trains the rows of :data:`ROWS` on each of :data:`CELLS`, over :data:`SPLITS` splits of
the same patients, and keeps each split's mean over sites in ``docs/results/forests.json``; what is kept is not trained
again. ``python docs/build_docs.py --render`` writes the table of ``docs/results.md`` from it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from usage import usage

from perfed.data.federation import Federation
from perfed.data.files import load_npz
from perfed.datasets.heart import CODES, read_hospitals
from perfed.experiment.config import validate
from perfed.experiment.sklearn_run import SklearnRun
from perfed.methods.forest import Forest
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.run.run import Run
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

KEPT = Path(__file__).parent.parent / "docs/results/forests.json"
SPLITS, MANY = 10, 40  # the second where a site has six rows
TEST = 0.3
METRICS = ("accuracy", "auc", "log-loss")
MORE = ("auc", "log-loss")
PER_SITE = "sklearn:random-forest"
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "random forest per site": (PER_SITE, {}),
    "forest": ("forest", {}),
    "forest, leaves of one row": ("forest", {"smallest_leaf": 1, "bins": 1000}),
}
CELLS: dict[str, tuple[str, int]] = {
    "heart disease, 3 a class": ("heart", 3),
    "heart disease, all rows": ("heart", 0),
    "intensive care, 100 stays": ("icu", 100),
    "intensive care, 300 stays": ("icu", 300),
}
_ABSENT = 0.5  # share of missing values from which a unit does not have a column


def units(data_dir: Path | None) -> dict[str, Any]:
    """Each type of intensive care's data frame with the columns that it measures, and ``died``, "yes" or "no"."""
    names = ["x", "y", "icu_type", "icu_names", "feature_names"]
    data = load_npz("icu_2012.npz", data_dir, names)
    table = pd.DataFrame(data["x"], columns=data["feature_names"].tolist())
    table["died"] = np.where(data["y"] > 0, "yes", "no")
    kinds = sorted(set(data["icu_type"].tolist()))
    frames = {str(n): table[data["icu_type"] == k] for k, n in zip(kinds, data["icu_names"].tolist(), strict=True)}
    return {name: frame.loc[:, frame.isna().mean() <= _ABSENT] for name, frame in frames.items()}


def parts(frame: Any, target: str, rows: int, per_class: bool, generator: np.random.Generator) -> tuple[Any, Any]:
    """Training and test rows of one site, by class: a share :data:`TEST` to test on, and of the others ``rows``."""
    train, test = [], []
    for label in sorted(frame[target].unique()):
        held = generator.permutation(np.flatnonzero(frame[target] == label))
        first = round(TEST * len(held))
        test += held[:first].tolist()
        train.append(held[first:])
    total = sum(map(len, train))
    wanted = [rows if per_class else round(rows * len(held) / total) for held in train]
    kept = [held[: n or None] for held, n in zip(train, wanted, strict=True)]
    return frame.iloc[np.concatenate(kept)], frame.iloc[test]


def federation(data: str, rows: int, seed: int, columns: str = "own") -> Federation:
    """The sites of one split, of whose training rows ``rows`` are kept: of each class, or of all; 0 keeps all."""
    generator, data_dir = np.random.default_rng(seed), Path(os.environ["PERFED_DATA"])
    heart = data == "heart"
    frames, target = (read_hospitals(data_dir), "disease") if heart else (units(data_dir), "died")
    made = {site: parts(frame, target, rows, heart, generator) for site, frame in frames.items()}
    train, test = ({site: both[place] for site, both in made.items()} for place in (0, 1))
    codes = CODES if heart else ()
    return Federation.from_frames(train, test=test, target=target, categories=codes, columns=columns)


def measured(cell: str, row: str, seed: int) -> dict[str, float]:
    """Means over sites, on test rows."""
    method, settings = ROWS[row]
    sites = federation(*CELLS[cell], seed)
    if method == PER_SITE:
        table: dict[str, Any] = {"method": "local", "rounds": 1, "seed": seed, "data": {"name": "digits"}}
        table |= {"model": {"head": "linear"}, "evaluation": {"metrics": list(MORE)}}
        found = SklearnRun(method, validate(table), sites).execute()["metrics"]
    else:
        made = Forest(**settings)
        evaluation, plan = Evaluation(metrics=MORE), Plan("stacked", threads=1)
        run = Run(sites, made, Model(head=linear(2)), rounds=1, seed=seed, evaluation=evaluation, plan=plan)
        found = run.execute()["metrics"]
    return {name: found[name]["mean"] for name in METRICS}


def main() -> None:
    """Train what is not kept, a split at a time."""
    kept: dict[str, dict[str, dict[str, list[float]]]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in range(MANY):
        for cell in [name for name in CELLS if seed < SPLITS or name.endswith("3 a class")]:
            for row in ROWS:
                found = kept.setdefault(cell, {}).setdefault(row, {name: [] for name in METRICS})
                if len(found["accuracy"]) > seed:
                    continue
                for name, value in measured(cell, row, seed).items():
                    found[name].append(round(value, 6))
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
                print(seed, cell, row, *(f"{found[name][-1]:.3f}" for name in METRICS), flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
