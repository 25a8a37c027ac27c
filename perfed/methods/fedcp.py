"""FedCP: for every sample a policy says which part of its features the global head gets, and which the personal one."""

from __future__ import annotations

import copy
from functools import partial, reduce
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from perfed.errors import PerfedError
from perfed.maths.divergence import mean_kernel
from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model, Parameters, Shape
from perfed.model.placement import PERSONAL, Placement
from perfed.training.cohort import Cohort
from perfed.training.step import Step, mean_loss


class PolicyHeads(nn.Module):
    """Two heads, ``personal(r f) + general(s f)``, with ``r`` and ``s = 1 - r`` from a policy on ``f v / |v|``."""

    def __init__(self, head: nn.Module, shape: Shape) -> None:
        super().__init__()
        if {parameter.ndim for parameter in head.parameters()} | {2} != {1, 2}:
            raise PerfedError(
                "fedcp computes its context from the matrices of a head of linear layers; this head has other layers"
            )
        self.general, self.personal, size = head, copy.deepcopy(head), torch.Size(shape).numel()
        self.policy = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())
        self.context = nn.Buffer(torch.ones(size))

    def forward(self, f: Tensor) -> Tensor:
        """Return the logits of features ``(batch, ...)``."""
        a = self.policy(f.flatten(1) * nn.functional.normalize(self.context, dim=0)).unflatten(1, (2, *f.shape[1:]))
        personal_features = f * torch.sigmoid(
            a[:, 0] - a[:, 1]
        )  # r is a softmax of two; its gradient is zero while both heads are equal.
        return torch.add(self.personal(personal_features), self.general(f - personal_features))


@register("fedcp", title="FedCP")
class FedCP(FedAvg):
    """Federated conditional policy (Zhang et al. 2023, KDD, Algorithm 1).

    A client minimises ``CE(personal(r f) + general(s f)) + lam MMD^2(f, f^g)``, where f are its features, f^g are the
    features of the body as received, and MMD^2 uses the sum of Gaussian kernels of the authors' program (variances 10,
    15, 20 and 50). The general head is fixed in local training; the server averages body, policy, and the mean of both
    heads. v is the personal head, summed over the classes, at the start of the round. r is a softmax (authors' program:
    a Gumbel softmax).
    """

    layer_placement: ClassVar[dict[str, Placement]] = {"head.personal.*": PERSONAL, "head.context": PERSONAL}
    fits_unused: ClassVar[str] = "train"

    lam: float = Field(5.0, ge=0, description="lambda: weight of the MMD")

    def adapt(self, model: Model) -> Model:
        """Return the model with two heads and the policy instead of the head."""
        return model.replace_head(PolicyHeads, "fedcp gives every client two heads")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load the shared parameters, and compute the context from the personal head's product of matrices."""
        cohort.load(payload["shared"])
        matrices = [n for n, t in cohort.chain.named_parameters() if n.startswith("head.personal.") and t.ndim == 2]
        cohort.model["head.context"] = reduce(lambda below, w: w @ below, (cohort.model[n] for n in matrices)).sum(1)

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train all parameters except the general head, and send the mean of both heads."""
        self.personalise(cohort, shared=shared)
        trained = [name for name in cohort.trainable_names(STAGES) if not name.startswith("head.general.")]
        cohort.fit(trained, epochs=self.local_epochs, loss=partial(self.loss, shared))
        general = set(cohort.shared_parameters).difference(trained)
        means = {n: (cohort.model[n] + cohort.model[n.replace("general", "personal", 1)]) / 2 for n in general}
        return Reply(shared=cohort.shared() | means, num_samples=cohort.num_samples)

    def loss(self, received: Parameters, step: Step) -> Tensor:
        """Return ``CE + lam MMD^2(f, f^g)``, with f^g computed in evaluation mode."""
        f_g = (
            step.in_evaluation_mode({n: step.select_rows(t) for n, t in received.items()})
            .representation()
            .flatten(2)
            .detach()
        )
        features, weight = (
            torch.cat([step.representation().flatten(2), f_g], 1),
            torch.cat([step.weight, -step.weight], 1),
        )
        return mean_loss(step) + self.lam * mean_kernel(features, weight, [1 / 20, 1 / 30, 1 / 40, 1 / 100])
