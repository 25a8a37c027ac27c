"""What a site gets that uses the verdict's advice, on rows that the advice has not seen.

``python benchmarks/advice.py school|icu|views DIR``: five folds of each site's rows. The method for each site is chosen
on one fold, with so many rows' worth of the mean over all sites, and used on each other fold. 0: by the site's own rows
alone; inf: one method everywhere. "verdict": what :func:`perfed.report.verdict` says of the fold, and of all folds but
the one that it is tried on. Data: the folder of PERFED_DATA; views are of scikit-learn's digits. The comparison
is kept in DIR, and read from there the next time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from usage import usage

import perfed
from perfed.engine.metrics import metric_of
from perfed.report import load_runs
from perfed.report.against import needs_no_federation
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults
from perfed.report.verdict import WORTH, verdict

FOLDS = 5
WORTHS = (0.0, 50.0, float(WORTH), 1000.0, 1e12)
SHARED = {"body": {"kind": "mlp", "hidden": [32]}, "head": "linear"}
OWN = {"embedding": {"kind": "linear", "out": 8}, "body": {"kind": "hidden-layer", "out": 8}, "head": "linear"}
COMMON = ("local", "fedavg-ft", "fedrep", "ditto")

Sites = Iterator[tuple[str, NDArray[np.float32], NDArray[Any]]]


def school() -> Sites:
    """Every second of 139 schools; examination scores."""
    data = np.load(Path(os.environ["PERFED_DATA"]) / "school.npz")
    for name in np.unique(data["school"])[::2]:
        own = data["school"] == name
        yield f"school-{name}", data["x"][own].astype(np.float32), data["y"][own].astype(np.float32)


def icu() -> Sites:
    """Each of four types of intensive care in six sites; who dies in hospital."""
    data, rng = np.load(Path(os.environ["PERFED_DATA"]) / "icu_2012.npz"), np.random.default_rng(0)
    for kind in np.unique(data["icu_type"]):
        rows = rng.permutation(np.flatnonzero(data["icu_type"] == kind))
        for number, part in enumerate(np.array_split(rows, 6)):
            yield f"type-{kind}-{number}", data["x"][part].astype(np.float32), data["y"][part].astype(np.int64)


def views() -> Sites:
    """24 sites of digits, six views of the pictures: pixels, spectrum, profiles, moments, projections, means."""
    x, y = load_digits(return_X_y=True)
    pictures, rng, at = x.reshape(-1, 8, 8) / 16, np.random.default_rng(3), np.arange(8) - 3.5
    rows, columns = pictures.sum(1), pictures.sum(2)
    seen = {
        "pixels": x[:, ::2],
        "spectrum": np.abs(np.fft.fft2(pictures)).reshape(len(x), -1)[:, :40],
        "profiles": np.concatenate([rows, columns, np.diff(rows), np.diff(columns)], 1),
        "moments": np.stack([np.einsum("nij,i,j->n", pictures**p, at**a, at**b) for p, a, b in np.ndindex(3, 3, 3)], 1),
        "projections": x @ rng.normal(size=(64, 20)),
        "means": pictures.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16),
    }
    for number, part in enumerate(np.array_split(rng.permutation(len(x)), 24)):
        view = list(seen)[number % 6]
        yield f"{view}-{number // 6}", seen[view][part].astype(np.float32), y[part]


STUDIES: dict[str, tuple[Callable[[], Sites], str, dict[str, Any], tuple[str, ...], float]] = {
    "school": (school, "mse", SHARED, (*COMMON, "sklearn:ridge", "sklearn:random-forest"), 1e-2),
    "icu": (icu, "log-loss", SHARED, (*COMMON, "sklearn:logistic", "sklearn:random-forest"), 1e-2),
    "views": (
        views,
        "accuracy",
        OWN,
        ("local", "hetfedrep", "flic-class", "sklearn:logistic", "sklearn:random-forest"),
        3e-2,
    ),
}


def fold(sites: Callable[[], Sites], seed: int) -> perfed.Federation:
    """The federation that tests on fold ``seed`` of each site; gaps are the mean, columns standardised by the rest."""
    clients = {}
    for name, x, y in sites():
        test = np.random.default_rng(len(x)).permutation(len(x)) % FOLDS == seed
        mean, scale = (np.nan_to_num(of(x[~test], axis=0)) for of in (np.nanmean, np.nanstd))
        fill_template = np.nan_to_num((x - mean) / np.where(scale > 1e-6, scale, 1.0)).astype(np.float32)
        clients[name] = {
            "x_train": fill_template[~test],
            "y_train": y[~test],
            "x_test": fill_template[test],
            "y_test": y[test],
        }
    return perfed.Federation.from_arrays(clients)


def main(name: str, out: Path) -> None:
    """Compare, choose on each fold, and print what that gives on the others."""
    sites, metric, model, methods, decay = STUDIES[name]
    if not out.exists():
        perfed.compare(
            lambda seed: fold(sites, seed),
            list(methods),
            model=model,
            rounds=60,
            seeds=range(FOLDS),
            out=out,
            training={"optimizer": "adam", "lr": 3e-3, "weight_decay": decay, "batch_size": 32, "local_epochs": 2},
            evaluation={
                "compare_by": metric,
                "every": 60,
                **({"metrics": ["log-loss"]} if metric == "log-loss" else {}),
            },
            plan={"engine": "stacked", "threads": 1},
        )
    runs = load_runs(sorted(file.parent for file in out.rglob("summary.json")))
    values = ClientTable.from_runs(runs, metric)
    direction, known = metric_of(metric).direction, [m for m in methods if m in values.of_method]
    alone = [needs_no_federation(method) for method in known]
    print(f"{name}, {metric}, {len(values.sites)} sites, {np.mean(values.rows):.0f} test rows each")
    for worth in WORTHS:
        got, own = [], []
        for seen, new in permutations(range(FOLDS), 2):
            told = replace(values, of_method={m: v[[seen]] for m, v in values.of_method.items()})
            score = np.nan_to_num(direction * np.stack([told.shrink_to_mean(m, worth) for m in known]), nan=-np.inf)
            tested = np.stack([values.of_method[m][new] for m in known])
            at = np.arange(len(values.sites))
            got.append(tested[score.argmax(0), at])
            own.append(tested[np.where(np.array(alone)[:, None], score, -np.inf).argmax(0), at])
        gain = direction * np.nanmean(np.array(got) - np.array(own), axis=0)
        print(f"  {worth:g} rows: {np.nanmean(got):.4f}; below its best own model: {int((gain < 0).sum())} sites")
    for told_of, pairs in (
        ("one fold", permutations(range(FOLDS), 2)),
        ("all others", ((None, k) for k in range(FOLDS))),
    ):
        follow(told_of, runs, values, direction, list(pairs))


def follow(
    told_of: str, runs: list[RunResults], values: ClientTable, direction: int, pairs: list[tuple[int | None, int]]
) -> None:
    """Print what sites get that do as the verdict says of fold ``seen`` (None: of all but the new one)."""
    got, own, shared = [], [], 0
    for seen, new in pairs:
        found = verdict([run for run in runs if (run.seed != new if seen is None else run.seed == seen)])
        assert found is not None
        use = {site.site: site for site in found.sites}
        got.append([values.of_method[use[s].method][new, at] for at, s in enumerate(values.sites)])
        own.append([values.of_method[use[s].local or use[s].method][new, at] for at, s in enumerate(values.sites)])
        shared += sum(of.method == of.federated for of in found.sites)
    gain = direction * np.nanmean(np.array(got) - np.array(own), axis=0)
    print(f"  verdict of {told_of}: {np.nanmean(got):.4f} (own models {np.nanmean(own):.4f}); federated at "
          f"{shared / len(pairs):.1f} sites; below its own model: {int((gain < 0).sum())} sites")  # fmt: skip


if __name__ == "__main__":
    usage(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
