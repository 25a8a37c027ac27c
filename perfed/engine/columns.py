"""Replies of clients that lack some of the columns which several share by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perfed.data.client import Client
from perfed.maths.aggregate import masked_mean
from perfed.model.chain import Chain
from perfed.model.columns import ColumnLinear


def filled(content: Mapping[str, Any], clients: Sequence[Client], chain: Chain, uniform: bool) -> dict[str, Any]:
    """Put the mean of the clients that hold a column where others say something of its weights, who know nothing of it.

    Whatever a method then makes of the replies, a mean with the same weights is one over those who hold the column.
    Where nobody does, it is one over all, who have kept what they got.

    Args:
        content: of the replies, nested dictionaries of ``(clients, ...)``; parameters are known by their names.
        clients: in the same order.
        chain: the modules of one of them.
        uniform: whether the mean is plain, or weighted with the ``num_samples`` of the replies.
    """
    names = {f"{name}.weight" for name, module in chain.named_modules() if isinstance(module, ColumnLinear)}
    held = torch.tensor([client.held or () for client in clients], dtype=torch.float64)
    if not names or bool(held.all()):
        return dict(content)
    sizes = torch.ones(len(clients)).double() if uniform else content["num_samples"].double().cpu()

    def of(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: of(value)
            if isinstance(value, Mapping)
            else _filled(value, held, sizes)
            if name in names and isinstance(value, Tensor) and value.shape[-1] == held.shape[1]
            else value
            for name, value in tree.items()
        }

    return of(content)


def _filled(x: Tensor, held: Tensor, sizes: Tensor) -> Tensor:
    """``x`` ``(clients, ..., columns)`` with means where a client does not hold a column."""
    by_column = x.movedim(-1, 1)
    weights = (held * sizes[:, None]).to(x.device)
    everybody = sizes[:, None].expand(held.shape).to(x.device)
    mean = masked_mean(by_column, weights, masked_mean(by_column, everybody, torch.zeros_like(by_column[0])))
    there = held.bool().to(x.device).view(*held.shape, *([1] * (x.ndim - 2)))
    return torch.where(there, by_column, mean).movedim(1, -1).contiguous()
