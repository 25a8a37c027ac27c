"""The Cox partial likelihood, the loss of survival."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.training.batches import Samples


def cox_losses(hazard: Tensor, time: Tensor, event: Tensor, weight: Tensor) -> Tensor:
    """Return the terms of the negative Cox partial log-likelihood: for an event ``log sum_j w_j exp(h_j) - h_i``, else
    0.

    The sum is over the risk set, the samples of the row with ``t_j >= t_i``. Tied events are in each other's risk set
    (Breslow). ``w`` are the weights divided by their mean over the row, so that their scale does not matter; equal
    weights give the plain likelihood. Terms are computed in float64.

    Args:
        hazard: log hazards h ``(n, batch)``.
        time: t ``(n, batch)``.
        event: ``(n, batch)``, 1 if the event was observed at t, 0 if the sample was censored at t.
        weight: ``(n, batch)``; samples of weight 0 are not in any risk set, and their terms are 0.

    Returns:
        ``(n, batch)``.

    Source: Cox 1972; Breslow 1974.
    """
    present = weight > 0
    order = time.masked_fill(~present, -torch.inf).argsort(dim=1, descending=True, stable=True)
    ordered_present, share, h, t, observed = (
        part.gather(1, order) for part in (present, weight.double(), hazard.double(), time.double(), event.double())
    )
    later = t.neg().masked_fill(~ordered_present, torch.inf)  # ascending
    last = torch.searchsorted(later, later, right=True) - 1  # the last sample with the same time
    mean = share.sum(1, keepdim=True) / ordered_present.sum(1, keepdim=True)
    log_hazard = torch.where(
        ordered_present, h + (share / mean).log(), 0.0
    )  # absent samples come last and are not used
    risk = _running_logsumexp(log_hazard).gather(1, last)
    terms = torch.where(ordered_present, observed * (risk - h), 0.0)
    return torch.zeros_like(terms).scatter(1, order, terms).to(hazard.dtype)


def _running_logsumexp(x: Tensor) -> Tensor:
    """Return ``log sum_{k <= j} exp(x_k)`` of rows ``(n, batch)``, in log2(batch) passes over them.

    No sum is taken relative to a row's largest entry, so that small entries are not lost beside large ones.
    ``torch.logcumsumexp`` has no second derivative where a gradient is zero.
    """
    span = 1  # number of entries in each sum
    while span < x.shape[1]:
        x = torch.cat([x[:, :span], torch.logaddexp(x[:, span:], x[:, :-span])], 1)
        span *= 2
    return x


def client_cox_losses(hazard: Tensor, samples: Samples) -> Tensor:
    """Return :func:`cox_losses` ``(total,)`` of several clients, with risk sets of all samples of a client.

    Args:
        hazard: ``(total, 1)`` log hazards, in the order of ``samples``.
        samples: the samples of the clients.
    """
    counts = torch.from_numpy(samples.counts).to(hazard.device)
    starts = torch.from_numpy(samples.starts).to(hazard.device)
    position = torch.arange(int(samples.counts.max(initial=0)), device=hazard.device)
    valid = position < counts[:, None]
    index = torch.where(valid, starts[:, None] + position, 0)
    time, event = samples.y[index].unbind(2)
    return cox_losses(hazard.flatten()[index], time, event, valid.to(hazard))[valid]
