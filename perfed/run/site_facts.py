"""``site.json``: what is known of a site's model beside its network, checked when it is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from perfed.data.reading import checked, read_json
from perfed.errors import PerfedError

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


def read_facts(file: Path) -> dict[str, Any]:
    """Return content of ``site.json``.

    Raises:
        PerfedError: it cannot be read, is of another version of perfed, or holds a value of another type.
    """
    content: dict[str, Any] = read_json(file)
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise PerfedError(f"{file}: was written by another version of perfed")
    checked(_Facts, content, file)
    return {name: value for name, value in content.items() if name != "format"}
