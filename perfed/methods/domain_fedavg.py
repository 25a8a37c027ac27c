"""FedAvg for known domains: re-weighted, a head or a model per domain, or fine-tuned on each domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from perfed.maths.aggregate import masked_mean, weighted_mean
from perfed.method.declared import ParameterSet
from perfed.method.domains import domain_means, domain_weights, of_domain, reweighted, unit_weights
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, stage_of
from perfed.model.placement import PER_DOMAIN, SHARED, Placement
from perfed.training.cohort import Cohort
from perfed.training.step import Loss


@register("fedavg-rw", title="FedAvg-RW")
class DomainFedAvg(Method):
    """FedAvg on the re-weighted loss, in which every domain counts the same (Zhong et al. 2023, section 5).

    Parameters placed per domain are averaged with the clients' samples of the domain as weights. The paper's image
    experiments begin with ``warmup_rounds`` of FedAvg (appendix B.3).
    """

    needs_mean: ClassVar[str] = "it averages by domain, with each client's share of a domain"
    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, SHARED)
    needs_domains: ClassVar[bool] = True

    reweight: bool = Field(True, description="every domain counts the same in the loss")
    warmup_rounds: int = Field(0, ge=0, description="first rounds, of FedAvg with the same parameters for all domains")
    warmup_epochs: int | None = Field(1, ge=0, description="local epochs of these rounds; not given: local_epochs")

    def epochs_in(self, round_: int) -> int:
        """``warmup_epochs`` in the rounds of the warm-up."""
        own = self.warmup_epochs if round_ <= self.warmup_rounds else None
        return self.local_epochs if own is None else own

    def sets(self) -> dict[str, ParameterSet]:
        """The weight of a sample of each domain."""
        return {"domain_weights": ParameterSet("server", init=unit_weights)}

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Collect how many samples of each domain there are."""
        if self.reweight:
            server.domain_weights = {"u": domain_weights(clients.run(self.count).domain_counts)}

    def count(self, cohort: Cohort) -> Reply:
        """Training samples of each domain."""
        return Reply(domain_counts=cohort.domain_counts)

    def round(self, server: ServerState, clients: Clients) -> None:
        """A round of the method, or of the FedAvg before it."""
        if clients.round > self.warmup_rounds:
            self.domain_round(server, clients)
            return
        reply = clients.train(self.warm_up, shared=server.shared)
        server.shared = weighted_mean(reply.shared, reply.num_samples)

    def domain_round(self, server: ServerState, clients: Clients) -> None:
        """E local epochs from the received model, then the means."""
        reply = clients.train(self.train, shared=server.shared, weights=server.domain_weights["u"])
        one_each = {n: t for n, t in reply.shared.items() if self._one_each(n)}
        common = {n: t for n, t in reply.shared.items() if n not in one_each}
        means = {n: masked_mean(t, reply.domain_counts, server.shared[n]) for n, t in one_each.items()}
        server.shared = {**weighted_mean(common, reply.num_samples), **means}

    def _one_each(self, name: str) -> bool:
        """Whether the parameter has values for each domain."""
        return {**self.default_placement, **self.placement}.get(stage_of(name)) == PER_DOMAIN

    def warm_up(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """All stages together on the plain loss; every sample passes the first domain's parameters, which all get."""
        cohort.load(shared)
        samples = cohort.samples()
        assert samples.domain is not None
        samples = replace(samples, domain=torch.zeros_like(samples.domain))
        cohort.fit(STAGES, epochs=self.epochs_in(cohort.where.round), samples=samples)
        for name in filter(self._one_each, cohort.model):
            cohort.model[name] = cohort.model[name][:, :1].expand_as(cohort.model[name]).clone()
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def loss(self, cohort: Cohort) -> Loss | None:
        """Of local training; ``None`` for the plain one."""
        return None

    def train(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor) -> Reply:
        """All stages together, on the re-weighted loss."""
        cohort.load(shared)
        samples = reweighted(cohort, weights)
        cohort.fit(STAGES, epochs=self.local_epochs, samples=samples, loss=self.loss(cohort))
        return Reply(
            shared=cohort.shared(),
            num_samples=cohort.num_samples,
            domain_counts=cohort.domain_counts,
        )


@register("fedavg-multi-head", title="FedAvg-Multi-Head")
class MultiHeadFedAvg(DomainFedAvg):
    """FedAvg with a head per domain, trained with the body on the re-weighted loss (Zhong et al. 2023, section 5)."""

    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": PER_DOMAIN}


@register(
    "fedavg-separate-ft",
    title="FedAvg-Separate-FT",
    defaults={"reweight": False, "warmup_rounds": 10, "warmup_epochs": None},
    summary="FedAvg for warmup_rounds, then a model per domain, fine-tuned from it by FedAvg (Zhong et al. 2023)",
)
@register("separate-fedavg", title="Separate-FedAvg", defaults={"reweight": False})
class SeparateFedAvg(DomainFedAvg):
    """A model per domain, each by FedAvg on the samples of its domain alone (Zhong et al. 2023, section 5).

    Mini-batches are of all domains; each model takes the mean over its samples in them. After a warm-up it is the
    paper's "FedAvg + separate FT" in its federated reading (section 5.3: fine-tuning on each domain is FedAvg too);
    :class:`FedAvgDomainFT` is the local one.
    """

    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, PER_DOMAIN)

    @field_validator("reweight")
    @classmethod
    def _counts_domains_alike(cls, value: bool) -> bool:
        if value:
            raise ValueError("true has no effect here: no model sees two domains; allowed: false")
        return value

    def loss(self, cohort: Cohort) -> Loss:
        """The sum of the domains' mean losses."""
        return domain_means(cohort.num_domains)


@register("fedavg-domain-ft", title="FedAvg-Domain-FT")
class FedAvgDomainFT(FedAvg):
    """FedAvg; each client evaluates a copy per domain, fine-tuned on its own samples of the domain (Zhong et al. 2023).

    The paper's "FedAvg + separate FT" (section 5, B.3.3), read as local fine-tuning, on the local loss alone (without
    extensions); ``fedavg-separate-ft`` is the federated reading. Samples of a domain that the client has no training
    samples of get the global model.
    """

    needs_domains: ClassVar[bool] = True

    finetune_epochs: int = Field(10, ge=0, description="local epochs of fine-tuning each copy before evaluation")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Fine-tune a copy of the global model on each domain's samples, each a fit of its own."""
        cohort.load(payload["shared"])
        copies = {}
        for domain in range(cohort.num_domains):
            copy = {name: tensor.clone() for name, tensor in cohort.model.items()}
            samples = of_domain(cohort.samples(), domain)
            cohort.fit(STAGES, params=copy, samples=samples, epochs=self.finetune_epochs)
            copies[str(domain)] = copy
        cohort.scratch["copies"] = copies

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Outputs of the copy for each sample's domain; right after local training, those of the trained model."""
        if "copies" not in cohort.scratch:
            return cohort.forward(x)
        domain = cohort.domain
        assert domain is not None
        outputs = torch.stack([cohort.forward(x, params=copy) for copy in cohort.scratch["copies"].values()], 2)
        rows, columns = torch.meshgrid(*(torch.arange(size, device=x.device) for size in domain.shape), indexing="ij")
        chosen: Tensor = outputs[rows, columns, domain]
        return chosen
