"""FedMinMax: one model for the worst mixture of the domains."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed.maths.aggregate import weighted_mean
from perfed.maths.simplex import nearest_on_simplex
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.domains import reweight_samples
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES
from perfed.training.cohort import Cohort


@register("fedminmax", title="FedMinMax")
class FedMinMax(Method):
    """Minimax over domains: a shared model against the domains' weights (Papadaki et al. 2021, Algorithm 1).

    ``min_theta max_mu sum_m mu_m R_m(theta)``, mu on the simplex, starting at the domains' shares rho of all samples.
    In local training a sample of domain m has the weight ``mu_m / rho_m``. mu then ascends along the domains' risks at
    the *received* model, where the descent in theta starts, as in the paper.

    Departures: several local steps replace one full gradient step, as in FedDAR's comparison (Zhong et al. 2023,
    B.3.3); the last model is evaluated, not the mean over rounds. Under partial participation, risks are computed over
    the samples of the round's participants; a domain without samples there keeps its mu, and the other weights ascend
    on the simplex of the remaining sum.
    """

    needs_mean: ClassVar[str] = "FedMinMax follows sums of the domains' losses over clients"
    needs_domains: ClassVar[bool] = True

    domain_lr: float = Field(0.1, ge=0, description="eta_mu, learning rate of the domains' weights")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``domains``: the weights mu and the shares rho, float64 ``(M,)``."""
        return {"domains": ParameterSet("server", init=_init_domains)}

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Compute the domains' shares from the numbers of samples of all clients."""
        counts = clients.run(self.count).domain_counts.double().sum(0)
        shares = counts / counts.sum()
        server.domains = {"mu": shares, "rho": shares}

    def count(self, cohort: Cohort) -> Reply:
        """Return the number of training samples of each domain."""
        return Reply(domain_counts=cohort.domain_counts)

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run E local epochs from the received model, compute the mean, and let mu ascend."""
        mu, rho = server.domains["mu"], server.domains["rho"]
        weights = torch.where(rho > 0, mu / rho, 0)
        reply = clients.train(self.train, shared=server.shared, weights=weights)
        server.shared = weighted_mean(reply.shared, reply.num_samples)
        losses, counts = reply.domain_losses.double().sum(0), reply.domain_counts.double().sum(0)
        server.domains = {"mu": ascend_weights(mu, losses, counts, self.domain_lr), "rho": rho}

    def train(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor) -> Reply:
        """Compute the domains' losses at the received model, then train all stages together on the weighted loss."""
        cohort.load(shared)
        losses = _compute_domain_losses(cohort)
        samples = reweight_samples(cohort, weights)
        cohort.fit(STAGES, epochs=self.local_epochs, samples=samples)
        return Reply(
            shared=cohort.shared(),
            num_samples=cohort.num_samples,
            domain_losses=losses,
            domain_counts=cohort.domain_counts,
        )


def ascend_weights(mu: Tensor, losses: Tensor, counts: Tensor, lr: float) -> Tensor:
    """Return ``Pi(mu + lr r)`` with the risks ``r_m = losses_m / counts_m``, over the domains with samples.

    Args:
        mu: ``(M,)``, on the simplex.
        losses, counts: ``(M,)``, sums of losses and numbers of samples.
        lr: eta_mu.

    Returns:
        ``(M,)``; domains with ``counts`` 0 keep their mu, so that the sum of the other weights does not change.
    """
    present = counts > 0
    present_sum = mu[present].sum()
    if present_sum == 0:
        return mu
    point = (
        mu[present] + lr * losses[present] / counts[present]
    ) / present_sum  # a simplex of size s: s times the nearest of v / s
    new = mu.clone()
    new[present] = present_sum * torch.from_numpy(nearest_on_simplex(point.cpu().numpy())).to(mu)
    return new


def _compute_domain_losses(cohort: Cohort) -> Tensor:
    """Return the sum of the working model's losses over each client's samples of each domain, ``(n, M)``."""
    losses = cohort.sample_losses()
    return losses.new_zeros(cohort.n * cohort.num_domains).index_add_(0, cohort.domain_cells, losses).view(cohort.n, -1)


def _init_domains(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    """Return zeros, the values before the domains are counted."""
    return {name: torch.zeros(info.num_domains, dtype=torch.float64) for name in ("mu", "rho")}
