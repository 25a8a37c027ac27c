"""FedDAR's linear regression, whose domains share a representation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.datasets.catalogue import NonNegativeReal, Positive, PositiveReal, check_range, client_ids, dataset
from perfed.theory.linear import domain_problem


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
) -> Federation:
    """Targets ``w_z^T B^T x + noise`` with a head per domain z and a common B (FedDAR, figure 1).

    Domains are mixed at every client by ``Dir(alpha p)``; x is standard normal. Test targets have no noise. The paper
    does not give ``dim``; 20 is that of the program it adapts.

    Source: Zhong et al. 2023, section 5.1 and appendix B.3.1.
    """
    check_range("samples_low", samples_low, "samples_high", samples_high)
    sizes = (samples_low, samples_high)
    problem = domain_problem(clients, domains, dim, latent, samples=sizes, alpha=alpha, noise=noise, seed=seed)
    test = replace(problem, sizes=torch.full_like(problem.sizes, test_samples), noise=0.0)
    everyone = torch.arange(clients)
    drawn = {"train": problem.sample(everyone, 0), "test": test.sample(everyone, 1)}

    def split(name: str, row: int) -> Split:
        batch = drawn[name]
        held = batch.member[row].sum(1) > 0
        return Split(batch.x[row, held], batch.y[row, held], batch.member[row, held].argmax(1))

    members = tuple(Client(id_, split("train", i), split("test", i)) for i, id_ in enumerate(client_ids(clients)))
    return Federation(members, None)
