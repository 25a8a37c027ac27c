"""Partial pooling: slopes that sites share, the departures of each site, and how strongly both are pulled to 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import torch
from torch import Tensor

from perfed.maths.glm import Summary

SHARED_PULL_RANGE, SITE_PULL_RANGE = (1e-3, 1e4), (1e-2, 1e6)
"""Weakest and strongest pull that empirical Bayes may select, for the shared slopes and for sites' departures."""

_STEPS, _REFINED = 15, 256  # number of pulls in the first grid, and of parts of a step in the finest grid
_LAST = (_STEPS - 1) * _REFINED
_ROUNDING = 1e-15


@dataclass(frozen=True)
class Pooled:
    """The result of pooling the summaries of all sites.

    Attributes:
        weight: the shared slopes w, ``(D,)``.
        shared_pull: the pull of w to 0.
        site_pull: the pull of a site's slopes to w.
        evidence: the log of the marginal likelihood with these pulls, up to a constant.
    """

    weight: Tensor
    shared_pull: float
    site_pull: float
    evidence: float


@dataclass(frozen=True)
class Spectra:
    """The summaries of m sites in terms of the eigenvectors of their Hessians.

    A site has at most as many eigenvectors as rows, which makes computations with many columns fast.

    Attributes:
        vectors: eigenvectors ``(m, D, r)``; the last ones are 0 if a site has fewer than r.
        values: positive eigenvalues ``(m, r)``, padded with 0.
        along: the components of the targets along the eigenvectors ``(m, r)``.
        residual: the targets without these components ``(m, D)``, usually 0 up to rounding.
        constant: the sum of the summaries' constants.
    """

    vectors: Tensor
    values: Tensor
    along: Tensor
    residual: Tensor
    constant: Tensor

    @classmethod
    def from_summaries(cls, summaries: Sequence[Summary]) -> Self:
        """Return the spectra of the sites' summaries."""
        pairs = [_positive_spectrum(summary.hessian) for summary in summaries]
        rank = max(len(values) for values, _ in pairs)
        targets = torch.stack([summary.target for summary in summaries])
        vectors = targets.new_zeros(*targets.shape, rank)
        padded = targets.new_zeros(len(targets), rank)
        for site, (eigenvalues, directions) in enumerate(pairs):
            vectors[site, :, : len(eigenvalues)] = directions
            padded[site, : len(eigenvalues)] = eigenvalues
        along = torch.einsum("mir,mi->mr", vectors, targets)
        residual = targets - torch.einsum("mir,mr->mi", vectors, along)
        return cls(vectors, padded, along, residual, torch.stack([summary.constant for summary in summaries]).sum())

    def reduce_to_span(self) -> tuple[Self, Tensor | None]:
        """Return the spectra in the space that they span, and its basis ``(D, R)``; ``None`` for the full space."""
        sites, size, rank = self.vectors.shape
        if sites * (rank + 1) >= size:
            return self, None
        everything = torch.cat([self.vectors.transpose(0, 1).reshape(size, sites * rank), self.residual.T], 1)
        basis = torch.linalg.qr(everything).Q
        vectors = torch.einsum("di,mdr->mir", basis, self.vectors)
        return type(self)(vectors, self.values, self.along, self.residual @ basis, self.constant), basis


