"""Partial pooling: slopes that sites share, each site's departure from them, and how strongly both are pulled to 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.maths.glm import Summary

OF_ALL, OF_SITE = (1e-3, 1e4), (1e-2, 1e6)
"""Least and strongest pull that empirical Bayes may find: of the shared slopes, and of sites' departures."""

_STEPS, _AROUND, _HALVINGS = 15, (-1.0, -0.5, 0.0, 0.5, 1.0), 8


@dataclass(frozen=True)
class Pooled:
    """What all sites say together.

    Attributes:
        weight: the shared slopes w, ``(D,)``.
        of_all: pull of w to 0.
        of_site: pull of a site's slopes to w.
        evidence: log of how probable what the sites say is with these pulls, but for a constant.
    """

    weight: Tensor
    of_all: float
    of_site: float
    evidence: float


def pooled(
    summaries: Sequence[Summary], of_all: float | None, of_site: float | None, freedom: float | None = None
) -> Pooled:
    """Return the shared slopes by what each site says of its own, ``b_i = w + d_i``.

    ``w ~ N(0, 1/of_all)`` and ``d_i ~ N(0, 1/of_site)``. Pulls that are not given maximise the marginal likelihood of
    the summaries, in which w and d are integrated out (Laplace's approximation; exact for the linear model).

    Args:
        summaries: of each site.
        of_all, of_site: the pulls; ``None`` to find one.
        freedom: of the linear model, samples less intercepts of all sites: pulls are then in units of the inverse
            variance of the noise, which is integrated out by its best value (REML).

    Source: MacKay 1992 (evidence); Patterson and Thompson 1971 (REML); Breslow and Clayton 1993 (the approximation).

    Example:
        >>> sites = [Summary(torch.eye(1).double(), torch.tensor([b]).double(), torch.tensor(0.0)) for b in (1.0, 3.0)]
        >>> round(pooled(sites, of_all=1e-9, of_site=1.0).weight.item(), 3)
        2.0
    """
    values, vectors = torch.linalg.eigh(torch.stack([s.hessian for s in summaries]))
    values = values.clamp_min(0)
    turned = torch.einsum("mij,mi->mj", vectors, torch.stack([s.target for s in summaries]))
    constant = torch.stack([s.constant for s in summaries]).sum()

    def tried(alls: Tensor, sites: Tensor) -> Pooled:
        found = [_best(values, vectors, turned, constant, alls, float(site), freedom) for site in sites]
        return max(found, key=lambda each: each.evidence)

    like = values.new_tensor
    alls, sites = _grid(OF_ALL, of_all, like(0.0)), _grid(OF_SITE, of_site, like(0.0))
    best = tried(alls, sites)
    for halving in range(_HALVINGS if of_all is None or of_site is None else 0):
        around = [
            like([centre * _width(ends) ** (shift / 2**halving) for shift in _AROUND]).clamp(*ends)
            if said is None
            else like([said])
            for centre, ends, said in ((best.of_all, OF_ALL, of_all), (best.of_site, OF_SITE, of_site))
        ]
        best = tried(*around)
    return best


def _width(ends: tuple[float, float]) -> float:
    """Factor between two pulls that are tried one after the other."""
    return float((ends[1] / ends[0]) ** (1 / (_STEPS - 1)))


def _grid(ends: tuple[float, float], said: float | None, like: Tensor) -> Tensor:
    found = [said] if said is not None else [ends[0] * _width(ends) ** step for step in range(_STEPS)]
    return like.new_tensor(found)


def _best(
    values: Tensor, vectors: Tensor, turned: Tensor, constant: Tensor, alls: Tensor, site: float, freedom: float | None
) -> Pooled:
    """Return what is best of ``alls``, the pulls of w, with the pull ``site`` of departures from it.

    Hessians come as eigenvalues ``(m, D)`` and eigenvectors; targets ``(m, D)`` in the same directions.
    """
    shrunk = site / (values + site)
    precision = torch.einsum("mij,mj,mkj->ik", vectors, values * shrunk, vectors)
    pull = torch.einsum("mij,mj->i", vectors, shrunk * turned)
    eigen, basis = torch.linalg.eigh(precision)
    eigen, along = eigen.clamp_min(0), basis.T @ pull
    total = eigen + alls[:, None]
    quadratic = constant - 0.5 * (turned.square() / (values + site)).sum() - 0.5 * (along.square() / total).sum(1)
    volume = (alls.log()[:, None] - total.log()).sum(1) + shrunk.log().sum()
    fit = quadratic if freedom is None else 0.5 * freedom * quadratic.clamp_min(1e-12).log()
    evidence = 0.5 * volume - fit
    at = int(evidence.argmax())
    return Pooled(basis @ (along / total[at]), float(alls[at]), site, float(evidence[at]))
