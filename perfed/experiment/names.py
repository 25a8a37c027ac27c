"""Methods and seeds as users name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfed.errors import PerfedError
from perfed.experiment.config import Experiment
from perfed.experiment.estimators import baseline_id, is_baseline
from perfed.method.registry import method_id


def parse_names(text: str, *, baselines: bool = False) -> list[str]:
    """Names of methods separated by commas, as :func:`known_methods` has them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return known_methods(names, "--methods", baselines=baselines)


def known_methods(names: Sequence[str], where: str, *, baselines: bool = False) -> list[str]:
    """The ``names`` as files have them, whatever their case; ``baselines``: those of scikit-learn models are known.

    Raises:
        PerfedError: no names, an unknown one or one that is there twice; starts with ``where``.

    Example:
        >>> known_methods(["Local", "FedAvg-FT"], "methods")
        ['local', 'fedavg-ft']
    """
    if not names:
        raise PerfedError(f"{where}: at least one is needed; 'perfed list methods' names them")
    try:
        found = [baseline_id(name) if baselines and is_baseline(name) else method_id(name) for name in names]
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None
    if len(set(found)) < len(found):
        raise PerfedError(f"{where} {','.join(names)}: a method is named twice")
    return found


def suggested(table: Mapping[str, Any]) -> list[str]:
    """A few methods to compare on the experiment ``table``: Local, its own, and those that it has settings for.

    Example:
        >>> suggested({"method": "fedpac", "methods": {"local": {"lr": 0.01}, "ditto": {"lr": 0.001}}})
        ['local', 'fedpac', 'ditto']
    """
    own, tables = str(table.get("method", Experiment.model_fields["method"].default)), table.get("methods")
    return list(dict.fromkeys(["local", own, *(tables if isinstance(tables, Mapping) else ())]))[:4]


def parse_seeds(text: str, where: str = "--seeds") -> list[int]:
    """``"0..2"`` (inclusive), ``"0,3,5"`` or ``"7"``.

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


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """A folder for each name: with a dot for signs that not every system allows, no two alike whatever the case.

    Example:
        >>> folder_names(["fedpac", "mine:FedPAC", "mine.fedpac"])
        {'fedpac': 'fedpac', 'mine:FedPAC': 'mine.FedPAC', 'mine.fedpac': 'mine.fedpac_'}
    """
    found: dict[str, str] = {}
    for name in names:
        folder = re.sub(r"[^\w.+=-]", ".", name)
        while folder.casefold() in {other.casefold() for other in found.values()}:
            folder += "_"
        found[name] = folder
    return found
