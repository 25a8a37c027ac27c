"""The base class of kinds of aggregation, and the registry of kinds.

Each kind is one file in :mod:`perfed.aggregation.kinds`, or a file of the user's (``kind = "module:NAME"``).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from perfed.errors import PerfedError, suggest_name
from perfed.plugins import Registry, bare_name
from perfed.settings import STRICT
from perfed.tree import Tree, map_leaves, stack


class AggregatorSettings(BaseModel):
    """Base class of the settings of a kind of aggregation, which are keys of ``[aggregation]``; it has no settings."""

    model_config = STRICT


Settings = TypeVar("Settings", bound=BaseModel)


class Aggregator(ABC, Generic[Settings]):
    """Base class of all kinds of aggregation.

    Attributes:
        settings: the settings of the kind, which are keys of ``[aggregation]``.
        is_mean: whether the result is the weighted mean, for which sums over clients suffice.

    Example:
        >>> from perfed.aggregation import register_aggregator
        >>> @register_aggregator("largest-client")
        ... class LargestClient(Aggregator[AggregatorSettings]):
        ...     \"\"\"The values of the client with the largest weight.\"\"\"
        ...
        ...     def combine(self, stacked, weights, current):
        ...         return map_leaves(stacked, lambda _, x: x[weights.argmax()])
    """

    is_mean: bool = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def combine(self, stacked: Tree, weights: Tensor, current: Tree) -> dict[str, Any]:
        """Return one value for the clients' tensors.

        Args:
            stacked: nested dictionary of ``(clients, ...)`` tensors.
            weights: ``(clients,)``, positive, as the mean has them; clients with weight 0 have been removed.
            current: the server's values, the same structure without the client axis.
        """

    def aggregate(self, stacked: Tree, weights: Tensor | None, current: Tree) -> dict[str, Any]:
        """Return one value for the clients' tensors, which replaces their weighted mean.

        Args:
            stacked: nested dictionary of ``(clients, ...)`` tensors.
            weights: ``(clients,)``, not negative; ``None``: equal weights. ``(clients, entries)``: every entry k of the
                tensors ``(clients, entries, ...)``, such as a class, is aggregated over the clients that have it, with
                its own weights.
            current: the server's values, the same structure without the client axis. Entries without any weight keep
                them.
        """
        if weights is None:
            weights = torch.ones(_count_clients(stacked))
        if weights.ndim == 1:
            return self._combine_positive(stacked, weights, current)
        entries = [
            self._combine_positive(_select_entry(stacked, k, 1), weights[:, k], _select_entry(current, k, 0))
            for k in range(weights.shape[1])
        ]
        return stack(entries)

    def _combine_positive(self, stacked: Tree, weights: Tensor, current: Tree) -> dict[str, Any]:
        present = weights > 0
        if not present.any():
            return dict(current)
        if not present.all():
            stacked = map_leaves(stacked, lambda _, x: x[present.to(x.device)])
        return self.combine(stacked, weights[present], current)


def _count_clients(stacked: Tree) -> int:
    for value in stacked.values():
        count = len(value) if isinstance(value, Tensor) else _count_clients(value)
        if count:
            return count
    return 0


def _select_entry(tree: Tree, k: int, axis: int) -> dict[str, Any]:
    return map_leaves(tree, lambda _, x: x.select(axis, k))


@dataclass(frozen=True)
class AggregatorEntry:
    """A registered kind of aggregation.

    Attributes:
        name: the name in settings.
        aggregator: the class of the kind.
        settings: the class of its settings.
        summary: one line for readers.
        module: the module that registered the kind.
    """

    name: str
    aggregator: type[Aggregator[Any]]
    settings: type[BaseModel]
    summary: str
    module: str


AGGREGATORS: Registry[AggregatorEntry] = Registry("kind of aggregation", lambda entry: entry.module)
"""The kinds of aggregation that :func:`register_aggregator` has registered, by name."""

_Class = TypeVar("_Class", bound=type[Aggregator[Any]])


def register_aggregator(
    name: str, *, settings: type[BaseModel] = AggregatorSettings, summary: str = ""
) -> Callable[[_Class], _Class]:
    """Return a class decorator that registers a kind of aggregation as ``name``.

    Args:
        name: the name in ``aggregation.kind``.
        settings: the pydantic class of the settings of the kind, which are keys of ``[aggregation]``.
        summary: one line for ``perfed list aggregations``; default: the first line of the class's docstring.

    Raises:
        PerfedError: the name contains ``+``, ``:`` or ``.``, or is registered by another module; a setting is called
            ``kind``; the class lacks ``combine``.
    """

    def add(cls: _Class) -> _Class:
        if not name or set(name) & set("+:."):
            raise PerfedError(f"kind of aggregation '{name}': a name has no '+', ':' or '.'")
        if "kind" in settings.model_fields:
            raise PerfedError(f"kind of aggregation '{name}': 'kind' cannot be one of its settings")
        AGGREGATORS.check_free(name, cls.__module__)
        if inspect.isabstract(cls):
            raise PerfedError(f"kind of aggregation '{name}': {cls.__name__} does not define combine")
        text = summary or (inspect.getdoc(cls) or name).splitlines()[0]
        AGGREGATORS[name] = AggregatorEntry(name, cls, settings, text, cls.__module__)
        return cls

    return add


def aggregator_names() -> list[str]:
    """Return the names of all registered kinds of aggregation, sorted.

    Example:
        >>> {"mean", "median", "norm-bound", "trimmed-mean"} <= set(aggregator_names())
        True
    """
    return sorted(AGGREGATORS)


def aggregator_entry(name: str) -> AggregatorEntry:
    """Return the registered kind of aggregation ``name``, which may be ``module:NAME``; see :func:`aggregator_id`."""
    return AGGREGATORS[bare_name(aggregator_id(name))]


def aggregator_id(name: str) -> str:
    """Return the canonical name of a kind, as it was registered, with its module in front if ``name`` has one.

    ``module:NAME`` imports the module, which registers the kind.

    Raises:
        PerfedError: there is no such kind, or its module cannot be imported.

    Example:
        >>> aggregator_id("Median")
        'median'
    """
    return AGGREGATORS.qualify_name(name, "aggregation.kind", "kind")


def check_settings(kind: str, model: type[BaseModel], settings: Mapping[str, Any]) -> None:
    """Check that the class ``model`` of a kind's settings has all of the ``settings``.

    Raises:
        PerfedError: a setting is unknown; the message contains it and the settings of the kind.
    """
    fields = model.model_fields
    for key in settings:
        if key not in fields:
            hint = suggest_name(key, ["kind", *fields])
            raise PerfedError(
                f"unknown key 'aggregation.{key}'{hint}; allowed with kind = '{kind}': {', '.join(['kind', *fields])}"
            )
