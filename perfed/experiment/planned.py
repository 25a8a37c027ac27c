"""What a campaign is to be made of: the comparisons of a file, or one for each value of a key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from perfed.errors import PerfedError, first_problem
from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import experiment_names, find_experiment, validate
from perfed.experiment.names import known_methods, parse_seeds
from perfed.experiment.overrides import axis_of, override
from perfed.plugins import known_as
from perfed.settings import STRICT


class _Entry(BaseModel):
    """A ``[[comparison]]`` of a campaign's file."""

    model_config = STRICT

    experiment: str
    name: str = ""
    methods: list[str]
    seeds: str = "0"
    settings: list[str] = Field(default_factory=list)


def read_campaign(file: Path, settings: Sequence[str] = ()) -> dict[str, ComparisonSpec]:
    """The comparisons of a file, by name, in its order; ``settings`` are assignments on top for all.

    Raises:
        PerfedError: no such file, not TOML, or a comparison that cannot be; names it.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PerfedError(f"{file}: cannot be read as a campaign: {error}") from None
    entries = content.pop("comparison", None)
    if content or not isinstance(entries, list) or not entries:
        unknown = f"unknown key '{next(iter(content))}'" if content else "holds no comparison"
        raise PerfedError(f"{file}: {unknown}; a campaign is tables [[comparison]], nothing else")
    found: dict[str, ComparisonSpec] = {}
    for number, values in enumerate(entries, start=1):
        try:
            entry = _Entry.model_validate(values)
        except ValidationError as error:
            raise PerfedError(f"{file}: {first_problem(error, f'comparison {number}')}") from None
        name = entry.name or entry.experiment
        if name in found:
            raise PerfedError(f"{file}: two comparisons are called '{name}'; give one another name")
        with problems_of(f"{file}: comparison '{name}'"):
            methods = known_methods(entry.methods, "methods", baselines=True)
            table = find_experiment(_beside(file, entry.experiment))
            table = override(table, [*entry.settings, *settings], federated(methods))
            found[name] = ComparisonSpec(table, methods, parse_seeds(entry.seeds, "seeds"))
            found[name].check()
    return found


def _beside(file: Path, experiment: str) -> str:
    """A shipped experiment's name, or the path of a file beside the campaign's."""
    return known_as(experiment, experiment_names()) or str(file.parent / experiment)


@contextmanager
def problems_of(what: str) -> Iterator[None]:
    """Say what a problem is of."""
    try:
        yield
    except PerfedError as error:
        raise PerfedError(f"{what}: {error}") from None


def swept(
    table: dict[str, Any], axis: str, methods: list[str], seeds: list[int]
) -> tuple[str, dict[str, ComparisonSpec]]:
    """The key of ``axis`` (``key=v1,v2,...``), and a comparison for each of its values, by ``key=value``.

    Raises:
        PerfedError: fewer than two values, one that is there twice or is not allowed, an unknown key, or two values
            with which nothing is different for any of the methods.
    """
    points, names = axis_of(axis), federated(methods)
    if len(points) < 2:
        raise PerfedError(f"{axis}: a sweep needs two values or more, as in {axis.rstrip(',')},...")
    found = {point: ComparisonSpec(override(table, [point], names), methods, seeds) for point in points}
    effects: dict[str, list[dict[str, Any]]] = {}
    for point, planned in found.items():
        planned.check()
        own = [planned.experiment(method, 0).effect for method in names]
        effects[point] = own or [{"data": validate(planned.table).data}]  # models of scikit-learn alone
    for one, other in combinations(points, 2):
        if effects[one] == effects[other]:
            raise PerfedError(f"{axis}: {one} and {other} make no difference to {', '.join(methods)}")
    return points[0].partition("=")[0], found
