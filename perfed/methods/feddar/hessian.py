"""Hessians of linear heads in closed form, for every client and domain."""

from __future__ import annotations

import torch
from torch import Tensor


def with_ones(features: Tensor) -> Tensor:
    """Features ``(samples, k)`` with a constant feature behind, ``(samples, k + 1)``: the one that a bias weighs."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def squared_error_hessian(features: Tensor, group: Tensor, num_groups: int, outputs: int = 1) -> Tensor:
    """Hessian of the mean squared error (averaged over outputs) in each output's weights: ``2 X^T X / (L outputs)``.

    It is the same for every output and does not depend on the weights.

    Args:
        features: ``(samples, k + 1)``, with the constant feature.
        group: ``(samples,)`` int64, which client and domain a sample belongs to.
        num_groups: number of groups.
        outputs: of the head.

    Returns:
        ``(num_groups, k + 1, k + 1)`` float64; zero for groups without samples.

    Source: Zhong et al. 2023 (FedDAR), section 4.3, divided by the number of samples of the group.
    """
    size = features.shape[1]
    found = features.new_zeros(num_groups, size, size, dtype=torch.float64)
    for index, x in _groups(features.double(), group, num_groups):
        found[index] = 2 * x.T @ x / (len(x) * outputs)
    return found


def softmax_hessian(features: Tensor, logits: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Hessian of the mean cross-entropy in a softmax head: ``1/L sum (diag(p) - p p^T) x (x x^T)`` (Kronecker product).

    Rows and columns are those of the weights with the bias as last column, ``(C, k + 1)`` row by row. A head for two
    classes is the logistic one twice: in the difference of its rows it is ``X^T diag(mu (1 - mu)) X / L``.

    Args:
        features: ``(samples, k + 1)``, with the constant feature.
        logits: ``(samples, C)``, of the head at which the Hessian is taken.
        group, num_groups: as in :func:`squared_error_hessian`.

    Returns:
        ``(num_groups, C (k + 1), C (k + 1))`` float64; zero for groups without samples.

    Source: Zhong et al. 2023 (FedDAR), section 4.3; Murphy 2012, eq. 8.38.
    """
    size, classes = features.shape[1], logits.shape[1]
    found = features.new_zeros(num_groups, classes * size, classes * size, dtype=torch.float64)
    joined = torch.cat([features, logits], dim=1).double()
    for index, both in _groups(joined, group, num_groups):
        x, p = both[:, :size], both[:, size:].softmax(1)
        scaled = (p[:, :, None] * x[:, None, :]).flatten(1) / len(x) ** 0.5
        blocks = torch.mm(scaled.T, scaled, out=found[index]).neg_().view(classes, size, classes, size)
        own = blocks.diagonal(dim1=0, dim2=2)
        # p_a - p_a^2 is the sum of p_a p_b over the other classes, which loses no digits when one class is certain.
        own.zero_()
        own.copy_(-blocks.sum(2).permute(1, 2, 0))
    return found


def _groups(rows: Tensor, group: Tensor, num_groups: int) -> list[tuple[int, Tensor]]:
    """The rows of every group that has some."""
    order = torch.argsort(group, stable=True)
    sizes = torch.bincount(group, minlength=num_groups).tolist()
    return [(index, part) for index, part in enumerate(torch.split(rows[order], sizes)) if len(part)]
