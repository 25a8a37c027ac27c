"""The step of FLIC's anchors at a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def descended(
    values: Mapping[str, Tensor],
    gradient_at: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]],
    steps: Tensor,
    lr: float,
) -> dict[str, Tensor]:
    """Adam, from fresh moments, on what is learnt of the anchors.

    Args:
        values: where it starts, ``(n, entries, ...)`` each.
        gradient_at: gradients at some values in step number ``count``, from 1.
        steps: of each client, ``(n,)``.
        lr: learning rate.
    """
    moved = {name: tensor.clone() for name, tensor in values.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in moved.items()} for _ in range(2))
    for count in range(1, int(steps.max()) + 1):
        for name, gradient in gradient_at(moved, count).items():
            one = first[name].mul_(0.9).add_(gradient, alpha=0.1)
            two = second[name].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            update = (one / (1 - 0.9**count)) / ((two / (1 - 0.999**count)).sqrt() + 1e-8)
            moved[name] -= lr * update * (steps >= count).to(update)[:, None, None]
    return moved
