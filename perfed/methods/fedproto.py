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
    """Local models aligned to common class means; the nearest mean predicts (Tan et al. 2022, Algorithm 1).

    The prototypes extension exchanges the class means. Before they exist, clients predict with the local classifier;
    afterwards a class without a mean is never predicted.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure()

    predict_with: Literal["prototypes", "classifier"] = Field(
        "prototypes", description="nearest class mean, or the local classifier"
    )

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return the extensions' payload, which contains the class means."""
        return {"extensions": extension_payloads(self.extensions, server)}

    def train(self, cohort: Cohort) -> Reply:
        """Train locally, aligned to the received class means."""
        self._store_means(cohort)
        return super().train(cohort)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Store the received class means for prediction; every client has its own model."""
        self._store_means(cohort)

    def _store_means(self, cohort: Cohort) -> None:
        """Store the class means for :meth:`predict`."""
        received = cohort.carried.get("prototypes", {})
        means = received.get("centroids") or cohort.state.get("centroids")
        if means is not None and means["known"].any():
            cohort.scratch["means"] = means

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return minus the squared distance to each class mean as logits, or the classifier's logits.

        The logit of a class without a mean is smaller by one than the smallest of the others.
        """
        if self.predict_with == "classifier" or "means" not in cohort.scratch:
            return cohort.forward(x)
        means = cohort.scratch["means"]
        features = cohort.forward(x, stages=cohort.chain.stages_before("head")).flatten(2)
        distances = _squared_distances(features, means["mean"])
        has_mean = means["known"][:, None]
        farthest = distances.masked_fill(~has_mean, 0).amax(-1, keepdim=True)
        return -torch.where(has_mean, distances, farthest + 1)


def _squared_distances(features: Tensor, means: Tensor) -> Tensor:
    """Return the squared distances ``(n, b, C)`` of ``features`` ``(n, b, d)`` to ``means`` ``(n, C, d)``."""
    if torch.compiler.is_compiling():  # cdist chooses its algorithm by b, but a graph must work for any b.
        return (features[:, :, None] - means[:, None]).square().sum(-1)
    return torch.cdist(features, means).square()
