"""FedPAC's estimate of the generalisation gap, for the personalised models of any method with a linear head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from perfed.method.method import Method
from perfed.model.chain import Chain, stage_of
from perfed.model.placement import PER_DOMAIN
from perfed.training.cohort import Cohort


def generalisation_gap(means: Tensor, counts: Tensor, heads: Tensor) -> Tensor:
    """Return ``(2 / (n_i K)) sum_l <f(x_l) - c_{y_l}, g_i(y_l)>`` over each client's training samples.

    By linearity it is computed from the class means of the features: ``(2 / K) sum_y P_i(y) <mu_iy - c_y, g_i(y)>``.
    The centroid ``c_y = sum_i n_iy mu_iy / sum_i n_iy`` is the mean over the samples of the class at all clients.

    The paper prints the opposite sign. Up to terms that do not depend on the head, this value is the difference between
    the loss of its eq. 12 and the loss on the client's samples (``tests/methods/test_fedpac.py`` checks it). It is
    positive if a head fits its client's samples better than other samples of the same class.

    Args:
        means: ``(m, C, d)``, the mean feature mu of each client and class; arbitrary for classes without samples.
        counts: ``(m, C)``, the numbers of samples n.
        heads: ``(m, C, d)``, the weights of each client's linear head; ``g_i(y)`` is the row of class y.

    Returns:
        ``(m,)``, float64; 0 for a client without samples, or with the same features as all clients together.

    Source: Xu, Tong, Huang 2023, Eq. 14 (A.4, Eq. 42).

    Example:
        >>> means = torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]]])  # class 0 is 2 on average
        >>> generalisation_gap(means, torch.tensor([[4, 0], [4, 0]]), torch.ones(2, 2, 1)).tolist()
        [-1.0, 1.0]
    """
    means, counts, heads = means.double(), counts.double(), heads.double()
    class_means = torch.where(counts[:, :, None] > 0, means, 0.0)
    centroids = (counts[:, :, None] * class_means).sum(0) / counts.sum(0).clamp_min(1)[:, None]
    priors = counts / counts.sum(1, keepdim=True).clamp_min(1)
    return 2 / counts.shape[1] * torch.einsum("ic,icd,icd->i", priors, class_means - centroids, heads)


GAP = "generalisation-gap"
"""The name of the metric."""


def linear_head(method: Method, chain: Chain) -> str | None:
    """Return the name of the weight ``(C, d)`` of the linear head with which clients predict; ``None`` without one."""
    if type(method).predict is not Method.predict or PER_DOMAIN in method.places(chain).values():
        return None
    inside = [(n, m) for n, m in chain.named_modules() if n and stage_of(n) == "head" and not [*m.children()]]
    layers = [name for name, module in inside if isinstance(module, nn.Linear)]
    is_linear = all(isinstance(module, nn.Linear | nn.Flatten) for _, module in inside)
    return f"{layers[0]}.weight" if is_linear and len(layers) == 1 else None


@torch.no_grad()
def generalisation_gaps(cohorts: Iterable[Cohort], head: str) -> dict[str, float]:
    """Return the :func:`~perfed.engine.gap.generalisation_gap` of each client's personalised model, by client id.

    Args:
        cohorts: the clients with their personalised models; centroids are over all of them.
        head: the name of the head's weight.
    """
    ids, parts = list[str](), []
    for cohort in cohorts:
        ids += cohort.ids
        parts.append((cohort.class_means().cpu(), cohort.class_counts.cpu(), cohort.model[head].cpu()))
    if not ids:
        return {}
    order = sorted(range(len(ids)), key=ids.__getitem__)
    means, counts, heads = (torch.cat(tensors)[order] for tensors in zip(*parts, strict=True))
    gaps = generalisation_gap(means, counts, heads)
    return dict(zip((ids[i] for i in order), gaps.tolist(), strict=True))
