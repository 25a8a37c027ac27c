"""FedPAC: features aligned to common class means, heads combined across clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.maths.aggregate import weighted_mean
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Replies, Reply, ServerState, each
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.fedpac.combination import client_statistics, combination_weights, combination_weights_general
from perfed.model.placement import PERSONAL, SHARED, Placement
from perfed.training.cohort import Cohort


@register(
    "fedpac-none",
    title="FedPAC-None",
    defaults={"collaboration": False},
    summary="FedPAC's ablation: its local training alone (Xu et al. 2023, Table 2)",
)
@register(
    "fedpac-cc",
    title="FedPAC-CC",
    summary="FedPAC's ablation: classifier collaboration alone (Xu et al. 2023, Table 2)",
    needs="class labels",
)
@register(
    "fedpac-fa",
    title="FedPAC-FA",
    extensions=(Prototypes,),
    defaults={"collaboration": False},
    summary="FedPAC's ablation: feature alignment alone (Xu et al. 2023, Table 2)",
    needs="class labels",
)
@register("fedpac", title="FedPAC", extensions=(Prototypes,), needs="class labels")
class FedPAC(Method):
    """Feature alignment and classifier collaboration (Xu et al. 2023, Algorithm 1).

    ``local_epochs`` are the epochs E of the body; the head has ``head_epochs`` before. The alignment is the prototypes
    extension, ``alignment = 0`` turns it off; ``collaboration = false`` leaves every client its own head.

    Clients that were not chosen keep their combined head and take the newest body. If the problem of a client does not
    solve, it keeps its own head, and the run's summary counts it under ``unsolved_combinations``.

    The weights of the combination, with their variance term V_i / n_i, are computed in
    :mod:`perfed.methods.fedpac.combination` and compared with brute force in ``tests/methods/test_combination.py``.
    """

    needs_mean: ClassVar[str] = "FedPAC combines heads by second moments of the clients' features"
    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": PERSONAL}

    collaboration: bool = Field(True, description="combine the heads of the round's clients")
    head_epochs: int = Field(1, ge=0, description="epochs of the head, before those of the body")
    head_lr: float = Field(0.1, ge=0, description="learning rate of the head")
    inner_product: Literal["identity", "covariance"] = Field(
        "identity",
        description="of class means: plain (eq. 43), or with each client's feature covariance (appendix A.2)",
    )
    ridge: float = Field(1e-3, ge=0, description="added to the feature covariance, as a part of its mean eigenvalue")
    cut: float = Field(0.0, ge=0, lt=1, description="weights below are set to 0 (authors' program: 1e-3)")

    def epochs_in(self, round_: int) -> int:
        """Of the head, and of the body."""
        return self.head_epochs + self.local_epochs

    def first_lr_of(self, stage: str) -> float:
        """``head_lr`` for the head."""
        return self.head_lr if stage == "head" else super().first_lr_of(stage)

    def sets(self) -> dict[str, ParameterSet]:
        """The clients' combined heads, by id, and which clients have one."""
        if not self.collaboration:
            return {}
        return {"heads": ParameterSet("table", like="head"), "combined": ParameterSet("table", init=_not_yet)}

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange; mean of the bodies, means of the classes (the extension), combined heads."""
        sent = self._sent_heads(server, clients.ids)
        reply = clients.train(self.train, shared=server.shared, **sent)
        server.shared = weighted_mean(reply.shared, reply.num_samples)
        if self.collaboration:
            mixed = self._combine(reply, clients)
            server.heads = {**server.heads, **{i: {**server.heads[i], **head} for i, head in mixed.items()}}
            done = {i: {"combined": torch.ones_like(server.combined[i]["combined"])} for i in mixed}
            server.combined = {**server.combined, **done}

    def _combine(self, reply: Replies, clients: Clients) -> dict[str, Any]:
        """``phi_i = sum_j alpha_ij phi_j`` with the weights of eq. 11, over the round's clients, by id."""
        sent, counts = reply.statistics, reply.num_samples
        if self.inner_product == "identity":
            weights, failed = combination_weights(sent["means"], sent["variances"], counts, cut=self.cut)
        else:
            moments = sent["second_moments"]
            weights, failed = combination_weights_general(
                sent["means"], moments, counts, ridge=self.ridge, cut=self.cut
            )
        clients.show("combination", weights=weights, clients=reply.ids)
        clients.count("unsolved_combinations", [i for i, bad in zip(reply.ids, failed.tolist(), strict=True) if bad])
        mixed = {name: torch.tensordot(weights.to(t), t, 1) for name, t in reply.head.items()}
        return {i: {name: t[row] for name, t in mixed.items()} for row, i in enumerate(reply.ids)}

    def train(self, cohort: Cohort, shared: dict[str, Any], **sent: Any) -> Reply:
        """Statistics with the received body, head, body, class means with the new body (the extension)."""
        cohort.load(shared, self._own_heads(cohort, **sent))
        content: dict[str, Any] = {}
        if self.collaboration:
            content["statistics"] = self._statistics(cohort)
        cohort.fit(cohort.personal_parameters, epochs=self.head_epochs)
        cohort.fit(cohort.shared_parameters, epochs=self.local_epochs)
        if self.collaboration:
            content["head"] = {name: cohort.model[name].detach() for name in _personal_head(cohort)}
        content |= {"shared": cohort.shared(), "num_samples": cohort.num_samples}
        return Reply(**content)

    def _statistics(self, cohort: Cohort) -> dict[str, Any]:
        """Of the features under the received body: ``h`` ``(n, C, d)`` and V, or what the general form needs."""
        samples, general = cohort.samples(), self.inner_product == "covariance"
        found = client_statistics(
            cohort.representation().flatten(1),
            samples.y,
            cohort.client_of(samples),
            cohort.n,
            cohort.class_counts.shape[1],
            second_moments=general,
        )
        last = {"second_moments": found.second_moments} if general else {"variances": found.variances}
        return {"means": found.means, **last}

    def download(self, server: ServerState) -> dict[str, Any]:
        """The body, and the combined heads."""
        return {"shared": server.shared, **self._sent_heads(server, server.heads if self.collaboration else ())}

    def _sent_heads(self, server: ServerState, ids: Iterable[str]) -> dict[str, Any]:
        if not self.collaboration:
            return {}
        ids = list(ids)
        return {
            "heads": each({i: server.heads[i] for i in ids}),
            "combined": each({i: server.combined[i] for i in ids}),
        }

    def _own_heads(self, cohort: Cohort, **sent: Any) -> dict[str, Any]:
        """The combined heads; a client that has none yet keeps its own. The rest of a head is the client's."""
        if not self.collaboration:
            return {}
        chosen, own = sent["combined"]["combined"], {name: cohort.model[name] for name in _personal_head(cohort)}
        return {n: torch.where(chosen.view(-1, *[1] * (t.ndim - 1)), sent["heads"][n], t) for n, t in own.items()}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """The newest body with the client's combined head."""
        cohort.load(payload["shared"], self._own_heads(cohort, **payload))


def _personal_head(cohort: Cohort) -> list[str]:
    return [name for name in cohort.trainable_names("head") if cohort.places[name] == "personal"]


def _not_yet(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"combined": torch.tensor(False)}
