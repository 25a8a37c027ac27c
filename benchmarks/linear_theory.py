"""The papers' theorems on linear problems: algorithms, contraction bounds, rounds and time of SRPFL's schedule.

A *sampler* ``sample(clients, draw)`` gives the samples of some clients as a
:class:`~perfed.datasets.linear.Batch`; equal draws are equal samples. FLIC's theory calls B* A*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed import rng
from perfed.datasets.linear import F64, Batch, LinearProblem, draw_orthonormal, make_key, orthonormalise
from perfed.errors import PerfedError
from perfed.participation.schedule import order_statistic

Sampler = Callable[[Tensor, int], Batch]
Round = Callable[[Tensor, Batch, Batch, float], Tensor]


def principal_angle_distance(first: Tensor, second: Tensor) -> Tensor:
    """Sine of the largest principal angle between two column spaces, ``||(I - Q_A Q_A^T) Q_B||_2``.

    FedRep's notebook, which FedDAR adapts, plots the square of this.

    Args:
        first: ``(..., d, k)``, any basis of the first space.
        second: ``(..., d, k)``; the leading axes broadcast.

    Returns:
        ``(...)``, from 0 to 1.

    Source: Tziotis et al. 2023, definition 4.1 (Jain et al. 2013).
    """
    a, b = orthonormalise(first), orthonormalise(second)
    distance: Tensor = torch.linalg.matrix_norm(b - a @ (a.mT @ b), ord=2)
    return distance


def client_problem(
    clients: int = 100, d: int = 20, k: int = 2, *, samples: int = 20, noise: float = 1e-3, seed: int
) -> LinearProblem:
    """FedRep's and SRPFL's linear problem: a head per client, rows of Q scaled to ``||w_i|| = sqrt(k)``.

    Source: Tziotis et al. 2023, section 4 and assumption 4.6; Collins et al. 2021 (d = 20, k = 2).
    """
    basis, heads = (
        draw_orthonormal(make_key(seed, "basis"), d, k),
        draw_orthonormal(make_key(seed, "heads"), clients, k),
    )
    heads = math.sqrt(k) * torch.nn.functional.normalize(heads, dim=-1)
    return LinearProblem(basis, heads, None, torch.full((clients,), samples), noise, seed)


@dataclass(frozen=True)
class EmbeddedProblem:
    """Clients with feature spaces of their own: x ~ N(m_i, P_i D_i P_i^T) and ``y = (A* beta*_i)^T phi*_i(x)``.

    The spaces are padded to the widest: P_i is block diagonal and D_i is 0 beyond the client's own dimension.

    Attributes:
        oracle: the problem in the latent space R^k, with A* ``(k, d)`` and beta*; its samples are ``phi*_i(x)`` and y.
        means: m ``(clients, width)``.
        axes: P ``(clients, width, width)``, the eigenvectors that the oracle and the estimate both use.
        variances: D ``(clients, width)``, distinct and decreasing.
        signs: ``(k,)``, the oracle's diagonal of +-1; an estimate with signs S recovers Q A*, Q = diag(S signs).
    """

    oracle: LinearProblem
    means: Tensor
    axes: Tensor
    variances: Tensor
    signs: Tensor

    def observe(self, clients: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """What the clients hold: x ``(clients, samples, width)`` and y ``(clients, samples)``."""
        latent, y, _ = self.oracle.sample(clients, draw)
        rest = self.means.shape[1] - len(self.signs)
        more = rng.normal(make_key(self.oracle.seed, "rest", draw, clients), y.shape[1] * rest, F64)
        whole = torch.cat([latent * self.signs, more.view(*y.shape, rest)], dim=-1)
        x = whole * self.variances[clients, None].sqrt() @ self.axes[clients].mT + self.means[clients, None]
        return x, y

    def embed(self, x: Tensor, clients: Tensor, signs: Tensor) -> Tensor:
        """``phi_i(x) = S D_i^{-1/2} P_i[:, :k]^T (x - m_i)``, ``(clients, samples, k)`` (algorithm S3, line 2).

        ``signs`` is the diagonal of S: ``(k,)``, the same for all as the theorem has it, or one row per client.
        """
        k = len(self.signs)
        own = signs if signs.ndim == 1 else signs[clients, None]
        centred = (x - self.means[clients, None]) @ self.axes[clients, :, :k]
        return own * centred / self.variances[clients, None, :k].sqrt()

    def sampler(self, signs: Tensor) -> Sampler:
        """The clients' samples as seen through embeddings with these signs."""

        def sample(clients: Tensor, draw: int) -> Batch:
            x, y = self.observe(clients, draw)
            return Batch(self.embed(x, clients, signs), y, torch.ones(*y.shape, 1, dtype=F64))

        return sample


