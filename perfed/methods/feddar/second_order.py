"""Second-order aggregation: the minimiser of the sum of the clients' quadratic models, one client at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.errors import PerfedError

_RANK = 1e-12  # eigenvalues below this fraction of the largest are treated as zero


@dataclass(frozen=True)
class Quadratics:
    """The sums over clients of their quadratic models around the values that were sent out, for each of M entries.

    Attributes:
        weight: ``(M,)``, ``sum_i a_i``.
        matrix: ``(M, D, D)``, ``sum_i a_i H_i``.
        change: ``(M, D, r)``, ``sum_i a_i H_i (w_i - w_old)``.
    """

    weight: Tensor
    matrix: Tensor
    change: Tensor


def add_quadratics(total: Quadratics | None, changes: Tensor, hessians: Tensor, counts: Tensor) -> Quadratics:
    """Add one client's quadratic models to ``total``, in place and in float64; return the total.

    Args:
        total: ``None`` before the first client.
        changes: ``(M, D, r)``, ``w_i - w_old``, with r right-hand sides for each Hessian.
        hessians: ``(M, D, D)``, symmetric positive semi-definite.
        counts: ``(M,)``, the weights ``a_i``; entries with weight 0 are skipped.

    Source: Zhong et al. 2023 (FedDAR), eq. 8.
    """
    if total is None:
        total = Quadratics(*(torch.zeros_like(t, dtype=torch.float64) for t in (counts, hessians, changes)))
    total.weight.add_(counts)
    # Entry by entry, because the Hessian is then still in the cache for the product, and absent entries cost nothing.
    for m, count in enumerate(counts.tolist()):
        if count:
            hessian = hessians[m].double()
            total.matrix[m].add_(hessian, alpha=count)
            total.change[m].addmm_(hessian, changes[m].double(), alpha=count)
    return total


def minimise_quadratics(total: Quadratics, old: Tensor, *, damping: float = 0.0) -> Tensor:
    """Return the minimiser of the summed quadratic models; entries without data keep their old values.

    ``w = w_old + (H + delta I)^-1 sum_i a_i H_i (w_i - w_old)`` with ``H = sum_i a_i H_i`` and ``a_i`` in proportion to
    the counts. It equals ``H^-1 sum_i a_i H_i w_i`` if H is invertible and delta is 0. Damping is relative to the mean
    curvature of the entry's H, ``delta = damping tr(H) / D``, so that the units of features and losses do not matter:
    along a direction with ``damping`` times the mean curvature, the step has half of its length. With 0 the
    pseudo-inverse is used (eigenvalues below 1e-12 of the largest are treated as zero). The computation is in float64.

    Args:
        total: the sums from :func:`add_quadratics`.
        old: ``(M, D, r)``, the values that were sent out; returned for entries without weight or curvature.
        damping: at least 0. If all local values are equal, they are the result only with damping 0, or if they equal
            ``old``.

    Raises:
        PerfedError: sums are not finite, or singular up to rounding in spite of the damping.

    Source: Zhong et al. 2023 (FedDAR), eq. 8.
    """
    new = old.clone()
    for m, weight in enumerate(total.weight.tolist()):
        if weight:
            matrix, change = total.matrix[m] / weight, total.change[m] / weight
            if not (torch.isfinite(matrix).all() and torch.isfinite(change).all()):
                raise PerfedError(
                    f"the Hessians of domain {m} or their heads are not finite; lower the learning rate of the heads"
                )
            step = _solve_damped(matrix, change, damping, m) if damping else _solve_least_norm(matrix, change)
            new[m] = (old[m] + step).to(old.dtype)
    return new


def _solve_damped(matrix: Tensor, change: Tensor, damping: float, domain: int) -> Tensor:
    curvature = float(matrix.diagonal().mean())
    if curvature == 0:
        return torch.zeros_like(change)
    matrix.diagonal().add_(damping * curvature)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        raise PerfedError(
            f"damping = {damping:g} (times the mean curvature, {curvature:.2g}) is lost in rounding beside the Hessian "
            f"of domain {domain}; allowed: more, e.g. 1e-8, or 0 (pseudo-inverse)"
        )
    return torch.cholesky_solve(change, factor)


def _solve_least_norm(matrix: Tensor, change: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    inverse = torch.where(values > _RANK * values[-1], 1 / values, 0.0)
    step: Tensor = vectors @ (inverse[:, None] * (vectors.T @ change))
    return step
