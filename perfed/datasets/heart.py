"""Heart disease at four hospitals with different columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from perfed.data.federation import Federation
from perfed.data.files import load_npz, optional_package, require
from perfed.datasets.catalogue import dataset
from perfed.tables.options import Mode

FILE = "heart_disease.npz"
CODES = ("cp", "restecg", "slope", "thal")
TRUE_OR_FALSE = ("sex", "fbs", "exang")
_ABSENT = 0.9  # share of missing values above which a column counts as absent


@dataset("heart-disease", files=(FILE,))
def heart_disease(
    seed: int,
    data_dir: Path | None,
    *,
    folds: Annotated[int, Field(ge=2)] = 5,
    columns: Mode = "own",
) -> Federation:
    """Whether a patient has heart disease, at four hospitals that measured different things (UCI, 920 patients).

    Each hospital's table is read like a user's table (:meth:`perfed.data.federation.Federation.from_frames`; extra
    ``perfed[tables]``). A column that is missing in nine tenths of a hospital's rows counts as absent: only Cleveland
    has ``ca``, all but Hungary ``thal``, all but Switzerland ``chol`` (0 there, which means unknown). Seed s
    tests on fold s mod ``folds`` of each hospital, by class. ``columns`` as for data set "tables": "own", "common",
    "union" or "named".

    Source: Janosi, Steinbrunn, Pfisterer and Detrano 1988; UCI Machine Learning Repository.
    """
    return Federation.from_frames(read_hospitals(data_dir), target="disease", categories=CODES, folds=folds,
                                  columns=columns, seed=seed)  # fmt: skip


def read_hospitals(data_dir: Path | None) -> dict[str, Any]:
    """Return each hospital's data frame with its columns and ``disease``, "yes" or "no"."""
    data = load_npz(FILE, data_dir, ["x", "y", "hospital", "hospital_names", "feature_names"])
    x, y, hospital = data["x"], data["y"], data["hospital"]
    names, features = data["hospital_names"].tolist(), data["feature_names"].tolist()
    require(FILE, x.dtype.kind == "f" and x.shape == (len(x), len(features)), "'x' must be (rows, features) of floats")
    same = y.shape == hospital.shape == (len(x),)
    require(FILE, same and set(y.tolist()) <= {0, 1}, "'y' must hold 0 or 1 for every row of 'x'")
    require(
        FILE, set(hospital.tolist()) == set(range(len(names))), "'hospital' must hold positions in 'hospital_names'"
    )
    needed = ("chol", *TRUE_OR_FALSE)
    require(FILE, set(needed) <= set(features), f"'feature_names' must have {', '.join(needed)}")
    pandas = optional_package("pandas", "data set 'heart-disease'", "tables")
    table = pandas.DataFrame(x, columns=features)
    table["chol"] = table["chol"].replace(0, np.nan)
    for name in TRUE_OR_FALSE:
        table[name] = table[name].map({0.0: False, 1.0: True})
    table["disease"] = np.where(y > 0, "yes", "no")
    frames = {name: table[hospital == number] for number, name in enumerate(names)}
    return {name: frame.loc[:, frame.isna().mean() < _ABSENT] for name, frame in frames.items()}
