"""Linear shared representations: the papers' theorems as programs.

The model of FedRep, FedDAR, SRPFL and FLIC's theory: labels ``y = w*^T B*^T x + noise`` share the span of the
orthonormal columns of B* ``(d, k)``; the head w* belongs to the sample's domain (FedDAR) or to the client (the others,
where B* is called A* in FLIC). A *sampler* ``sample(clients, draw)`` gives the samples of some clients as a
:class:`Batch`; equal draws are equal samples. Everything is float64 and batched over clients, and a client's samples
depend only on the seed, its number and the draw, so that a round costs what its participants cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from perfed import rng
from perfed.data.partition.shards import generator
from perfed.errors import PerfedError

F64 = torch.float64


class Batch(NamedTuple):
    """Samples of some clients, padded with zero rows.

    Attributes:
        x: ``(clients, samples, d)``.
        y: ``(clients, samples)``.
        member: ``(clients, samples, domains)``: 1 where a sample belongs to a domain (one domain where the client has
            a head of its own), all 0 for padding.
    """

    x: Tensor
    y: Tensor
    member: Tensor


Sampler = Callable[[Tensor, int], Batch]


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


def _key(seed: int, *words: str | int | Tensor) -> Tensor:
    return rng.key(seed, "theory", *words)


def orthonormal(keys: Tensor, rows: int, columns: int) -> Tensor:
    """Q of the QR factorisation of Gaussian matrices, ``(*keys.shape, rows, columns)`` with ``rows >= columns``."""
    if rows < columns:
        raise PerfedError(f"{rows} rows cannot hold {columns} orthonormal columns; at most {rows} are possible")
    return orthonormalise(rng.normal(keys, rows * columns, F64).view(*keys.shape, rows, columns))


def orthonormalise(x: Tensor) -> Tensor:
    """Q of the QR factorisation of ``x`` ``(..., d, k)``: an orthonormal basis of its columns' space."""
    q: Tensor = torch.linalg.qr(x).Q
    return q


@dataclass(frozen=True)
class LinearProblem:
    """A linear problem whose samples have the domains of their client's mixture, or one head per client.

    Attributes:
        basis: B* ``(d, k)``, orthonormal columns.
        heads: W* ``(domains, k)``, or ``(clients, k)`` without a mixture.
        mixture: pi ``(clients, domains)``, rows sum to 1; None: every client has a head of its own.
        sizes: ``(clients,)`` samples per client and draw.
        noise: sigma of the labels.
        seed: of every draw.
    """

    basis: Tensor
    heads: Tensor
    mixture: Tensor | None
    sizes: Tensor
    noise: float
    seed: int

    @cached_property
    def width(self) -> int:
        """Samples of the client that has the most."""
        return int(self.sizes.max())

    def domains(self, clients: Tensor, draw: int) -> Tensor:
        """z of every sample of these clients in that draw, ``(clients, samples)``; only with a mixture."""
        assert self.mixture is not None
        u = rng.uniform(_key(self.seed, "domain", draw, clients), self.width, F64)
        edges = self.mixture[clients, None, :-1].cumsum(-1)
        return (u[..., None] >= edges).sum(-1)

    def sample(self, clients: Tensor, draw: int) -> Batch:
        """Draw number ``draw`` of these clients: x ~ N(0, I), z ~ pi_i, y ~ N(w_z^T B^T x, sigma^2)."""
        width, d = self.width, len(self.basis)
        real = (torch.arange(width) < self.sizes[clients, None]).to(F64)
        x = rng.normal(_key(self.seed, "x", draw, clients), width * d, F64).view(-1, width, d)
        x = x * real[..., None]
        if self.mixture is None:
            member, heads = real[..., None], self.heads[clients, None]
        else:
            domain = self.domains(clients, draw)
            member = torch.nn.functional.one_hot(domain, len(self.heads)) * real[..., None]
            heads = self.heads[domain]
        y = ((x @ self.basis) * heads).sum(-1)
        if self.noise:
            y = y + self.noise * real * rng.normal(_key(self.seed, "noise", draw, clients), width, F64)
        return Batch(x, y, member)


def domain_problem(
    clients: int = 100,
    domains: int = 5,
    d: int = 20,
    k: int = 2,
    *,
    samples: int | tuple[int, int] = 20,
    alpha: float = 0.4,
    noise: float = 1e-3,
    seed: int,
) -> LinearProblem:
    """FedDAR's synthetic problem: pi_i ~ Dir(alpha p) with p uniform; B* and W* are Q of Gaussian matrices.

    ``samples`` per client (or a range to draw each client's from), ``noise`` the labels' standard deviation; d is not
    in the paper (20 in the notebook it adapts); p = (1/M, ..., 1/M), so that the Dirichlet parameters are alpha / M.

    Raises:
        PerfedError: fewer domains than k (no such W* spans the heads).

    Source: Zhong et al. 2023, section 5.1 and appendix B.3.1 (figure 1: samples 5 to 20).
    """
    low, high = samples if isinstance(samples, tuple) else (samples, samples)
    draw = generator(seed, "theory-mixture")
    mixture = torch.from_numpy(draw.dirichlet([alpha / domains] * domains, clients))
    sizes = torch.from_numpy(draw.integers(low, high + 1, clients))
    basis, heads = orthonormal(_key(seed, "basis"), d, k), orthonormal(_key(seed, "heads"), domains, k)
    return LinearProblem(basis, heads, mixture, sizes, noise, seed)


def client_problem(
    clients: int = 100, d: int = 20, k: int = 2, *, samples: int = 20, noise: float = 1e-3, seed: int
) -> LinearProblem:
    """FedRep's and SRPFL's linear problem: a head per client, rows of Q scaled to ``||w_i|| = sqrt(k)``.

    Source: Tziotis et al. 2023, section 4 and assumption 4.6; Collins et al. 2021 (d = 20, k = 2).
    """
    basis, heads = orthonormal(_key(seed, "basis"), d, k), orthonormal(_key(seed, "heads"), clients, k)
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
        more = rng.normal(_key(self.oracle.seed, "rest", draw, clients), y.shape[1] * rest, F64)
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
    dims = k + (rng.uniform(_key(seed, "size", ids), 1, F64) * (widest - k + 1)).long()
    real = (torch.arange(widest) < dims).to(F64)
    raw = rng.normal(_key(seed, "axes", ids), widest**2, F64).view(-1, widest, widest)
    variances = (0.5 + 1.5 * rng.uniform(_key(seed, "variance", ids), widest, F64)) * real
    return EmbeddedProblem(
        oracle=client_problem(clients, k, d, samples=samples, noise=0.0, seed=seed),
        means=rng.normal(_key(seed, "mean", ids), widest, F64) * real,
        axes=orthonormalise(raw * real[:, :, None] * real[:, None] + torch.diag_embed(1 - real)),
        variances=variances.sort(descending=True).values,
        signs=rng.normal(_key(seed, "signs"), k, F64).sign(),
    )
