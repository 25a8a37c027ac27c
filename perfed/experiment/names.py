"""Methods and seeds as users name them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perfed.errors import PerfedError
from perfed.experiment.estimators import baseline_names, check_baseline, is_baseline
from perfed.method.registry import entry, known_names


def parse_names(text: str, *, baselines: bool = False) -> list[str]:
    """Names of methods separated by commas, as :func:`check_names` allows them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    check_names(names, "--methods", baselines=baselines)
    return names


def check_names(names: list[str], where: str, *, baselines: bool = False) -> None:
    """Refuse no names, unknown ones and one that is there twice; ``baselines``: those of scikit-learn models are known.

    Raises:
        PerfedError: starts with ``where``.
    """
    if not names:
        allowed = [*known_names(), *(baseline_names() if baselines else ())]
        raise PerfedError(f"{where}: at least one is needed; allowed: {', '.join(allowed)}")
    for name in names:
        try:
            if baselines and is_baseline(name):
                check_baseline(name)
            else:
                entry(name)
        except PerfedError as error:
            raise PerfedError(f"{where}: {error}") from None
    if len(set(names)) < len(names):
        raise PerfedError(f"{where} {','.join(names)}: a method is named twice")


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
