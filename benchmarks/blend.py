"""No site worse off: ``blend`` against each site's own best model and the best single method, on eight data sets.

``python benchmarks/blend.py DIR [NAMES]`` makes the comparisons of :data:`DATA` in ``DIR``, each over its splits,
and keeps what came of each in ``docs/results/blend.json``; what is kept is not made again, and a run that is there is
not trained again. ``python docs/build_docs.py --render`` writes the table of ``docs/results.md``.

Each site's own best model is that of scikit-learn's with the least loss on its training rows, held out in five folds;
picking does the same among all candidates. ``keep_own`` sites keep their best own model, for the blend errs more on
their held-out rows; ``without guard`` is the blend if none did. A site loses or wins where the difference of the loss
on its test rows has a bootstrap interval on one side of 0, with the error 5 % divided by the number of sites.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from numpy.typing import NDArray
from scipy.special import softmax  # type: ignore[import-untyped]
from usage import usage

from perfed import Federation, load
from perfed.data.files import load_npz
from perfed.datasets.catalogue import register_temporarily
from perfed.datasets.heart import CODES, read_hospitals
from perfed.engine.scores import auc, c_index
from perfed.experiment.blend import FILE, BlendRun, candidates_of, mixture
from perfed.experiment.comparison import Comparison, ComparisonSpec
from perfed.experiment.study import Study
from perfed.maths.blending import drop_small_weights, learn_weights
from perfed.run import predictions
from perfed.run.directory import read_marker

KEPT = Path(__file__).parent.parent / "docs/results/blend.json"
DRAWS = 10_000
TRIES = 5

Numbers = NDArray[np.float64]
Said = dict[str, tuple[NDArray[Any], Numbers]]
OWN = ("sklearn:logistic", "sklearn:random-forest")
VALUES = ("sklearn:ridge", "sklearn:random-forest")


def data_dir() -> Path:
    return Path(os.environ["PERFED_DATA"])


def heart(seed: int) -> Federation:
    """Four hospitals, all columns that each has."""
    return Federation.from_frames(
        read_hospitals(data_dir()), target="disease", test=0.3, categories=CODES, columns="named", seed=seed
    )


def units(seed: int) -> Federation:
    """Four types of intensive care, a hundred stays each to train on."""
    data = load_npz("icu_2012.npz", data_dir(), ["x", "y", "icu_type", "icu_names", "feature_names"])
    table = pd.DataFrame(data["x"], columns=data["feature_names"].tolist())
    table["died"] = np.where(data["y"] > 0, "yes", "no")
    train, test = {}, {}
    for kind, name in enumerate(data["icu_names"].tolist(), 1):
        unit = table[data["icu_type"] == kind]
        unit = unit.loc[:, unit.isna().mean() <= 0.5]
        drawn, chosen = np.random.default_rng([seed, kind]), np.zeros(len(unit), bool)
        for label in ("yes", "no"):
            of_class = np.flatnonzero(unit["died"] == label)
            chosen[drawn.permutation(of_class)[: max(5, round(100 * len(of_class) / len(unit)))]] = True
        train[name], test[name] = unit[chosen], unit[~chosen]
    return Federation.from_frames(train, test=test, target="died", columns="named", seed=seed)


def parkinsons(seed: int) -> Federation:
    """42 people, tested on recordings drawn at random."""
    return load("parkinsons", {"split": "random", "test_fraction": 0.5}, seed=seed, data_dir=data_dir())


def wiki(seed: int) -> Federation:
    """Articles of whom some have images and others texts."""
    return load("wiki-crossmodal", {"columns": "union"}, seed=seed, data_dir=data_dir())


def adult(seed: int) -> Federation:
    """Ten sites of 200 people whose mixtures of races differ."""
    return load("adult", {"clients": 10, "samples": 200, "alpha": 1.0}, seed=seed, data_dir=data_dir())


def tcga(seed: int) -> Federation:
    """Six regions' patients with breast cancer, FLamby's split."""
    return load("flamby-tcga", {}, seed=seed, data_dir=data_dir())


def schools(seed: int) -> Federation:
    """Seventy schools, half of the pupils each."""
    data, arrays = load_npz("school.npz", data_dir(), ["x", "y", "school"]), {}
    for school in np.unique(data["school"])[:70].tolist():
        own = np.random.default_rng([seed, school]).permutation(np.flatnonzero(data["school"] == school))
        train, test = own[: len(own) // 2], own[len(own) // 2 :]
        parts = {"train": train, "test": test}
        arrays[f"{school:03d}"] = {
            **{f"x_{name}": data["x"][rows, :-1] for name, rows in parts.items()},
            **{f"y_{name}": data["y"][rows] for name, rows in parts.items()},
            "feature_names": [f"x{j}" for j in range(27)],
        }
    return Federation.from_arrays(arrays, task="regression").standardised()


def digits(seed: int) -> Federation:
    """Twenty clients that hold four digits each."""
    options = {"partition": "pathological", "clients": 20, "classes_per_client": 4, "samples": 40}
    return load("digits", {**options, "test_samples": 100, "overlap": "test"}, seed=seed)


LINEAR = {"model": {"head": "linear"}, "rounds": 30}
ADAM = {"optimizer": "adam", "lr": 1e-2, "batch_size": 32, "local_epochs": 3, "weight_decay": 1e-2}
DEEP = {"model": {"body": {"kind": "mlp", "hidden": [64], "out": 32}, "head": "linear"}, "rounds": 20}
MIXED = {"mixed": {"model": {"body": "none"}}}


@dataclass(frozen=True)
class Cell:
    """A data set with its candidates and the seeds of its splits."""

    make: Callable[[int], Federation]
    methods: tuple[str, ...]
    table: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1)


DATA: dict[str, Cell] = {
    "heart disease": Cell(heart, (*OWN, "local", "fedavg-ft", "mixed", "forest"), LINEAR),
    "intensive care": Cell(units, (*OWN, "local", "fedavg-ft", "mixed", "forest"), LINEAR),
    "TCGA": Cell(tcga, ("sklearn:cox", "local", "fedavg-ft", "mixed"), LINEAR),
    "Adult": Cell(adult, (*OWN, "local", "fedavg-ft", "mixed", "forest"), LINEAR),
    "Parkinson's": Cell(parkinsons, (*VALUES, "local", "fedavg-ft", "mixed", "forest"), LINEAR, tuple(range(8))),
    "schools": Cell(schools, (*VALUES, "local", "fedavg-ft", "mixed", "forest"), LINEAR),
    "digits": Cell(digits, (*OWN, "local", "fedavg-ft", "fedpac"), {**DEEP, "methods": MIXED}),
    "wiki": Cell(wiki, (*OWN, "local", "fedavg-ft", "ditto"), LINEAR),
}


def loss(task: str, y: NDArray[Any], said: Numbers) -> Numbers:
    """Of each row: minus the log-likelihood, or the squared error; of survival the row's term of Cox's."""
    if task == "classification":
        return np.asarray(-np.log(softmax(said, axis=1)[np.arange(len(y)), y].clip(1e-12)))
    if task == "regression":
        return np.asarray(((said.reshape(len(y), -1) - y.reshape(len(y), -1)) ** 2).mean(1))
    h, (time, event) = said[:, 0], y.T
    risk = np.array([np.log(np.exp(h[time >= at] - h.max()).sum()) + h.max() for at in time])
    return np.asarray(event * (risk - h) * len(y) / max(1, event.sum()))


def ranked(task: str, y: NDArray[Any], said: Numbers) -> float:
    """AUC of two classes, C-index of survival; else none."""
    if task == "survival":
        return c_index(y, said)
    return auc(y, said) if task == "classification" and said.shape[1] == 2 and len(np.unique(y)) == 2 else float("nan")


def side(own: Numbers, other: Numbers, sites: int, generator: np.random.Generator) -> int:
    """1 where ``own`` loss is less on a site's rows, -1 where it is more, 0 where that can be chance."""
    difference = other - own
    rows = generator.integers(0, len(difference), (DRAWS, len(difference)))
    low, high = np.quantile(difference[rows].mean(1), [0.025 / sites, 1 - 0.025 / sites])
    return int(low > 0) - int(high < 0)


