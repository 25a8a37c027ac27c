"""Facts about the model of a client: functions that collect them, and that read and write the file ``site.json``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from perfed.client_model.onnx_table import output_name
from perfed.data.client import SPLITS, Client
from perfed.data.column import MISSING_CATEGORY, Column
from perfed.data.federation import Federation
from perfed.data.labels import Classes
from perfed.data.reading import check_seal, checked, read_json, seal, to_json_values
from perfed.errors import PerfedError
from perfed.system import versions, write_atomic
from perfed.tables.site import table_of

FORMAT = 1


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Column(_Strict):
    name: str
    kind: str
    texts: list[str] | None = None


class _Ranges(_Strict):
    mean: float
    std: float
    smallest: float
    largest: float
    whole: bool


class _Data(_Strict):
    train: int
    validation: int
    test: int
    per_class: dict[str, int] = {}
    per_domain: dict[str, int] = {}
    targets: dict[str, float] = {}
    inputs: _Ranges


class _Interval(_Strict):
    value: float | None
    low: float | None
    high: float | None


class _Metrics(_Strict):
    samples: int = 0
    of: dict[str, _Interval] = {}


class _Facts(_Strict):
    format: int
    site: str
    method: str
    dataset: str
    rounds: int
    seed: int
    target: str | None = None
    classes: list[int | float | str] | None
    features: list[str]
    columns: list[_Column] | None
    output: str | None = None
    input_shape: list[int]
    dtype: str
    domains: list[str] | None
    data: _Data
    settings: dict[str, Any]
    versions: dict[str, str]
    date: str
    metrics: _Metrics
    joined: int | None = None
    weights: dict[str, float] | None = None
    contributors: dict[str, int | None] | None = None
    privacy: dict[str, Any] | None = None
    files: dict[str, str]


def read_facts(file: Path) -> dict[str, Any]:
    """Return the facts in a file ``site.json``.

    Raises:
        PerfedError: it cannot be read, was written by another version of perfed, or has a value of another type.
    """
    content: dict[str, Any] = read_json(file)
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise PerfedError(f"{file}: was written by another version of perfed")
    checked(_Facts, content, file)
    return {name: value for name, value in content.items() if name not in ("format", "files", "sha256")}


def write_facts(facts: Mapping[str, Any], file: Path) -> None:
    """Write the facts that :func:`read_facts` reads, with a checksum that excludes the name of the site."""
    content = {"format": FORMAT, **facts}
    write_atomic(file, json.dumps({**seal(_without_name(content)), **content}, indent=2) + "\n")


def _without_name(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != "site"}


def read_file_checksums(file: Path) -> dict[str, str]:
    """Return the SHA-256 of each file beside ``site.json`` by its name.

    Raises:
        PerfedError: ``site.json`` itself has changed since it was written.
    """
    content = read_json(file)
    check_seal(_without_name(content), file)
    checksums: dict[str, str] = content["files"]
    return checksums


def describe_model(client: Client, federation: Federation, **facts: Any) -> dict[str, Any]:
    """Return the facts about the model of a client, in types of JSON.

    Args:
        client: the client, whose data and columns are described.
        federation: the federation of the client.
        facts: further facts about the model itself, such as ``method`` and ``settings``.
    """
    table = table_of(client)
    columns = () if table is None else (*(column.name for column in table.columns), table.domain or "")
    features = [client.original_name(name) for name in client.feature_names or ()]
    content: dict[str, Any] = to_json_values(
        {
            "site": client.id,
            "dataset": federation.name,
            "target": None if table is None else table.target,
            "classes": _original_classes(client, federation),
            "features": features or [f"x{j}" for j in range(prod(client.input_shape))],
            "columns": None if table is None else [_describe_column(column) for column in table.columns],
            "output": output_name(federation.classes, table),
            "missing": [] if table is None else list(table.missing),
            "values": {} if table is None else table.conversions.settings(columns)["values"],
            "input_shape": client.input_shape,
            "data": _describe_data(client, federation),
            "versions": versions("torch", torch.__version__),
            "date": datetime.date.today().isoformat(),
            **facts,
        }
    )
    return content


def _original_classes(client: Client, federation: Federation) -> Classes | None:
    """Return the classes as the client writes them; a table restores its spelling when it predicts."""
    if federation.classes is None or client.table is not None:
        return federation.classes
    return tuple(client.original_name(label) if isinstance(label, str) else label for label in federation.classes)


def _describe_column(column: Column) -> dict[str, Any]:
    """Return the name and kind of a column and, for categories, the texts that have a separate input."""
    facts: dict[str, Any] = {"name": column.name, "kind": column.kind}
    if column.kind == "category":
        texts = column.levels or column.categories
        facts["texts"] = [text for text in texts if text != MISSING_CATEGORY]
    return facts


def _describe_data(client: Client, federation: Federation) -> dict[str, Any]:
    """Return counts and ranges of the data of a client, without any row.

    Returns:
        ``train``, ``validation``, ``test`` samples; ``per_class``, training samples by class, or ``targets``,
        the smallest and largest in the unit of the data (for survival, of the times); ``per_domain``; ``inputs``:
        mean, standard deviation, smallest and largest of all values, and whether they are ``whole`` numbers.
    """
    train = client.train.loaded()
    x = train.x.double()
    counts = {name: 0 if (split := client.split(name)) is None else len(split) for name in SPLITS}
    facts: dict[str, Any] = dict(counts)
    if federation.num_classes is None:
        values = train.y[:, 0] if federation.survival else train.y  # times
        if federation.target_scale is not None:
            values = federation.target_scale.up(values)
        facts["targets"] = {"smallest": float(values.min()), "largest": float(values.max())}
    else:
        class_counts = train.class_counts(federation.num_classes)
        facts["per_class"] = {str(name): n for name, n in zip(federation.classes or (), class_counts, strict=True)}
    if train.has_domains:
        domain_counts = train.domain_counts(federation.num_domains)
        facts["per_domain"] = {federation.domain_name(m): n for m, n in enumerate(domain_counts)}
    facts["inputs"] = {
        "mean": float(x.mean()),
        "std": float(x.std(correction=0)),
        "smallest": float(x.min()),
        "largest": float(x.max()),
        "whole": bool((x == x.round()).all()),
    }
    return facts
