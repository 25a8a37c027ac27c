"""Regression on planes: local losses are quadratics, whose minimisers and gradients have closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.model.chain import Model
from perfed.model.presets import linear

LINEAR = Model(head=linear(1))


def planes(
    sizes: Sequence[int] = (12, 12, 12), dim: int = 3, *, first: float = 1.0, more: float = 1.0, seed: int = 1
) -> Federation:
    """A plane of its own for every client; the inputs of client i have the scale ``first + more * i``."""
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for i, size in enumerate(sizes):
        x = torch.randn(size, dim, generator=generator).double() * (first + more * i)
        y = x @ torch.randn(dim, generator=generator).double() + torch.randn(1, generator=generator).double()
        arrays[f"c{i}"] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    return Federation.from_arrays(arrays, num_classes=None)


def quadratic(client: Client) -> tuple[Tensor, Tensor]:
    """A and b of ``f(w) = mean (x w - y)^2``: grad f(w) = A w - b, w with the bias as last entry."""
    x = torch.cat([client.train.x, torch.ones(len(client.train), 1, dtype=torch.float64)], 1)
    return 2 * x.T @ x / len(x), 2 * x.T @ client.train.y / len(x)


def flat(params: Mapping[str, Tensor]) -> Tensor:
    """The head's weights, the bias last."""
    return torch.cat([params["head.weight"].flatten(), params["head.bias"].flatten()])