def _positive_spectrum(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positive eigenvalues of a positive semidefinite matrix ``(D, D)``, and their eigenvectors.

    A pivoted Cholesky factor ``(D, r)`` has the rank; where that is small, its Gram matrix has the eigenvalues.
    """
    from scipy.linalg.lapack import dpstrf  # type: ignore[import-untyped]

    size = len(hessian)
    lower, pivots, rank, _ = dpstrf(hessian.cpu().numpy(), lower=1)
    if 2 * rank >= size:
        values, vectors = torch.linalg.eigh(hessian)
    else:
        factor = hessian.new_zeros(size, rank)
        factor[torch.from_numpy(pivots - 1).to(factor.device).long()] = (
            torch.from_numpy(lower[:, :rank]).tril().to(factor)
        )
        values, vectors = torch.linalg.eigh(factor.T @ factor)
        vectors = factor @ (vectors / values.clamp_min(1e-300).sqrt())
    positive = values > _ROUNDING * size * values.amax() if size and len(values) else values > 0
    return values[positive], vectors[:, positive]


def pool_summaries(
    summaries: Sequence[Summary], shared_pull: float | None, site_pull: float | None, freedom: float | None = None
) -> Pooled:
    """Return the shared slopes w of the model ``b_i = w + d_i`` for the slopes of the sites.

    ``w ~ N(0, 1/shared_pull)`` and ``d_i ~ N(0, 1/site_pull)``. Pulls that are ``None`` maximise the marginal
    likelihood of the summaries, in which w and d are integrated out (Laplace's approximation; exact for the linear
    model).

    All computations use the directions about which a site is informative, at most as many as all sites have rows.

    Args:
        summaries: the summary of each site.
        shared_pull, site_pull: the pulls; ``None`` to estimate one.
        freedom: for the linear model, the number of samples less intercepts of all sites: pulls are then in units of
            the inverse variance of the noise, which is integrated out by its best value (REML).

    Source: MacKay 1992 (evidence); Patterson and Thompson 1971 (REML); Breslow and Clayton 1993 (the approximation).

    Example:
        >>> sites = [Summary(torch.eye(1).double(), torch.tensor([b]).double(), torch.tensor(0.0)) for b in (1.0, 3.0)]
        >>> round(pool_summaries(sites, shared_pull=1e-9, site_pull=1.0).weight.item(), 3)
        2.0
    """
    spectra, basis = Spectra.from_summaries(summaries).reduce_to_span()

    @cache
    def integrate_departures(pull: float) -> _Shrunk:
        return _Shrunk.from_spectra(spectra, pull)

    def search_places(alls: Sequence[int], sites: Sequence[int]) -> tuple[Pooled, int, int]:
        """Return the best pair of pulls among the combinations of positions in both ranges, and its positions."""
        shared_pulls = spectra.values.new_tensor(
            [_interpolate_pull(place, SHARED_PULL_RANGE, shared_pull) for place in alls]
        )
        candidates = []
        for place in sites:
            best, position = integrate_departures(
                _interpolate_pull(place, SITE_PULL_RANGE, site_pull)
            ).choose_shared_pull(shared_pulls, freedom)
            candidates.append((best, alls[position], place))
        return max(candidates, key=lambda candidate: candidate[0].evidence)

    grid = range(0, _LAST + 1, _REFINED)
    places = [grid if pull is None else range(1) for pull in (shared_pull, site_pull)]
    best, *centres = search_places(*places)
    step = _REFINED // 2
    while step and not (shared_pull is not None and site_pull is not None):
        near = [
            sorted({min(max(centre + shift * step, 0), _LAST) for shift in (-2, -1, 0, 1, 2)}) if pull is None else [0]
            for centre, pull in zip(centres, (shared_pull, site_pull), strict=True)
        ]
        best, *centres = search_places(*near)
        step //= 2
    return best if basis is None else replace(best, weight=basis @ best.weight)


def _interpolate_pull(place: int, ends: tuple[float, float], fixed: float | None) -> float:
    """Return the pull at a position between 0 and ``_LAST`` of its range, or the fixed pull."""
    return float(ends[0] * (ends[1] / ends[0]) ** (place / _LAST)) if fixed is None else fixed


@dataclass(frozen=True)
class _Shrunk:
    """The likelihood of w after the sites' departures, pulled to 0 by ``site_pull``, are integrated out.

    Attributes:
        site_pull: the pull of departures.
        values, basis: the eigenvalues ``(D,)`` and eigenvectors of the precision of w.
        along: the linear term of the likelihood in the directions of the eigenvectors ``(D,)``.
        quadratic, volume: the terms of the evidence that do not depend on w.
    """

    site_pull: float
    values: Tensor
    basis: Tensor
    along: Tensor
    quadratic: Tensor
    volume: Tensor

    @classmethod
    def from_spectra(cls, spectra: Spectra, site_pull: float) -> Self:
        """Return the likelihood of w after integrating the departures out of the summaries."""
        total = spectra.values + site_pull
        shrunk = site_pull / total
        factor = spectra.vectors * (spectra.values * shrunk).sqrt()[:, None, :]
        factor = factor.transpose(0, 1).flatten(1)
        pull = torch.einsum("mir,mr->i", spectra.vectors, shrunk * spectra.along) + spectra.residual.sum(0)
        values, basis = torch.linalg.eigh(factor @ factor.T)
        departed = (spectra.along.square() / total).sum() + spectra.residual.square().sum() / site_pull
        quadratic = spectra.constant - 0.5 * departed
        return cls(site_pull, values.clamp_min(0), basis, basis.T @ pull, quadratic, shrunk.log().sum())

    def choose_shared_pull(self, pulls: Tensor, freedom: float | None) -> tuple[Pooled, int]:
        """Return the result for the element of ``pulls`` with the greatest evidence as pull of w, and its index."""
        total = self.values + pulls[:, None]
        quadratic = self.quadratic - 0.5 * (self.along.square() / total).sum(1)
        volume = (pulls.log()[:, None] - total.log()).sum(1) + self.volume
        fit = quadratic if freedom is None else 0.5 * freedom * quadratic.clamp_min(1e-12).log()
        evidence = 0.5 * volume - fit
        index = int(evidence.argmax())
        weight = self.basis @ (self.along / total[index])
        return Pooled(weight, float(pulls[index]), self.site_pull, float(evidence[index])), index
