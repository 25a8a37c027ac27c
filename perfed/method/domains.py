"""Weights and losses for samples with domain ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.method.declared import FederationInfo
from perfed.training.batches import Samples
from perfed.training.step import Loss, Step
from perfed.training.view import View


def domain_weights(counts: Tensor) -> Tensor:
    """Return the weight ``u_m = L / (L_m M)`` of a sample of each domain m, with which every domain counts the same.

    Args:
        counts: ``(clients, domains)``, training samples L_im.

    Returns:
        ``(domains,)``; 0 for a domain without samples, which does not count in M. The weights of all samples sum to L.

    Source: Zhong et al. 2023 (FedDAR), section 4.1.
    """
    totals = counts.sum(0)
    present = totals > 0
    return totals.sum() / (totals.clamp_min(1) * present.sum()) * present


def reweight_samples(view: View, weights: Tensor) -> Samples:
    """Return the training samples, weighted by their domains.

    Args:
        view: some clients.
        weights: ``(n, domains)``, the weight of a sample of each domain; rows may differ between clients.

    Raises:
        PerfedError: the samples have no domain ids.
    """
    return replace(view.samples(), weight=weights.flatten()[view.domain_cells])


def mean_loss_per_domain(num_domains: int) -> Loss:
    """Return a loss ``(clients,)`` that sums, over the domains of a mini-batch, the mean loss of the domain's samples.

    The parameters of a domain get the gradient of the mean loss of that domain, however rare it is, and no gradient in
    a mini-batch without the domain. The risk sets of survival losses also contain samples of only one domain.
    """

    def loss(step: Step) -> Tensor:
        assert step.domain is not None
        # In the dtype of the weights: integers divided by integers are float32, whatever the run's dtype.
        member = F.one_hot(step.domain, num_domains) * (step.weight > 0).to(step.weight).unsqueeze(2)
        shares = (member / member.sum(1, keepdim=True).clamp_min(1)).sum(2)
        if step.objective.task == "survival":
            losses = torch.stack([step.losses(weight=member[:, :, m]) * member[:, :, m] for m in range(num_domains)])
            return (losses.sum(0) * shares).sum(1)
        return (step.losses() * shares).sum(1)

    return loss


def select_domain(samples: Samples, domain: int) -> Samples:
    """Return the samples of one domain, in their order; clients without any get none."""
    assert samples.domain is not None
    in_domain = samples.domain == domain
    client_rows = np.repeat(np.arange(len(samples.counts)), samples.counts)
    counts = np.bincount(client_rows[in_domain.cpu().numpy()], minlength=len(samples.counts))
    return samples.take(torch.nonzero(in_domain).flatten(), counts)


def init_domain_weights(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    """Return the initial value of a set of domain weights: 1 for each domain."""
    return {"u": torch.ones(info.num_domains, dtype=info.dtype)}
