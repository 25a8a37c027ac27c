"""The Cox partial likelihood, the loss of survival."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.training.batches import Samples


def cox_losses(hazard: Tensor, time: Tensor, event: Tensor, weight: Tensor) -> Tensor:
    """Terms of the negative Cox partial log-likelihood: of an event ``log sum_j w_j exp(h_j) - h_i``, else 0.

    The sum is over the risk set, the samples of the row with ``t_j >= t_i``. Of tied events each has all of them in
    its risk set (Breslow). ``w`` are the weights in units of their mean over the row, so that their scale does not
    matter; equal ones are the plain likelihood. Computed in float64.

    Args:
        hazard: log hazards h ``(n, batch)``.
        time: t ``(n, batch)``.
        event: ``(n, batch)``, 1 where the event was seen at t, 0 where the sample was censored then.
        weight: ``(n, batch)``; samples of weight 0 are in no risk set, and their terms are 0.

    Returns:
        ``(n, batch)``.

    Source: Cox 1972; Breslow 1974.
    """
    there = weight > 0
    order = time.masked_fill(~there, -torch.inf).argsort(dim=1, descending=True, stable=True)
    held, share, h, t, seen = (
        part.gather(1, order) for part in (there, weight.double(), hazard.double(), time.double(), event.double())
    )
    top = h.detach().masked_fill(~held, -torch.inf).amax(1, keepdim=True).nan_to_num(neginf=0.0)
    h = torch.where(held, h, top)
    later = t.neg().masked_fill(~held, torch.inf)  # ascending
    last = torch.searchsorted(later, later, right=True) - 1  # of those with the same time
    mean = share.sum(1, keepdim=True) / held.sum(1, keepdim=True)
    share = torch.where(held, share / mean, 0.0)
    risk = ((h - top).exp() * share).cumsum(1).gather(1, last).clamp_min(torch.finfo(torch.float64).tiny).log() + top
    terms = torch.where(held, seen * (risk - h), 0.0)
    return torch.zeros_like(terms).scatter(1, order, terms).to(hazard.dtype)


def client_cox_losses(hazard: Tensor, samples: Samples) -> Tensor:
    """:func:`cox_losses` of several clients, each with risk sets of all its samples: ``(total,)``.

    Args:
        hazard: ``(total, 1)`` log hazards, in the order of ``samples``.
        samples: of the clients.
    """
    counts = torch.from_numpy(samples.counts).to(hazard.device)
    starts = torch.from_numpy(samples.starts).to(hazard.device)
    position = torch.arange(int(samples.counts.max(initial=0)), device=hazard.device)
    valid = position < counts[:, None]
    index = torch.where(valid, starts[:, None] + position, 0)
    time, event = samples.y[index].unbind(2)
    return cox_losses(hazard.flatten()[index], time, event, valid.to(hazard))[valid]
