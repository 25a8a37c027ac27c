"""Algebra of FedDAR's linear heads per domain: joining weights and biases, least squares, and Hessians."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from perfed.errors import PerfedError
from perfed.training.cohort import Cohort


def with_ones(features: Tensor) -> Tensor:
    """Return features ``(samples, k)`` followed by a constant feature for the bias, ``(samples, k + 1)``."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def squared_error_hessian(features: Tensor, group: Tensor, num_groups: int, outputs: int = 1) -> Tensor:
    """Return the Hessian of the mean squared error in each output's weights: ``2 X^T X / (L outputs)``.

    The error is averaged over outputs. The Hessian is the same for every output and does not depend on the weights.

    Args:
        features: ``(samples, k + 1)``, with the constant feature.
        group: ``(samples,)`` int64, the number of the sample's group (client and domain).
        num_groups: number of groups.
        outputs: number of outputs of the head.

    Returns:
        ``(num_groups, k + 1, k + 1)`` float64; zero for groups without samples.

    Source: Zhong et al. 2023 (FedDAR), section 4.3, divided by the number of samples of the group.
    """
    size = features.shape[1]
    hessians = features.new_zeros(num_groups, size, size, dtype=torch.float64)
    for index, x in _split_groups(features.double(), group, num_groups):
        hessians[index] = 2 * x.T @ x / (len(x) * outputs)
    return hessians


def softmax_hessian(features: Tensor, logits: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the Hessian of the mean cross-entropy in a softmax head: ``1/L sum (diag(p) - p p^T) x (x x^T)``.

    The middle ``x`` is the Kronecker product. Rows and columns are those of the weights with the bias as last column,
    ``(C, k + 1)`` row by row. A head for two classes corresponds to logistic regression: in the difference of its rows
    the Hessian is ``X^T diag(mu (1 - mu)) X / L``.

    Args:
        features: ``(samples, k + 1)``, with the constant feature.
        logits: ``(samples, C)``, of the head at which the Hessian is computed.
        group, num_groups: as in :func:`squared_error_hessian`.

    Returns:
        ``(num_groups, C (k + 1), C (k + 1))`` float64; zero for groups without samples.

    Source: Zhong et al. 2023 (FedDAR), section 4.3; Murphy 2012, eq. 8.38.
    """
    size, classes = features.shape[1], logits.shape[1]
    hessians = features.new_zeros(num_groups, classes * size, classes * size, dtype=torch.float64)
    join_bias = torch.cat([features, logits], dim=1).double()
    for index, rows in _split_groups(join_bias, group, num_groups):
        x, p = rows[:, :size], rows[:, size:].softmax(1)
        scaled = (p[:, :, None] * x[:, None, :]).flatten(1) / len(x) ** 0.5
        blocks = torch.mm(scaled.T, scaled, out=hessians[index]).neg_().view(classes, size, classes, size)
        diagonal = blocks.diagonal(dim1=0, dim2=2)
        # p_a - p_a^2 is the sum of p_a p_b over the other classes, which is accurate even if one class is certain.
        diagonal.zero_()
        diagonal.copy_(-blocks.sum(2).permute(1, 2, 0))
    return hessians


def _split_groups(rows: Tensor, group: Tensor, num_groups: int) -> list[tuple[int, Tensor]]:
    """Return the number and the rows of every group that has some."""
    order = torch.argsort(group, stable=True)
    sizes = torch.bincount(group, minlength=num_groups).tolist()
    return [(index, part) for index, part in enumerate(torch.split(rows[order], sizes)) if len(part)]


WEIGHT, BIAS = "head.weight", "head.bias"
_RANK = 1e-10  # singular values below this fraction of the largest are treated as zero


def check_linear(shared: Mapping[str, Tensor], purpose: str) -> None:
    """Check that the shared parameters contain a linear head per domain with a bias.

    Args:
        shared: the shared parameters.
        purpose: what needs such a head; the error message starts with it.

    Raises:
        PerfedError: there is no such head.
    """
    if WEIGHT not in shared or BIAS not in shared or shared[WEIGHT].ndim != 3:
        raise PerfedError(f"{purpose} needs a linear head with bias; add model.head=linear")


def solve_heads(cohort: Cohort) -> None:
    """Replace each head by the least-squares solution of its domain's samples, of least norm if there are several."""
    samples = cohort.samples()
    assert samples.domain is not None
    features = with_ones(cohort.representation().flatten(1)).double()
    y = samples.y.double().view(len(samples.y), -1)
    group = cohort.domain_cells
    solutions = join_bias(cohort.model, joint=False).flatten(0, 1).double()
    for index in torch.unique(group).tolist():
        x = features[group == index]
        if not torch.isfinite(x).all():
            raise cohort.make_divergence_error(index // cohort.num_domains, "torch.linalg.pinv")
        solutions[index] = torch.linalg.pinv(x, rtol=_RANK) @ y[group == index]
    for name, solved in split_bias(solutions, {WEIGHT: cohort.model[WEIGHT].flatten(0, 1)}, joint=False).items():
        cohort.model[name] = solved.view_as(cohort.model[name])


def make_hessian_function(cohort: Cohort) -> Callable[[int], Tensor]:
    """Return a function that computes the Hessians ``(M, D, D)`` of the client in a row of the cohort.

    They are the Hessians of each domain's mean loss with respect to its head, at the current heads.
    """
    samples, domains = cohort.samples(), cohort.num_domains
    features = with_ones(cohort.representation().flatten(1))
    logits = None if cohort.num_classes is None else cohort.features("head")
    outputs = cohort.model[BIAS].shape[-1]
    assert samples.domain is not None
    domains_of_client = torch.split(samples.domain, samples.counts.tolist())
    starts = samples.starts.tolist()

    def compute_hessians(row: int) -> Tensor:
        rows = slice(starts[row], starts[row] + len(domains_of_client[row]))
        if logits is None:
            return squared_error_hessian(features[rows], domains_of_client[row], domains, outputs)
        return softmax_hessian(features[rows], logits[rows], domains_of_client[row], domains)

    return compute_hessians


def join_bias(heads: Mapping[str, Tensor], joint: bool) -> Tensor:
    """Return the weight with the bias as last column.

    Its shape is ``(..., k + 1, C)``, or ``(..., C (k + 1), 1)`` if the outputs have one joint Hessian.
    """
    matrix = torch.cat([heads[WEIGHT], heads[BIAS].unsqueeze(-1)], dim=-1)
    return matrix.flatten(-2).unsqueeze(-1) if joint else matrix.transpose(-1, -2)


def split_bias(columns: Tensor, like: Mapping[str, Tensor], joint: bool) -> dict[str, Tensor]:
    """Return weight and bias from the output of :func:`join_bias` for ``(M, ...)``."""
    domains, outputs, k = like[WEIGHT].shape
    matrix = columns.view(domains, outputs, k + 1) if joint else columns.transpose(1, 2)
    matrix = matrix.to(like[WEIGHT].dtype)
    return {WEIGHT: matrix[..., :k].contiguous(), BIAS: matrix[..., k].contiguous()}
