"""When does it pay to federate tables whose columns have names? Gains over the best model per site, AUC and log loss.

``python benchmarks/maps_named.py`` trains on each split of every cell the two models per site and the methods on
``columns = "named"``, and keeps each split's means over the sites in ``docs/results/maps_named.json``; a row that is
kept is not trained again. ``python docs/build_docs.py --render`` writes the table of ``docs/when.md`` from it.

Sites are the four hospitals of heart disease and the four types of intensive care (:mod:`forests`). Five strengths (C
of logistic regression, leaves of a forest per site, weight decay of what is trained by gradients) are chosen by log
loss on a quarter of the training rows of two splits; ``mixed`` and ``forest`` have theirs from the training rows by
themselves. Gradients train linear models for 20 rounds of ten epochs. Every row is then trained on ten splits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from forests import federation
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from perfed import Evaluation, Federation, Model, Run, build_method
from perfed.data.held_out import with_validation
from perfed.model.presets import linear
from perfed.training.plan import Plan

KEPT = Path(__file__).parent.parent / "docs/results/maps_named.json"
SPLITS, TUNING, HELD_OUT, ROUNDS, EPOCHS = 10, 2, 0.25, 20, 10
CELLS = {
    **{f"heart disease, {rows} a class": ("heart", rows) for rows in (3, 10, 30)},
    "heart disease, all rows": ("heart", 0),
    **{f"intensive care, {rows} stays": ("icu", rows) for rows in (50, 100, 300)},
}
PER_SITE: dict[str, tuple[tuple[float, ...], Callable[[float], Any]]] = {
    "logistic": ((0.001, 0.01, 0.1, 1.0, 10.0), lambda c: LogisticRegression(C=c, max_iter=2000)),
    "random-forest": (
        (1, 2, 5, 10, 20),
        lambda leaf: RandomForestClassifier(200, min_samples_leaf=int(leaf), random_state=0),
    ),
}
BY_GRADIENT, BY_ITSELF, DECAYS = ("local", "fedavg-ft", "ditto"), ("mixed", "forest"), (0.0, 1e-2, 3e-2, 1e-1, 3e-1)

Scores = tuple[float, float]


@cache
def sites(cell: str, split: int, columns: str, cut: bool) -> Federation:
    """The clients of one split; ``cut``: with a quarter of the training rows for validation."""
    found = federation(*CELLS[cell], split, columns)
    if not cut:
        return found
    return replace(found, clients=tuple(with_validation(client, HELD_OUT, True, split) for client in found))


def per_site(name: str, strength: float, cell: str, split: int, cut: bool) -> Scores:
    """AUC and log loss of a model per site on its own columns, means over the sites."""
    scores = []
    for client in sites(cell, split, "own", cut):
        part = client.split("validation" if cut else "test")
        assert part is not None
        model = PER_SITE[name][1](strength).fit(client.train.x.numpy(), client.train.y.numpy())
        said, y = model.predict_proba(part.x.numpy())[:, 1], part.y.numpy()
        both = len(np.unique(y)) > 1
        scores.append((roc_auc_score(y, said) if both else np.nan, log_loss(y, said, labels=[0, 1])))
    auc, loss = np.nanmean(scores, axis=0)
    return float(auc), float(loss)


def federated(name: str, strength: float, cell: str, split: int, cut: bool) -> Scores:
    """AUC and log loss of a method on columns that are named, means over the sites."""
    settings: dict[str, Any] = {}
    if name in BY_GRADIENT:
        settings = {"lr": 3e-3, "optimizer": "adam", "weight_decay": strength, "batch_size": 32, "local_epochs": EPOCHS}
    rounds = {"mixed": 8, "forest": 1}.get(name, ROUNDS)
    evaluation = Evaluation(split="validation" if cut else "test", metrics=("auc", "log-loss"), every=rounds)
    run = Run(
        sites(cell, split, "named", cut),
        build_method(name, settings),
        Model(head=linear(2)),
        rounds=rounds,
        seed=split,
        evaluation=evaluation,
        plan=Plan(engine="stacked", threads=1),
    )
    found = run.execute()["metrics"]
    return float(found["auc"]["mean"]), float(found["log-loss"]["mean"])


def scored(cell: str, name: str) -> dict[str, Any]:
    """AUC and log loss of one row by split, and the strength that was chosen."""
    score = per_site if name in PER_SITE else federated
    strengths = PER_SITE[name][0] if name in PER_SITE else DECAYS if name in BY_GRADIENT else (0.0,)
    best = strengths[0]
    if len(strengths) > 1:
        tries = {s: np.mean([score(name, s, cell, k, True)[1] for k in range(TUNING)]) for s in strengths}
        best = min(tries, key=lambda strength: tries[strength])
    auc, loss = np.array([score(name, best, cell, split, False) for split in range(SPLITS)]).round(5).T.tolist()
    return {"auc": auc, "loss": loss, "strength": best}


def main() -> None:
    """Train the rows that are not kept yet."""
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for cell in CELLS:
        for name in (*PER_SITE, *BY_GRADIENT, *BY_ITSELF):
            if name not in kept.setdefault(cell, {}):
                started = time.perf_counter()
                kept[cell][name] = of = scored(cell, name)
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
                means = f"AUC {np.mean(of['auc']):.4f}, log loss {np.mean(of['loss']):.4f} ({of['strength']:g})"
                print(f"{cell}: {name} {means}, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
