"""Estimators over clients that a minority of dishonest clients cannot move far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from perfed.maths.aggregate import convert_like
from perfed.tree import Tree, iterate_leaves, map_leaves

_NUMBERS = 1 << 18
"""Largest number of values that are sorted at once: a block of columns."""
_NEGLIGIBLE = 1e-9
"""Shares of the total weight below this value come from rounding and count as zero."""


def weighted_median(x: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted median over clients of every coordinate, in float64.

    Sorted by value, it is the first value up to which at least half of the total weight lies. Where exactly half lies
    up to a value, it is the mean of this value and the next one, so that equal weights give the usual median. It
    minimises ``sum_i w_i |x_i - m|``. NaN counts as larger than any number.

    Args:
        x: ``(clients, ...)``.
        weights: ``(clients,)``, positive.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [50.0]])
        >>> weighted_median(x, torch.tensor([1, 1, 1])).item(), weighted_median(x, torch.tensor([2, 1, 1])).item()
        (2.0, 1.5)
    """

    def median(values: Tensor, upto: Tensor) -> Tensor:
        half = upto[:, -1:] / 2
        last = values.shape[1] - 1
        low = (upto < half * (1 - _NEGLIGIBLE)).sum(1, keepdim=True).clamp_max(last)
        high = (upto <= half * (1 + _NEGLIGIBLE)).sum(1, keepdim=True).clamp_max(last)
        a, b = values.gather(1, low)[:, 0].double(), values.gather(1, high)[:, 0].double()
        return torch.where(a == b, a, (a + b) / 2)

    return _reduce_sorted(x, weights, median)


def trimmed_mean(x: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Return the weighted mean over clients of every coordinate without its smallest and largest values, in float64.

    The share ``trim`` of the total weight is cut at each end. A client of which only a part lies in a cut share counts
    with the rest of its weight. With equal weights and a whole number ``trim * clients``, that many values are dropped
    at each end. NaN counts as larger than any number.

    Args:
        x: ``(clients, ...)``.
        weights: ``(clients,)``, positive.
        trim: at least 0 and less than 0.5.

    Example:
        >>> x = torch.tensor([[-70.0], [1.0], [2.0], [3.0], [50.0]])
        >>> trimmed_mean(x, torch.ones(5), 0.2).item()
        2.0
    """

    def mean(values: Tensor, upto: Tensor) -> Tensor:
        total = upto[:, -1:]
        inside = upto.clamp(trim * total, (1 - trim) * total)
        parts = torch.diff(inside, dim=1, prepend=trim * total)
        parts = torch.where(parts > _NEGLIGIBLE * (1 - 2 * trim) * total, parts, 0.0)
        weighted = torch.where(parts > 0, values.double() * parts, 0.0)  # a cut value may be infinite
        return weighted.sum(1) / parts.sum(1)

    return _reduce_sorted(x, weights, mean)


def joint_norms(changes: Iterable[Tensor]) -> Tensor:
    """Return the norm of each client's ``(clients, ...)`` tensors, taken as one vector, float64 ``(clients,)``."""
    return torch.stack([x.double().reshape(len(x), -1).square().sum(1) for x in changes]).sum(0).sqrt()


def bound_updates(stacked: Tree, current: Tree, bound: float) -> dict[str, Any]:
    """Return the clients' tensors with every client's update cut to the norm ``bound``.

    A client's update is the difference of all its floating-point tensors from ``current``, taken as one vector. A
    longer one is multiplied by ``bound / norm``; one that is not finite becomes zero. Integer tensors stay as they are.

    Args:
        stacked: nested dictionary of ``(clients, ...)`` tensors.
        current: the same structure without the client axis.
        bound: largest Euclidean norm of an update.

    Example:
        >>> stacked, current = {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, {"w": torch.zeros(2)}
        >>> [[round(v, 3) for v in row] for row in bound_updates(stacked, current, 1.0)["w"].tolist()]
        [[0.6, 0.8], [0.3, 0.4]]
    """
    now = dict(iterate_leaves(current))
    changes = {path: x - now[path] for path, x in iterate_leaves(stacked) if x.is_floating_point()}
    if not changes:
        return dict(stacked)
    norms = joint_norms(changes.values())
    factors = torch.where(torch.isfinite(norms), (bound / norms).clamp(max=1), 0.0)

    def cut(path: str, x: Tensor) -> Tensor:
        if path not in changes:
            return x
        factor = factors.view(-1, *[1] * (x.ndim - 1))
        short = torch.where(factor > 0, changes[path].double() * factor, 0.0)
        return torch.where(factor == 1, x, (now[path].double() + short).to(x.dtype))

    bounded = iter([cut(path, x) for path, x in iterate_leaves(stacked)])
    return map_leaves(stacked, lambda _, x: next(bounded))  # both visit the tensors in the same order


def map_coordinates(stacked: Tree, estimate: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return ``estimate`` of every ``(clients, ...)`` tensor in its dtype; integer tensors are rounded."""
    return map_leaves(stacked, lambda _, x: convert_like(estimate(x), x))


def _reduce_sorted(x: Tensor, weights: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return ``reduce`` of the sorted values of every coordinate, a block of coordinates at a time.

    ``reduce`` gets the sorted values ``(coordinates, clients)`` and the weights summed up to each of them, in float64.
    """
    count, weights = len(x), weights.to(x.device).double()
    if not x.numel():
        return x.new_zeros(x.shape[1:], dtype=torch.float64)
    results = []
    for block in x.reshape(count, -1).split(max(1, _NUMBERS // count), dim=1):
        values, order = block.T.contiguous().sort(dim=1, stable=True)
        results.append(reduce(values, weights[order].cumsum(1)))
    return torch.cat(results).view(x.shape[1:])
