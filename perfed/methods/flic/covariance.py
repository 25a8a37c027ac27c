"""The anchors' covariances: fixed, or learnt through a factor that the server averages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perfed.maths.aggregate import masked_mean
from perfed.methods.flic.bures import barycentre
from perfed.methods.flic.gaussians import Gaussians

Kind = Literal["fixed", "diagonal", "full"]


@dataclass(frozen=True)
class Covariance:
    """How the anchors' covariances are kept: not at all, or as the numbers of a factor L that is learnt.

    Attributes:
        kind: fixed, a diagonal factor, or a lower triangle, whose k (k + 1) / 2 numbers travel.
        std: of a fixed one, and of all at the start: L is this times the identity.
    """

    kind: Kind
    std: float

    def initial(self, means: Tensor) -> dict[str, Tensor]:
        """The factors of anchors with ``means`` ``(entries, k)`` at the start, if they are learnt."""
        if self.kind == "fixed":
            return {}
        start = torch.full_like(means, self.std)
        return {"factor": start if self.kind == "diagonal" else packed(torch.diag_embed(start))}

    def gaussians(self, values: Mapping[str, Tensor], where: tuple[Tensor, ...]) -> Gaussians:
        """The anchors at ``where``, indices into the leading axes of ``values``."""
        mean = values["mean"][where]
        if self.kind == "fixed":
            return Gaussians(mean, self.std)
        factor = values["factor"][where]
        return Gaussians(mean, factor if self.kind == "diagonal" else unpacked(factor, mean.shape[-1]))

    def mean(self, replies: Tensor, weights: Tensor, kept: Tensor, *, exact: bool) -> Tensor:
        """The anchors' new factors.

        Args:
            replies: factors of the clients ``(clients, entries, ...)``.
            weights: ``(clients, entries)``; 0 where a client holds none of an entry.
            kept: ``(entries, ...)``, for entries that no client holds.
            exact: the factor of the barycentre of the clients' Gaussians; else the mean of their factors.
        """
        if not exact:
            return masked_mean(replies, weights, kept)
        if self.kind == "diagonal":  # covariances that commute: the barycentre's roots are the mean of the roots
            return masked_mean(replies.abs(), weights, kept)
        k = int((2 * kept.shape[1]) ** 0.5)
        found = kept.clone()
        for entry in torch.nonzero(weights.sum(0) > 0).flatten().tolist():
            holders = weights[:, entry] > 0
            factors = unpacked(replies[holders, entry].double(), k)
            found[entry] = packed(barycentre(factors, weights[holders, entry].double())).to(kept.dtype)
        return found


def packed(factors: Tensor) -> Tensor:
    """The numbers of lower triangles ``(..., k, k)``, row by row: ``(..., k (k + 1) / 2)``."""
    rows, columns = torch.tril_indices(factors.shape[-1], factors.shape[-1], device=factors.device)
    return factors[..., rows, columns]


def unpacked(numbers: Tensor, k: int) -> Tensor:
    """Lower triangles ``(..., k, k)`` from their numbers."""
    rows, columns = torch.tril_indices(k, k, device=numbers.device)
    factors = numbers.new_zeros(*numbers.shape[:-1], k, k)
    factors[..., rows, columns] = numbers
    return factors
