"""GPFL: category embeddings that all clients share guide the features; a valve makes them global and personal."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model, Shape
from perfed.model.placement import PERSONAL, SHARED, Placement
from perfed.training.cohort import Cohort
from perfed.training.step import Step


class Valve(nn.Module):
    """The layer ``relu((1 + gamma(c)) f + beta(c))`` of features f and a condition c, with category embeddings."""

    def __init__(self, shape: Shape, categories: int) -> None:
        super().__init__()
        size = torch.Size(shape).numel()
        self.gamma = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))
        self.beta = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))
        self.embeddings = nn.Parameter(torch.randn(categories, size))
        self.condition = nn.Buffer(torch.zeros(size))

    def forward(self, f: Tensor) -> Tensor:
        """Return the transformed features ``(batch, ...)``."""
        return torch.relu((1 + self.gamma(self.condition)) * f.flatten(1) + self.beta(self.condition)).view_as(f)


@register("gpfl", title="GPFL", needs="class labels")
class GPFL(FedAvg):
    """Global and personalised feature information at the same time (Zhang et al. 2023, ICCV, Algorithm 1).

    With category embeddings E (rows E_c) and the valve v, features f become ``f_p = v(f, sum_c a_c E_c)`` for the
    client's personal head, with a_c its share of category c, and ``f_g = v(f, mean_c E_c)`` for the guidance by global
    features. The client minimises ``CE(head(f_p)) - log softmax_y(cos(f_g, E)) + lam |f_g - E_y| + mu / 2 (|E|^2 +
    |v|^2)``; the third term and both conditions use E as received. (In the authors' program the conditions use E as the
    client last sent it, and the third term is over a whole mini-batch. In the paper a is divided by the number of
    categories, eq. 7, and eq. 11 has no squares.)
    """

    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": PERSONAL}
    layer_placement: ClassVar[dict[str, Placement]] = {"head.0.*": SHARED, "head.0.condition": PERSONAL}
    fits_unused: ClassVar[str] = "train"

    lam: float = Field(0.01, ge=0, description="lambda: weight of the guidance in magnitude (program: 0.01 for a CNN)")
    mu: float = Field(0.1, ge=0, description="weight decay of valve and embeddings (program: 0.1 for a CNN)")

    def adapt(self, model: Model) -> Model:
        """Return the model with the valve before the head, and a category embedding for each output."""
        return model.insert_before_head(Valve, "gpfl puts a valve before the head")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load the shared parameters, and compute the client's condition."""
        cohort.load(payload["shared"])
        shares, received = cohort.class_counts / cohort.num_samples[:, None], cohort.model["head.0.embeddings"]
        cohort.model["head.0.condition"] = torch.einsum("nc,ncd->nd", shares, received[:, : shares.shape[1]])

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train all parameters together on the three losses."""
        self.personalise(cohort, shared=shared)
        cohort.fit(STAGES, epochs=self.local_epochs, loss=partial(self.loss, shared["head.0.embeddings"]))
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def loss(self, received: Tensor, step: Step) -> Tensor:
        """Return the sum of the personal loss, the guidance in angle and in magnitude, and the weight decay."""
        frozen = step.select_rows(received)
        f_g = step.apply("head.0", step.representation(), {"head.0.condition": frozen.mean(1)}).flatten(2)
        angle = normalize(f_g, dim=2) @ normalize(step.params["head.0.embeddings"], dim=2).mT
        distance: Tensor = torch.linalg.vector_norm(f_g - frozen.take_along_dim(step.y[:, :, None], 1), dim=2)
        losses = step.losses() + step.losses(angle) + self.lam * distance
        weights = (t for n, t in step.params.items() if n.startswith("head.0.") and t.requires_grad)
        return (losses * step.weight).sum(1) + self.mu / 2 * sum(t.square().flatten(1).sum(1) for t in weights)
