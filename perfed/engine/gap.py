"""The generalisation gap of clients' own models, for evaluations that ask for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from perfed.maths.gap import generalisation_gap
from perfed.method.method import Method
from perfed.model.chain import Chain, stage_of
from perfed.model.placement import PER_DOMAIN
from perfed.training.cohort import Cohort

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
    """:func:`~perfed.maths.gap.generalisation_gap` of each client's own model over its training samples.

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
