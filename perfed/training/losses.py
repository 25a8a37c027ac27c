"""The plain losses of the three tasks, sample by sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.data.labels import Task
from perfed.training.batches import Samples


def sample_losses(outputs: Tensor, y: Tensor, task: Task, weight: Tensor | None = None) -> Tensor:
    """Loss of every sample: cross-entropy, squared error (mean over outputs), or :func:`cox_losses`.

    Args:
        outputs: ``(n, batch, C)`` logits, ``(n, batch, ...)`` values, or ``(n, batch, 1)`` log hazards.
        y: ``(n, batch)`` labels, ``(n, batch, ...)`` values, or ``(n, batch, 2)`` times and events.
        task: which of the three.
        weight: ``(n, batch)``, of the samples in the risk sets of survival; 0 for padding. Default: 1.

    Returns:
        ``(n, batch)``; only those of survival depend on the other samples of the same row.
    """
    if task == "classification":
        return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    if task == "regression":
        return (outputs.flatten(2) - y.unsqueeze(-1).flatten(2)).square().mean(2)
    hazard = outputs.flatten(2).squeeze(2)
    return cox_losses(hazard, y[..., 0], y[..., 1], torch.ones_like(hazard) if weight is None else weight)


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


def client_losses(outputs: Tensor, samples: Samples, task: Task) -> Tensor:
    """:func:`sample_losses` of the samples of several clients, with risk sets of all samples of a client: ``(total,)``.

    Args:
        outputs: ``(total, ...)``, in the order of ``samples``.
        samples: of the clients.
        task: classification, regression or survival.
    """
    if task != "survival":
        return sample_losses(outputs[None], samples.y[None], task)[0]
    counts = torch.from_numpy(samples.counts).to(outputs.device)
    starts = torch.from_numpy(samples.starts).to(outputs.device)
    position = torch.arange(int(samples.counts.max(initial=0)), device=outputs.device)
    valid = position < counts[:, None]
    index = torch.where(valid, starts[:, None] + position, 0)
    found = sample_losses(outputs[index], samples.y[index], task, valid.to(outputs))
    return found[valid]


def balanced(counts: Tensor) -> Tensor:
    """Weights ``n / (C_i n_c)`` with which all classes that a client holds count the same.

    Args:
        counts: n_c, samples of each client and class ``(n, C)``; their sum over classes is n.

    Returns:
        ``(n, C)``; C_i is the number of classes that occur, and one that does not weighs 0. The weights of all samples
        sum to n. As scikit-learn's ``class_weight="balanced"``.
    """
    held = counts > 0
    return torch.where(held, counts.sum(1, keepdim=True) / (held.sum(1, keepdim=True) * counts.clamp_min(1)), 0)
