"""The first layer of clients whose columns have names: weights of columns that several have, and of a client's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed.model.chain import Model, Shape, StageFactory


class ColumnLinear(nn.Module):
    """A linear layer whose first inputs mean the same at all clients, while the others are the client's own.

    Args:
        layer: whose values it starts from.
        shared: how many inputs, the first, mean the same.

    Attributes:
        weight: of these ``(out, shared)``.
        own: of the others ``(out, inputs - shared)``; it stays with the client where ``weight`` is shared.
        bias: ``(out,)``, or ``None``.

    Example:
        >>> layer = ColumnLinear(nn.Linear(5, 2), shared=3)
        >>> layer.weight.shape, layer.own.shape, layer(torch.zeros(4, 5)).shape
        (torch.Size([2, 3]), torch.Size([2, 2]), torch.Size([4, 2]))
    """

    def __init__(self, layer: nn.Linear, shared: int) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.weight = nn.Parameter(weight[:, :shared].clone(), layer.weight.requires_grad)
        self.own = nn.Parameter(weight[:, shared:].clone(), layer.weight.requires_grad)
        self.bias = layer.bias

    def extra_repr(self) -> str:
        """Return how many inputs are shared and own, how many outputs there are, and whether there is a bias."""
        return f"{self.weight.shape[1]} + {self.own.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to inputs ``(..., inputs)``."""
        return F.linear(x, torch.cat([self.weight, self.own], -1), self.bias)


def by_columns(model: Model, shared: int | None) -> Model:
    """Return the model whose first stage, if it begins with a linear layer, has a :class:`ColumnLinear` in its place.

    Args:
        model: of any stages.
        shared: how many inputs of each client, the first, mean the same; ``None``: nothing is known of columns.
    """
    if shared is None:
        return model
    first, *rest = model.factories
    return Model(**{first: _named(model.factories[first], shared), **{stage: model.factories[stage] for stage in rest}})


def _named(factory: StageFactory, shared: int) -> StageFactory:
    def build(shape: Shape) -> nn.Module:
        module = factory(shape)
        if isinstance(module, nn.Linear):
            return ColumnLinear(module, shared)
        inside: nn.Module = module
        while isinstance(inside, nn.Sequential) and len(inside):
            if isinstance(inside[0], nn.Linear):
                inside[0] = ColumnLinear(inside[0], shared)
                break
            inside = inside[0]
        return module

    return build
