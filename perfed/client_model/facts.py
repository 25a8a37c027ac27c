"""``site.json``: what is known of a site's model beside its network, checked when it is read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from perfed.data.reading import check_seal, checked, read_json, seal
from perfed.errors import PerfedError
from perfed.system import write_atomic

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
    """Return content of ``site.json``.

    Raises:
        PerfedError: it cannot be read, is of another version of perfed, or holds a value of another type.
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
