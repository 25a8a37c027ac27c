"""FedDAR's linear regression, whose domains share a representation."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perfed.data.client import Client, Split
from perfed.data.facts import ClientFacts, SplitFacts
from perfed.data.federation import Federation
from perfed.data.lazy import Source
from perfed.datasets.catalogue import NonNegativeReal, Positive, PositiveReal, check_range, client_ids, dataset
from perfed.datasets.linear_problem import LinearProblem, domain_problem


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
    ids = client_ids(clients)
    drawn = _Drawn({"train": problem, "test": test}, {id_: row for row, id_ in enumerate(ids)})
    if deferred:
        options = (seed, clients, domains, dim, latent, sizes, test_samples, alpha, noise)
        source = Source(drawn)
        return Federation(tuple(map(source.client, drawn.facts(zlib.crc32(repr(options).encode())))), None)
    train, tests = (drawn.splits(name, range(clients)) for name in drawn.problems)
    return Federation(tuple(map(Client, ids, train, tests)), None)


@dataclass(frozen=True, eq=False)
class _Drawn:
    """The samples of clients, drawn when they are asked for.

    Attributes:
        problems: of each split; its place in the dictionary is the number of its draw.
        rows: each client's number.
    """

    problems: dict[str, LinearProblem]
    rows: dict[str, int]

    def __call__(self, clients: Sequence[str], split: str) -> list[Split]:
        return self.splits(split, [self.rows[client] for client in clients])

    def splits(self, name: str, rows: Sequence[int]) -> list[Split]:
        """The samples of split ``name`` of each of the clients ``rows``."""
        problem, clients = self.problems[name], torch.tensor(rows)
        batch = problem.sample(clients, self._draw(name))
        parts = zip(problem.sizes[clients].tolist(), batch.x, batch.y, batch.member.argmax(2), strict=True)
        # Copies: a part of the batch would keep all of it alive.
        return [Split(x[:size].clone(), y[:size].clone(), domain[:size].clone()) for size, x, y, domain in parts]

    def facts(self, mark: int) -> Iterator[ClientFacts]:
        """Of every client, without its samples."""
        counts = {name: self._domain_counts(name) for name in self.problems}
        shape = (len(self.problems["train"].basis),)
        for id_, row in self.rows.items():
            held = {name: tuple(counts[name][row]) for name in self.problems}
            yield ClientFacts(id_, {n: SplitFacts(sum(h), shape, domains=h) for n, h in held.items()}, mark=mark)

    def _domain_counts(self, name: str) -> list[list[int]]:
        """Samples of each client and domain."""
        problem = self.problems[name]
        domains = problem.domains(torch.arange(len(self.rows)), self._draw(name))
        real = torch.arange(domains.shape[1]) < problem.sizes[:, None]
        counts = torch.zeros(len(domains), len(problem.heads), dtype=torch.int64)
        return counts.scatter_add_(1, domains, real.long()).tolist()

    def _draw(self, name: str) -> int:
        return [*self.problems].index(name)
