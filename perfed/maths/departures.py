"""Partial pooling whose pull of departures has a factor for each column, each site, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.maths.glm import Summary, cholesky
from perfed.maths.pooling import OF_ALL, OF_SITE, Spectra, pooled

SPREAD = 1.0
"""Of the log of a factor, before sites have said anything: two factors in three lie between 0.37 and 2.7."""

FACTOR = (1e-3, 1e3)
"""Least and greatest."""


@dataclass(frozen=True)
class Varied:
    """What all sites say together, of departures ``d_ic ~ N(0, 1/(of_site sites_i columns_c))``.

    Attributes:
        weight: the shared slopes w, ``(D,)``.
        of_all: pull of w to 0.
        of_site: pull of a site's slopes to w, before its factors.
        columns: factors ``(S,)``, 1 where they were not asked for.
        sites: factors ``(m,)``, likewise.
        evidence: log of how probable these factors and what the sites say are, but for a constant.
    """

    weight: Tensor
    of_all: float
    of_site: float
    columns: Tensor
    sites: Tensor
    evidence: float


def varied(
    summaries: Sequence[Summary],
    of_all: float | None,
    freedom: float | None = None,
    *,
    by_column: bool,
    by_site: bool,
    outputs: int = 1,
    spread: float = SPREAD,
) -> Varied:
    """Return the shared slopes and the pulls that maximise the marginal likelihood times the prior of the factors.

    The likelihood is that of :func:`~perfed.maths.pooling.pooled`, which explains ``of_all`` and ``freedom``, and from
    whose pulls the search (L-BFGS-B) starts. Logs of factors are independent and ``N(0, spread^2)``: where few sites
    speak, or samples say little of a column, a factor stays near 1.

    Args:
        summaries: of each site.
        by_column, by_site: which factors are looked for.
        outputs: slopes of a column, one after the other, which have its factor.
        spread: of the prior; near 0 all pulls are the same.

    Source: as there; a pull for each column is automatic relevance determination (MacKay 1994).

    Example:
        >>> hessian, constant = 100 * torch.eye(2).double(), torch.tensor(0.0).double()
        >>> slopes = torch.tensor([[1.0, 3.0], [1.1, -3.0], [1.0, 0.0]]).double()
        >>> said = [Summary(hessian, hessian @ b, constant) for b in slopes]
        >>> found = varied(said, of_all=1e-3, by_column=True, by_site=False)
        >>> bool(found.columns[0] > 1 > found.columns[1])
        True
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    start = pooled(summaries, of_all, None, freedom)
    spectra = Spectra.from_summaries(summaries)
    sites, size = spectra.rest.shape
    sizes = (1, 1, size // outputs if by_column else 0, sites if by_site else 0)

    def factors(point: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both pulls, the columns' factors and the sites', of their logs; those of factors in units of the spread."""
        of_all, of_site, of_columns, of_sites = point.split(sizes)
        columns = (spread * of_columns).exp() if by_column else point.new_ones(size // outputs)
        return of_all.exp(), of_site.exp(), columns, (spread * of_sites).exp() if by_site else point.new_ones(sites)

    def posterior(point: Tensor) -> tuple[Tensor, Tensor]:
        """Its log, and the slopes w."""
        of_all, of_site, columns, of_sites = factors(point)
        pulls = of_site * of_sites[:, None] * columns.repeat_interleave(outputs)
        evidence, weight = _log_evidence(spectra, of_all, pulls, freedom)
        return evidence - 0.5 * point[2:].square().sum(), weight

    def objective(numbers: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        point = torch.from_numpy(numbers).requires_grad_()
        with torch.enable_grad():
            value = -posterior(point)[0]
            (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient.numpy()

    none = np.zeros(sum(sizes[2:]))
    ends = np.log([OF_ALL if of_all is None else (of_all, of_all), OF_SITE])
    how = {"jac": True, "method": "L-BFGS-B", "options": _PRECISE}
    how["bounds"] = [*ends, *[np.log(FACTOR) / spread] * len(none)]
    starts = [np.concatenate([np.log([start.of_all, of_site]), none]) for of_site in (start.of_site, _MIDDLE)]
    best = torch.from_numpy(min((minimize(objective, first, **how) for first in starts), key=lambda end: end.fun).x)
    (evidence, weight), (alone, common, of_columns, of_sites) = posterior(best), factors(best)
    return Varied(weight, float(alone), float(common), of_columns, of_sites, float(evidence))


_MIDDLE = 10.0  # a second start: where no site departs as a whole, nothing says which way a factor should go
_PRECISE = {"ftol": 1e-13, "gtol": 1e-7, "maxiter": 500, "maxls": 50}


def _log_evidence(spectra: Spectra, of_all: Tensor, pulls: Tensor, freedom: float | None) -> tuple[Tensor, Tensor]:
    """Return the log of the marginal likelihood with pulls ``(m, D)`` of departures, and the slopes w ``(D,)``.

    With Hessians ``F F^T`` of rank r and ``G = F / sqrt(pulls)``, only the r x r matrices ``I + G^T G`` of the sites
    and one matrix with min(D, m r) rows for w are factorised.
    """
    roots, root = spectra.values.sqrt()[:, None, :], pulls.sqrt()[:, :, None]
    factors = spectra.vectors * roots
    targets = torch.where(spectra.values > 0, spectra.along / roots[:, 0], 0)[:, :, None]  # F targets + rest = H b
    scaled, rest = factors / root, spectra.rest[:, :, None] / root
    size, eye = scaled.shape[1], torch.eye(scaled.shape[2]).to(scaled)
    factor = torch.linalg.cholesky(eye + scaled.mT @ scaled)
    halved = torch.linalg.solve_triangular(factor, targets - scaled.mT @ rest, upper=False)
    remaining = scaled @ torch.linalg.solve_triangular(factor.mT, halved, upper=True) + rest
    quadratic = spectra.constant - 0.5 * ((scaled @ targets + rest) * remaining).sum()
    pull = (root * remaining).sum(0)[:, 0]
    shared = torch.linalg.solve_triangular(factor, factors.mT, upper=False).flatten(0, 1)  # (m r, D), of the precision
    volume = factor.diagonal(dim1=1, dim2=2).log().sum()
    if len(shared) < size:
        inner = cholesky(of_all * torch.eye(len(shared)).to(shared) + shared @ shared.T)
        beyond = spectra.rest.sum(0)
        weight = shared.T @ torch.cholesky_solve(halved.reshape(-1, 1) - shared @ beyond[:, None] / of_all, inner)
        weight = weight[:, 0] + beyond / of_all
        volume = volume + inner.diagonal().log().sum() + 0.5 * (size - len(shared)) * of_all.log().squeeze()
    else:
        full = cholesky(of_all * torch.eye(size).to(shared) + shared.T @ shared)
        weight = torch.cholesky_solve(pull[:, None], full)[:, 0]
        volume = volume + full.diagonal().log().sum()
    quadratic = quadratic - 0.5 * pull @ weight
    fit = quadratic if freedom is None else 0.5 * freedom * quadratic.clamp_min(1e-12).log()
    return 0.5 * size * of_all.log().squeeze() - volume - fit, weight
