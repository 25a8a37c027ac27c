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


def masked_mean(x: Tensor, weights: Tensor, fallback: Tensor) -> Tensor:
    """``sum_i w_ik x_ik / sum_i w_ik`` for every entry k: each class's centroid, each domain's head (FedDAR, eq. 6).

    Args:
        x: ``(clients, entries, ...)``.
        weights: ``(clients, entries)``, numbers of samples, or boolean: who holds an entry.
        fallback: ``(entries, ...)``, kept for entries that no client holds.
    """
    weight = weights.double().view(*weights.shape, *([1] * (x.ndim - 2)))
    total = weight.sum(0)
    value = (x.double() * weight).sum(0) / total.clamp_min(1)
    return torch.where(total > 0, value, fallback.double()).to(x.dtype)


def second_order_mean(old: Tensor, local: Tensor, hessians: Tensor, counts: Tensor, *, damping: float = 0.0) -> Tensor:
    """Minimiser of the clients' quadratic models, in its correction form: what nobody saw keeps its old value.

    ``w = w_old + (H + delta I)^-1 sum_i a_i H_i (w_i - w_old)`` with ``H = sum_i a_i H_i`` and ``a_i`` in proportion to
    ``counts``. It equals ``H^-1 sum_i a_i H_i w_i`` where H is invertible. With ``delta = 0`` the pseudo-inverse is
    taken (eigenvalues below 1e-12 of the largest count as zero). Everything is done in float64.

    Args:
        old: ``(D, r)``, the values that were sent out; r right-hand sides have the same Hessians.
        local: ``(clients, D, r)``.
        hessians: ``(clients, D, D)``, symmetric positive semi-definite.
        counts: ``(clients,)``; clients with 0 do not count. All zero: ``old`` is returned.
        damping: delta, at least 0. Equal local values stay as they are only for 0, or if they equal ``old``.

    Source: Zhong et al. 2023 (FedDAR), eq. 8.
    """
    total = counts.double().sum()
    if total == 0:
        return old
    shares = counts.double() / total
    change = torch.einsum("i,ide,ier->dr", shares, hessians.double(), (local - old).double())
    matrix = torch.tensordot(shares, hessians.double(), 1)
    if damping:
        matrix = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        step: Tensor = torch.linalg.solve(matrix, change)
    else:
        step = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12) @ change
    return (old + step).to(old.dtype)
