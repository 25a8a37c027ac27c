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
    """``personal(r f) + general(s f)``; the policy makes r and ``s = 1 - r`` of every feature from ``f v / |v|``."""

    def __init__(self, head: nn.Module, shape: Shape) -> None:
        super().__init__()
        if {parameter.ndim for parameter in head.parameters()} | {2} != {1, 2}:
            raise PerfedError("fedcp's context is of the matrices of a head of linear layers; this head has others")
        self.general, self.personal, size = head, copy.deepcopy(head), torch.Size(shape).numel()
        self.policy = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())
        self.context = nn.Buffer(torch.ones(size))

    def forward(self, f: Tensor) -> Tensor:
        """Logits of features ``(batch, ...)``."""
        a = self.policy(f.flatten(1) * nn.functional.normalize(self.context, dim=0)).unflatten(1, (2, *f.shape[1:]))
        own = f * torch.sigmoid(a[:, 0] - a[:, 1])  # r, a softmax of two; no gradient while both heads are the same
        return torch.add(self.personal(own), self.general(f - own))


@register("fedcp", title="FedCP")
class FedCP(FedAvg):
    """Federated conditional policy (Zhang et al. 2023, KDD, Algorithm 1).

    A client minimises ``CE(personal(r f) + general(s f)) + lam MMD^2(f, f^g)``: f are its features, f^g those of the
    body as received, MMD^2 with the authors' program's sum of Gaussian kernels (variances 10, 15, 20 and 50). The
    general head rests in local training; the server averages the mean of both heads, beside body and policy. v is the
    personal head summed over the classes when the round began; r is a softmax (authors' program: a Gumbel softmax).
    """

    layer_placement: ClassVar[dict[str, Placement]] = {"head.personal.*": PERSONAL, "head.context": PERSONAL}
    fits_unused: ClassVar[str] = "train"

    lam: float = Field(5.0, ge=0, description="lambda: weight of the MMD")

    def adapt(self, model: Model) -> Model:
        """Two heads and the policy in place of the head."""
        return model.replace_head(PolicyHeads, "fedcp gives every client two heads")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """The shared parameters, and the context: the product of the personal head's matrices, summed over its rows."""
        cohort.load(payload["shared"])
        own = [n for n, t in cohort.chain.named_parameters() if n.startswith("head.personal.") and t.ndim == 2]
        cohort.model["head.context"] = reduce(lambda below, w: w @ below, (cohort.model[n] for n in own)).sum(1)

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """All but the general head, then the mean of both heads for the others."""
        self.personalise(cohort, shared=shared)
        trained = [name for name in cohort.trainable_names(STAGES) if not name.startswith("head.general.")]
        cohort.fit(trained, epochs=self.local_epochs, loss=partial(self.loss, shared))
        general = set(cohort.shared_parameters).difference(trained)
        means = {n: (cohort.model[n] + cohort.model[n.replace("general", "personal", 1)]) / 2 for n in general}
        return Reply(shared=cohort.shared() | means, num_samples=cohort.num_samples)

    def loss(self, received: Parameters, step: Step) -> Tensor:
        """``CE + lam MMD^2(f, f^g)``, f^g in evaluation mode."""
        f_g = (
            step.in_evaluation_mode({n: step.select_rows(t) for n, t in received.items()})
            .representation()
            .flatten(2)
            .detach()
        )
        both, weight = torch.cat([step.representation().flatten(2), f_g], 1), torch.cat([step.weight, -step.weight], 1)
        return mean_loss(step) + self.lam * mean_kernel(both, weight, [1 / 20, 1 / 30, 1 / 40, 1 / 100])
