"""FLamby's heart disease and breast cancer, with its rows, splits and inputs, so that its published figures are
comparable.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfed.data.federation import Federation
from perfed.data.files import load_npz, require
from perfed.datasets.catalogue import dataset
from perfed.datasets.heart import FILE as HEART

TCGA = "tcga_brca.npz"
TrainRows = Literal["own", "all", "first"]
_CODES = {"cp": (2, 3, 4), "restecg": (1, 2)}  # all levels except the first
_NOT_USED = ("slope", "ca", "thal")
# One bit for each of the 740 patients in the file's order, 1 for test rows. owkin/FLamby@edacf54d (MIT),
# fed_heart_disease/dataset.py: train_test_split(train_size=0.66, random_state=43, stratify) of each hospital.
_TEST = (
    "040480a020b3c59dc48a03b505c0481087c001ac9430180a847015a598491260f8e2001cebe4220108f97083a8591"
    "0e01aa201270d2331a288269090245ed274082300522174607863a8c80c1192000916d94083ae16c1221800e9d16"
)


@dataset("flamby-heart", files=(HEART,))
def flamby_heart(
    seed: int,
    data_dir: Path | None,
    *,
    train_rows: TrainRows = "own",
    scaling: Literal["own", "all", "mixed"] = "own",
) -> Federation:
    """Heart disease at four hospitals as FLamby has it: 740 patients, 13 inputs, one split for all seeds.

    The patients have values in all of the first ten columns; chest pain and ECG are one-hot without their first level.
    Inputs are scaled to mean 0 and deviation 1 (n - 1) over the training rows of the hospital, or of all hospitals with
    ``scaling = "all"``. With "mixed", training rows are scaled over all hospitals and test rows over the hospital,
    which is equivalent to FLamby's pooled training. ``train_rows``: the training rows of a hospital are its own, those
    of all hospitals, or those of the first hospital, Cleveland; test rows are always its own. All 30 training patients
    of Switzerland are ill.

    Source: Ogier du Terrail et al. 2022 (FLamby), Fed-Heart-Disease; Janosi, Steinbrunn, Pfisterer and Detrano 1988.
    """
    data = load_npz(HEART, data_dir, ["x", "y", "hospital", "hospital_names", "feature_names", "flamby_rows"])
    rows = data["flamby_rows"].astype(bool)
    number, names = int(rows.sum()), data["feature_names"].tolist()
    require(HEART, number == 4 * len(_TEST), f"'flamby_rows' has {number} rows, FLamby {4 * len(_TEST)}")
    test = np.array([digit == "1" for digit in f"{int(_TEST, 16):0{number}b}"])
    table = dict(zip(names, data["x"][rows].T.astype(np.float64), strict=True))
    columns = {name: table[name] for name in names if name not in (*_CODES, *_NOT_USED)}
    columns |= {f"{name}_{level}": table[name] == level for name, levels in _CODES.items() for level in levels}
    raw, hospital = np.stack([*columns.values()], 1).astype(np.float64), data["hospital"][rows]
    sites = {site: hospital == code for code, site in enumerate(data["hospital_names"].tolist())}
    x = np.empty_like(raw)
    for in_site in sites.values():
        x[in_site] = _standardise(raw[in_site], raw[in_site & ~test])
    scaled_together = {"own": np.zeros_like(test), "all": np.ones_like(test), "mixed": ~test}[scaling]
    x[scaled_together] = _standardise(raw[scaled_together], raw[~test])
    arrays = _make_arrays(x, data["y"][rows].astype(np.int64), sites, test, train_rows, [*columns])
    federation = Federation.from_arrays(arrays, num_classes=2, class_names=["no", "yes"])
    return replace(federation, scaled_inputs=True)


@dataset("flamby-tcga", files=(TCGA,))
def flamby_tcga(
    seed: int, data_dir: Path | None, *, train_rows: TrainRows = "own", scale_age: bool = False
) -> Federation:
    """Survival with breast cancer in six regions as FLamby has it: 1088 patients, 39 inputs, one split for all seeds.

    The inputs are clinical columns: age in years (with ``scale_age``, scaled to mean 0 and deviation 1 over all
    training rows), and columns of 0 and 1. Targets are times in days and whether death was observed at that time.
    Days are counted from 1, since some times are 0 and survival times must be positive; only their order matters.
    ``train_rows``: the training rows of a region are its own, those of all regions, or those of the first region; test
    rows are always its own. The terms of the GDC apply: it is forbidden to try to identify patients.

    Source: Ogier du Terrail et al. 2022 (FLamby), Fed-TCGA-BRCA; The Cancer Genome Atlas, GDC data portal.
    """
    data = load_npz(TCGA, data_dir, ["x", "event", "time", "center", "is_train", "feature_names"])
    x, center, names = data["x"].astype(np.float64), data["center"], data["feature_names"].tolist()
    require(TCGA, x.shape == (len(center), len(names)), "'x' must be (rows, features) and 'center' say whose each is")
    same = data["time"].shape == data["event"].shape == data["is_train"].shape == center.shape
    require(TCGA, same, "'time', 'event' and 'is_train' must have one entry per row of 'x'")
    y = np.stack([data["time"] + 1, data["event"]], 1).astype(np.float64)
    if scale_age:
        require(TCGA, "age_at_index" in names, "'feature_names' lacks age_at_index, which scale_age is of")
        age = names.index("age_at_index")
        x[:, age] = _standardise(x[:, age], x[data["is_train"], age])
    sites = {f"region-{number}": center == number for number in np.unique(center).tolist()}
    arrays = _make_arrays(x, y, sites, ~data["is_train"], train_rows, names)
    return replace(Federation.from_arrays(arrays, task="survival"), scaled_inputs=scale_age)


def _standardise(x: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``x`` scaled by the mean and deviation of ``reference``.

    A constant column, Switzerland's cholesterol, has deviation 1.
    """
    deviation = reference.std(0, ddof=1)
    return np.asarray((x - reference.mean(0)) / np.where(deviation > 0, deviation, 1))


def _make_arrays(
    x: NDArray[np.float64],
    y: NDArray[Any],
    sites: dict[str, NDArray[np.bool_]],
    test: NDArray[np.bool_],
    train_rows: TrainRows,
    names: list[str],
) -> dict[str, dict[str, Any]]:
    """Return each site's arrays: the test rows of the site, and the rows that it trains on."""
    arrays: dict[str, dict[str, Any]] = {}
    first = next(iter(sites.values()))
    for site, in_site in sites.items():
        train = ~test & {"own": in_site, "all": np.ones_like(in_site), "first": first}[train_rows]
        arrays[site] = {"feature_names": names, "x_train": x[train], "y_train": y[train]}
        arrays[site] |= {"x_test": x[in_site & test], "y_test": y[in_site & test]}
    return arrays