def said_of(run: Path) -> Said:
    """By site targets and outputs of a run's test rows."""
    return predictions.read_predictions(run)[-1].by_site()


def measured(cell: Cell, comparison: Comparison, seed: int) -> dict[str, Any]:
    """Means over sites of each row, and at how many the blend, and each single method, loses and wins."""
    federation = cell.make(seed)
    task, ids = federation.task, federation.ids
    of = comparison.finished_candidates(seed)
    run = BlendRun(comparison.experiment("blend", seed), federation, of, comparison.directory("blend", seed))
    held = run.held_out(list(zip(*of.values(), strict=True))[1:])
    names = list(of)
    scores = {site: [held[site].compute_sums(np.eye(len(names))[k]).value for k in range(len(names))] for site in ids}
    own = [k for k, name in enumerate(names) if name.startswith("sklearn:")]
    best_own = {site: names[min(own, key=lambda k: scores[site][k])] for site in ids}
    picked = {site: names[int(np.argmin(scores[site]))] for site in ids}
    said = {name: said_of(places[0]) for name, places in of.items()}
    content = json.loads((comparison.directory("blend", seed) / FILE).read_text())
    _, weights = learn_weights([held[site] for site in ids], float(content["prior_rows"]))
    unguarded = {
        site: (
            y := said[names[0]][site][0],
            mixture(task, y, [said[n][site][1] for n in names], drop_small_weights(own_weights)),
        )
        for site, own_weights in zip(ids, weights, strict=True)
    }
    rows: dict[str, Said] = {
        **said,
        "best own": {site: said[best_own[site]][site] for site in ids},
        "picked": {site: said[picked[site]][site] for site in ids},
        "blend": said_of(comparison.directory("blend", seed)),
        "without guard": unguarded,
    }
    generator, found = np.random.default_rng(seed), {}
    losses = {name: {site: loss(task, *each[site]) for site in ids} for name, each in rows.items()}
    for name, each in rows.items():
        base = losses["best own"]
        sides = [side(losses[name][site], base[site], len(ids), generator) for site in ids]
        order = [ranked(task, *each[site]) for site in ids]
        found[name] = {
            "loss": float(np.mean([losses[name][site].mean() for site in ids])),
            "ranked": None if np.isnan(order).all() else float(np.nanmean(order)),
            "loses": sides.count(-1),
            "wins": sides.count(1),
        }
    return {"task": task, "sites": len(ids), "keep_own": len(content["keep_own"]), "rows": found}


def main(folder: Path, names: list[str]) -> None:
    """Make what is not kept, one data set and seed at a time."""
    warnings.simplefilter("ignore")
    for name in names or DATA:
        for seed in DATA[name].seeds:
            kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            if str(seed) in kept.get(name, {}):
                continue
            cell, where = DATA[name], folder / f"{name.replace(' ', '-')}-{seed}"
            with register_temporarily(cell.make) as data:
                table = {"name": name, "training": ADAM, "baseline_tries": TRIES, **cell.table, "data": {"name": data}}
                table = {**table, "evaluation": {"every": 100}}
                methods = candidates_of(cell.methods)
                spec = ComparisonSpec(table, [*methods, "blend"], [seed])
                study = Study.read(where) if read_marker(where)[0] else Study.create(where, spec)
                _, failed = study.execute(tell=lambda label, outcome: print(label, flush=True))
                if failed:
                    print(name, *failed, sep="\n")
                    continue
                result = measured(cell, study.comparisons[""], seed)
            kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            kept.setdefault(name, {})[str(seed)] = result
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            for row, of in result["rows"].items():
                print(f"{name}, {seed}: {row} {of}", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
