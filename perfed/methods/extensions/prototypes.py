"""Alignment of features to class means, the extension of FedPAC and FedProto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.data.labels import no_labels
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import CLASS_COUNTS, CLASS_MEANS, Disclosure
from perfed.method.exchange import Replies, ServerState
from perfed.method.extension import Extension, register_extension
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step


@register_extension
class Prototypes(Extension):
    """Alignment of features to class means, ``(lambda / d) |f(x) - c_y|^2`` averaged over the mini-batch.

    FedPAC's feature alignment (Xu et al. 2023, eq. 8) and FedProto's regulariser (Tan et al. 2022, eq. 8). Features are
    the inputs of the head. The server stores the mean feature ("centroid") of every class over all samples of the
    round's clients, computed with each client's model after local training; a class without samples in a round keeps
    its old centroid. There is no alignment before the first centroids exist, and none for a class without a centroid.

    Example:
        >>> from perfed import build_method
        >>> build_method("fedrep", {"extensions": ["prototypes"], "alignment": 0.5}).extensions[0].alignment
        0.5
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"means": CLASS_MEANS, "counts": CLASS_COUNTS},
        counts=(CLASS_COUNTS,),
        per_round=lambda prototypes: 1,
        absent=lambda prototypes: {"means", "counts"} if prototypes.source == "own" else (),
    )
    name: ClassVar[str] = "prototypes"

    alignment: float = Field(1.0, ge=0, description="lambda, weight of the alignment; 0 turns it off")
    unknown_class: Literal["skip", "own"] = Field(
        "skip",
        description="class without a centroid: 'skip' it, or use the client's 'own' mean (authors' program)",
    )
    source: Literal["global", "own"] = Field(
        "global", description="'own': each client aligns to its own earlier means and sends none (FedProto-L)"
    )

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``centroids``, class means ``(C, d)`` and which exist ``(C,)``; on the client if they are its own."""
        return {"centroids": ParameterSet("server" if self.source == "global" else "client", init=_init_centroids)}

    def payload(self, server: ServerState) -> dict[str, Any]:
        """Return the centroids of all classes; nothing if clients use their own."""
        return {"centroids": server.centroids} if self.source == "global" else {}

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """Return the mean squared distance of trained features to the centroids of their classes, as a penalty."""
        centroids = payload["centroids"] if self.source == "global" else cohort.state["centroids"]
        means, exists = centroids["mean"], centroids["known"]
        active = bool(self.alignment and exists.any())
        if active and self.unknown_class == "own":
            means = torch.where(exists[:, :, None], means, cohort.class_means())
            exists = exists | (cohort.class_counts > 0)

        def value(step: Step) -> Tensor:
            features = step.representation().flatten(2) if active else step.weight
            if not features.requires_grad:
                return step.weight.new_zeros(step.weight.shape[0])
            rows = torch.arange(len(step.y), device=step.y.device)[:, None]
            target, use = step.select_rows(means)[rows, step.y], step.select_rows(exists)[rows, step.y]
            distances = (features - target).square().mean(2) * use
            return self.alignment * (distances * step.weight).sum(1)

        return value

    def client_update(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the class means of the updated features, and the number of samples of each class."""
        means, counts = cohort.class_means(), cohort.class_counts
        if self.source == "global":
            return {"means": means, "counts": counts}
        cohort.state["centroids"] = {"mean": means, "known": counts > 0}
        return {}

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Update the centroids, ``c_k = sum_i n_ik c_ik / sum_i n_ik``."""
        if self.source == "own":
            return
        means, counts, old = content["means"], content["counts"], server.centroids
        exists = old["known"] | (counts.sum(0) > 0)
        mean = replies.aggregator.aggregate({"mean": means}, counts, {"mean": old["mean"]})
        server.centroids = {**mean, "known": exists}


def _init_centroids(info: FederationInfo, key: Tensor) -> dict[str, Any]:
    if info.num_classes is None:
        raise no_labels("the prototypes extension needs", info.task)
    if not info.representation:
        raise PerfedError(
            "the prototypes extension compares the inputs of clients' heads, but their number differs between "
            "the clients of this model; add model.body (such as model.body=mlp)"
        )
    mean = torch.zeros(info.num_classes, info.representation, dtype=info.dtype)
    return {"mean": mean, "known": torch.zeros(info.num_classes, dtype=torch.bool)}
