"""FedDAR: a shared body and one head per domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.aggregate import masked_mean, second_order_mean, weighted_mean
from perfed.cohort import Cohort
from perfed.domains import reweighted
from perfed.errors import PerfedError
from perfed.hessian import softmax_hessian, squared_error_hessian, with_ones
from perfed.method import Clients, Replies, Reply, ServerState, register
from perfed.methods.domain_fedavg import DomainFedAvg
from perfed.model import stage_of
from perfed.placement import PER_DOMAIN, SHARED, Placement

WEIGHT, BIAS = "head.weight", "head.bias"


@register(
    "feddar-wa",
    defaults={"aggregation": "weighted"},
    summary="FedDAR with weighted averages of the heads (Zhong et al. 2023, Algorithm 1, eq. 6)",
)
@register(
    "feddar-sa", summary="FedDAR with second-order aggregation of the heads (Zhong et al. 2023, Algorithm 1, eq. 8)"
)
class FedDAR(DomainFedAvg):
    """Shared body, one linear head per domain, two exchanges a round (Zhong et al. 2023, Algorithm 1).

    First the heads are trained on the mean loss of each domain's samples (no re-weighting) and aggregated per domain,
    then the body on the re-weighted loss with the new heads. ``local_epochs`` are the epochs of the body. Domains that
    a client does not hold contribute nothing; a domain that nobody of the round holds keeps its head. Without
    ``alternate`` it is :class:`~perfed.methods.domain_fedavg.MultiHeadFedAvg`.

    ``damping`` is added to the diagonal of the summed Hessian in the correction form of eq. 8
    (:func:`~perfed.aggregate.second_order_mean`): heads move less in directions with little curvature, and stay where
    they are in directions without. Eq. 8 itself has none.
    """

    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": PER_DOMAIN}

    head_epochs: int = Field(5, ge=0, description="local epochs of the heads, before those of the body")
    aggregation: Literal["second-order", "weighted"] = Field("second-order", description="of the heads: SA or WA")
    damping: float = Field(1e-2, ge=0, description="of the second-order aggregation; 0 takes the pseudo-inverse")
    hessian_at: Literal["trained", "received"] = Field("trained", description="heads at which Hessians are taken")
    alternate: bool = Field(True, description="heads first, then the body; false: both together, in one exchange")

    def round(self, server: ServerState, clients: Clients) -> None:
        """Heads to the server and back, then bodies; or both together."""
        if not self.alternate:
            super().round(server, clients)
            return
        sent = {"weights": server.domain_weights["u"], "terms": self.term_payload(server)}
        reply = clients.run(self.train_heads, shared=server.shared, **sent)
        server.shared = {**server.shared, **self._heads(server.shared, reply)}
        reply = clients.run(self.train_body, shared=server.shared, **sent)
        server.shared = {**server.shared, **weighted_mean(reply.shared, reply.num_samples)}
        self.absorb_terms(server, reply)

    def _heads(self, old: Mapping[str, Tensor], reply: Replies) -> dict[str, Tensor]:
        """The aggregated heads by name, ``(M, ...)``."""
        counts = reply.domain_counts
        if self.aggregation == "weighted":
            return {name: masked_mean(x, counts, old[name]) for name, x in reply.heads.items()}
        joint = reply.hessians.shape[-1] != old[WEIGHT].shape[-1] + 1
        before, local = _joined(old, joint), _joined(reply.heads, joint)
        new = [
            second_order_mean(before[m], local[:, m], reply.hessians[:, m], counts[:, m], damping=self.damping)
            for m in range(len(before))
        ]
        return _parted(torch.stack(new), old, joint)

    def train_heads(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor, terms: dict[str, Any]) -> Reply:
        """Heads (with personal parameters), each on the samples of its domain, the body frozen."""
        cohort.load(shared)
        received = {} if self.hessian_at == "trained" else self._hessians(cohort)
        samples = reweighted(cohort.samples(), _mean_per_domain(cohort), cohort.client_of(cohort.samples()))
        train = (*cohort.personal_parameters, *cohort.trainable("head"))
        cohort.fit(train, epochs=self.head_epochs, samples=samples, penalties=self.penalties(cohort, terms))
        heads = {name: cohort.model[name].detach() for name in cohort.trainable("head")}
        hessians = received or self._hessians(cohort)
        return Reply(heads=heads, domain_counts=cohort.domain_counts, **hessians)

    def train_body(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor, terms: dict[str, Any]) -> Reply:
        """The body on the re-weighted loss, the heads frozen."""
        cohort.load(shared)
        body = tuple(name for name in cohort.shared_parameters if stage_of(name) != "head")
        samples = reweighted(cohort.samples(), weights, cohort.client_of(cohort.samples()))
        cohort.fit(body, epochs=self.local_epochs, samples=samples, penalties=self.penalties(cohort, terms))
        shared = {name: t for name, t in cohort.shared().items() if stage_of(name) != "head"}
        return Reply(shared=shared, num_samples=cohort.num_samples, terms=self.after_terms(cohort, terms))

    def _hessians(self, cohort: Cohort) -> dict[str, Tensor]:
        """``(n, M, D, D)`` of each domain's mean loss in its head, at the working heads."""
        if self.aggregation == "weighted":
            return {}
        samples = cohort.samples()
        if samples.domain is None or WEIGHT not in cohort.model or BIAS not in cohort.model:
            raise PerfedError('second-order aggregation needs domains and a linear head with bias (head = "linear")')
        features = with_ones(cohort.representation().flatten(1))
        group = cohort.client_of(samples) * cohort.num_domains + samples.domain
        groups = cohort.n * cohort.num_domains
        if cohort.num_classes is None:
            outputs = cohort.model[BIAS].shape[-1]
            found = squared_error_hessian(features, group, groups, outputs)
        else:
            found = softmax_hessian(features, cohort.features("head"), group, groups)
        return {"hessians": found.view(cohort.n, cohort.num_domains, *found.shape[1:])}


def _mean_per_domain(cohort: Cohort) -> Tensor:
    """``(n, M)``: with it, a client's loss over its samples is the sum over its domains of their mean losses."""
    counts = cohort.domain_counts
    return cohort.num_samples[:, None] / counts.clamp_min(1)


def _joined(heads: Mapping[str, Tensor], joint: bool) -> Tensor:
    """Weight with the bias as last column: ``(..., k + 1, C)``; with a joint Hessian ``(..., C (k + 1), 1)``."""
    both = torch.cat([heads[WEIGHT], heads[BIAS].unsqueeze(-1)], dim=-1)
    return both.flatten(-2).unsqueeze(-1) if joint else both.transpose(-1, -2)


def _parted(joined: Tensor, like: Mapping[str, Tensor], joint: bool) -> dict[str, Tensor]:
    """The inverse of :func:`_joined` for ``(M, ...)``."""
    domains, outputs, k = like[WEIGHT].shape
    both = joined.view(domains, outputs, k + 1) if joint else joined.transpose(1, 2)
    both = both.to(like[WEIGHT].dtype)
    return {WEIGHT: both[..., :k].contiguous(), BIAS: both[..., k].contiguous()}
