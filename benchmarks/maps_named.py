"""When does it pay to federate tables whose columns have names? Gains over the best model per site, AUC and log loss.

``python benchmarks/maps_named.py`` trains on each split of every cell the two models per site and the methods on
``columns = "named"``, and keeps each split's means over the sites in ``docs/results/maps_named.json``; a row that is
kept is not trained again. ``python docs/build_docs.py --render`` writes the table of ``docs/when.md`` from it.
The row ``blend`` mixes all others at each site, as ``perfed blend`` does; it is kept split by split.

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
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from forests import federation
from numpy.typing import NDArray
from scipy.special import softmax  # type: ignore[import-untyped]
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from usage import usage

from perfed import Evaluation, Federation, Model, Run, build_method
from perfed.data.held_out import fold_as_test, with_validation
from perfed.maths.blending import Probabilities, drop_small_weights, learn_weights, prepare_outputs
from perfed.model.presets import linear
from perfed.run import predictions
from perfed.run.directory import RunDirectory
from perfed.run.settings import Blend
from perfed.training.plan import Plan

KEPT = Path(__file__).parent.parent / "docs/results/maps_named.json"
SPLITS, TUNING, HELD_OUT, ROUNDS, EPOCHS, PRIOR_ROWS = 10, 2, 0.25, 20, 10, 50.0
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

CANDIDATES = (*PER_SITE, *BY_GRADIENT, *BY_ITSELF)

Scores = tuple[float, float]
Said = dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]


@cache
def sites(cell: str, split: int, columns: str, judged: str | int) -> Federation:
    """The clients of one split: with a quarter of the training rows for validation where that is ``judged``, or with
    a fold of these rows in the place of the test rows.
    """
    found = federation(*CELLS[cell], split, columns)
    if judged == "test":
        return found
    if judged == "validation":
        return replace(found, clients=tuple(with_validation(client, HELD_OUT, True, split) for client in found))
    fold = (int(judged), Blend().folds)
    return replace(found, clients=tuple(fold_as_test(client, fold, True, split) for client in found))


def part_of(judged: str | int) -> Literal["validation", "test"]:
    """Where the rows are that are judged."""
    return "validation" if judged == "validation" else "test"


def per_site(name: str, strength: float, cell: str, split: int, judged: str | int) -> Said:
    """By site the classes, and what a model per site on its own columns says: logarithms of probabilities."""
    found = {}
    for client in sites(cell, split, "own", judged):
        part = client.split(part_of(judged))
        assert part is not None
        model = PER_SITE[name][1](strength).fit(client.train.x.numpy(), client.train.y.numpy())
        chances = model.predict_proba(part.x.numpy())
        found[client.id] = part.y.numpy(), np.log(chances.clip(np.finfo(float).tiny))
    return found


def federated(name: str, strength: float, cell: str, split: int, judged: str | int) -> Said:
    """The same of a method on columns that are named."""
    settings: dict[str, Any] = {}
    if name in BY_GRADIENT:
        settings = {"lr": 3e-3, "optimizer": "adam", "weight_decay": strength, "batch_size": 32, "local_epochs": EPOCHS}
    rounds = {"mixed": 8, "forest": 1}.get(name, ROUNDS)
    with TemporaryDirectory() as folder:
        run = Run(
            sites(cell, split, "named", judged),
            build_method(name, settings),
            Model(head=linear(2)),
            rounds=rounds,
            seed=split,
            evaluation=Evaluation(split=part_of(judged), every=rounds),
            plan=Plan(engine="stacked", threads=1),
            directory=RunDirectory.create(Path(folder) / "run"),
        )
        run.execute()
        return predictions.read_predictions(Path(folder) / "run")[-1].by_site()


def row(name: str, strength: float, cell: str, split: int, judged: str | int) -> Said:
    """What a row says."""
    return (per_site if name in PER_SITE else federated)(name, strength, cell, split, judged)


def blended(strengths: dict[str, float], cell: str, split: int) -> Said:
    """What the mixture of all candidates says, these with ``strengths``: weights as those of ``perfed blend``."""
    folds = range(Blend().folds)
    held = [[row(name, strengths[name], cell, split, fold) for name in CANDIDATES] for fold in folds]
    whole = [row(name, strengths[name], cell, split, "test") for name in CANDIDATES]
    ids, rows = sorted(whole[0]), []
    for site in ids:
        of_folds = [prepare_outputs("classification", one[0][site][0], [said[site][1] for said in one]) for one in held]
        said, y = (np.concatenate(parts) for parts in zip(*of_folds, strict=True))
        rows.append(Probabilities(said, y, np.repeat(folds, [len(targets) for _, targets in of_folds])))
    found: Said = {}
    for site, weights in zip(ids, learn_weights(rows, PRIOR_ROWS)[1], strict=True):
        mixed = sum(
            weight * softmax(said[site][1], axis=1)
            for weight, said in zip(drop_small_weights(weights), whole, strict=True)
        )
        found[site] = whole[0][site][0], np.log(mixed)
    return found


def scores(said: Said) -> Scores:
    """AUC and log loss, means over the sites."""
    found = []
    for y, logits in said.values():
        chances = softmax(logits, axis=1)[:, 1]
        both = len(np.unique(y)) > 1
        found.append((roc_auc_score(y, chances) if both else np.nan, log_loss(y, chances, labels=[0, 1])))
    auc, loss = np.nanmean(found, axis=0)
    return float(auc), float(loss)


def scored(cell: str, name: str) -> dict[str, Any]:
    """AUC and log loss of one row by split, and the strength that was chosen."""
    strengths = PER_SITE[name][0] if name in PER_SITE else DECAYS if name in BY_GRADIENT else (0.0,)
    best = strengths[0]
    if len(strengths) > 1:
        tries = {s: np.mean([scores(row(name, s, cell, k, "validation"))[1] for k in range(TUNING)]) for s in strengths}
        best = min(tries, key=lambda strength: tries[strength])
    found = [scores(row(name, best, cell, split, "test")) for split in range(SPLITS)]
    auc, loss = np.array(found).round(5).T.tolist()
    return {"auc": auc, "loss": loss, "strength": best}


def main() -> None:
    """Train the rows that are not kept yet, and of the blend the splits."""
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for cell in CELLS:
        for name in CANDIDATES:
            if name not in kept.setdefault(cell, {}):
                started = time.perf_counter()
                kept[cell][name] = of = scored(cell, name)
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
                means = f"AUC {np.mean(of['auc']):.4f}, log loss {np.mean(of['loss']):.4f} ({of['strength']:g})"
                print(f"{cell}: {name} {means}, {time.perf_counter() - started:.0f} s", flush=True)
    for split in range(SPLITS):
        for cell, rows in kept.items():
            found = rows.setdefault("blend", {"auc": [], "loss": []})
            if len(found["auc"]) <= split:
                started = time.perf_counter()
                auc, loss = scores(blended({name: rows[name]["strength"] for name in CANDIDATES}, cell, split))
                found["auc"].append(round(auc, 5))
                found["loss"].append(round(loss, 5))
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
                seconds = time.perf_counter() - started
                print(f"{cell}, split {split}: blend {auc:.4f}, {loss:.4f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
