"""The covariances of anchors: fixed, or learnt through a factor that the server averages."""

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
    """The representation of the anchors' covariances: fixed, or as a learnt factor L.

    Attributes:
        kind: fixed; a diagonal factor; or a lower triangular factor, of which k (k + 1) / 2 values are sent.
        std: fixed and initial factors are this times the identity.
    """

    kind: Kind
    std: float

    def initial(self, means: Tensor) -> dict[str, Tensor]:
        """Return the initial factors of anchors with ``means`` ``(entries, k)``; nothing if covariances are fixed.

        A triangular factor is packed (:func:`pack_triangles`), a diagonal factor is not.
        """
        if self.kind == "fixed":
            return {}
        start = torch.full_like(means, self.std)
        return {"factor": start if self.kind == "diagonal" else pack_triangles(torch.diag_embed(start))}

    def gaussians(self, values: Mapping[str, Tensor], where: tuple[Tensor, ...]) -> Gaussians:
        """Return the anchors at ``where``, indices into the leading axes of ``values``."""
        mean = values["mean"][where]
        if self.kind == "fixed":
            return Gaussians(mean, self.std)
        factor = values["factor"][where]
        return Gaussians(mean, factor if self.kind == "diagonal" else unpack_triangles(factor, mean.shape[-1]))

    def mean(self, replies: Tensor, weights: Tensor, current: Tensor, *, exact: bool) -> Tensor:
        """Return the anchors' new factors.

        Args:
            replies: factors of the clients ``(clients, entries, ...)``.
            weights: ``(clients, entries)``; 0 if a client has no samples of an entry.
            current: ``(entries, ...)``, the factors of entries without samples at any client.
            exact: whether to return the factor of the barycentre of the clients' Gaussians, not the mean of their
                factors.
        """
        if not exact:
            return masked_mean(replies, weights, current)
        if self.kind == "diagonal":  # The covariances commute, so that the barycentre's root is the mean of the roots.
            return masked_mean(replies.abs(), weights, current)
        k = int((2 * current.shape[1]) ** 0.5)
        factors_of_entries = current.clone()
        for entry in torch.nonzero(weights.sum(0) > 0).flatten().tolist():
            has_samples = weights[:, entry] > 0
            factors = unpack_triangles(replies[has_samples, entry].double(), k)
            factors_of_entries[entry] = pack_triangles(barycentre(factors, weights[has_samples, entry].double())).to(
                current.dtype
            )
        return factors_of_entries


def pack_triangles(factors: Tensor) -> Tensor:
    """Return the entries of lower triangles ``(..., k, k)``, row by row: ``(..., k (k + 1) / 2)``."""
    rows, columns = torch.tril_indices(factors.shape[-1], factors.shape[-1], device=factors.device)
    return factors[..., rows, columns]


def unpack_triangles(entries: Tensor, k: int) -> Tensor:
    """Return lower triangles ``(..., k, k)`` from their entries."""
    rows, columns = torch.tril_indices(k, k, device=entries.device)
    factors = entries.new_zeros(*entries.shape[:-1], k, k)
    factors[..., rows, columns] = entries
    return factors
