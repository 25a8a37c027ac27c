"""Linear heads per domain as the algebra of FedDAR sees them: joined with their biases, solved, and curved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from perfed.errors import PerfedError
from perfed.methods.feddar.hessian import softmax_hessian, squared_error_hessian, with_ones
from perfed.training.cohort import Cohort

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
            raise cohort.diverged(index // cohort.num_domains, "torch.linalg.pinv")
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
