"""FLIC's distances between anchors and the samples of their classes, each behind one setting.

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


def pot() -> Any:
    """The package POT.

    Raises:
        PerfedError: it is not installed; names the extra.
    """
    return optional_package("ot", 'distance = "ot"', extra="ot")


def transport(x: Tensor, z: Tensor, counts: Sequence[int], entropy: float = 0.0) -> Tensor:
    """Squared 2-Wasserstein distance between sets of equally many samples, all of the same weight.

    ``min_P <P, C>``, C the squared distances and P the plans with these weights; with ``entropy``, e, the minimum of
    ``<P, C> + e sum P log P``. Its gradient is that of ``<P, C>`` at the best plan P. One set after the other on the
    processor: many times slower than the closed form (a set of ten takes 0.2 ms; entropic 2 to 30 ms, the less
    entropy the longer). Sinkhorn's iterations end after POT's 1,000, converged or not: with little entropy the plan is
    not the best one (64 points and an entropy of 0.5: the gradient can be off by 2e-3).

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
    found = []
    for own, drawn, n in zip(x, z, counts, strict=True):
        costs = (own[:n, None] - drawn[None, :n]).square().sum(2)
        plan = torch.from_numpy(_plan(costs.detach().double().cpu().numpy(), entropy)).to(costs)
        found.append((plan * costs).sum() + entropy * torch.special.xlogy(plan, plan).sum())
    return torch.stack(found)


def _plan(costs: NDArray[np.float64], entropy: float) -> NDArray[np.float64]:
    if not np.isfinite(costs).all():
        return np.full_like(costs, np.nan)
    shares = np.full(len(costs), 1 / len(costs))
    # What a row or a column has in common decides nothing; without it the numbers are smaller.
    costs = costs - costs.min(1, keepdims=True)
    costs = costs - costs.min(0, keepdims=True)
    plan: NDArray[np.float64]
    if entropy:
        plan = pot().sinkhorn(shares, shares, costs, entropy, method="sinkhorn_log", warn=False)
    else:
        plan = pot().emd(shares, shares, costs)
    return plan


GAMMAS = (1e-4, 1e-3, 1e-2, 1e-1, 1e0, 1e1, 1e2)
"""Of the authors' program. Embeddings start some 80 from their anchors: there only the widest has a gradient."""


def mmd(x: Tensor, counts: Sequence[int], anchors: Gaussians) -> Tensor:
    """Squared maximum mean discrepancy between sets of samples and Gaussians.

    ``E k(x, x') + E k(z, z') - 2 E k(x, z)`` with x, x' any two of the set's samples (a sample and itself among
    them), z and z' independent draws from the Gaussian, and k the sum of the kernels ``exp(-gamma |x - z|^2)`` over
    :data:`GAMMAS`. Both expectations over the Gaussian ``N(v, Sigma)`` are taken exactly: with ``A = I + 2 gamma
    Sigma``, ``E k(x, z) = det A^(-1/2) exp(-gamma (x - v)^T A^(-1) (x - v))``, and ``E k(z, z')`` is
    ``det(I + 4 gamma Sigma)^(-1/2)``.

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
    off = x - anchors.mean.unsqueeze(1)
    total = mean_kernel(x, share, GAMMAS)
    for gamma in GAMMAS:
        lengths, volume = _whitened(off, anchors, 2 * gamma)
        _, twice = _whitened(off[:, :0], anchors, 4 * gamma)
        across = volume * ((-gamma * lengths).exp() * share).sum(1)
        total = total + twice - 2 * across
    return total


def _whitened(off: Tensor, anchors: Gaussians, factor: float) -> tuple[Tensor, Tensor]:
    """``x^T A^(-1) x`` for each row of ``off`` ``(sets, rows, k)``, and ``det A^(-1/2)``, A = I + factor Sigma."""
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
    """How far samples are from their anchors.

    Attributes:
        between: of embedded samples ``(rows, k)``, which of them form sets, the sets' anchors and noise: ``(sets,)``.
        centres: whether its gradient in an anchor whose covariance is fixed is twice the way from the samples' centre.
        part: most samples of a client, of all classes and in the order in which they are stored, that the anchors' own
            step takes at once (``None``: all): a class's value is then the mean over parts, by its samples in each.
    """

    between: Callable[[Tensor, ClassMembers, Gaussians, Noise], Tensor]
    centres: bool = False
    part: int | None = None


def _rows(z: Tensor, members: ClassMembers) -> Tensor:
    return z[members.rows[:, : members.counts[0]]]


def _closed_form(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    if isinstance(anchors.factor, float) and not anchors.mean.requires_grad:
        return gaussian_w2_sets(z, members.sets, anchors.mean, anchors.factor)
    return bures_w2(_rows(z, members), members.counts.tolist(), anchors)


def _two_sample(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    rows = _rows(z, members)
    return sample_w2(rows, anchors.drawn(noise(rows.shape[1])), members.counts.tolist())


def _mmd(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    return mmd(_rows(z, members), members.counts.tolist(), anchors)


def _transport(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise, entropy: float) -> Tensor:
    rows = _rows(z, members)
    return transport(rows, anchors.drawn(noise(rows.shape[1])), members.counts.tolist(), entropy)


def distance_for(measure: Measure, w2: Estimate, entropy: float) -> Distance:
    """What the settings ``distance``, ``w2`` and ``ot_entropy`` say; optimal transport is to new samples in each step.

    Raises:
        PerfedError: a package that it needs is not installed; names the extra.
    """
    if measure == "ot":
        pot()
        return Distance(partial(_transport, entropy=entropy), part=128)
    if measure == "mmd":
        return Distance(_mmd, part=128)
    return Distance(_two_sample if w2 == "two-sample" else _closed_form, centres=True)
