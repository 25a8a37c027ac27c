"""FedDAR's linear regression, and linear problems whose clients or domains share a representation.

Labels ``y = w*^T B*^T x + noise`` share the span of the orthonormal columns of B* ``(d, k)``; the head w* belongs to
the sample's domain (FedDAR) or to the client (FedRep, SRPFL). Everything is float64 and batched over clients, and a
client's samples depend only on the seed, its number and the draw, so that a round costs what its participants cost.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from perfed import rng
from perfed.data.client import Client, Split
from perfed.data.facts import ClientFacts, SplitFacts
from perfed.data.federation import Federation
from perfed.data.lazy import Source
from perfed.data.partition.shards import make_generator
from perfed.datasets.catalogue import NonNegativeReal, Positive, PositiveReal, check_range, dataset, make_client_ids
from perfed.errors import PerfedError

F64 = torch.float64


class Batch(NamedTuple):
    """Samples of some clients, padded with zero rows.

    Attributes:
        x: ``(clients, samples, d)``.
        y: ``(clients, samples)``.
        member: ``(clients, samples, domains)``: 1 if a sample belongs to a domain (there is one domain if each client
            has a separate head), all 0 for padding.
    """

    x: Tensor
    y: Tensor
    member: Tensor


def make_key(seed: int, *words: str | int | Tensor) -> Tensor:
    """Return the random key identified by ``words``, for :mod:`perfed.rng`."""
    return rng.key(seed, "theory", *words)


def draw_orthonormal(keys: Tensor, rows: int, columns: int) -> Tensor:
    """Return Q of the QR factorisation of Gaussian matrices, ``(*keys.shape, rows, columns)``.

    Raises:
        PerfedError: if there are more columns than rows.
    """
    if rows < columns:
        raise PerfedError(f"{rows} rows cannot hold {columns} orthonormal columns; at most {rows} are possible")
    return orthonormalise(rng.normal(keys, rows * columns, F64).view(*keys.shape, rows, columns))


def orthonormalise(x: Tensor) -> Tensor:
    """Return Q of the QR factorisation of ``x`` ``(..., d, k)``, an orthonormal basis of the space of its columns."""
    q: Tensor = torch.linalg.qr(x).Q
    return q


@dataclass(frozen=True)
class LinearProblem:
    """A linear problem in which samples have domains from their client's mixture, or clients have separate heads.

    Attributes:
        basis: B* ``(d, k)``, orthonormal columns.
        heads: W* ``(domains, k)``, or ``(clients, k)`` without a mixture.
        mixture: pi ``(clients, domains)``, rows sum to 1; ``None`` if every client has a separate head.
        sizes: ``(clients,)`` number of samples per client and draw.
        noise: sigma of the labels.
        seed: the seed of every draw.
    """

    basis: Tensor
    heads: Tensor
    mixture: Tensor | None
    sizes: Tensor
    noise: float
    seed: int

    @cached_property
    def width(self) -> int:
        """Return the largest number of samples of a client."""
        return int(self.sizes.max())

    def domains(self, clients: Tensor, draw: int) -> Tensor:
        """Return z of every sample of ``clients`` in a draw, ``(clients, samples)``; requires a mixture."""
        assert self.mixture is not None
        u = rng.uniform(make_key(self.seed, "domain", draw, clients), self.width, F64)
        edges = self.mixture[clients, None, :-1].cumsum(-1)
        return (u[..., None] >= edges).sum(-1)

    def sample(self, clients: Tensor, draw: int) -> Batch:
        """Return the samples of ``clients`` in draw number ``draw``: x ~ N(0, I), z ~ pi_i, y ~ N(w_z^T B^T x,
        sigma^2).
        """
        width, d = self.width, len(self.basis)
        real = (torch.arange(width) < self.sizes[clients, None]).to(F64)
        x = rng.normal(make_key(self.seed, "x", draw, clients), width * d, F64).view(-1, width, d)
        x = x * real[..., None]
        if self.mixture is None:
            member, heads = real[..., None], self.heads[clients, None]
        else:
            domain = self.domains(clients, draw)
            member = torch.nn.functional.one_hot(domain, len(self.heads)) * real[..., None]
            heads = self.heads[domain]
        y = ((x @ self.basis) * heads).sum(-1)
        if self.noise:
            y = y + self.noise * real * rng.normal(make_key(self.seed, "noise", draw, clients), width, F64)
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
    """Return FedDAR's synthetic problem: pi_i ~ Dir(alpha p) with p uniform; B* and W* are Q of Gaussian matrices.

    ``samples`` per client (or a range to draw each client's from), ``noise`` the labels' standard deviation; d is not
    in the paper (20 in the notebook it adapts); p = (1/M, ..., 1/M), so that the Dirichlet parameters are alpha / M.

    Raises:
        PerfedError: if there are fewer domains than k, so that no such W* spans the heads.

    Source: Zhong et al. 2023, section 5.1 and appendix B.3.1 (figure 1: samples 5 to 20).
    """
    low, high = samples if isinstance(samples, tuple) else (samples, samples)
    draw = make_generator(seed, "theory-mixture")
    mixture = torch.from_numpy(draw.dirichlet([alpha / domains] * domains, clients))
    sizes = torch.from_numpy(draw.integers(low, high + 1, clients))
    basis = draw_orthonormal(make_key(seed, "basis"), d, k)
    heads = draw_orthonormal(make_key(seed, "heads"), domains, k)
    return LinearProblem(basis, heads, mixture, sizes, noise, seed)


@dataset("linear-domains", task="regression")
def linear_domains(
    seed: int,
    data_dir: Path | None,
    *,
    clients: Positive = 100,
    domains: Positive = 5,
    dim: Positive = 20,
    latent: Positive = 2,
    samples_low: Positive = 5,
    samples_high: Positive = 20,
    test_samples: Positive = 50,
    alpha: PositiveReal = 0.4,
    noise: NonNegativeReal = 1e-3,
    deferred: bool = False,
) -> Federation:
    """Targets ``w_z^T B^T x + noise`` with a head per domain z and a common B (FedDAR, figure 1).

    Domains are mixed at every client by ``Dir(alpha p)``; x is standard normal. Test targets have no noise. The paper
    does not give ``dim``; 20 is that of the program it adapts. With ``deferred`` a client's samples, the same numbers,
    are drawn when they are used, so that there is room for very many clients.

    Source: Zhong et al. 2023, section 5.1 and appendix B.3.1.
    """
    check_range("samples_low", samples_low, "samples_high", samples_high)
    sizes = (samples_low, samples_high)
    problem = domain_problem(clients, domains, dim, latent, samples=sizes, alpha=alpha, noise=noise, seed=seed)
    test = replace(problem, sizes=torch.full_like(problem.sizes, test_samples), noise=0.0)
    ids = make_client_ids(clients)
    sampler = _Sampler({"train": problem, "test": test}, {id_: row for row, id_ in enumerate(ids)})
    if deferred:
        options = (seed, clients, domains, dim, latent, sizes, test_samples, alpha, noise)
        source = Source(sampler)
        return Federation(tuple(map(source.client, sampler.iterate_facts(zlib.crc32(repr(options).encode())))), None)
    train, tests = (sampler.draw_splits(name, range(clients)) for name in sampler.problems)
    return Federation(tuple(map(Client, ids, train, tests)), None)


@dataclass(frozen=True, eq=False)
class _Sampler:
    """The samples of clients, drawn on access.

    Attributes:
        problems: the problem of each split; its position in the dictionary is the number of its draw.
        rows: the number of each client.
    """

    problems: dict[str, LinearProblem]
    rows: dict[str, int]

    def __call__(self, clients: Sequence[str], split: str) -> list[Split]:
        return self.draw_splits(split, [self.rows[client] for client in clients])

    def draw_splits(self, name: str, rows: Sequence[int]) -> list[Split]:
        """Return the samples of split ``name`` of each of the clients ``rows``."""
        problem, clients = self.problems[name], torch.tensor(rows)
        batch = problem.sample(clients, self._draw(name))
        parts = zip(problem.sizes[clients].tolist(), batch.x, batch.y, batch.member.argmax(2), strict=True)
        # Copies, because views would keep the whole batch in memory.
        return [Split(x[:size].clone(), y[:size].clone(), domain[:size].clone()) for size, x, y, domain in parts]

    def iterate_facts(self, mark: int) -> Iterator[ClientFacts]:
        """Yield the facts of every client, without its samples."""
        counts = {name: self._domain_counts(name) for name in self.problems}
        shape = (len(self.problems["train"].basis),)
        for id_, row in self.rows.items():
            domain_counts = {name: tuple(counts[name][row]) for name in self.problems}
            yield ClientFacts(
                id_, {n: SplitFacts(sum(h), shape, domains=h) for n, h in domain_counts.items()}, mark=mark
            )

    def _domain_counts(self, name: str) -> list[list[int]]:
        """Return the number of samples of each client and domain."""
        problem = self.problems[name]
        domains = problem.domains(torch.arange(len(self.rows)), self._draw(name))
        real = torch.arange(domains.shape[1]) < problem.sizes[:, None]
        counts = torch.zeros(len(domains), len(problem.heads), dtype=torch.int64)
        return counts.scatter_add_(1, domains, real.long()).tolist()

    def _draw(self, name: str) -> int:
        return [*self.problems].index(name)
