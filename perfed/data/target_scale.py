"""Targets of a regression as numbers of mean 0 and variance 1, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.errors import PerfedError


@dataclass(frozen=True)
class TargetScale:
    """What the targets of a federation were standardised by: mean and standard deviation of each value of a sample.

    Example:
        >>> scale = TargetScale.of([torch.tensor([10.0, 30.0])])
        >>> scale.down(torch.tensor([40.0])).tolist(), scale.up(torch.tensor([2.0])).tolist()
        ([2.0], [40.0])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, targets: Sequence[Tensor]) -> TargetScale:
        """Of the training targets ``(samples, ...)`` of all clients: from their counts, sums and sums of squares.

        Raises:
            PerfedError: a value is the same for all samples of all clients.
        """
        rows = [y.double().reshape(len(y), -1) for y in targets]
        count = sum(len(y) for y in rows)
        mean = torch.stack([y.sum(0) for y in rows]).sum(0) / count
        # About the mean: sums of squares of large numbers would cancel.
        std = (torch.stack([(y - mean).square().sum(0) for y in rows]).sum(0) / count).sqrt()
        if not bool((std > 0).all()):
            raise PerfedError("the target is the same for all samples of all clients; nothing can be learnt of it")
        return cls(tuple(mean.tolist()), tuple(std.tolist()))

    def down(self, y: Tensor) -> Tensor:
        """Values in the unit of the data as models have them, ``(samples, ...)``."""
        mean, std = self._like(y)
        return (y - mean) / std

    def up(self, y: Tensor) -> Tensor:
        """Values as models have them, ``(samples, ...)``, in the unit of the data."""
        mean, std = self._like(y)
        return y * std + mean

    def _like(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return y.new_tensor(self.mean).view(y.shape[1:]), y.new_tensor(self.std).view(y.shape[1:])
