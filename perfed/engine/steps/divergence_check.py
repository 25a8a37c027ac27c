"""The step that checks that values are finite."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from perfed import tree
from perfed.engine.executor import ChunkResult
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.errors import ClientsDiverged
from perfed.method.exchange import Replies

_OUTLIER_RATIO = 1e3  # between the largest values of two clients' replies; larger ones indicate a fault


class DivergenceCheck(ExchangeStep):
    """The step that raises an error if a loss or a reply is not finite, before the server uses any reply.

    One bad reply would otherwise affect all clients in the next exchange. The step exists for a whole run: the error
    also names a client whose reply in the previous exchange was much larger than the others.
    """

    def __init__(self) -> None:
        self._place = ""
        self._problems: dict[str, str] = {}
        self._largest_values: dict[str, float] = {}
        self._outlier = ""

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Clear the problems of the previous exchange."""
        self._place, self._problems, self._largest_values = task.exchange.place, {}, {}
        return task

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Check the stacked entries of all replies now, and entries that are computed per client when they are read.

        Raises:
            ClientsDiverged: when a reply is read, if an entry that is computed per client is not finite.
        """
        self._problems |= result.diverged
        largest = _find_largest_values(result)
        for row, (client, value) in enumerate(largest.items()):
            if not isfinite(value):
                self._problems[client] = _describe_stacked_problem(result, row)
        self._largest_values |= largest
        names = [name for name, value in result.content.items() if not isinstance(value, Tensor | Mapping)]

        def check(client: str, reply: dict[str, Any]) -> dict[str, Any]:
            for name in names:
                if not all(torch.isfinite(tensor).all() for _, tensor in tree.iterate_leaves({name: reply[name]})):
                    raise ClientsDiverged(self._place, {**self._problems, client: _describe_problem(client, name)})
            return reply

        return result.map_replies(check) if names else result

    def collect(self, replies: Replies) -> Replies:
        """Return the replies after checking that all of them are finite.

        Raises:
            ClientsDiverged: a loss or reply is not finite; the error names all such clients of the exchange.
        """
        if self._problems:
            raise ClientsDiverged(self._place, dict(sorted(self._problems.items())), self._outlier)
        if any(self._largest_values.values()):
            self._outlier = _describe_outlier(self._largest_values)
        return replies


def _select_stacked_entries(result: ChunkResult) -> dict[str, Any]:
    """Return the entries of the replies that are stacked rather than computed per client."""
    return {name: value for name, value in result.content.items() if isinstance(value, Tensor | Mapping)}


def _find_largest_values(result: ChunkResult) -> dict[str, float]:
    """Return the largest absolute value in each client's reply, by id; it is NaN or infinite if any value is."""
    largest = torch.zeros(len(result.ids), dtype=torch.float64)
    for _, value in tree.iterate_leaves(_select_stacked_entries(result)):
        if value.is_floating_point() and value.numel():
            flat = value.reshape(len(result.ids), -1)
            size = torch.maximum(flat.amax(1), -flat.amin(1))  # ten times faster than a norm or isfinite
            largest = torch.maximum(largest, size.double().cpu())
    return dict(zip(result.ids, largest.tolist(), strict=True))


def _describe_stacked_problem(result: ChunkResult, row: int) -> str:
    """Return a message that names the entry of the reply in ``row`` that is not finite."""
    entries = tree.iterate_leaves(_select_stacked_entries(result))
    return _describe_problem(result.ids[row], next(n for n, value in entries if not torch.isfinite(value[row]).all()))


def _describe_problem(client: str, entry: str) -> str:
    return f"the reply of client '{client}' holds values that are not finite (entry '{entry}')"


def _describe_outlier(largest_values: Mapping[str, float]) -> str:
    """Return a clause on the reply whose values are by far the largest; empty if there is none."""
    (client, largest), *second = sorted(largest_values.items(), key=lambda pair: -pair[1])[:2]
    if not second or largest < _OUTLIER_RATIO * second[0][1]:
        return ""
    return f"; before, client '{client}' sent values up to {largest:.1e}, the others up to {second[0][1]:.1e}"
