"""FedAvg for known domains: re-weighted, a head or a model per domain, or fine-tuned on each domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from perfed.maths.aggregate import masked_mean, weighted_mean
from perfed.method.declared import ParameterSet
from perfed.method.domains import (
    domain_weights,
    init_domain_weights,
    mean_loss_per_domain,
    reweight_samples,
    select_domain,
)
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

    Per-domain parameters are averaged with the numbers of the clients' samples of the domain as weights. In the paper,
    image experiments begin with ``warmup_rounds`` of FedAvg (appendix B.3).
    """

    needs_mean: ClassVar[str] = "it averages by domain, with each client's share of a domain"
    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, SHARED)
    needs_domains: ClassVar[bool] = True

    reweight: bool = Field(True, description="every domain counts the same in the loss")
    warmup_rounds: int = Field(0, ge=0, description="first rounds, of FedAvg with the same parameters for all domains")
    warmup_epochs: int | None = Field(1, ge=0, description="local epochs of these rounds; not given: local_epochs")

    def epochs_in(self, round_: int) -> int:
        """Return ``warmup_epochs`` in rounds of the warm-up, and ``local_epochs`` afterwards."""
        warmup_epochs = self.warmup_epochs if round_ <= self.warmup_rounds else None
        return self.local_epochs if warmup_epochs is None else warmup_epochs

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``domain_weights``: the weight of a sample of each domain."""
        return {"domain_weights": ParameterSet("server", init=init_domain_weights)}

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Compute the domains' weights from the numbers of samples of all clients."""
        if self.reweight:
            server.domain_weights = {"u": domain_weights(clients.run(self.count).domain_counts)}

    def count(self, cohort: Cohort) -> Reply:
        """Return the number of training samples of each domain."""
        return Reply(domain_counts=cohort.domain_counts)

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run a round of the method, or of FedAvg during the warm-up."""
        if clients.round > self.warmup_rounds:
            self.domain_round(server, clients)
            return
        reply = clients.train(self.warm_up, shared=server.shared)
        server.shared = weighted_mean(reply.shared, reply.num_samples)

    def domain_round(self, server: ServerState, clients: Clients) -> None:
        """Run E local epochs from the received model, then average by samples, and per-domain parameters by domain."""
        reply = clients.train(self.train, shared=server.shared, weights=server.domain_weights["u"])
        per_domain = {n: t for n, t in reply.shared.items() if self._is_per_domain(n)}
        common = {n: t for n, t in reply.shared.items() if n not in per_domain}
        means = {n: masked_mean(t, reply.domain_counts, server.shared[n]) for n, t in per_domain.items()}
        server.shared = {**weighted_mean(common, reply.num_samples), **means}

    def _is_per_domain(self, name: str) -> bool:
        """Return whether the parameter has one value per domain."""
        return {**self.default_placement, **self.placement}.get(stage_of(name)) == PER_DOMAIN

    def warm_up(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train all stages together on the plain loss, as if all samples belonged to the first domain.

        All domains then get the first domain's parameters.
        """
        cohort.load(shared)
        samples = cohort.samples()
        assert samples.domain is not None
        samples = replace(samples, domain=torch.zeros_like(samples.domain))
        cohort.fit(STAGES, epochs=self.epochs_in(cohort.where.round), samples=samples)
        for name in filter(self._is_per_domain, cohort.model):
            cohort.model[name] = cohort.model[name][:, :1].expand_as(cohort.model[name]).clone()
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def loss(self, cohort: Cohort) -> Loss | None:
        """Return the loss of local training; ``None`` for the usual one."""
        return None

    def train(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor) -> Reply:
        """Train all stages together on the re-weighted loss."""
        cohort.load(shared)
        samples = reweight_samples(cohort, weights)
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
    """A model per domain, each trained by FedAvg on the samples of its domain (Zhong et al. 2023, section 5).

    Mini-batches contain samples of all domains; the loss of each model is the mean over the samples of its domain.
    After a warm-up it is the paper's "FedAvg + separate FT", read as federated fine-tuning (section 5.3: fine-tuning on
    each domain is FedAvg too); :class:`FedAvgDomainFT` reads it as local fine-tuning.
    """

    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, PER_DOMAIN)

    @field_validator("reweight")
    @classmethod
    def _refuse_reweighting(cls, value: bool) -> bool:
        if value:
            raise ValueError("true has no effect here: no model sees two domains; allowed: false")
        return value

    def loss(self, cohort: Cohort) -> Loss:
        """Return the sum of the domains' mean losses."""
        return mean_loss_per_domain(cohort.num_domains)


@register("fedavg-domain-ft", title="FedAvg-Domain-FT")
class FedAvgDomainFT(FedAvg):
    """FedAvg; each client evaluates a copy per domain, fine-tuned on its own samples of the domain (Zhong et al. 2023).

    This reads the paper's "FedAvg + separate FT" (section 5, B.3.3) as local fine-tuning, on the local loss without
    extensions; ``fedavg-separate-ft`` reads it as federated fine-tuning. The global model predicts samples of domains
    without training samples at the client.
    """

    needs_domains: ClassVar[bool] = True

    finetune_epochs: int = Field(10, ge=0, description="local epochs of fine-tuning each copy before evaluation")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Fine-tune one copy of the global model for each domain, on the samples of the domain."""
        cohort.load(payload["shared"])
        copies = {}
        for domain in range(cohort.num_domains):
            copy = {name: tensor.clone() for name, tensor in cohort.model.items()}
            samples = select_domain(cohort.samples(), domain)
            cohort.fit(STAGES, params=copy, samples=samples, epochs=self.finetune_epochs)
            copies[str(domain)] = copy
        cohort.scratch["copies"] = copies

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return the outputs of the copy for each sample's domain; right after local training, of the trained model."""
        if "copies" not in cohort.scratch:
            return cohort.forward(x)
        domain = cohort.domain
        assert domain is not None
        outputs = torch.stack([cohort.forward(x, params=copy) for copy in cohort.scratch["copies"].values()], 2)
        rows, columns = torch.meshgrid(*(torch.arange(size, device=x.device) for size in domain.shape), indexing="ij")
        domain_outputs: Tensor = outputs[rows, columns, domain]
        return domain_outputs
