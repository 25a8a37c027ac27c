"""Partial pooling: slopes that sites share, each site's departure from them, and how strongly both are pulled to 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import torch
from torch import Tensor

from perfed.maths.glm import Summary

OF_ALL, OF_SITE = (1e-3, 1e4), (1e-2, 1e6)
"""Least and strongest pull that empirical Bayes may find: of the shared slopes, and of sites' departures."""

_STEPS, _REFINED = 15, 256  # number of pulls in the first grid, and of parts of a step in the finest grid
_LAST = (_STEPS - 1) * _REFINED
_ROUNDING = 1e-15


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


@dataclass(frozen=True)
class Spectra:
    """The summaries of m sites in terms of the eigenvectors of their Hessians.

    A site has at most as many eigenvectors as rows, which makes computations with many columns fast.

    Attributes:
        vectors: eigenvectors ``(m, D, r)``; the last ones are 0 if a site has fewer than r.
        values: positive eigenvalues ``(m, r)``, padded with 0.
        along: the components of the targets along the eigenvectors ``(m, r)``.
        rest: the targets without these components ``(m, D)``, usually 0 up to rounding.
        constant: the sum of the summaries' constants.
    """

    vectors: Tensor
    values: Tensor
    along: Tensor
    rest: Tensor
    constant: Tensor

    @classmethod
    def from_summaries(cls, summaries: Sequence[Summary]) -> Self:
        """Return the spectra of the sites' summaries."""
        pairs = [_positive_spectrum(summary.hessian) for summary in summaries]
        rank = max(len(values) for values, _ in pairs)
        targets = torch.stack([summary.target for summary in summaries])
        vectors = targets.new_zeros(*targets.shape, rank)
        padded = targets.new_zeros(len(targets), rank)
        for site, (of_site, directions) in enumerate(pairs):
            vectors[site, :, : len(of_site)] = directions
            padded[site, : len(of_site)] = of_site
        along = torch.einsum("mir,mi->mr", vectors, targets)
        rest = targets - torch.einsum("mir,mr->mi", vectors, along)
        return cls(vectors, padded, along, rest, torch.stack([summary.constant for summary in summaries]).sum())

    def reduce_to_span(self) -> tuple[Self, Tensor | None]:
        """Return the spectra in the space that they span, and its basis ``(D, R)``; ``None`` for the full space."""
        sites, size, rank = self.vectors.shape
        if sites * (rank + 1) >= size:
            return self, None
        everything = torch.cat([self.vectors.transpose(0, 1).reshape(size, sites * rank), self.rest.T], 1)
        basis = torch.linalg.qr(everything).Q
        vectors = torch.einsum("di,mdr->mir", basis, self.vectors)
        return type(self)(vectors, self.values, self.along, self.rest @ basis, self.constant), basis


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


def pooled(
    summaries: Sequence[Summary], of_all: float | None, of_site: float | None, freedom: float | None = None
) -> Pooled:
    """Return the shared slopes by what each site says of its own, ``b_i = w + d_i``.

    ``w ~ N(0, 1/of_all)`` and ``d_i ~ N(0, 1/of_site)``. Pulls that are not given maximise the marginal likelihood of
    the summaries, in which w and d are integrated out (Laplace's approximation; exact for the linear model).

    All computations use the directions about which a site is informative, at most as many as all sites have rows.

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
    spectra, basis = Spectra.from_summaries(summaries).reduce_to_span()

    @cache
    def with_site_pull(pull: float) -> _Shrunk:
        return _Shrunk.from_spectra(spectra, pull)

    def best_of(alls: Sequence[int], sites: Sequence[int]) -> tuple[Pooled, int, int]:
        """Return the best pair of pulls among some places of both ranges, and its places."""
        tried = spectra.values.new_tensor([_pull_at(place, OF_ALL, of_all) for place in alls])
        candidates = []
        for place in sites:
            best, position = with_site_pull(_pull_at(place, OF_SITE, of_site)).best_of(tried, freedom)
            candidates.append((best, alls[position], place))
        return max(candidates, key=lambda candidate: candidate[0].evidence)

    grid = range(0, _LAST + 1, _REFINED)
    places = [grid if pull is None else range(1) for pull in (of_all, of_site)]
    best, *centres = best_of(*places)
    step = _REFINED // 2
    while step and not (of_all is not None and of_site is not None):
        near = [
            sorted({min(max(centre + shift * step, 0), _LAST) for shift in (-2, -1, 0, 1, 2)}) if pull is None else [0]
            for centre, pull in zip(centres, (of_all, of_site), strict=True)
        ]
        best, *centres = best_of(*near)
        step //= 2
    return best if basis is None else replace(best, weight=basis @ best.weight)


def _pull_at(place: int, ends: tuple[float, float], fixed: float | None) -> float:
    """Return the pull at a place between 0 and ``_LAST`` of its range, or the fixed pull."""
    return float(ends[0] * (ends[1] / ends[0]) ** (place / _LAST)) if fixed is None else fixed


@dataclass(frozen=True)
class _Shrunk:
    """The likelihood of w after the sites' departures, pulled to 0 by ``of_site``, are integrated out.

    Attributes:
        of_site: the pull of departures.
        values, basis: the eigenvalues ``(D,)`` and eigenvectors of the precision of w.
        along: the linear term of the likelihood in the directions of the eigenvectors ``(D,)``.
        quadratic, volume: the terms of the evidence that do not depend on w.
    """

    of_site: float
    values: Tensor
    basis: Tensor
    along: Tensor
    quadratic: Tensor
    volume: Tensor

    @classmethod
    def from_spectra(cls, spectra: Spectra, of_site: float) -> Self:
        """Integrate the departures out of the summaries."""
        total = spectra.values + of_site
        shrunk = of_site / total
        factor = spectra.vectors * (spectra.values * shrunk).sqrt()[:, None, :]
        factor = factor.transpose(0, 1).flatten(1)
        pull = torch.einsum("mir,mr->i", spectra.vectors, shrunk * spectra.along) + spectra.rest.sum(0)
        values, basis = torch.linalg.eigh(factor @ factor.T)
        departed = (spectra.along.square() / total).sum() + spectra.rest.square().sum() / of_site
        quadratic = spectra.constant - 0.5 * departed
        return cls(of_site, values.clamp_min(0), basis, basis.T @ pull, quadratic, shrunk.log().sum())

    def best_of(self, alls: Tensor, freedom: float | None) -> tuple[Pooled, int]:
        """Return the result with the pull of w that has the most evidence among ``alls``, and its index."""
        total = self.values + alls[:, None]
        quadratic = self.quadratic - 0.5 * (self.along.square() / total).sum(1)
        volume = (alls.log()[:, None] - total.log()).sum(1) + self.volume
        fit = quadratic if freedom is None else 0.5 * freedom * quadratic.clamp_min(1e-12).log()
        evidence = 0.5 * volume - fit
        index = int(evidence.argmax())
        weight = self.basis @ (self.along / total[index])
        return Pooled(weight, float(alls[index]), self.of_site, float(evidence[index])), index
