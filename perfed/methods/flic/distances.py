"""FLIC's distances between anchors and the samples of their classes, selected by settings.

Mean discrepancies, transport between samples (extra ``perfed[ot]``), or the closed form for Gaussians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.files import optional_package
from perfed.maths.divergence import mean_kernel, sample_w2
from perfed.methods.flic.bures import bures_w2
from perfed.methods.flic.class_batches import ClassMembers
from perfed.methods.flic.fast_w2 import gaussian_w2_sets
from perfed.methods.flic.gaussians import Gaussians


def import_pot() -> Any:
    """Return the package POT.

    Raises:
        PerfedError: the package is not installed; the message names the extra.
    """
    return optional_package("ot", 'distance = "ot"', extra="ot")


def transport(x: Tensor, z: Tensor, counts: Sequence[int], entropy: float = 0.0) -> Tensor:
    """Return the squared 2-Wasserstein distance between sets of equally many samples of equal weight.

    This is ``min_P <P, C>`` over plans P with these weights, where C are the squared distances; with ``entropy`` e it
    is the minimum of ``<P, C> + e sum P log P``. The gradient is that of ``<P, C>`` at the optimal plan P. Sets are
    solved one after the other on the CPU, which is many times slower than the closed form (a set of ten takes 0.2 ms;
    with entropy 2 to 30 ms, longer for less entropy). Sinkhorn's algorithm stops after POT's 1,000 iterations,
    converged or not, so that with little entropy the plan is not optimal (with 64 points and an entropy of 0.5 the
    error of the gradient can be 2e-3).

    Args:
        x, z: ``(sets, rows, k)``; rows beyond ``counts`` are ignored. Gradients flow to both.
        counts: samples of each set.
        entropy: strength of the entropic regularisation, in units of a squared distance; 0: none.

    Returns:
        ``(sets,)``; NaN where distances are not finite.

    Raises:
        PerfedError: POT is not installed.

    Source: Flamary et al. 2021, "POT: Python Optimal Transport"; Cuturi 2013, "Sinkhorn Distances"; Rakotomamonjy et
    al. 2024, remark 2.

    Example:
        >>> x, z = torch.tensor([[[0.0], [3.0]]]), torch.tensor([[[4.0], [0.0]]])
        >>> transport(x, z, [2]).tolist()  # 0 to 0 and 3 to 4
        [0.5]
    """
    distances = []
    for points, targets, n in zip(x, z, counts, strict=True):
        costs = (points[:n, None] - targets[None, :n]).square().sum(2)
        plan = torch.from_numpy(_solve_plan(costs.detach().double().cpu().numpy(), entropy)).to(costs)
        distances.append((plan * costs).sum() + entropy * torch.special.xlogy(plan, plan).sum())
    return torch.stack(distances)


def _solve_plan(costs: NDArray[np.float64], entropy: float) -> NDArray[np.float64]:
    if not np.isfinite(costs).all():
        return np.full_like(costs, np.nan)
    shares = np.full(len(costs), 1 / len(costs))
    # A constant in a row or a column does not change the plan; without it the numbers are smaller.
    costs = costs - costs.min(1, keepdims=True)
    costs = costs - costs.min(0, keepdims=True)
    plan: NDArray[np.float64]
    if entropy:
        plan = import_pot().sinkhorn(shares, shares, costs, entropy, method="sinkhorn_log", warn=False)
    else:
        plan = import_pot().emd(shares, shares, costs)
    return plan


GAMMAS = (1e-4, 1e-3, 1e-2, 1e-1, 1e0, 1e1, 1e2)
"""The gammas of the authors' program. Initial distances to anchors are about 80: only the widest has a gradient."""


