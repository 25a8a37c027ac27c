"""Text tables: UCI's heart disease, Adult and Parkinson's, FLamby's breast cancer, tweets to airlines."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.originals.reading import Files
from perfed.errors import PerfedError

_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_HEART = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
)
_COMPLETE = 10  # number of columns that are complete for FLamby's patients
_ADULT = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)
_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_AIRLINES = {"virginamerica", "united", "southwestair", "jetblue", "usairways", "americanair", "delta", "deltaassist"}
Arrays = dict[str, NDArray[Any]]


def read_heart_disease(files: Files) -> Arrays:
    """Return ``x`` ``(n, 13)`` with NaN for unknown values, ``y_severity`` 0 to 4, ``y``, ``hospital``,
    ``flamby_rows``.
    """
    parts = [_parse_rows(files.read(f"processed.{hospital}.data"), len(_HEART) + 1) for hospital in _HOSPITALS]
    values = np.array([[np.nan if cell == "?" else float(cell) for cell in row] for part in parts for row in part])
    x, severity = values[:, :-1].astype(np.float32), values[:, -1].astype(np.uint8)
    return {
        "x": x,
        "y_severity": severity,
        "y": (severity > 0).astype(np.uint8),
        "hospital": np.repeat(np.arange(len(parts)), [len(part) for part in parts]).astype(np.uint8),
        "hospital_names": np.array(_HOSPITALS),
        "feature_names": np.array(_HEART),
        "flamby_rows": np.asarray(~np.isnan(x[:, :_COMPLETE]).any(axis=1)),
    }


def read_adult(files: Files) -> Arrays:
    """Return ``num_*`` ``(n, 6)``, ``cat_*`` ``(n, 8)`` positions in ``categories_NAME``, ``y_*`` 1 above 50,000
    dollars.
    """
    names = {"train": "adult.data", "test": "adult.test"}
    rows = {split: _parse_rows(files.read(name), len(_ADULT) + 1) for split, name in names.items()}
    categories = [name for name in _ADULT if name not in _NUMBERS]
    arrays: Arrays = {"num_names": np.array(_NUMBERS), "cat_names": np.array(categories)}
    values_by_category: dict[str, list[str]] = {}
    for name in categories:
        place = _ADULT.index(name)
        values_by_category[name] = sorted({row[place] for part in rows.values() for row in part})
        arrays[f"categories_{name}"] = np.array(values_by_category[name])
    for split, part in rows.items():
        numbers = [[int(row[_ADULT.index(name)]) for name in _NUMBERS] for row in part]
        codes = [[values_by_category[name].index(row[_ADULT.index(name)]) for name in categories] for row in part]
        incomes = [row[-1].rstrip(".") for row in part]  # with a full stop in the test file
        if wrong := set(incomes) - {">50K", "<=50K"}:
            raise PerfedError(f"{names[split]}: incomes are '>50K' and '<=50K', not '{min(wrong)}'")
        arrays[f"num_{split}"] = np.array(numbers, dtype=np.int32)
        arrays[f"cat_{split}"] = np.array(codes, dtype=np.int8)
        arrays[f"y_{split}"] = np.array([income == ">50K" for income in incomes], dtype=np.uint8)
    return arrays


def read_parkinsons(files: Files) -> Arrays:
    """Return ``x`` ``(n, 19)``, ``motor_updrs``, ``total_updrs`` and ``patient``, with ``feature_names``."""
    names, *rows = _parse_cells(files.read("parkinsons_updrs.data"))
    table = dict(zip(names, np.array(rows, dtype=np.float64).T, strict=True))
    try:
        motor, total, patient = (table.pop(name) for name in ("motor_UPDRS", "total_UPDRS", "subject#"))
    except KeyError as error:
        raise PerfedError(f"parkinsons_updrs.data has no column {error}") from None
    return {
        "x": np.stack(list(table.values()), axis=1).astype(np.float32),
        "motor_updrs": motor.astype(np.float32),
        "total_updrs": total.astype(np.float32),
        "patient": patient.astype(np.uint8),
        "feature_names": np.array(list(table)),
    }


def read_tcga_brca(files: Files) -> Arrays:
    """Return ``x`` ``(n, 39)``, ``event``, ``time``, ``center``, ``is_train``, without the barcodes of patients."""
    head, *split = _parse_cells(files.read("train_test_split.csv"))
    pid, fold = head.index("pid"), head.index("fold2")  # "train_3"
    folds = {row[pid]: row[fold].split("_") for row in split}
    names, *rows = _parse_cells(files.read("brca.csv"))
    rows = [row for row in rows if row[0] in folds]
    if not rows:
        raise PerfedError("no patient of brca.csv is in train_test_split.csv")
    values = np.array([row[1:] for row in rows], dtype=np.float64)
    assignments = [folds[row[0]] for row in rows]
    return {
        "x": values[:, :-2].astype(np.float32),
        "feature_names": np.array(names[1:-2]),
        "event": values[:, -2].astype(np.int8),
        "time": values[:, -1].astype(np.float32),
        "center": np.array([int(center) for _, center in assignments], dtype=np.int8),
        "is_train": np.array([half == "train" for half, _ in assignments]),
    }


def read_airline_tweets(files: Files) -> Arrays:
    """Return tweets by id: ``text_utf8``, ``y``, ``airline``, ``user``, ``confidence``, without names."""
    text = files.read("Tweets.csv").decode("utf-8-sig")
    rows = sorted(csv.DictReader(io.StringIO(text, newline="")), key=lambda row: float(row["tweet_id"]))
    users = {name: number for number, name in enumerate(dict.fromkeys(row["name"] for row in rows))}
    arrays: Arrays = {"text_utf8": np.frombuffer("\n".join(map(_anonymise_tweet, rows)).encode(), np.uint8)}
    for key, column, kind in (("y", "airline_sentiment", "class"), ("airline", "airline", "airline")):
        values = sorted({row[column] for row in rows})
        arrays[key] = np.array([values.index(row[column]) for row in rows], dtype=np.uint8)
        arrays[f"{kind}_names"] = np.array(values)
    arrays["user"] = np.array([users[row["name"]] for row in rows], dtype=np.int16)
    arrays["confidence"] = np.array([float(row["airline_sentiment_confidence"]) for row in rows], dtype=np.float32)
    return arrays


def _anonymise_tweet(row: dict[str, str]) -> str:
    """Return a tweet in one line, with ``@user`` for all accounts except airlines."""
    text = re.sub(r"\s+", " ", row["text"]).strip()
    return re.sub(r"@\w+", lambda handle: handle[0] if handle[0][1:].lower() in _AIRLINES else "@user", text)


def _parse_cells(content: bytes) -> list[list[str]]:
    lines = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), skipinitialspace=True)
    return [row for row in lines if row]


def _parse_rows(content: bytes, columns: int) -> Sequence[list[str]]:
    """Return UCI's rows without empty lines and the first line of ``adult.test``."""
    rows = [row for row in _parse_cells(content) if not row[0].startswith("|")]
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise PerfedError(f"row {number} has {len(row)} cells, not {columns}")
    return rows
