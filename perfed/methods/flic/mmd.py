"""FLIC's alignment by maximum mean discrepancy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.maths.divergence import mean_kernel
from perfed.methods.flic.gaussians import Gaussians

GAMMAS = (1e-4, 1e-3, 1e-2, 1e-1, 1e0, 1e1, 1e2)
"""Of the authors' program. Embeddings start some 80 from their anchors: there only the widest has a gradient."""


def mmd(x: Tensor, counts: Sequence[int], anchors: Gaussians) -> Tensor:
    """Squared maximum mean discrepancy between sets of samples and Gaussians.

    ``E k(x, x') + E k(z, z') - 2 E k(x, z)`` with x, x' any two of the set's samples (a sample and itself among
    them), z and z' independent draws from the Gaussian, and k the sum of the kernels ``exp(-gamma |x - z|^2)`` over
    :data:`GAMMAS`. Both expectations over the Gaussian ``N(v, Sigma)`` are taken exactly: with ``A = I + 2 gamma
    Sigma``, ``E k(x, z) = det A^(-1/2) exp(-gamma (x - v)^T A^(-1) (x - v))``, and ``E k(z, z')`` is
    ``det(I + 4 gamma Sigma)^(-1/2)``.

    Args:
        x: ``(sets, rows, k)``; rows beyond ``counts`` are ignored.
        counts: samples of each set.
        anchors: ``(sets, ...)``.

    Returns:
        ``(sets,)``, at most 14, with gradients in the samples and in the anchors.

    Source: Gretton et al. 2012, "A Kernel Two-Sample Test", eq. 5; Rakotomamonjy et al. 2024, remark 2.

    Example:
        >>> point = Gaussians(torch.zeros(1, 1), 0.0)
        >>> float(mmd(torch.zeros(1, 1, 1), [1], point))
        0.0
    """
    n = torch.tensor(counts, dtype=x.dtype, device=x.device)
    share = (torch.arange(x.shape[1], device=x.device) < n[:, None]) / n[:, None]
    off = x - anchors.mean.unsqueeze(1)
    total = mean_kernel(x, share, GAMMAS)
    for gamma in GAMMAS:
        lengths, volume = _whitened(off, anchors, 2 * gamma)
        _, twice = _whitened(off[:, :0], anchors, 4 * gamma)
        across = volume * ((-gamma * lengths).exp() * share).sum(1)
        total = total + twice - 2 * across
    return total


def _whitened(off: Tensor, anchors: Gaussians, factor: float) -> tuple[Tensor, Tensor]:
    """``x^T A^(-1) x`` for each row of ``off`` ``(sets, rows, k)``, and ``det A^(-1/2)``, A = I + factor Sigma."""
    diagonal = anchors.diagonal
    if diagonal is not None:
        a = 1 + factor * diagonal.square()
        return (off.square() / a.unsqueeze(1)).sum(2), (-0.5 * a.log().sum(1)).exp()
    triangle = torch.linalg.cholesky(torch.eye(off.shape[2]).to(off) + factor * anchors.covariance)
    solved = torch.linalg.solve_triangular(triangle, off.mT, upper=False)
    return solved.square().sum(1), (-triangle.diagonal(dim1=1, dim2=2).log().sum(1)).exp()
