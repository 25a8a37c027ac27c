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
    """Minimax over domains: a shared model against weights of the domains (Papadaki et al. 2021, Algorithm 1).

    ``min_theta max_mu sum_m mu_m R_m(theta)``, mu on the simplex, starting at the domains' shares rho of all samples.
    In local training a sample of domain m weighs ``mu_m / rho_m``. mu then ascends by the domains' risks at the
    *received* model, as in the paper: at the point where the descent in theta starts.

    Departures: several local steps in place of one full gradient step, as in FedDAR's comparison (Zhong et al. 2023,
    B.3.3); the last model is evaluated, not the mean of all rounds'. Under partial participation, risks are those of
    the round's participants, weighted by their samples; a domain that none of them holds keeps its mu, and the others
    ascend on the simplex of what is left.
    """

    needs_mean: ClassVar[str] = "FedMinMax follows sums of the domains' losses over clients"
    needs_domains: ClassVar[bool] = True

    domain_lr: float = Field(0.1, ge=0, description="eta_mu, learning rate of the domains' weights")

    def sets(self) -> dict[str, ParameterSet]:
        """``domains``: the weights mu and the shares rho, float64 ``(M,)``."""
        return {"domains": ParameterSet("server", init=_no_shares)}

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Collect how many samples of each domain there are."""
        counts = clients.run(self.count).domain_counts.double().sum(0)
        shares = counts / counts.sum()
        server.domains = {"mu": shares, "rho": shares}

    def count(self, cohort: Cohort) -> Reply:
        """Training samples of each domain."""
        return Reply(domain_counts=cohort.domain_counts)

    def round(self, server: ServerState, clients: Clients) -> None:
        """E local epochs from the received model, the mean, and the ascent of mu."""
        mu, rho = server.domains["mu"], server.domains["rho"]
        weights = torch.where(rho > 0, mu / rho, 0)
        reply = clients.train(self.train, shared=server.shared, weights=weights)
        server.shared = weighted_mean(reply.shared, reply.num_samples)
        losses, counts = reply.domain_losses.double().sum(0), reply.domain_counts.double().sum(0)
        server.domains = {"mu": ascended(mu, losses, counts, self.domain_lr), "rho": rho}

    def train(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor) -> Reply:
        """The domains' losses at the received model; then all stages together, on the weighted loss."""
        cohort.load(shared)
        losses = _domain_losses(cohort)
        samples = reweight_samples(cohort, weights)
        cohort.fit(STAGES, epochs=self.local_epochs, samples=samples)
        return Reply(
            shared=cohort.shared(),
            num_samples=cohort.num_samples,
            domain_losses=losses,
            domain_counts=cohort.domain_counts,
        )


def ascended(mu: Tensor, losses: Tensor, counts: Tensor, lr: float) -> Tensor:
    """``Pi(mu + lr r)`` with the risks ``r_m = losses_m / counts_m``, over the domains that have samples.

    Args:
        mu: ``(M,)``, on the simplex.
        losses, counts: ``(M,)``, sums of losses and numbers of samples.
        lr: eta_mu.

    Returns:
        ``(M,)``; domains with ``counts`` 0 keep their mu, and so the sum of the others stays what it is.
    """
    held = counts > 0
    mass = mu[held].sum()
    if mass == 0:
        return mu
    point = (mu[held] + lr * losses[held] / counts[held]) / mass  # a simplex of size s: s times the nearest of v / s
    new = mu.clone()
    new[held] = mass * torch.from_numpy(nearest_on_simplex(point.cpu().numpy())).to(mu)
    return new


def _domain_losses(cohort: Cohort) -> Tensor:
    """Sum of the working model's losses over each client's samples of each domain, forward only: ``(n, M)``."""
    each = cohort.sample_losses()
    return each.new_zeros(cohort.n * cohort.num_domains).index_add_(0, cohort.domain_cells, each).view(cohort.n, -1)


def _no_shares(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    """Values before the domains are counted."""
    return {name: torch.zeros(info.num_domains, dtype=torch.float64) for name in ("mu", "rho")}