def embedded_problem(
    clients: int = 100, k: int = 20, d: int = 2, *, widest: int = 30, samples: int = 20, seed: int
) -> EmbeddedProblem:
    """FLIC's linear problem; dimensions k_i ~ U{k..widest}, m_i ~ N(0, I), eigenvalues U[0.5, 2] sorted (our choice).

    Source: Rakotomamonjy et al. 2024, appendix S2 (assumption H1; figure 2's sizes are not published).
    """
    ids = torch.arange(clients)
    dims = k + (rng.uniform(make_key(seed, "size", ids), 1, F64) * (widest - k + 1)).long()
    real = (torch.arange(widest) < dims).to(F64)
    raw = rng.normal(make_key(seed, "axes", ids), widest**2, F64).view(-1, widest, widest)
    variances = (0.5 + 1.5 * rng.uniform(make_key(seed, "variance", ids), widest, F64)) * real
    return EmbeddedProblem(
        oracle=client_problem(clients, k, d, samples=samples, noise=0.0, seed=seed),
        means=rng.normal(make_key(seed, "mean", ids), widest, F64) * real,
        axes=orthonormalise(raw * real[:, :, None] * real[:, None] + torch.diag_embed(1 - real)),
        variances=variances.sort(descending=True).values,
        signs=rng.normal(make_key(seed, "signs"), k, F64).sign(),
    )


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


def rounds_to_reach(target: float, floor: float, a: float, start: float = 1.0) -> int:
    """Rounds in which a distance falls from ``start`` to ``target``, moving towards ``floor`` by sqrt(1-a) a round.

    Source: Tziotis et al. 2023, equations 207 and 252 (the bound of theorem 4.7 taken as an equality).
    """
    if target <= floor:
        raise PerfedError(f"the target distance is {target}, but must be above the floor, {floor:.4g}")
    return 0 if target >= start else math.ceil(2 * math.log((target - floor) / (start - floor)) / math.log1p(-a))


def expected_time(
    sizes: Sequence[int], lengths: Sequence[int], clients: int, *, rate: float = 1.0, cost: float = 0.0
) -> float:
    """Expected wall-clock time ``sum_r tau_r (E[T_(n_r)] + C)`` of a schedule (Tziotis et al. 2023, section 4)."""
    rounds = zip(sizes, lengths, strict=True)
    return math.fsum(tau * (order_statistic(n, clients, rate) + cost) for n, tau in rounds)


def srpfl_time_bound(clients: int, a: float, *, excess: float, rate: float = 1.0, cost: float = 0.0) -> float:
    """Upper bound of SRPFL's expected time to ``excess`` times the floor of N clients.

    ``log N (6 (c + 1) + 4 l) / log(1 / (1-a)) / rate`` with c = cost rate and l = log(1 / (excess - 1)); logarithms are
    natural. ``a`` is theorem 4.7's (:func:`contraction_constant`), or a measured contraction;
    that theorem's absolute constants, in its conditions on samples and n_0, are not published and not needed.

    Source: Tziotis et al. 2023, lemma B.2 (equation 217).
    """
    return math.log(clients) * _srpfl(excess, rate * cost) / -math.log1p(-a) / rate


def full_time_bound(clients: int, a: float, *, excess: float, rate: float = 1.0) -> float:
    """What lemma B.3 says that full participation takes at least: ``log N (log N + 2 l) / log(1 / (1-a)) / rate``.

    Its number of rounds leaves out ``2 log((1 + sqrt(1-a)) sqrt(n_0 / (1-a)))`` of the numerator (equations 252, 253),
    so that it is a lower bound only where N or the cost of communication is large, and above the expected time
    elsewhere.

    Source: Tziotis et al. 2023, lemma B.3 (equation 248).
    """
    return math.log(clients) * _full(clients, excess) / -math.log1p(-a) / rate


def speed_up_bound(clients: int, *, excess: float, rate: float = 1.0, cost: float = 0.0) -> float:
    """The speed-up that theorem 4.9 promises: ``(log N + 2 l) / (6 (c + 1) + 4 l)``, in which a and n_0 cancel.

    Source: Tziotis et al. 2023, equation 256.
    """
    return _full(clients, excess) / _srpfl(excess, rate * cost)


def speed_up_slope(*, excess: float, rate: float = 1.0, cost: float = 0.0) -> float:
    """The slope of :func:`speed_up_bound` in log N."""
    return 1 / _srpfl(excess, rate * cost)


def _srpfl(excess: float, c: float) -> float:
    return 6 * (c + 1) + 4 * math.log(1 / (excess - 1))


def _full(clients: int, excess: float) -> float:
    return math.log(clients) + 2 * math.log(1 / (excess - 1))
