"""What users ask for: methods and seeds, the comparisons of a campaign's file, or one for each value of a key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from perfed.errors import PerfedError, summarise_validation_error
from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import Experiment, experiment_names, find_experiment, validate
from perfed.experiment.estimators import baseline_id, is_baseline
from perfed.experiment.overrides import axis_of, override
from perfed.method.registry import method_id
from perfed.plugins import BLEND, match_name
from perfed.settings import STRICT


def parse_names(text: str, *, baselines: bool = False) -> list[str]:
    """Return names of methods separated by commas, as :func:`known_methods` has them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return known_methods(names, "--methods", baselines=baselines)


def known_methods(names: Sequence[str], where: str, *, baselines: bool = False) -> list[str]:
    """Return the ``names`` as files have them, whatever their case; ``baselines``: those of scikit-learn models too.

    Raises:
        PerfedError: no names, an unknown one or one that is there twice; starts with ``where``.

    Example:
        >>> known_methods(["Local", "FedAvg-FT"], "methods")
        ['local', 'fedavg-ft']
    """
    if not names:
        raise PerfedError(f"{where}: at least one is needed; 'perfed list methods' names them")
    try:
        found = [_row_id(name) if baselines else method_id(name) for name in names]
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None
    if len(set(found)) < len(found):
        raise PerfedError(f"{where} {','.join(names)}: a method is named twice")
    return found


def _row_id(name: str) -> str:
    """A method, a model of scikit-learn's, or the blend of the others."""
    return BLEND if name.casefold() == BLEND else baseline_id(name) if is_baseline(name) else method_id(name)


def suggested(table: Mapping[str, Any]) -> list[str]:
    """Return a few methods to compare on the experiment ``table``: Local, its own, and those that it has settings for.

    Example:
        >>> suggested({"method": "fedpac", "methods": {"local": {"lr": 0.01}, "ditto": {"lr": 0.001}}})
        ['local', 'fedpac', 'ditto']
    """
    own, tables = str(table.get("method", Experiment.model_fields["method"].default)), table.get("methods")
    return list(dict.fromkeys(["local", own, *(tables if isinstance(tables, Mapping) else ())]))[:4]


def parse_seeds(text: str, where: str = "--seeds") -> list[int]:
    """Return the seeds of ``"0..2"`` (inclusive), ``"0,3,5"`` or ``"7"``.

    Raises:
        PerfedError: anything else; starts with ``where``.
    """
    problem = PerfedError(f"{where} {text}: must be like 0..2 (inclusive), 0,3,5 or 7")
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            seeds = list(range(first, last + 1))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise problem from None
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise problem
    return seeds


class _Entry(BaseModel):
    """A ``[[comparison]]`` of a campaign's file."""

    model_config = STRICT

    experiment: str
    name: str = ""
    methods: list[str]
    seeds: str = "0"
    settings: list[str] = Field(default_factory=list)


def read_campaign(file: Path, settings: Sequence[str] = ()) -> dict[str, ComparisonSpec]:
    """Return the comparisons of a file, by name, in its order; ``settings`` are assignments on top for all.

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
            raise PerfedError(f"{file}: {summarise_validation_error(error, f'comparison {number}')}") from None
        name = entry.name or entry.experiment
        if name in found:
            raise PerfedError(f"{file}: two comparisons are called '{name}'; give one another name")
        with problems_of(f"{file}: comparison '{name}'"):
            methods = known_methods(entry.methods, "methods", baselines=True)
            table = find_experiment(
                match_name(entry.experiment, experiment_names()) or str(file.parent / entry.experiment)
            )
            table = override(table, [*entry.settings, *settings], federated(methods))
            found[name] = ComparisonSpec(table, methods, parse_seeds(entry.seeds, "seeds"))
            found[name].check()
    return found


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
    """Return the key of ``axis`` (``key=v1,v2,...``), and a comparison for each of its values, by ``key=value``.

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
