"""The step for clients that share columns by name and may each lack some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perfed.data.client import Client
from perfed.engine.initial import Initialiser
from perfed.engine.steps.step import ExchangeStep
from perfed.maths.aggregate import masked_mean
from perfed.method.exchange import Replies
from perfed.model.chain import Chain
from perfed.model.columns import ColumnLinear


class NamedColumns(ExchangeStep):
    """The step that replaces the weights of missing columns by their mean over the clients that have the column.

    With the same weights, a method's mean over all clients is then equal to the mean over the clients that have the
    column. If no client of the exchange has a column, its weights are averaged over all clients, which still have the
    values that they received.

    Args:
        initialiser: the method, which decides whether its means are plain or weighted with ``num_samples``.
        clients: all clients by id.
    """

    def __init__(self, initialiser: Initialiser, clients: Mapping[str, Client]) -> None:
        self._initialiser, self._clients = initialiser, clients

    def collect(self, replies: Replies) -> Replies:
        """Return the replies with means in place of the weights of missing columns."""
        clients = [self._clients[client] for client in replies.ids]
        if not clients:
            return replies
        is_plain = getattr(self._initialiser.method, "average", "samples") == "uniform"
        sizes = None if is_plain else replies.content.get("num_samples")
        content = fill_columns(replies.content, clients, self._initialiser.chain(clients[0].input_shape), sizes)
        return Replies(replies.ids, content, replies.train_loss)


def fill_columns(
    content: Mapping[str, Any], clients: Sequence[Client], chain: Chain, sizes: Tensor | None = None
) -> dict[str, Any]:
    """Return replies in which each client has weights of all columns.

    Args:
        content: stacked replies, nested dictionaries of ``(clients, ...)``; parameters are identified by name.
        clients: the clients in the same order, with the columns that they have.
        chain: the modules of one of the clients.
        sizes: ``(clients,)``, the weights of the mean; ``None`` for a plain mean.
    """
    names = {f"{name}.weight" for name, module in chain.named_modules() if isinstance(module, ColumnLinear)}
    has_column = torch.tensor([client.held or () for client in clients], dtype=torch.float64)
    if not names or bool(has_column.all()):
        return dict(content)
    sizes = torch.ones(len(clients)).double() if sizes is None else sizes.double().cpu()

    def fill_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: fill_tree(value)
            if isinstance(value, Mapping)
            else _fill_weight(value, has_column, sizes)
            if name in names and isinstance(value, Tensor) and value.shape[-1] == has_column.shape[1]
            else value
            for name, value in tree.items()
        }

    return fill_tree(content)


def _fill_weight(x: Tensor, has_column: Tensor, sizes: Tensor) -> Tensor:
    """Return ``x`` ``(clients, ..., columns)`` with means where a client does not have a column."""
    by_column = x.movedim(-1, 1)
    weights = (has_column * sizes[:, None]).to(x.device)
    all_weights = sizes[:, None].expand(has_column.shape).to(x.device)
    mean = masked_mean(by_column, weights, masked_mean(by_column, all_weights, torch.zeros_like(by_column[0])))
    mask = has_column.bool().to(x.device).view(*has_column.shape, *([1] * (x.ndim - 2)))
    return torch.where(mask, by_column, mean).movedim(1, -1).contiguous()
