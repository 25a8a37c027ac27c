"""Wasserstein distances to Gaussians of any covariance, and barycentres; singular covariances included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.maths.divergence import centred_nuclear_norm, compute_moments
from perfed.methods.flic.gaussians import Gaussians

_MOST_ITERATIONS = 500
_CLOSE = 1e-10


def bures_w2(x: Tensor, counts: Sequence[int], anchors: Gaussians) -> Tensor:
    """Squared 2-Wasserstein distance between Gaussians and those fitted to sets of samples.

    ``|m - v|^2 + tr S + tr Sigma - 2 tr (Sigma^(1/2) S Sigma^(1/2))^(1/2)`` with m and S, the mean and the unbiased
    covariance of the samples (zero for one), ``Sigma = L L^T``. The last trace is the nuclear norm of ``X L``, X the
    centred samples over sqrt(n - 1): no root of a matrix is taken, and where S or Sigma is singular the gradient is
    finite.

    Args:
        x: ``(sets, rows, k)``; rows beyond ``counts`` are ignored.
        counts: samples of each set, in decreasing order.
        anchors: ``(sets, ...)``.

    Returns:
        ``(sets,)``, with gradients in the samples, the anchors' means and their factors L.

    Source: Rakotomamonjy et al. 2024, eq. 4; Muzellec, Cuturi 2018, "Generalizing Point Embeddings using the
    Wasserstein Space of Elliptical Distributions", for the gradient in a factor.

    Example:
        >>> anchor = Gaussians(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
        >>> round(float(bures_w2(torch.tensor([[[0.0], [2.0]]]), [2], anchor)), 4)  # (3 - sqrt(2))^2
        2.5147
    """
    centred, mean, squares, n = compute_moments(x, counts)
    rest = (n - 1).clamp_min(1)
    cross = centred_nuclear_norm(anchors.scaled(centred), counts) / rest.sqrt()
    return (mean - anchors.mean).square().sum(1) + squares / rest + anchors.traces() - 2 * cross


def barycentre(factors: Tensor, weights: Tensor) -> Tensor:
    """Lower triangular factor of the barycentre of the centred Gaussians ``N(0, L_i L_i^T)``.

    The fixed point of ``L <- sum_i w_i L_i Q_i``, Q_i the rotation that brings L_i nearest to L, that is of
    ``Sigma <- T Sigma T`` with T the weighted mean of the optimal maps from Sigma to the Gaussians. In factors nothing
    is inverted, so that they may be singular. Starts at the mean of the covariances.

    Args:
        factors: L_i, ``(m, k, k)``; float64 as a rule.
        weights: ``(m,)``, not negative, not all zero.

    Returns:
        ``(k, k)``, its diagonal not negative.

    Source: Álvarez-Esteban, del Barrio, Cuesta-Albertos, Matrán 2016, "A fixed-point approach to barycenters in
    Wasserstein space", theorem 4.2.

    Example:
        >>> one, other = torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([0.0, 3.0]))
        >>> barycentre(torch.stack([one, other]).double(), torch.tensor([1.0, 1.0])).round(decimals=6).tolist()
        [[0.5, 0.0], [0.0, 1.5]]
    """
    shares = (weights / weights.sum()).to(factors)
    values, vectors = torch.linalg.eigh(torch.einsum("i,ijk,ilk->jl", shares, factors, factors))
    found = vectors * values.clamp_min(0).sqrt()
    for _ in range(_MOST_ITERATIONS):
        left, _, right = torch.linalg.svd(factors.mT @ found)
        moved = torch.einsum("i,ijk->jk", shares, factors @ left @ right)
        gap, found = (moved - found).norm(), moved
        if gap <= _CLOSE * found.norm():
            break
    triangle: Tensor = torch.linalg.qr(found.mT).R.mT
    return triangle * torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(triangle)
