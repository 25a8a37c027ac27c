"""Batches of Gaussian anchors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gaussians:
    """Normal distributions ``N(mean, L L^T)``.

    Attributes:
        mean: ``(..., k)``.
        factor: L, as a number (times the identity), a diagonal ``(..., k)``, or matrices ``(..., k, k)``.
    """

    mean: Tensor
    factor: Tensor | float

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of L, ``(..., k)``; ``None`` if L is a full matrix."""
        if isinstance(self.factor, float):
            return self.mean.new_full(self.mean.shape, self.factor)
        return self.factor if self.factor.ndim == self.mean.ndim else None

    @property
    def covariance(self) -> Tensor:
        """The covariance ``L L^T`` for a full L, ``(..., k, k)``."""
        assert isinstance(self.factor, Tensor)
        return self.factor @ self.factor.mT

    def draw_samples(self, noise: Tensor) -> Tensor:
        """Return samples ``mean + L noise`` ``(..., J, k)`` from standard normal ``noise`` of the same shape."""
        return self._apply_factor(noise, transposed=True).add_(self.mean.unsqueeze(-2))

    def multiply_factor(self, x: Tensor) -> Tensor:
        """Return ``x L`` of rows x ``(..., n, k)``."""
        return self._apply_factor(x, transposed=False)

    def traces(self) -> Tensor | float:
        """Return ``tr L L^T``, ``(...)``; one number if L is a number."""
        if isinstance(self.factor, float):
            return self.factor * self.factor * self.mean.shape[-1]
        return self.factor.square().flatten(self.mean.ndim - 1).sum(-1)

    def _apply_factor(self, x: Tensor, *, transposed: bool) -> Tensor:
        if isinstance(self.factor, float):
            return x * self.factor
        if self.factor.ndim == self.mean.ndim:
            return x * self.factor.unsqueeze(-2)
        return x @ (self.factor.mT if transposed else self.factor)
