"""FedPAC's estimate of the generalisation gap, of any method with a linear head."""

from __future__ import annotations

import torch
from torch import Tensor


def generalisation_gap(means: Tensor, counts: Tensor, heads: Tensor) -> Tensor:
    """``(2 / (n_i K)) sum_l <f(x_l) - c_{y_l}, g_i(y_l)>`` over each client's training samples.

    By linearity it needs the means of the features alone: ``(2 / K) sum_y P_i(y) <mu_iy - c_y, g_i(y)>``. The centroid
    ``c_y = sum_i n_iy mu_iy / sum_i n_iy`` is that of all samples of the class, whoever holds them.

    The paper prints the other sign. What its loss (eq. 12) is above the loss on the client's own samples, but for what
    does not depend on the head, is this (``tests/methods/test_fedpac.py`` sums it up): positive where a head knows its
    client's samples better than others of the same class.

    Args:
        means: ``(m, C, d)``, mean feature mu of each client and class; whatever, where there is no sample.
        counts: ``(m, C)``, numbers of samples n.
        heads: ``(m, C, d)``, weights of each client's linear head, ``g_i(y)`` the row of class y.

    Returns:
        ``(m,)``, float64; 0 for a client without samples, or whose features are distributed as everybody's.

    Source: Xu, Tong, Huang 2023, Eq. 14 (A.4, Eq. 42).

    Example:
        >>> means = torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]]])  # class 0 is 2 on average
        >>> generalisation_gap(means, torch.tensor([[4, 0], [4, 0]]), torch.ones(2, 2, 1)).tolist()
        [-1.0, 1.0]
    """
    means, counts, heads = means.double(), counts.double(), heads.double()
    held = torch.where(counts[:, :, None] > 0, means, 0.0)
    centroids = (counts[:, :, None] * held).sum(0) / counts.sum(0).clamp_min(1)[:, None]
    priors = counts / counts.sum(1, keepdim=True).clamp_min(1)
    return 2 / counts.shape[1] * torch.einsum("ic,icd,icd->i", priors, held - centroids, heads)
