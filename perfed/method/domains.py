"""Domains that every sample is known to belong to: how much each counts."""

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
    """Weight ``u_m = L / (L_m M)`` of a sample of domain m, so that every domain counts the same.

    Args:
        counts: ``(clients, domains)``, training samples L_im.

    Returns:
        ``(domains,)``; 0 for a domain without samples, which M does not count. The weights of all samples sum to L.

    Source: Zhong et al. 2023 (FedDAR), section 4.1.
    """
    totals = counts.sum(0)
    held = totals > 0
    return totals.sum() / (totals.clamp_min(1) * held.sum()) * held


def reweighted(view: View, weights: Tensor) -> Samples:
    """The training samples, each with the weight of its domain.

    Args:
        view: some clients.
        weights: ``(n, domains)``, the same for all clients or each its own.

    Raises:
        PerfedError: the domains are not known.
    """
    return replace(view.samples(), weight=weights.flatten()[view.domain_cells])


def domain_means(num_domains: int) -> Loss:
    """Loss of each client's mini-batch: the sum over its domains of the mean over their samples, ``(clients,)``.

    Parameters of one domain get the gradient of that domain's mean, however rare it is; in a mini-batch without the
    domain they get none: survival's risk sets are of one domain each, too.
    """

    def loss(step: Step) -> Tensor:
        assert step.domain is not None
        # In the dtype of the weights: integers divided by integers are float32, whatever the run's dtype.
        held = F.one_hot(step.domain, num_domains) * (step.weight > 0).to(step.weight).unsqueeze(2)
        shares = (held / held.sum(1, keepdim=True).clamp_min(1)).sum(2)
        if step.objective.task == "survival":
            each = torch.stack([step.losses(weight=held[:, :, m]) * held[:, :, m] for m in range(num_domains)])
            return (each.sum(0) * shares).sum(1)
        return (step.losses() * shares).sum(1)

    return loss


def of_domain(samples: Samples, domain: int) -> Samples:
    """The samples of one domain, in their order; clients without any have none."""
    assert samples.domain is not None
    mine = samples.domain == domain
    owner = np.repeat(np.arange(len(samples.counts)), samples.counts)
    counts = np.bincount(owner[mine.cpu().numpy()], minlength=len(samples.counts))
    return samples.take(torch.nonzero(mine).flatten(), counts)


def unit_weights(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    """Weight 1 for a sample of any domain: the initial value of a set of weights."""
    return {"u": torch.ones(info.num_domains, dtype=info.dtype)}
