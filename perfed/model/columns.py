"""The first layer for clients with named columns: weights of columns that clients share, and of a client's other
columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed.model.chain import Model, Shape, StageFactory


class ColumnLinear(nn.Module):
    """A linear layer whose first inputs have the same meaning at all clients, while the others are local to the client.

    Args:
        layer: the layer from which initial values are taken.
        shared: the number of inputs, from the first, that have the same meaning at all clients.

    Attributes:
        weight: the weights of these inputs ``(out, shared)``.
        own: the weights of the other inputs ``(out, inputs - shared)``; personal if ``weight`` is shared.
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
        """Return the numbers of shared and other inputs, the number of outputs, and whether there is a bias."""
        return f"{self.weight.shape[1]} + {self.own.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs ``(..., inputs)``."""
        return F.linear(x, torch.cat([self.weight, self.own], -1), self.bias)


def split_first_layer(model: Model, shared: int | None) -> Model:
    """Return a model whose first stage has a :class:`ColumnLinear` in place of the linear layer that it begins with, if
    any.

    Args:
        model: the model.
        shared: the number of inputs, from the first, that have the same meaning at all clients; ``None`` if columns
            have no names, for which the model is returned unchanged.
    """
    if shared is None:
        return model
    first, *later_stages = model.factories
    return Model(
        **{
            first: _wrap_factory(model.factories[first], shared),
            **{stage: model.factories[stage] for stage in later_stages},
        }
    )


def _wrap_factory(factory: StageFactory, shared: int) -> StageFactory:
    def build(shape: Shape) -> nn.Module:
        module = factory(shape)
        if isinstance(module, nn.Linear):
            return ColumnLinear(module, shared)
        container: nn.Module = module
        while isinstance(container, nn.Sequential) and len(container):
            if isinstance(container[0], nn.Linear):
                container[0] = ColumnLinear(container[0], shared)
                break
            container = container[0]
        return module

    return build
