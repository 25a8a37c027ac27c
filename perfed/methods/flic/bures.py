"""Wasserstein distances to Gaussians with any covariance, even singular, and barycentres of Gaussians."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.maths.divergence import centred_nuclear_norm, compute_moments
from perfed.methods.flic.gaussians import Gaussians

_MOST_ITERATIONS = 500
_CLOSE = 1e-10


def bures_w2(x: Tensor, counts: Sequence[int], anchors: Gaussians) -> Tensor:
    """Return the squared 2-Wasserstein distance between Gaussians and those fitted to sets of samples.

    ``|m - v|^2 + tr S + tr Sigma - 2 tr (Sigma^(1/2) S Sigma^(1/2))^(1/2)`` with m and S, the mean and the unbiased
    covariance of the samples (zero for one sample), and ``Sigma = L L^T``. The last trace is computed as the nuclear
    norm of ``X L``, where X are the centred samples divided by sqrt(n - 1). This needs no matrix root, and its gradient
    is finite even if S or Sigma is singular.

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
    degrees_of_freedom = (n - 1).clamp_min(1)
    cross = centred_nuclear_norm(anchors.multiply_factor(centred), counts) / degrees_of_freedom.sqrt()
    return (mean - anchors.mean).square().sum(1) + squares / degrees_of_freedom + anchors.traces() - 2 * cross


def barycentre(factors: Tensor, weights: Tensor) -> Tensor:
    """Return the lower triangular factor of the barycentre of the centred Gaussians ``N(0, L_i L_i^T)``.

    It is the fixed point of ``L <- sum_i w_i L_i Q_i``, where Q_i is the rotation with L_i Q_i nearest to L; this is
    ``Sigma <- T Sigma T`` with T the weighted mean of the optimal maps from Sigma to the Gaussians. The iteration on
    factors inverts nothing, so that they may be singular. It starts at the mean of the covariances.

    Args:
        factors: L_i, ``(m, k, k)``, preferably float64.
        weights: ``(m,)``, not negative, not all zero.

    Returns:
        ``(k, k)``, its diagonal not negative.

    Source: Álvarez-Esteban, del Barrio, Cuesta-Albertos, Matrán 2016, "A fixed-point approach to barycenters in
    Wasserstein space", theorem 4.2.

    Example:
        >>> first, second = torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([0.0, 3.0]))
        >>> barycentre(torch.stack([first, second]).double(), torch.tensor([1.0, 1.0])).round(decimals=6).tolist()
        [[0.5, 0.0], [0.0, 1.5]]
    """
    shares = (weights / weights.sum()).to(factors)
    values, vectors = torch.linalg.eigh(torch.einsum("i,ijk,ilk->jl", shares, factors, factors))
    root = vectors * values.clamp_min(0).sqrt()
    for _ in range(_MOST_ITERATIONS):
        u, _, vh = torch.linalg.svd(factors.mT @ root)
        new_root = torch.einsum("i,ijk->jk", shares, factors @ u @ vh)
        gap, root = (new_root - root).norm(), new_root
        if gap <= _CLOSE * root.norm():
            break
    triangle: Tensor = torch.linalg.qr(root.mT).R.mT
    return triangle * torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(triangle)
