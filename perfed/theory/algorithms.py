"""The papers' algorithms for linear shared representations, and how fast their theorems say they are.

A basis B ``(d, k)`` and heads by least squares, on the problems of :mod:`perfed.theory.linear`.

Example:
    >>> from perfed.theory.linear import client_problem, principal_angle_distance
    >>> problem = client_problem(20, samples=30, noise=0.0, seed=0)
    >>> everyone = torch.arange(20)
    >>> start = moment_start(problem.sample(everyone, 0), 2)
    >>> bases = trajectory(fedrep_round, problem.sample, start, 0.2, [everyone] * 300)
    >>> bool(principal_angle_distance(bases[-1], problem.basis) < 1e-8)
    True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from perfed.theory.linear import Batch, Sampler, orthonormalise

Round = Callable[[Tensor, Batch, Batch, float], Tensor]


def moment_start(batch: Batch, k: int) -> Tensor:
    """Method of moments: the top k eigenvectors ``(d, k)`` of the mean of y^2 x x^T over all samples.

    Source: Zhong et al. 2023, algorithm 2; Tziotis et al. 2023, algorithm 2, lines 2-3; FLIC, algorithm S3, lines 4-6.
    """
    weighted = (batch.x * batch.y[..., None]).flatten(0, 1)
    vectors: Tensor = torch.linalg.eigh(weighted.mT @ weighted / batch.member.sum()).eigenvectors
    return vectors[:, -k:].flip(-1)


def head_statistics(basis: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """What clients send for the heads: ``A_{i,m} = B^T X_m^T X_m B``, ``a_{i,m} = B^T X_m^T y_m``.

    Returns ``(clients, domains, k, k)`` and ``(clients, domains, k)``.
    """
    features = batch.x @ basis
    return (
        torch.einsum("nsm,nsk,nsl->nmkl", batch.member, features, features),
        torch.einsum("nsm,nsk,ns->nmk", batch.member, features, batch.y),
    )


def solve_heads(gram: Tensor, moment: Tensor) -> Tensor:
    """w with ``A w = a`` ``(..., k)``; the shortest where A is singular (no samples: 0)."""
    inverse: Tensor = torch.linalg.pinv(gram, hermitian=True)
    return (inverse @ moment[..., None])[..., 0]


def basis_gradients(basis: Tensor, heads: Tensor, batch: Batch) -> Tensor:
    """Gradient of ``f_{i,m} = 1/2 sum_j (w_m^T B^T x_j - y_j)^2`` in B, ``(clients, domains, d, k)``.

    ``heads`` is ``(domains, k)`` for all clients or ``(clients, domains, k)``.
    """
    errors = (batch.x @ basis) @ heads.mT - batch.y[..., None]
    return torch.einsum("nsm,nsd->nmd", batch.member * errors, batch.x)[..., None] * heads[..., None, :]


def feddar_round(basis: Tensor, for_heads: Batch, for_basis: Batch, step: float) -> Tensor:
    """One round of FedDAR for linear regression, B ``(d, k)`` to B.

    Heads solve the pooled ``(sum_i A_{i,m}) w_m = sum_i a_{i,m}``; then ``B - step (1/M) sum_m (1/L_m) sum_i grad
    f_{i,m}`` (the printed 1/m is 1/M, equation 21) and QR. M counts the domains that have samples in ``for_basis``.

    Source: Zhong et al. 2023, algorithm 2.
    """
    gram, moment = head_statistics(basis, for_heads)
    heads = solve_heads(gram.sum(0), moment.sum(0))
    counts = for_basis.member.sum((0, 1))
    per_domain = basis_gradients(basis, heads, for_basis).sum(0) / counts.clamp_min(1)[:, None, None]
    return orthonormalise(basis - step * per_domain.sum(0) / (counts > 0).sum())


def fedrep_round(basis: Tensor, for_heads: Batch, for_basis: Batch, step: float) -> Tensor:
    """One round of FedRep, as in SRPFL's algorithm 2 and FLIC's algorithm S3, B ``(d, k)`` to B.

    The batches hold the participants only: heads by least squares, ``B_i = B - step grad 1/(2m) sum_j (...)^2``, the
    mean over the participants, QR. (FLIC prints the sum instead of the mean over samples, which does not converge.)

    Source: Tziotis et al. 2023, algorithm 2, lines 9-14; Rakotomamonjy et al. 2024, algorithm S3, lines 12-19.
    """
    heads = solve_heads(*head_statistics(basis, for_heads))
    gradients = basis_gradients(basis, heads, for_basis) / for_basis.member.sum(1)[..., None, None]
    return orthonormalise(basis - step * gradients.mean((0, 1)))


def trajectory(
    round_: Round, sample: Sampler, start: Tensor, step: float, participants: Iterable[Tensor], *, fresh: bool = True
) -> Tensor:
    """The bases of as many rounds as there are entries in ``participants``.

    Args:
        round_: :func:`feddar_round` or :func:`fedrep_round`.
        sample: gives the participants' samples; draw 0 is the start's.
        start: B_0 ``(d, k)``.
        step: eta.
        participants: per round the clients taking part, as numbers or as a boolean mask over all clients; may be a
            generator, for a policy that decides as it goes.
        fresh: new samples for each half of each round, as the theorems ask; otherwise draw 0 all along.

    Returns:
        ``(rounds + 1, d, k)``, the start first.
    """
    bases = [start]
    for t, who in enumerate(participants):
        clients = who.nonzero().flatten() if who.dtype == torch.bool else who
        for_heads = sample(clients, 2 * t + 1 if fresh else 0)
        for_basis = sample(clients, 2 * t + 2) if fresh else for_heads
        bases.append(round_(bases[-1], for_heads, for_basis, step))
    return torch.stack(bases)


def contraction_constant(step: float, start_distance: Tensor, heads: Tensor) -> Tensor:
    """``a = step E_0 sigma_min^2 / 2`` with E_0 = 1 - dist^2(B_0, B*) and sigma the singular values of W*/sqrt(n).

    Without noise dist_t <= (1 - a)^{t/2} dist_0. ``heads`` is W* ``(..., n, k)`` of the clients or domains of a round;
    leading axes are different sets, the smallest value over which is the theorems' sigma_min.

    Source: Zhong et al. 2023, theorem A.4 and Rakotomamonjy et al. 2024, theorem S3, for step <= 1/(4 sigma_max^2);
    Tziotis et al. 2023, theorem 4.7, for step <= 1/(8 sigma_max^2). (FLIC prints 1 - a for its kappa, and E_0 = dist.)
    """
    smallest: Tensor = torch.linalg.matrix_norm(heads, ord=-2).square().min() / heads.shape[-2]
    return step * (1 - start_distance.square()) * smallest / 2


def contraction_bound(distance: Tensor, a: float, ratio: float) -> Tensor:
    """``dist sqrt(1-a) + a / sqrt(ratio (1-a))``, ``ratio = n / n_0``: Tziotis et al. 2023, theorem 4.7."""
    return distance * math.sqrt(1 - a) + a / math.sqrt(ratio * (1 - a))
