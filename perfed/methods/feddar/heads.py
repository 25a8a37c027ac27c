"""Linear heads per domain as the algebra of FedDAR sees them: joined with their biases, solved, and curved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from perfed.errors import PerfedError
from perfed.training.cohort import Cohort


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


WEIGHT, BIAS = "head.weight", "head.bias"
_RANK = 1e-10  # singular values below this share of the largest count as zero


def check_linear(shared: Mapping[str, Tensor], what: str) -> None:
    """Refuse, for ``what``, shared parameters without a linear head per domain with a bias.

    Raises:
        PerfedError: there is none.
    """
    if WEIGHT not in shared or BIAS not in shared or shared[WEIGHT].ndim != 3:
        raise PerfedError(f"{what} needs a linear head with bias; add model.head=linear")


def solve_heads(cohort: Cohort) -> None:
    """Replace each head by the least-squares solution of its domain's samples, of least norm if there are several."""
    samples = cohort.samples()
    assert samples.domain is not None
    features = with_ones(cohort.representation().flatten(1)).double()
    y = samples.y.double().view(len(samples.y), -1)
    group = cohort.domain_cells
    found = joined(cohort.model, joint=False).flatten(0, 1).double()
    for index in torch.unique(group).tolist():
        own = features[group == index]
        if not torch.isfinite(own).all():
            raise cohort.make_divergence_error(index // cohort.num_domains, "torch.linalg.pinv")
        found[index] = torch.linalg.pinv(own, rtol=_RANK) @ y[group == index]
    for name, solved in parted(found, {WEIGHT: cohort.model[WEIGHT].flatten(0, 1)}, joint=False).items():
        cohort.model[name] = solved.view_as(cohort.model[name])


def hessians_of(cohort: Cohort) -> Callable[[int], Tensor]:
    """From a client's row to its ``(M, D, D)``: each domain's mean loss in its head, at the heads of now."""
    samples, domains = cohort.samples(), cohort.num_domains
    features = with_ones(cohort.representation().flatten(1))
    logits = None if cohort.num_classes is None else cohort.features("head")
    outputs = cohort.model[BIAS].shape[-1]
    assert samples.domain is not None
    owned = torch.split(samples.domain, samples.counts.tolist())
    starts = samples.starts.tolist()

    def of_client(row: int) -> Tensor:
        own = slice(starts[row], starts[row] + len(owned[row]))
        if logits is None:
            return squared_error_hessian(features[own], owned[row], domains, outputs)
        return softmax_hessian(features[own], logits[own], owned[row], domains)

    return of_client


def joined(heads: Mapping[str, Tensor], joint: bool) -> Tensor:
    """Weight with the bias as last column: ``(..., k + 1, C)``; with a joint Hessian ``(..., C (k + 1), 1)``."""
    both = torch.cat([heads[WEIGHT], heads[BIAS].unsqueeze(-1)], dim=-1)
    return both.flatten(-2).unsqueeze(-1) if joint else both.transpose(-1, -2)


def parted(columns: Tensor, like: Mapping[str, Tensor], joint: bool) -> dict[str, Tensor]:
    """The inverse of :func:`joined` for ``(M, ...)``."""
    domains, outputs, k = like[WEIGHT].shape
    both = columns.view(domains, outputs, k + 1) if joint else columns.transpose(1, 2)
    both = both.to(like[WEIGHT].dtype)
    return {WEIGHT: both[..., :k].contiguous(), BIAS: both[..., k].contiguous()}
