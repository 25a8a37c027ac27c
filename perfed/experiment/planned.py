"""Parsing of requests: methods, seeds, the comparisons of a campaign's file, and sweeps over the values of a key."""

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
    """Return the canonical names of methods separated by commas; see :func:`check_methods`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return check_methods(names, "--methods", baselines=baselines)


def check_methods(names: Sequence[str], where: str, *, baselines: bool = False) -> list[str]:
    """Return the canonical names of methods, after checking that they exist.

    Args:
        names: names in any case.
        where: the start of error messages.
        baselines: whether scikit-learn models and the blend are allowed, too.

    Raises:
        PerfedError: there are no names, or a name is unknown or occurs twice.

    Example:
        >>> check_methods(["Local", "FedAvg-FT"], "methods")
        ['local', 'fedavg-ft']
    """
    if not names:
        raise PerfedError(f"{where}: at least one is needed; 'perfed list methods' names them")
    try:
        canonical_names = [_row_id(name) if baselines else method_id(name) for name in names]
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None
    if len(set(canonical_names)) < len(canonical_names):
        raise PerfedError(f"{where} {','.join(names)}: a method is named twice")
    return canonical_names


def _row_id(name: str) -> str:
    """Return the canonical name of a method, a scikit-learn model or the blend."""
    return BLEND if name.casefold() == BLEND else baseline_id(name) if is_baseline(name) else method_id(name)


def suggest_methods(table: Mapping[str, Any]) -> list[str]:
    """Return at most four methods to compare on an experiment: Local, its method, and methods with settings in it.

    Example:
        >>> suggest_methods({"method": "fedpac", "methods": {"local": {"lr": 0.01}, "ditto": {"lr": 0.001}}})
        ['local', 'fedpac', 'ditto']
    """
    method, tables = str(table.get("method", Experiment.model_fields["method"].default)), table.get("methods")
    return list(dict.fromkeys(["local", method, *(tables if isinstance(tables, Mapping) else ())]))[:4]


def parse_seeds(text: str, where: str = "--seeds") -> list[int]:
    """Return the seeds of ``"0..2"`` (inclusive), ``"0,3,5"`` or ``"7"``.

    Raises:
        PerfedError: the text has another form; the message starts with ``where``.
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
    """Return the comparisons of a campaign's file by name, in the order of the file.

    Args:
        file: the file.
        settings: assignments that override the settings of all comparisons.

    Raises:
        PerfedError: the file does not exist or is not valid TOML, or a comparison is not valid.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PerfedError(f"{file}: cannot be read as a campaign: {error}") from None
    entries = content.pop("comparison", None)
    if content or not isinstance(entries, list) or not entries:
        unknown = f"unknown key '{next(iter(content))}'" if content else "holds no comparison"
        raise PerfedError(f"{file}: {unknown}; a campaign is tables [[comparison]], nothing else")
    comparisons: dict[str, ComparisonSpec] = {}
    for number, values in enumerate(entries, start=1):
        try:
            entry = _Entry.model_validate(values)
        except ValidationError as error:
            raise PerfedError(f"{file}: {summarise_validation_error(error, f'comparison {number}')}") from None
        name = entry.name or entry.experiment
        if name in comparisons:
            raise PerfedError(f"{file}: two comparisons are called '{name}'; give one another name")
        with name_in_errors(f"{file}: comparison '{name}'"):
            methods = check_methods(entry.methods, "methods", baselines=True)
            table = find_experiment(
                match_name(entry.experiment, experiment_names()) or str(file.parent / entry.experiment)
            )
            table = override(table, [*entry.settings, *settings], federated(methods))
            comparisons[name] = ComparisonSpec(table, methods, parse_seeds(entry.seeds, "seeds"))
            comparisons[name].check()
    return comparisons


@contextmanager
def name_in_errors(name: str) -> Iterator[None]:
    """Add the name of a comparison to errors that are raised inside the ``with`` block."""
    try:
        yield
    except PerfedError as error:
        raise PerfedError(f"{name}: {error}") from None


def plan_sweep(
    table: dict[str, Any], axis: str, methods: list[str], seeds: list[int]
) -> tuple[str, dict[str, ComparisonSpec]]:
    """Return the key of ``axis`` (``key=v1,v2,...``), and a comparison for each of its values, by ``key=value``.

    Raises:
        PerfedError: there are fewer than two values, a value occurs twice or is not allowed, the key is unknown, or two
            values make no difference to any of the methods.
    """
    points, names = axis_of(axis), federated(methods)
    if len(points) < 2:
        raise PerfedError(f"{axis}: a sweep needs two values or more, as in {axis.rstrip(',')},...")
    comparisons = {point: ComparisonSpec(override(table, [point], names), methods, seeds) for point in points}
    effects: dict[str, list[dict[str, Any]]] = {}
    for point, planned in comparisons.items():
        planned.check()
        method_effects = [planned.experiment(method, 0).effect for method in names]
        # Without a method, only data can make a difference to scikit-learn models.
        effects[point] = method_effects or [{"data": validate(planned.table).data}]
    for first, second in combinations(points, 2):
        if effects[first] == effects[second]:
            raise PerfedError(f"{axis}: {first} and {second} make no difference to {', '.join(methods)}")
    return points[0].partition("=")[0], comparisons
