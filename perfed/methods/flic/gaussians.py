"""Gaussian anchors, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gaussians:
    """Normal distributions ``N(mean, L L^T)``.

    Attributes:
        mean: ``(..., k)``.
        factor: L: a number times the identity; ``(..., k)``, a diagonal; or ``(..., k, k)``.
    """

    mean: Tensor
    factor: Tensor | float

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of L, where that is all there is of it: ``(..., k)``; else ``None``."""
        if isinstance(self.factor, float):
            return self.mean.new_full(self.mean.shape, self.factor)
        return self.factor if self.factor.ndim == self.mean.ndim else None

    @property
    def covariance(self) -> Tensor:
        """``L L^T`` where L is no diagonal, ``(..., k, k)``."""
        assert isinstance(self.factor, Tensor)
        return self.factor @ self.factor.mT

    def drawn(self, noise: Tensor) -> Tensor:
        """``mean + L noise``: samples ``(..., J, k)`` from as many vectors of standard normal numbers."""
        return self._times(noise, transposed=True).add_(self.mean.unsqueeze(-2))

    def scaled(self, x: Tensor) -> Tensor:
        """``x L`` of rows x ``(..., n, k)``."""
        return self._times(x, transposed=False)

    def traces(self) -> Tensor | float:
        """``tr L L^T``, ``(...)``; one number where L is one."""
        if isinstance(self.factor, float):
            return self.factor * self.factor * self.mean.shape[-1]
        return self.factor.square().flatten(self.mean.ndim - 1).sum(-1)

    def _times(self, x: Tensor, *, transposed: bool) -> Tensor:
        if isinstance(self.factor, float):
            return x * self.factor
        if self.factor.ndim == self.mean.ndim:
            return x * self.factor.unsqueeze(-2)
        return x @ (self.factor.mT if transposed else self.factor)
