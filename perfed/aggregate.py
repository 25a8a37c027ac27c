"""How the server combines what comes back; rows are in the sorted order of client ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perfed.tree import Tree, map_leaves


def weighted_mean(stacked: Tree, weights: Tensor) -> dict[str, Any]:
    """``sum_i w_i x_i / sum_i w_i`` of every tensor.

    Args:
        stacked: nested dictionary of ``(clients, ...)`` tensors.
        weights: ``(clients,)``, not negative, not all zero.

    Returns:
        The same structure without the client axis. Integer tensors (counters of batch-norm) are rounded.
    """
    shares = weights.double() / weights.double().sum()

    def mean(_: str, x: Tensor) -> Tensor:
        value: Tensor = torch.tensordot(shares.to(x.device), x.double(), 1)
        return value.to(x.dtype) if torch.is_floating_point(x) else value.round().to(x.dtype)

    return map_leaves(stacked, mean)


def masked_mean(x: Tensor, held: Tensor, fallback: Tensor) -> Tensor:
    """Mean over the clients that hold an entry, e.g. of each class's centroid.

    Args:
        x: ``(clients, entries, ...)``.
        held: ``(clients, entries)`` boolean.
        fallback: ``(entries, ...)``, kept for entries that no client holds.
    """
    weight = held.double().view(*held.shape, *([1] * (x.ndim - 2)))
    total = weight.sum(0)
    value = (x.double() * weight).sum(0) / total.clamp_min(1)
    return torch.where(total > 0, value, fallback.double()).to(x.dtype)
