"""Standardisation of the targets of a regression, and its inverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from perfed.errors import PerfedError
from perfed.settings import STRICT

_MOST = 1000  # values in one target
_EPS = torch.finfo(torch.float64).eps


class Sums(BaseModel):
    """The sums of a client's training targets ``(samples, ...)``, which it discloses.

    Attributes:
        number: the number of samples, at least 1.
        total: the sum of each value of a target over samples.
        squares: the sum of squared deviations of each value from the client's mean; squares themselves would lose
            precision for large numbers.
    """

    model_config = STRICT

    number: Annotated[int, Field(ge=1, le=2**53)]
    total: Annotated[tuple[float, ...], Field(min_length=1, max_length=_MOST)]
    squares: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1, max_length=_MOST)]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.total) != len(self.squares):
            raise PerfedError(f"{len(self.total)} sums, but {len(self.squares)} sums of squares; one each is needed")
        return self

    @classmethod
    def from_targets(cls, y: Tensor) -> Sums:
        """Return the sums of the targets ``y``, ``(samples, ...)``."""
        rows = y.double().reshape(len(y), -1)
        total = rows.sum(0)
        squares = (rows - total / len(rows)).square().sum(0)
        return cls(number=len(rows), total=tuple(total.tolist()), squares=tuple(squares.tolist()))


def varying_scale(sums: Sequence[Sums]) -> tuple[float, float] | None:
    """Return the mean and standard deviation of one value over all clients; ``None`` if it is constant.

    Values that differ only by rounding count as constant.
    """
    try:
        scale = TargetScale.of_sums(sums)
    except PerfedError:
        return None
    return scale.mean[0], scale.std[0]


@dataclass(frozen=True)
class TargetScale:
    """The mean and standard deviation by which each value of the targets of a federation is standardised.

    Example:
        >>> scale = TargetScale.from_targets([torch.tensor([10.0, 30.0])])
        >>> scale.down(torch.tensor([40.0])).tolist(), scale.up(torch.tensor([2.0])).tolist()
        ([2.0], [40.0])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_targets(cls, targets: Sequence[Tensor]) -> TargetScale:
        """Return the scale of the training targets ``(samples, ...)`` of all clients, computed from their sums.

        Raises:
            PerfedError: a value is the same for all samples of all clients.
        """
        return cls.of_sums([Sums.from_targets(y) for y in targets])

    @classmethod
    def of_sums(cls, sums: Sequence[Sums]) -> TargetScale:
        """Return the scale from the sums of all clients, which are added in this order.

        Raises:
            PerfedError: a value is the same for all samples of all clients, up to rounding.
        """
        number = sum(client.number for client in sums)
        numbers = torch.tensor([[float(client.number)] for client in sums], dtype=torch.float64)
        totals, squares = (
            torch.tensor([getattr(client, name) for client in sums], dtype=torch.float64)
            for name in ("total", "squares")
        )
        mean = totals.sum(0) / number
        between = numbers * (totals / numbers - mean).square()
        std = ((squares.sum(0) + between.sum(0)) / number).sqrt()
        if not bool((std > 4 * _EPS * mean.abs()).all()):
            raise PerfedError("the target is the same for all samples of all clients; nothing can be learnt of it")
        return cls(tuple(mean.tolist()), tuple(std.tolist()))

    def down(self, y: Tensor) -> Tensor:
        """Return standardised values, from values ``(samples, ...)`` in the unit of the data."""
        mean, std = self._to_tensors(y)
        return (y - mean) / std

    def up(self, y: Tensor) -> Tensor:
        """Return values in the unit of the data, from standardised values ``(samples, ...)``."""
        mean, std = self._to_tensors(y)
        return y * std + mean

    def _to_tensors(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation as tensors with the shape, type and device of a target."""
        return y.new_tensor(self.mean).view(y.shape[1:]), y.new_tensor(self.std).view(y.shape[1:])