def mmd(x: Tensor, counts: Sequence[int], anchors: Gaussians) -> Tensor:
    """Return the squared maximum mean discrepancy between sets of samples and Gaussians.

    ``E k(x, x') + E k(z, z') - 2 E k(x, z)`` with x and x' any two samples of the set (including pairs of a sample with
    itself), z and z' independent draws from the Gaussian, and k the sum of the kernels ``exp(-gamma |x - z|^2)`` over
    :data:`GAMMAS`. Both expectations over the Gaussian ``N(v, Sigma)`` are taken exactly: with ``A = I + 2 gamma
    Sigma``, ``E k(x, z) = det A^(-1/2) exp(-gamma (x - v)^T A^(-1) (x - v))``, and ``E k(z, z')`` is ``det(I + 4 gamma
    Sigma)^(-1/2)``.

    Args:
        x: ``(sets, rows, k)``; rows beyond ``counts`` are ignored.
        counts: samples of each set.
        anchors: ``(sets, ...)``.

    Returns:
        ``(sets,)``, at most 14, with gradients in the samples and in the anchors.

    Source: Gretton et al. 2012, "A Kernel Two-Sample Test", eq. 5; Rakotomamonjy et al. 2024, remark 2.

    Example:
        >>> point = Gaussians(torch.zeros(1, 1), 0.0)
        >>> float(mmd(torch.zeros(1, 1, 1), [1], point))
        0.0
    """
    n = torch.tensor(counts, dtype=x.dtype, device=x.device)
    share = (torch.arange(x.shape[1], device=x.device) < n[:, None]) / n[:, None]
    differences = x - anchors.mean.unsqueeze(1)
    total = mean_kernel(x, share, GAMMAS)
    for gamma in GAMMAS:
        lengths, volume = _whiten(differences, anchors, 2 * gamma)
        _, between_draws = _whiten(differences[:, :0], anchors, 4 * gamma)
        between_both = volume * ((-gamma * lengths).exp() * share).sum(1)
        total = total + between_draws - 2 * between_both
    return total


def _whiten(off: Tensor, anchors: Gaussians, factor: float) -> tuple[Tensor, Tensor]:
    """Return ``x^T A^(-1) x`` of each row x of ``off`` ``(sets, rows, k)``, and ``det A^(-1/2)``.

    A is ``I + factor Sigma``.
    """
    diagonal = anchors.diagonal
    if diagonal is not None:
        a = 1 + factor * diagonal.square()
        return (off.square() / a.unsqueeze(1)).sum(2), (-0.5 * a.log().sum(1)).exp()
    triangle = torch.linalg.cholesky(torch.eye(off.shape[2]).to(off) + factor * anchors.covariance)
    solved = torch.linalg.solve_triangular(triangle, off.mT, upper=False)
    return solved.square().sum(1), (-triangle.diagonal(dim1=1, dim2=2).log().sum(1)).exp()


Measure = Literal["w2", "mmd", "ot", "mixture"]
Estimate = Literal["closed-form", "two-sample"]
Noise = Callable[[int], Tensor]
"""Standard normal numbers ``(sets, J, k)`` for J samples of each anchor."""


@dataclass(frozen=True)
class Distance:
    """A distance of samples from their anchors.

    Attributes:
        between: function of embedded samples ``(rows, k)``, their sets, the sets' anchors and noise; returns
            ``(sets,)``.
        centres: whether the gradient in an anchor with fixed covariance is twice its difference from the samples'
            centre.
        part: most samples of a client, over all classes in storage order, that the anchors' own step processes at once
            (``None``: all). The distance of a class is then the mean over parts, weighted by its samples in each.
    """

    between: Callable[[Tensor, ClassMembers, Gaussians, Noise], Tensor]
    centres: bool = False
    part: int | None = None


def _select_rows(z: Tensor, members: ClassMembers) -> Tensor:
    return z[members.rows[:, : members.counts[0]]]


def _closed_form(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    if isinstance(anchors.factor, float) and not anchors.mean.requires_grad:
        return gaussian_w2_sets(z, members.sets, anchors.mean, anchors.factor)
    return bures_w2(_select_rows(z, members), members.counts.tolist(), anchors)


def _two_sample(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    rows = _select_rows(z, members)
    return sample_w2(rows, anchors.draw_samples(noise(rows.shape[1])), members.counts.tolist())


def _mmd(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    return mmd(_select_rows(z, members), members.counts.tolist(), anchors)


def _transport(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise, entropy: float) -> Tensor:
    rows = _select_rows(z, members)
    return transport(rows, anchors.draw_samples(noise(rows.shape[1])), members.counts.tolist(), entropy)


def select_distance(measure: Measure, w2: Estimate, entropy: float) -> Distance:
    """Return the distance that the settings ``distance``, ``w2`` and ``ot_entropy`` select.

    Optimal transport is to new samples of the anchors in each step.

    Raises:
        PerfedError: a package that it needs is not installed; the message names the extra.
    """
    if measure == "ot":
        import_pot()
        return Distance(partial(_transport, entropy=entropy), part=128)
    if measure == "mmd":
        return Distance(_mmd, part=128)
    return Distance(_two_sample if w2 == "two-sample" else _closed_form, centres=True)
