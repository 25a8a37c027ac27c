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
    later = t.neg().masked_fill(~held, torch.inf)  # ascending
    last = torch.searchsorted(later, later, right=True) - 1  # of those with the same time
    mean = share.sum(1, keepdim=True) / held.sum(1, keepdim=True)
    weighed = torch.where(held, h + (share / mean).log(), 0.0)  # of those not there, after all others, nothing is used
    risk = _running_logsumexp(weighed).gather(1, last)
    terms = torch.where(held, seen * (risk - h), 0.0)
    return torch.zeros_like(terms).scatter(1, order, terms).to(hazard.dtype)


def _running_logsumexp(x: Tensor) -> Tensor:
    """Return ``log sum_{k <= j} exp(x_k)`` of rows ``(n, batch)``, in log2(batch) passes over them.

    No sum is taken relative to a row's largest entry, so that entries any distance apart keep theirs.
    ``torch.logcumsumexp`` has no second derivative where a gradient is zero.
    """
    done = 1  # entries that each sum reaches back over
    while done < x.shape[1]:
        x = torch.cat([x[:, :done], torch.logaddexp(x[:, done:], x[:, :-done])], 1)
        done *= 2
    return x


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
