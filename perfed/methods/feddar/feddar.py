"""FedDAR: a shared body and one head per domain."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from perfed.errors import PerfedError
from perfed.maths.aggregate import masked_mean, weighted_mean
from perfed.method.declared import FederationInfo
from perfed.method.domains import mean_loss_per_domain, reweight_samples
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.registry import register
from perfed.methods.domain_fedavg import DomainFedAvg
from perfed.methods.feddar.heads import WEIGHT, check_linear, join_bias, make_hessian_function, solve_heads, split_bias
from perfed.methods.feddar.second_order import Quadratics, add_quadratics, minimise_quadratics
from perfed.model.chain import STAGES, stage_of
from perfed.model.placement import PER_DOMAIN, PERSONAL, SHARED, Placement
from perfed.training.cohort import Cohort


@register(
    "feddar-wa",
    title="FedDAR-WA",
    defaults={"aggregation": "weighted"},
    summary="FedDAR with weighted averages of the heads (Zhong et al. 2023, Algorithm 1, eq. 6)",
)
@register(
    "feddar-sa",
    title="FedDAR-SA",
    summary="FedDAR with second-order aggregation of the heads (Zhong et al. 2023, Algorithm 1, eq. 8)",
    needs="heads that are linear",
)
class FedDAR(DomainFedAvg):
    """Shared body, one linear head per domain, two exchanges per round (Zhong et al. 2023, Algorithm 1).

    First each head is trained on the mean loss of its domain's samples in the mini-batch, without re-weighting, so that
    the training loss of this part is a sum over domains; the heads are aggregated per domain. Then the body is trained
    on the re-weighted loss with the new heads. ``local_epochs`` are the epochs of the body. Clients without samples of
    a domain do not contribute to its head; a domain without samples in the round keeps its head.

    The switches of the paper's ablation are ``reweight``, ``aggregation`` and ``alternate``. ``alternate = false`` is
    :class:`~perfed.methods.domain_fedavg.MultiHeadFedAvg`; with ``placement = { head = "shared" }`` in addition it is
    :class:`~perfed.methods.domain_fedavg.DomainFedAvg`, and without ``reweight`` FedAvg. The domain as an input is an
    option of the data, ``domain_input``; a projection is a body that ends in few outputs.

    ``damping tr(H) / D`` is added to the diagonal of a domain's summed Hessian H, of D rows, in the correction form of
    eq. 8 (:func:`~perfed.methods.feddar.second_order.minimise_quadratics`): heads move less in directions with little
    curvature, and not at all in directions without curvature. Eq. 8 itself has no damping. The default shortens steps
    in directions with less than a tenth of the mean curvature, in which the loss hardly changes and a few samples
    contain mostly noise. Each client's Hessians are computed one client at a time, and folded.

    ``head_epochs = "exact"`` uses each domain's least-squares solution, that of least norm if a client has fewer
    samples of a domain than there are features; such heads distort weighted averages, but not second-order aggregation.
    """

    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": PER_DOMAIN}

    head_epochs: Annotated[int, Field(ge=0)] | Literal["exact"] = Field(
        5,
        description="local epochs of the heads, before those of the body; 'exact': least squares (regression)",
    )
    aggregation: Literal["second-order", "weighted"] = Field(
        "second-order", description="aggregation of the heads: SA or WA"
    )
    damping: float = Field(
        0.1,
        ge=0,
        description="damping of the second-order aggregation, relative to the mean curvature of a domain's summed "
        "Hessian, tr(H)/D; 0 uses the pseudo-inverse",
    )
    hessian_at: Literal["trained", "received"] = Field("trained", description="heads at which Hessians are computed")
    hessian_limit_mb: int = Field(1024, ge=1, description="largest size of one client's Hessians, and of their sum")
    alternate: bool = Field(
        True, validate_default=True, description="heads first, then the body; false: both together, in one exchange"
    )

    @field_validator("alternate")
    @classmethod
    def _check_alternate(cls, value: bool, info: ValidationInfo) -> bool:
        places = {**cls.default_placement, **info.data.get("placement", {})}
        if value and any((places[stage] == PER_DOMAIN) != (stage == "head") for stage in STAGES):
            raise ValueError("true needs a placement with the head alone per-domain; allowed with this one: false")
        return value

    def epochs_in(self, round_: int) -> int:
        """Return the epochs of the heads, if they are trained before the body, and of the body."""
        if round_ <= self.warmup_rounds:
            return super().epochs_in(round_)
        heads = self.head_epochs if self.alternate and self.head_epochs != "exact" else 0
        return heads + self.local_epochs

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse second-order aggregation and exact heads if model, data or settings do not allow them."""
        if self.alternate and self.aggregation == "second-order":
            _check_loss(info, self.class_weights)
            check_linear(server.shared, "second-order aggregation")
            self._check_hessians(server.shared, info)
        if self.head_epochs == "exact":
            check_linear(server.shared, "head_epochs = 'exact'")
            if info.task != "regression" or self.extensions or not self.alternate:
                raise PerfedError("head_epochs = 'exact' is for regression without extensions, heads and body in turns")
            if PERSONAL in self.placement.values():
                raise PerfedError("head_epochs = 'exact' trains no personal parameters, and the placement has some")

    def _check_hessians(self, shared: Mapping[str, Tensor], info: FederationInfo) -> None:
        domains, outputs, k = shared[WEIGHT].shape
        classes = 1 if info.num_classes is None else outputs
        size, limit = domains * (classes * (k + 1)) ** 2 * 8, self.hessian_limit_mb << 20
        if size > limit:
            most = isqrt(limit // (8 * domains)) // classes - 1
            shorter = f"let the body end in at most {most} outputs (a projection) or " if most > 0 else ""
            raise PerfedError(
                f"second-order aggregation: one client's Hessians take {-(-size >> 20)} MB ({domains} domains, a head "
                f"with {classes} x ({k} + 1) weights), more than hessian_limit_mb = {self.hessian_limit_mb}; {shorter}"
                'raise the limit, or take aggregation = "weighted"'
            )

    def domain_round(self, server: ServerState, clients: Clients) -> None:
        """Train and aggregate the heads, then the body; or both together in one exchange."""
        if not self.alternate:
            super().domain_round(server, clients)
            return
        sent = {"weights": server.domain_weights["u"]}
        heads = self._weighted_heads if self.aggregation == "weighted" else self._second_order_heads
        server.shared = {**server.shared, **heads(clients, server.shared, sent)}
        reply = clients.train(self.train_body, shared=server.shared, **sent)
        server.shared = {**server.shared, **weighted_mean(reply.shared, reply.num_samples)}

    def _weighted_heads(self, clients: Clients, old: dict[str, Any], sent: dict[str, Any]) -> dict[str, Tensor]:
        """Train the heads, and return their means by name, ``(M, ...)``."""
        reply = clients.train(self.train_heads, closing=False, shared=old, **sent)
        return {name: masked_mean(x, reply.domain_counts, old[name]) for name, x in reply.heads.items()}

    def _second_order_heads(self, clients: Clients, old: dict[str, Any], sent: dict[str, Any]) -> dict[str, Tensor]:
        """Train the heads, and return their second-order aggregates by name, ``(M, ...)``."""
        joint = clients.info.num_classes is not None
        before = join_bias(old, joint)

        def fold(total: Quadratics | None, reply: dict[str, Any]) -> Quadratics:
            change = join_bias(reply["heads"], joint) - before
            return add_quadratics(total, change, reply["hessians"], reply["domain_counts"])

        reply = clients.train(self.train_heads, closing=False, reduce={"hessians": fold}, shared=old, **sent)
        return split_bias(minimise_quadratics(reply.hessians, before, damping=self.damping), old, joint)

    def train_heads(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor) -> Reply:
        """Train heads and personal parameters on the mean losses of the domains, with the body fixed."""
        cohort.load(shared)
        hessian_at = self.hessian_at if self.aggregation == "second-order" else ""
        hessians = {"hessians": make_hessian_function(cohort)} if hessian_at == "received" else {}
        if self.head_epochs == "exact":
            solve_heads(cohort)
        else:
            train = (*cohort.personal_parameters, *cohort.trainable_names("head"))
            cohort.fit(train, epochs=self.head_epochs, loss=mean_loss_per_domain(cohort.num_domains))
        heads = {name: cohort.model[name].detach() for name in cohort.trainable_names("head")}
        if hessian_at == "trained":
            hessians = {"hessians": make_hessian_function(cohort)}
        return Reply(heads=heads, domain_counts=cohort.domain_counts, **hessians)

    def train_body(self, cohort: Cohort, shared: dict[str, Any], weights: Tensor) -> Reply:
        """Train the body on the re-weighted loss, with the heads fixed."""
        cohort.load(shared)
        body = tuple(name for name in cohort.shared_parameters if stage_of(name) != "head")
        samples = reweight_samples(cohort, weights)
        cohort.fit(body, epochs=self.local_epochs, samples=samples)
        shared = {name: t for name, t in cohort.shared().items() if stage_of(name) != "head"}
        return Reply(shared=shared, num_samples=cohort.num_samples)


def _check_loss(info: FederationInfo, class_weights: str) -> None:
    """Refuse losses that are not plain means over samples, because their Hessians are not implemented."""
    loss = "the Cox partial likelihood (survival)" if info.task == "survival" else "losses with class_weights"
    if info.task == "survival" or class_weights != "none":
        raise PerfedError(f"second-order aggregation is not implemented for {loss}; add aggregation=weighted")
