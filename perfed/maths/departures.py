"""Partial pooling whose pull of departures has a factor for each column, each site, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.maths.glm import Summary, factorise_cholesky
from perfed.maths.pooling import SHARED_PULL_RANGE, SITE_PULL_RANGE, Spectra, pool_summaries

SPREAD = 1.0
"""Prior standard deviation of the log of a factor: two factors in three lie between 0.37 and 2.7."""

FACTOR = (1e-3, 1e3)
"""Smallest and largest factor."""


@dataclass(frozen=True)
class Varied:
    """The result of pooling with departures ``d_ic ~ N(0, 1/(site_pull sites_i columns_c))``.

    Attributes:
        weight: the shared slopes w, ``(D,)``.
        shared_pull: the pull of w to 0.
        site_pull: the pull of a site's slopes to w, before its factors.
        columns: factors of the columns ``(S,)``; 1 where they were not requested.
        sites: factors of the sites ``(m,)``; 1 where they were not requested.
        evidence: the log of the marginal likelihood times the prior of the factors, up to a constant.
    """

    weight: Tensor
    shared_pull: float
    site_pull: float
    columns: Tensor
    sites: Tensor
    evidence: float


def pool_with_factors(
    summaries: Sequence[Summary],
    shared_pull: float | None,
    freedom: float | None = None,
    *,
    by_column: bool,
    by_site: bool,
    outputs: int = 1,
    spread: float = SPREAD,
) -> Varied:
    """Return the shared slopes and the pulls that maximise the marginal likelihood times the prior of the factors.

    The likelihood is that of :func:`~perfed.maths.pooling.pool_summaries`, which explains ``shared_pull`` and
    ``freedom``, and from whose pulls the search (L-BFGS-B) starts. Logs of factors are independent and ``N(0,
    spread^2)``: with few sites, or samples that are uninformative about a column, a factor stays near 1.

    Args:
        summaries: the summary of each site.
        by_column, by_site: which factors are estimated.
        outputs: the number of slopes of a column, which are adjacent and share its factor.
        spread: the standard deviation of the prior; near 0 all pulls are the same.

    Source: as for pooling; a pull for each column is automatic relevance determination (MacKay 1994).

    Example:
        >>> hessian, constant = 100 * torch.eye(2).double(), torch.tensor(0.0).double()
        >>> slopes = torch.tensor([[1.0, 3.0], [1.1, -3.0], [1.0, 0.0]]).double()
        >>> summaries = [Summary(hessian, hessian @ b, constant) for b in slopes]
        >>> result = pool_with_factors(summaries, shared_pull=1e-3, by_column=True, by_site=False)
        >>> bool(result.columns[0] > 1 > result.columns[1])
        True
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    start = pool_summaries(summaries, shared_pull, None, freedom)
    spectra = Spectra.from_summaries(summaries)
    sites, size = spectra.residual.shape
    sizes = (1, 1, size // outputs if by_column else 0, sites if by_site else 0)

    def unpack_point(point: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return both pulls and the factors of columns and of sites, from logs that are in units of the spread."""
        shared_pull, site_pull, column_logs, site_logs = point.split(sizes)
        columns = (spread * column_logs).exp() if by_column else point.new_ones(size // outputs)
        return (
            shared_pull.exp(),
            site_pull.exp(),
            columns,
            (spread * site_logs).exp() if by_site else point.new_ones(sites),
        )

    def log_posterior(point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log posterior density, and the slopes w."""
        shared_pull, site_pull, columns, site_factors = unpack_point(point)
        pulls = site_pull * site_factors[:, None] * columns.repeat_interleave(outputs)
        evidence, weight = _log_evidence(spectra, shared_pull, pulls, freedom)
        return evidence - 0.5 * point[2:].square().sum(), weight

    def negative_log_posterior(numbers: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        point = torch.from_numpy(numbers).requires_grad_()
        with torch.enable_grad():
            value = -log_posterior(point)[0]
            (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient.numpy()

    zeros = np.zeros(sum(sizes[2:]))
    pull_ranges = np.log([SHARED_PULL_RANGE if shared_pull is None else (shared_pull, shared_pull), SITE_PULL_RANGE])
    options = {"jac": True, "method": "L-BFGS-B", "options": _PRECISE}
    options["bounds"] = [*pull_ranges, *[np.log(FACTOR) / spread] * len(zeros)]
    starts = [
        np.concatenate([np.log([start.shared_pull, site_pull]), zeros]) for site_pull in (start.site_pull, _MIDDLE)
    ]
    best = torch.from_numpy(
        min((minimize(negative_log_posterior, first, **options) for first in starts), key=lambda end: end.fun).x
    )
    evidence, weight = log_posterior(best)
    best_shared_pull, best_site_pull, columns, site_factors = unpack_point(best)
    return Varied(weight, float(best_shared_pull), float(best_site_pull), columns, site_factors, float(evidence))


_MIDDLE = 10.0  # a second start, since pulls at the end of their range leave the gradient in the factors without a sign
_PRECISE = {"ftol": 1e-13, "gtol": 1e-7, "maxiter": 500, "maxls": 50}


def _log_evidence(spectra: Spectra, shared_pull: Tensor, pulls: Tensor, freedom: float | None) -> tuple[Tensor, Tensor]:
    """Return the log of the marginal likelihood with pulls ``(m, D)`` of departures, and the slopes w ``(D,)``.

    With Hessians ``F F^T`` of rank r and ``G = F / sqrt(pulls)``, only the r x r matrices ``I + G^T G`` of the sites
    and one matrix with min(D, m r) rows for w are factorised.
    """
    roots, root = spectra.values.sqrt()[:, None, :], pulls.sqrt()[:, :, None]
    factors = spectra.vectors * roots
    # F targets + spectra.residual = H b
    targets = torch.where(spectra.values > 0, spectra.along / roots[:, 0], 0)[:, :, None]
    scaled, remaining_targets = factors / root, spectra.residual[:, :, None] / root
    size, eye = scaled.shape[1], torch.eye(scaled.shape[2]).to(scaled)
    factor = torch.linalg.cholesky(eye + scaled.mT @ scaled)
    halved = torch.linalg.solve_triangular(factor, targets - scaled.mT @ remaining_targets, upper=False)
    remaining = scaled @ torch.linalg.solve_triangular(factor.mT, halved, upper=True) + remaining_targets
    quadratic = spectra.constant - 0.5 * ((scaled @ targets + remaining_targets) * remaining).sum()
    pull = (root * remaining).sum(0)[:, 0]
    information = torch.linalg.solve_triangular(factor, factors.mT, upper=False).flatten(
        0, 1
    )  # (m r, D), of the precision
    volume = factor.diagonal(dim1=1, dim2=2).log().sum()
    if len(information) < size:
        inner = factorise_cholesky(
            shared_pull * torch.eye(len(information)).to(information) + information @ information.T
        )
        total_rest = spectra.residual.sum(0)
        weight = information.T @ torch.cholesky_solve(
            halved.reshape(-1, 1) - information @ total_rest[:, None] / shared_pull, inner
        )
        weight = weight[:, 0] + total_rest / shared_pull
        volume = volume + inner.diagonal().log().sum() + 0.5 * (size - len(information)) * shared_pull.log().squeeze()
    else:
        full = factorise_cholesky(shared_pull * torch.eye(size).to(information) + information.T @ information)
        weight = torch.cholesky_solve(pull[:, None], full)[:, 0]
        volume = volume + full.diagonal().log().sum()
    quadratic = quadratic - 0.5 * pull @ weight
    fit = quadratic if freedom is None else 0.5 * freedom * quadratic.clamp_min(1e-12).log()
    return 0.5 * size * shared_pull.log().squeeze() - volume - fit, weight
