"""Targets of a regression as numbers of mean 0 and variance 1, and back."""

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
    """What a client tells of its training targets ``(samples, ...)``.

    Attributes:
        number: of samples, at least 1.
        total: of each value of a sample, the sum.
        squares: of each, the sum of squares about the client's mean (about 0, those of large numbers would cancel).
    """

    model_config = STRICT

    number: Annotated[int, Field(ge=1, le=2**53)]
    total: Annotated[tuple[float, ...], Field(min_length=1, max_length=_MOST)]
    squares: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1, max_length=_MOST)]

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.total) != len(self.squares):
            raise PerfedError(f"{len(self.total)} sums, but {len(self.squares)} sums of squares; one each is needed")
        return self

    @classmethod
    def of(cls, y: Tensor) -> Sums:
        """Of the targets ``y``, ``(samples, ...)``."""
        rows = y.double().reshape(len(y), -1)
        total = rows.sum(0)
        squares = (rows - total / len(rows)).square().sum(0)
        return cls(number=len(rows), total=tuple(total.tolist()), squares=tuple(squares.tolist()))


def varying_scale(sums: Sequence[Sums]) -> tuple[float, float] | None:
    """Mean and deviation of one value over all clients; ``None`` where it is the same everywhere, but for rounding."""
    try:
        scale = TargetScale.of_sums(sums)
    except PerfedError:
        return None
    return scale.mean[0], scale.std[0]


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
        return cls.of_sums([Sums.of(y) for y in targets])

    @classmethod
    def of_sums(cls, sums: Sequence[Sums]) -> TargetScale:
        """Of what clients tell, in the order in which the sums are added up.

        Raises:
            PerfedError: a value is the same for all samples of all clients, but for rounding.
        """
        number = sum(of.number for of in sums)
        numbers = torch.tensor([[float(of.number)] for of in sums], dtype=torch.float64)
        totals, squares = (
            torch.tensor([getattr(of, name) for of in sums], dtype=torch.float64) for name in ("total", "squares")
        )
        mean = totals.sum(0) / number
        between = numbers * (totals / numbers - mean).square()
        std = ((squares.sum(0) + between.sum(0)) / number).sqrt()
        if not bool((std > 4 * _EPS * mean.abs()).all()):
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
