"""FedPAC: features aligned to common class means, and heads combined across clients."""

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
    summary="FedPAC's ablation: only its local training (Xu et al. 2023, Table 2)",
)
@register(
    "fedpac-cc",
    title="FedPAC-CC",
    summary="FedPAC's ablation: only classifier collaboration (Xu et al. 2023, Table 2)",
    needs="class labels",
)
@register(
    "fedpac-fa",
    title="FedPAC-FA",
    extensions=(Prototypes,),
    defaults={"collaboration": False},
    summary="FedPAC's ablation: only feature alignment (Xu et al. 2023, Table 2)",
    needs="class labels",
)
@register("fedpac", title="FedPAC", extensions=(Prototypes,), needs="class labels")
class FedPAC(Method):
    """Feature alignment and classifier collaboration (Xu et al. 2023, Algorithm 1).

    ``local_epochs`` are the epochs E of the body; before them the head is trained for ``head_epochs``. The prototypes
    extension aligns the features; ``alignment = 0`` turns it off. With ``collaboration = false`` heads are not
    combined.

    Clients that do not take part keep their combined head and use the newest body. If the problem of a client cannot be
    solved, it keeps its own head, and the run's summary counts it under ``unsolved_combinations``.

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
        description="inner product of class means: plain (eq. 43), or by each client's feature covariance (A.2)",
    )
    ridge: float = Field(
        1e-3, ge=0, description="added to the feature covariance, as a fraction of its mean eigenvalue"
    )
    cut: float = Field(0.0, ge=0, lt=1, description="smaller weights are set to 0 (authors' program: 1e-3)")

    def epochs_in(self, round_: int) -> int:
        """Return the epochs of the head and of the body."""
        return self.head_epochs + self.local_epochs

    def first_lr_of(self, stage: str) -> float:
        """Return ``head_lr`` for the head, and the usual learning rate for other stages."""
        return self.head_lr if stage == "head" else super().first_lr_of(stage)

    def sets(self) -> dict[str, ParameterSet]:
        """Return the tables ``heads``, the clients' combined heads, and ``combined``, which clients have one."""
        if not self.collaboration:
            return {}
        return {"heads": ParameterSet("table", like="head"), "combined": ParameterSet("table", init=_init_combined)}

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange; average the bodies and combine the heads, while the extension averages class means."""
        sent = self._sent_heads(server, clients.ids)
        reply = clients.train(self.train, shared=server.shared, **sent)
        server.shared = weighted_mean(reply.shared, reply.num_samples)
        if self.collaboration:
            mixed = self._combine_heads(reply, clients)
            server.heads = {**server.heads, **{i: {**server.heads[i], **head} for i, head in mixed.items()}}
            combined = {i: {"combined": torch.ones_like(server.combined[i]["combined"])} for i in mixed}
            server.combined = {**server.combined, **combined}

    def _combine_heads(self, reply: Replies, clients: Clients) -> dict[str, Any]:
        """Return ``phi_i = sum_j alpha_ij phi_j`` by client id, with the weights of eq. 11 over the round's clients."""
        statistics, counts = reply.statistics, reply.num_samples
        if self.inner_product == "identity":
            weights, failed = combination_weights(statistics["means"], statistics["variances"], counts, cut=self.cut)
        else:
            moments = statistics["second_moments"]
            weights, failed = combination_weights_general(
                statistics["means"], moments, counts, ridge=self.ridge, cut=self.cut
            )
        clients.show("combination", weights=weights, clients=reply.ids)
        clients.count("unsolved_combinations", [i for i, bad in zip(reply.ids, failed.tolist(), strict=True) if bad])
        mixed = {name: torch.tensordot(weights.to(t), t, 1) for name, t in reply.head.items()}
        return {i: {name: t[row] for name, t in mixed.items()} for row, i in enumerate(reply.ids)}

    def train(self, cohort: Cohort, shared: dict[str, Any], **sent: Any) -> Reply:
        """Compute statistics with the received body, then train the head and the body."""
        cohort.load(shared, self._select_heads(cohort, **sent))
        content: dict[str, Any] = {}
        if self.collaboration:
            content["statistics"] = self._compute_statistics(cohort)
        cohort.fit(cohort.personal_parameters, epochs=self.head_epochs)
        cohort.fit(cohort.shared_parameters, epochs=self.local_epochs)
        if self.collaboration:
            content["head"] = {name: cohort.model[name].detach() for name in _list_personal_head(cohort)}
        content |= {"shared": cohort.shared(), "num_samples": cohort.num_samples}
        return Reply(**content)

    def _compute_statistics(self, cohort: Cohort) -> dict[str, Any]:
        """Return statistics of the features under the received body.

        They are ``h`` ``(n, C, d)`` and V, or the second moments in place of V for the general form.
        """
        samples, general = cohort.samples(), self.inner_product == "covariance"
        statistics = client_statistics(
            cohort.representation().flatten(1),
            samples.y,
            cohort.client_of(samples),
            cohort.n,
            cohort.class_counts.shape[1],
            second_moments=general,
        )
        last = {"second_moments": statistics.second_moments} if general else {"variances": statistics.variances}
        return {"means": statistics.means, **last}

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return the body and the combined heads."""
        return {"shared": server.shared, **self._sent_heads(server, server.heads if self.collaboration else ())}

    def _sent_heads(self, server: ServerState, ids: Iterable[str]) -> dict[str, Any]:
        if not self.collaboration:
            return {}
        ids = list(ids)
        return {
            "heads": each({i: server.heads[i] for i in ids}),
            "combined": each({i: server.combined[i] for i in ids}),
        }

    def _select_heads(self, cohort: Cohort, **sent: Any) -> dict[str, Any]:
        """Return the personal part of the heads: combined, or the client's own before its first combination."""
        if not self.collaboration:
            return {}
        has_combined, local_heads = (
            sent["combined"]["combined"],
            {name: cohort.model[name] for name in _list_personal_head(cohort)},
        )
        return {
            n: torch.where(has_combined.view(-1, *[1] * (t.ndim - 1)), sent["heads"][n], t)
            for n, t in local_heads.items()
        }

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load the newest body with the client's combined head."""
        cohort.load(payload["shared"], self._select_heads(cohort, **payload))


def _list_personal_head(cohort: Cohort) -> list[str]:
    return [name for name in cohort.trainable_names("head") if cohort.places[name] == "personal"]


def _init_combined(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"combined": torch.tensor(False)}
