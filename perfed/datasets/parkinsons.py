"""Parkinson's telemonitoring: a patient's symptoms from recordings of the voice, one client per patient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfed.data.federation import Federation
from perfed.data.files import load_npz, require
from perfed.data.partition.shards import make_generator
from perfed.datasets.catalogue import TestFraction, ValidationFraction, dataset

FILE = "parkinsons.npz"


@dataset("parkinsons", task="regression", files=(FILE,))
def parkinsons(
    seed: int,
    data_dir: Path | None,
    *,
    target: Literal["total", "motor"] = "total",
    split: Literal["later", "random"] = "later",
    test_fraction: TestFraction = 0.2,
    later_validation: ValidationFraction = 0.0,
) -> Federation:
    """How severe the symptoms of each of 42 people are (UPDRS, in points) over half a year, from voice recordings.

    Inputs are age, sex, days since the start and 16 measures of a recording, with mean 0 and deviation 1 over the
    training samples of all clients (sums that clients can add up without showing a sample); age and sex are constant
    at a client. Targets are UPDRS points, ``target`` says which; between visits to the clinic they are interpolated in
    time. Models work on them standardised over all clients' training samples.
    ``split``: "later" tests on each person's last recordings (``later_validation`` is the part of the others, the last
    of them, for validation), "random" on any recordings, which interpolation in time can predict.

    Source: Tsanas, Little, McSharry and Ramig 2010; UCI Machine Learning Repository.
    """
    data = load_npz(FILE, data_dir, ["x", f"{target}_updrs", "patient", "feature_names"])
    x, y, patient, names = data["x"], data[f"{target}_updrs"], data["patient"], data["feature_names"].tolist()
    require(FILE, x.shape == (len(y), len(names)) and patient.shape == y.shape, "'x', the scores and 'patient' differ")
    require(FILE, "test_time" in names, "'feature_names' must have 'test_time'")
    time = x[:, names.index("test_time")]
    rows: dict[str, dict[str, NDArray[np.int64]]] = {}
    for number in np.unique(patient).tolist():
        client = f"{number:03d}"
        recordings = np.flatnonzero(patient == number)
        order = np.argsort(time[recordings], kind="stable")
        if split == "random":
            order = make_generator(seed, f"recordings of {client}").permutation(len(recordings))
        train, test = _split_off_last(recordings[order], test_fraction)
        train, validation = _split_off_last(train, later_validation)
        rows[client] = {"train": train, "validation": validation, "test": test}
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(
        x[np.concatenate([rows_by_split["train"] for rows_by_split in rows.values()])].astype(np.float64)
    )
    inputs = scaler.transform(x.astype(np.float64)).astype(np.float32)
    arrays: dict[str, dict[str, Any]] = {}
    for client, rows_by_split in rows.items():
        arrays[client] = {"feature_names": names}
        for part, index in rows_by_split.items():
            if len(index):
                arrays[client] |= {f"x_{part}": inputs[index], f"y_{part}": y[index].astype(np.float32)}
    return replace(Federation.from_arrays(arrays, task="regression").standardised(), scaled_inputs=True)


def _split_off_last(rows: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all but the last ``share`` of the rows, and the last ones."""
    cut = len(rows) - round(share * len(rows))
    return rows[:cut], rows[cut:]
