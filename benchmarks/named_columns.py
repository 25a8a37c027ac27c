"""What columns that hospitals share by name are worth: `mixed` against logistic regression per site.

``python benchmarks/named_columns.py`` needs ``PERFED_DATA`` and takes some minutes; it keeps every split's figures in
``docs/results/named-columns.json``, of which ``python docs/build_docs.py --render`` makes the table of docs/results.md.

Heart disease has all rows (25 splits: five times five folds) or so many of each class at each hospital, intensive care
so many stays in each type of unit, drawn anew for each split; all others are tested on. Every site's AUC and log loss
are over its test rows, and averaged over the sites. Rivals have the columns of their own site: logistic regression
whose C is one of eleven, by the program's own rule (``sklearn:logistic``, on a quarter of the training rows) or by
five-fold cross-validation of the log loss.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.metrics import log_loss, roc_auc_score
from usage import usage

from perfed import Federation
from perfed.data.files import load_npz
from perfed.data.partition.shards import make_generator
from perfed.datasets.heart import CODES, read_hospitals
from perfed.experiment.config import validate
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import start

KEPT = Path(__file__).parent.parent / "docs/results/named-columns.json"
SPLITS, TRIES = 25, 11
MODEL = {"head": "linear"}


def main() -> None:
    """Run every setting that is not kept, and keep it."""
    warnings.simplefilter("ignore")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    frames = read_hospitals(Path(os.environ["PERFED_DATA"]))
    icu = stays(Path(os.environ["PERFED_DATA"]))
    settings: dict[str, tuple[dict[str, Any], int | None, bool]] = {
        **{f"heart disease, {n} a class": (frames, n, True) for n in (3, 10, 30)},
        "heart disease, all rows": (frames, None, True),
        **{f"intensive care, {n} stays": (icu, n, False) for n in (50, 100, 300)},
    }
    for name, (sites, number, by_class) in settings.items():
        if name not in kept:
            kept[name] = scored(sites, number, by_class)
            KEPT.write_text(json.dumps(kept, indent=1))
        shown(name, kept[name])


def stays(data_dir: Path) -> dict[str, Any]:
    """Each type of unit's stays with the columns that at least half of them have, and ``died``, "yes" or "no"."""
    data = load_npz("icu_2012.npz", data_dir, ["x", "y", "icu_type", "icu_names", "feature_names"])
    table = pd.DataFrame(data["x"], columns=data["feature_names"].tolist())
    table["died"] = np.where(data["y"] > 0, "yes", "no")
    units = {str(name): table[data["icu_type"] == kind] for kind, name in enumerate(data["icu_names"], 1)}
    return {name.replace(" ", "-"): unit.loc[:, unit.isna().mean() <= 0.5] for name, unit in units.items()}


def scored(sites: dict[str, Any], number: int | None, by_class: bool) -> dict[str, dict[str, list[float]]]:
    """Mean AUC and log loss over the sites, by row and split."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(SPLITS):
        for row, (auc, loss) in rows(sites, number, by_class, seed):
            of_row = found.setdefault(row, {"auc": [], "loss": []})
            of_row["auc"].append(round(auc, 5))
            of_row["loss"].append(round(loss, 5))
    return found


def rows(
    sites: dict[str, Any], number: int | None, by_class: bool, seed: int
) -> Iterator[tuple[str, tuple[float, float]]]:
    """What is compared on one split, and its figures."""
    target = next(iter(sites.values())).columns[-1]
    with TemporaryDirectory() as folder:
        data = written(Path(folder), sites, number, by_class, seed) | {"name": "tables", "target": target}
        data["categories"] = list(CODES) if target == "disease" else []
        table = {"seed": seed, "data": data, "model": MODEL, "rounds": 8, "baseline_tries": TRIES}
        named = validate({**table, "method": "mixed", "data": {**data, "columns": "named"}})
        summary = start(named).execute()
        yield "mixed", (summary["metrics"]["auc"]["mean"], summary["metrics"]["loss"]["mean"])
        own = validate({**table, "method": "local"})
        federation = own.data.load(seed, None)
        alone = SklearnRun("sklearn:logistic", own, federation)
        yield "sklearn:logistic", of_models(federation, [alone.fitted(client) for client in federation])
        yield "logistic, cross-validated", of_models(federation, [validated(client) for client in federation])


def written(folder: Path, sites: dict[str, Any], number: int | None, by_class: bool, seed: int) -> dict[str, Any]:
    """The sites' tables as files, and the settings that read them."""
    parts = ("train",) if number is None else ("train", "test")
    for part in parts:
        (folder / part).mkdir()
    for name, table in sites.items():
        if number is None:
            table.to_csv(folder / "train" / f"{name}.csv", index=False)
            continue
        drawn, labels = make_generator(seed, f"training rows of {name}"), table.iloc[:, -1].to_numpy()
        chosen = np.zeros(len(table), bool)
        for label in np.unique(labels):
            of_class = np.flatnonzero(labels == label)
            size = number if by_class else max(2, round(number * len(of_class) / len(table)))
            chosen[drawn.permutation(of_class)[: min(size, len(of_class) - 3)]] = True
        table[chosen].to_csv(folder / "train" / f"{name}.csv", index=False)
        table[~chosen].to_csv(folder / "test" / f"{name}.csv", index=False)
    files = {"files": [str(folder / "train")]}
    return {**files, "folds": 5} if number is None else {**files, "test_files": [str(folder / "test")]}


def validated(client: Any) -> Any:
    """Logistic regression whose strength five folds of the training rows choose."""
    x, y = client.train.x.numpy(), client.train.y.numpy()
    folds = min(5, int(np.bincount(y, minlength=2).min()))
    if folds < 2:
        return LogisticRegression(max_iter=1000).fit(x, y)
    model = LogisticRegressionCV(
        Cs=np.geomspace(0.001, 100, TRIES),
        cv=folds,
        scoring="neg_log_loss",
        max_iter=1000,
        l1_ratios=(0.0,),
        use_legacy_attributes=False,
    )
    return model.fit(x, y)


def of_models(federation: Federation, models: list[Any]) -> tuple[float, float]:
    """Mean AUC and log loss over the clients."""
    scores = []
    for client, model in zip(federation, models, strict=True):
        assert client.test is not None
        said, y = model.predict_proba(client.test.x.numpy())[:, 1], client.test.y.numpy()
        scores.append((roc_auc_score(y, said), log_loss(y, said, labels=[0, 1])))
    auc, loss = np.mean(scores, axis=0)
    return float(auc), float(loss)


def shown(name: str, found: dict[str, dict[str, list[float]]]) -> None:
    """Print the gains over both rivals."""
    for rival in [row for row in found if row != "mixed"]:
        gain = 100 * (np.array(found["mixed"]["auc"]) - found[rival]["auc"])
        half = 2.06 * gain.std(ddof=1) / len(gain) ** 0.5
        print(f"{name}: AUC {gain.mean():+.2f} ± {half:.2f} over {rival}", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
