"""FedAvg for known domains: re-weighted, with a head per domain, or one model per domain."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from perfed.aggregate import masked_mean, weighted_mean
from perfed.cohort import Cohort
from perfed.domains import domain_weights, reweighted, unit_weights
from perfed.method import Clients, Method, ParameterSet, Reply, ServerState, register
from perfed.model import STAGES, stage_of
from perfed.placement import PER_DOMAIN, SHARED, Placement


@register("fedavg-rw")
class DomainFedAvg(Method):
    """FedAvg on the re-weighted loss, in which every domain counts the same (Zhong et al. 2023, section 5).

    Parameters placed per domain are averaged with the clients' samples of the domain as weights.
    """

    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, SHARED)

    reweight: bool = Field(True, description="every domain counts the same in the loss")

    def sets(self) -> dict[str, ParameterSet]:
        """The weight of a sample of each domain."""
        return {"domain_weights": ParameterSet("server", init=unit_weights)}

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Collect how many samples of each domain there are."""
        super().prepare(server, clients)
        if self.reweight:
            server.domain_weights = {"u": domain_weights(clients.run(self.count).domain_counts)}

    def count(self, cohort: Cohort) -> Reply:
        """Training samples of each domain."""
        return Reply(domain_counts=cohort.domain_counts)

    def round(self, server: ServerState, clients: Clients) -> None:
        """E local epochs from the received model, then the means."""
        payload = {"shared": server.shared, "weights": server.domain_weights["u"], "terms": self.term_payload(server)}
        reply = clients.run(self.train, **payload)
        places = {**self.default_placement, **self.placement}
        one_each = {n: t for n, t in reply.shared.items() if places.get(stage_of(n)) == PER_DOMAIN}
        common = {n: t for n, t in reply.shared.items() if n not in one_each}
        means = {n: masked_mean(t, reply.domain_counts, server.shared[n]) for n, t in one_each.items()}
        server.shared = {**weighted_mean(common, reply.num_samples), **means}
        self.absorb_terms(server, reply)

    def train(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor, terms: dict[str, Any]) -> Reply:
        """All stages together, on the re-weighted loss."""
        cohort.load(shared)
        samples = reweighted(cohort.samples(), weights, cohort.client_of(cohort.samples()))
        cohort.fit(STAGES, epochs=self.local_epochs, samples=samples, penalties=self.penalties(cohort, terms))
        return Reply(
            shared=cohort.shared(),
            num_samples=cohort.num_samples,
            domain_counts=cohort.domain_counts,
            terms=self.after_terms(cohort, terms),
        )


@register("fedavg-multi-head")
class MultiHeadFedAvg(DomainFedAvg):
    """FedAvg with a head per domain, trained with the body on the re-weighted loss (Zhong et al. 2023, section 5)."""

    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": PER_DOMAIN}


@register("separate-fedavg", defaults={"reweight": False})
class SeparateFedAvg(DomainFedAvg):
    """A model per domain, each by FedAvg on the samples of its domain alone (Zhong et al. 2023, section 5)."""

    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, PER_DOMAIN)
