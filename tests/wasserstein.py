"""The distance between a Gaussian and the one fitted to samples, written down with torch's singular values."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.maths.divergence import singular_value_cutoff


def plain_w2(x: Tensor, mean: Tensor, std: float = 1.0) -> Tensor:
    """``|m - mean|^2 + tr S + k std^2 - 2 std tr S^(1/2)`` of samples ``(n, k)`` with mean m and covariance S.

    The roots of S's eigenvalues are the singular values of the centred samples over sqrt(n - 1). Those that rounding
    leaves, below ``singular_value_cutoff`` of the largest, have no gradient.
    """
    centre = x.mean(0)
    far = (centre - mean).square().sum() + x.shape[1] * std**2
    if len(x) == 1:
        return far
    roots = torch.linalg.svdvals((x - centre) / (len(x) - 1) ** 0.5)
    roots = torch.where(roots > singular_value_cutoff(x.dtype) * roots.max(), roots, roots.detach())
    return far + (roots.square() - 2 * std * roots).sum()
