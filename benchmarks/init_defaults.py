"""Whether a comparison with what ``perfed init`` writes ranks methods as one in which each method was tuned.

``python benchmarks/init_defaults.py DIR``: heart disease (four hospitals), intensive care (four types of unit), seventy
schools and 42 patients with Parkinson's disease become folders of CSV files, a file per site. ``perfed init`` writes an
experiment for each, ``perfed compare`` runs it unchanged, and again after ``perfed tune`` with the grid that ``init``
prints. Data: the folder of PERFED_DATA. What came of it is kept in ``docs/results/init-defaults.json``, from which
``docs/results.md`` has its tables. What DIR has already is not run again; about twenty minutes on one core.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from scipy.stats import kendalltau  # type: ignore[import-untyped]
from usage import usage

from perfed.datasets.heart import CODES, read_hospitals
from perfed.engine.metrics import metric_of
from perfed.report import load_runs
from perfed.report.against import needs_no_federation
from perfed.report.intervals import estimate_gain
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, main_metric

KEPT = Path(__file__).parent.parent / "docs" / "results" / "init-defaults.json"
SEEDS = "0..2"
MORE = ("fedavg-ft", "ditto")
"""Compared beside those that ``init`` names, where sites share columns."""

Table = Any  # a data frame


def heart() -> tuple[dict[str, Table], dict[str, Table]]:
    """Four hospitals, each with the columns that it has."""
    return read_hospitals(None), {}


def icu() -> tuple[dict[str, Table], dict[str, Table]]:
    """Four types of unit, each without the columns that more than half of its stays lack; who dies in hospital."""
    data = _arrays("icu_2012.npz")
    table = pd.DataFrame(data["x"], columns=data["feature_names"])
    table["died"] = np.where(data["y"] > 0, "yes", "no")
    rows = {str(name): table[data["icu_type"] == 1 + number] for number, name in enumerate(data["icu_names"])}
    return {name: own.loc[:, own.isna().mean() <= 0.5] for name, own in rows.items()}, {}


def school() -> tuple[dict[str, Table], dict[str, Table]]:
    """Every second of 139 schools; examination scores."""
    data = _arrays("school.npz")
    table = pd.DataFrame(data["x"], columns=[f"x{number}" for number in range(data["x"].shape[1])])
    table["score"] = data["y"]
    return {f"school-{name}": table[data["school"] == name] for name in np.unique(data["school"])[::2]}, {}


def parkinsons() -> tuple[dict[str, Table], dict[str, Table]]:
    """42 patients' total UPDRS from their voice; tested on the last fifth of the recordings."""
    data = _arrays("parkinsons.npz")
    table = pd.DataFrame(data["x"], columns=data["feature_names"])
    table["updrs"] = data["total_updrs"]
    train, test = {}, {}
    for number in np.unique(data["patient"]):
        own = table[data["patient"] == number].sort_values("test_time")
        last = len(own) - len(own) // 5
        train[f"patient-{number:02d}"], test[f"patient-{number:02d}"] = own[:last], own[last:]
    return train, test


STUDIES: dict[str, tuple[Callable[[], tuple[dict[str, Table], dict[str, Table]]], str]] = {
    "heart disease": (heart, "--target disease --categories " + " --categories ".join(CODES)),
    "intensive care": (icu, "--target died"),
    "schools": (school, "--target score"),
    "Parkinson's": (parkinsons, "--target updrs --test tests"),
}


def _arrays(name: str) -> Any:
    return np.load(Path(os.environ["PERFED_DATA"]) / name)


def perfed(folder: Path, words: str) -> None:
    """Run a command in ``folder``."""
    subprocess.run([sys.executable, "-m", "perfed", *shlex.split(words)], cwd=folder, check=True)


def made(folder: Path, of: Callable[[], tuple[dict[str, Table], dict[str, Table]]], words: str) -> Path:
    """Write a file per site, and let ``perfed init`` write the experiment."""
    for name, tables in zip(("sites", "tests"), of(), strict=True):
        for site, table in tables.items():
            file = folder / name / f"{site.replace(' ', '-')}.csv"
            file.parent.mkdir(parents=True, exist_ok=True)
            table.to_csv(file, index=False)
    perfed(folder, f"init sites {words}")
    return folder / "study.toml"


