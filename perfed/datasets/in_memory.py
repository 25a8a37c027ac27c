"""Federations of the user's own as a data set, for as long as something is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perfed.data.federation import Federation
from perfed.datasets import catalogue


@contextmanager
def in_memory(federation: Federation | Callable[[int], Federation]) -> Iterator[str]:
    """The name under which ``federation`` is a data set inside the block; experiments may hold validation data out.

    Args:
        federation: the same for every seed, or what makes that of a seed.

    Example:
        >>> from perfed.datasets import load
        >>> with in_memory(load("digits", {"clients": 4}, seed=0)) as name:
        ...     name, len(load(name, {"validation_fraction": 0.25}, seed=1))
        ('digits in memory', 4)
    """
    name = f"{federation.name if isinstance(federation, Federation) else 'data'} in memory".replace(":", " ")
    before = catalogue.DATASETS.get(name)

    @catalogue.dataset(name)
    def made(seed: int, data_dir: Path | None) -> Federation:
        """A federation of the user's own, in memory."""
        return federation if isinstance(federation, Federation) else federation(seed)

    try:
        yield name
    finally:
        del catalogue.DATASETS[name]
        if before is not None:
            catalogue.DATASETS[name] = before
