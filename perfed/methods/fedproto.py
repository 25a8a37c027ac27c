"""FedProto: clients with models of their own that share class means only."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.method.disclosure import Disclosure
from perfed.method.exchange import Reply, ServerState
from perfed.method.extension import extension_payloads
from perfed.method.registry import register
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.local import Local
from perfed.training.cohort import Cohort


@register(
    "fedproto-l",
    title="FedProto-L",
    extensions=(Prototypes,),
    defaults={"predict_with": "classifier", "source": "own"},
    summary="FedProto with each client's own class means and no communication (Xu et al. 2023, appendix C)",
    needs="class labels",
)
@register(
    "fedproto-g",
    title="FedProto-G",
    extensions=(Prototypes,),
    defaults={"predict_with": "classifier"},
    summary="FedProto predicting with the local classifier (Xu et al. 2023, appendix C)",
    needs="class labels",
)
@register("fedproto", title="FedProto", extensions=(Prototypes,), needs="class labels")
class FedProto(Local):
    """Local models aligned to the clients' common class means; nearest mean predicts (Tan et al. 2022, Algorithm 1).

    What is shared is the prototypes extension. Before the first class means exist, clients predict with the local
    classifier; a class without a mean is never predicted after that.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure()

    predict_with: Literal["prototypes", "classifier"] = Field(
        "prototypes", description="nearest class mean, or the local classifier"
    )

    def download(self, server: ServerState) -> dict[str, Any]:
        """The extensions' payload, with the class means."""
        return {"extensions": extension_payloads(self.extensions, server)}

    def train(self, cohort: Cohort) -> Reply:
        """Local training with the alignment to the received class means."""
        self._show(cohort)
        return super().train(cohort)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Every client has its own model; what is sent are the class means."""
        self._show(cohort)

    def _show(self, cohort: Cohort) -> None:
        """Keep the class means for :meth:`predict`."""
        sent = cohort.carried.get("prototypes", {})
        means = sent.get("centroids") or cohort.state.get("centroids")
        if means is not None and means["known"].any():
            cohort.scratch["means"] = means

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Minus the squared distance to each class mean as logits, one less than all others without a mean; or those
        of the classifier.
        """
        if self.predict_with == "classifier" or "means" not in cohort.scratch:
            return cohort.forward(x)
        means = cohort.scratch["means"]
        features = cohort.forward(x, stages=cohort.chain.stages_before("head")).flatten(2)
        distances = _squared_distances(features, means["mean"])
        known = means["known"][:, None]
        farthest = distances.masked_fill(~known, 0).amax(-1, keepdim=True)
        return -torch.where(known, distances, farthest + 1)


def _squared_distances(features: Tensor, means: Tensor) -> Tensor:
    """Of ``features`` ``(n, b, d)`` and ``means`` ``(n, C, d)``: ``(n, b, C)``."""
    if torch.compiler.is_compiling():  # cdist chooses its way by b, a graph is for any
        return (features[:, :, None] - means[:, None]).square().sum(-1)
    return torch.cdist(features, means).square()
