"""FedPAC's estimate of the generalisation gap, of the clients' own models of any method with a linear head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from perfed.method.method import Method
from perfed.model.chain import Chain, stage_of
from perfed.model.placement import PER_DOMAIN
from perfed.training.cohort import Cohort


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


GAP = "generalisation-gap"
"""The metric's name."""


def linear_head(method: Method, chain: Chain) -> str | None:
    """Full name of the weight ``(C, d)`` of the linear head with which clients predict, if they predict so."""
    if type(method).predict is not Method.predict or PER_DOMAIN in method.places(chain).values():
        return None
    inside = [(n, m) for n, m in chain.named_modules() if n and stage_of(n) == "head" and not [*m.children()]]
    layers = [name for name, module in inside if isinstance(module, nn.Linear)]
    known = all(isinstance(module, nn.Linear | nn.Flatten) for _, module in inside)
    return f"{layers[0]}.weight" if known and len(layers) == 1 else None


@torch.no_grad()
def generalisation_gaps(cohorts: Iterable[Cohort], head: str) -> dict[str, float]:
    """:func:`~perfed.engine.gap.generalisation_gap` of each client's own model over its training samples.

    Args:
        cohorts: the clients with their own models; centroids are over all of them.
        head: name of the head's weight.

    Returns:
        By client id.
    """
    ids, parts = list[str](), []
    for cohort in cohorts:
        ids += cohort.ids
        parts.append((cohort.class_means().cpu(), cohort.class_counts.cpu(), cohort.model[head].cpu()))
    if not ids:
        return {}
    order = sorted(range(len(ids)), key=ids.__getitem__)
    means, counts, heads = (torch.cat(each)[order] for each in zip(*parts, strict=True))
    found = generalisation_gap(means, counts, heads)
    return dict(zip((ids[i] for i in order), found.tolist(), strict=True))