def commands(study: Path) -> dict[str, str]:
    """What gives the numbers: the commands in ``init``'s file, with :data:`MORE`, seeds and engine."""
    text = study.read_text()
    methods = re.search(r"--methods (\S+)", text)
    tuned = re.search(r"perfed tune study.toml --methods (\S+) (--grid .*)(?= --out tuned)", text)
    assert methods is not None and tuned is not None
    more = [] if 'columns = "own"' in text else MORE
    named, trained = ([*found.split(","), *more] for found in (methods[1], tuned[1]))
    end = f"--seeds {SEEDS} --engine stacked plan.threads=1"
    return {
        "init": f"compare study.toml --methods {','.join(named)} {end} --out init",
        "tune": f"tune study.toml --methods {','.join(trained)} {tuned[2]} --engine stacked plan.threads=1 --out tuned",
        "tuned": f"compare tuned/chosen.toml --methods {','.join(named)} {end} --out chosen",
    }


def measured(folder: Path, metric: str) -> dict[str, Any]:
    """How far the two comparisons in ``folder`` agree by ``metric``.

    Returns:
        ``init`` and ``tuned``: the methods' means over sites and seeds; ``tau``: Kendall's, of the two; ``pairs`` of
        methods, those that are ``apart`` when tuned (the 95 % interval of their difference over sites and seeds has no
        0), of these the ``same`` whose means are in the same order with ``init``'s settings, and ``against``: those
        told apart in both, the other way round.
    """
    tables = [ClientTable.from_runs(_runs(folder / place), metric) for place in ("init", "chosen")]
    names = [name for name in tables[0].of_method if name in tables[1].of_method]
    means = [{name: table.mean(name) for name in names} for table in tables]
    known, apart, same, against = metric_of(metric), 0, 0, 0
    for one, other in combinations(names, 2):
        init, tuned = (estimate_gain(table.gains(one, other, known), table.weights) for table in tables)
        apart += tuned.sign != 0
        same += tuned.sign != 0 and init.mean * tuned.mean > 0
        against += tuned.sign * init.sign < 0
    tau = kendalltau(*([of[name] for name in names] for of in means)).statistic
    pairs = {"pairs": len(names) * (len(names) - 1) // 2, "apart": apart, "same": same, "against": against}
    return {"init": means[0], "tuned": means[1], "tau": round(float(tau), 2), **pairs}


def ahead(folder: Path, place: str) -> dict[str, list[str]]:
    """The verdict's reference, and which of the methods that train together are ahead of it and behind it."""
    said = json.loads((folder / place / "comparison.json").read_text())["verdict"]
    found = [(of["method"], of["gain"]) for of in said["methods"] if not needs_no_federation(of["method"])]
    return {
        "reference": [said["reference"]],
        "ahead": sorted(method for method, gain in found if gain["low"] > 0),
        "behind": sorted(method for method, gain in found if gain["high"] < 0),
    }


def _runs(folder: Path) -> list[RunResults]:
    return load_runs(sorted(file.parent for file in folder.rglob("summary.json")))


def main(out: Path) -> None:
    """Run what is not there yet, and keep what came of it."""
    kept: dict[str, Any] = {}
    for name, (of, words) in STUDIES.items():
        folder = out / name.replace(" ", "-").replace("'", "")
        study = folder / "study.toml"
        if not study.exists():
            made(folder, of, words)
        said = commands(study)
        for command, place in zip(said.values(), ("init", "tuned", "chosen"), strict=True):
            if not (folder / place).exists():
                perfed(folder, command)
        metric = main_metric(_runs(folder / "init"))
        assert metric is not None
        kept[name] = {
            "commands": [f"perfed init sites {words}", *(f"perfed {command}" for command in said.values())],
            "verdict": {place: ahead(folder, place) for place in ("init", "chosen")},
            "by": {metric: measured(folder, metric) for metric in (metric, *(["auc"] if metric == "log-loss" else []))},
        }
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    usage(__doc__)
    main(Path(sys.argv[1]))
