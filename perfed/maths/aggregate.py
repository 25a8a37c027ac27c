"""Means over clients, with which a server combines replies; rows are in the sorted order of client ids."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.maths.sums import Hidden
from perfed.tree import Tree, map_leaves

_BLOCK, _COLUMNS = 1 << 20, 1 << 10
"""Size of a block of columns: at most so many numbers, or so many columns if that is more."""
Average = Annotated[
    Literal["samples", "uniform"], Field(description="weights of the mean: n_i ('samples') or 1 ('uniform')")
]
"""A method's choice of weights, for :func:`client_mean`."""


def client_mean(stacked: Tree, num_samples: Tensor, average: Average) -> dict[str, Any]:
    """Return the mean over clients of every tensor, weighted by ``num_samples`` ``(clients,)`` or uniformly.

    Example:
        >>> stacked, num_samples = {"w": torch.tensor([[0.0], [1.0]])}, torch.tensor([3, 1])
        >>> [client_mean(stacked, num_samples, average)["w"].item() for average in ("samples", "uniform")]
        [0.25, 0.5]
    """
    return weighted_mean(stacked, average_weights(num_samples, average))


def average_weights(num_samples: Tensor, average: Average) -> Tensor:
    """Return the weights of a mean over clients: ``num_samples``, or ones."""
    return num_samples if average == "samples" else torch.ones_like(num_samples)


def weighted_mean(stacked: Tree, weights: Tensor | None = None) -> dict[str, Any]:
    """Return ``sum_i w_i x_i / sum_i w_i`` of every tensor.

    Args:
        stacked: nested dictionary of ``(clients, ...)`` tensors.
        weights: ``(clients,)``, not negative, not all zero; ``None`` for equal weights.

    Returns:
        The same structure without the client axis. Integer tensors (counters of batch-norm) are rounded.

    Example:
        >>> weighted_mean({"w": torch.tensor([[0.0, 4.0], [1.0, 0.0]])}, torch.tensor([3, 1]))["w"].tolist()
        [0.25, 3.0]
    """

    def mean(_: str, x: Tensor) -> Tensor:
        if isinstance(x, Hidden):
            return convert_like(x.average_clients(weights), x)
        client_weights = torch.ones(len(x)) if weights is None else weights
        shares = client_weights.double() / client_weights.double().sum()
        return convert_like(_weighted_sum(shares.to(x.device), x), x)

    return map_leaves(stacked, mean)


def _weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Return ``sum_i w_i x_i`` in float64, a block of columns at a time, whose copy fits the processor's cache."""
    columns = x.reshape(len(x), -1).split(max(_COLUMNS, _BLOCK // len(x)), dim=1)
    return torch.cat([torch.tensordot(weights, block.double(), 1) for block in columns]).view(x.shape[1:])


def convert_like(value: Tensor, like: Tensor) -> Tensor:
    """Return ``value`` in the dtype of ``like``, rounded if that is an integer type."""
    return value.to(like.dtype) if torch.is_floating_point(like) else value.round().to(like.dtype)


def masked_mean(x: Tensor, weights: Tensor, fallback: Tensor) -> Tensor:
    """Return ``sum_i w_ik x_ik / sum_i w_ik`` for every entry k, such as a class or a domain (FedDAR, eq. 6).

    Args:
        x: ``(clients, entries, ...)``.
        weights: ``(clients, entries)``, not negative, on any scale, such as numbers of samples; or boolean, whether
            a client has an entry.
        fallback: ``(entries, ...)``, the result for entries that no client has.

    Example:
        >>> x, weights = torch.tensor([[[1.0], [7.0]], [[3.0], [9.0]]]), torch.tensor([[1, 0], [1, 0]])
        >>> masked_mean(x, weights, torch.zeros(2, 1)).tolist()  # no client has the second entry
        [[2.0], [0.0]]
    """
    ones = [1] * (x.ndim - 2)
    if isinstance(x, Hidden) and isinstance(weights, Hidden):
        total, weighted = weights.sum_clients().view(-1, *ones), x.sum_clients(weights)
    else:
        weight = weights.double().view(*weights.shape, *ones)
        total, weighted = weight.sum(0), (x.double() * weight).sum(0)
    value = weighted / torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, value, fallback.double()).to(x.dtype)
