"""FedCP: for every sample a policy says which part of its features the global head gets, and which the personal one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from perfed.errors import PerfedError
from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model, Parameters, Shape, stage_of
from perfed.model.placement import PERSONAL, Placement
from perfed.training.cohort import Cohort
from perfed.training.step import Loss, Step

_BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
_OWN, _COMMON = "head.personal.", "head.general."


class PolicyHeads(nn.Module):
    """``personal(r f) + general(s f)``; the policy makes r and ``s = 1 - r`` of every feature from ``f v / |v|``."""

    context: Tensor

    def __init__(self, head: nn.Module, shape: Shape) -> None:
        super().__init__()
        if {parameter.ndim for parameter in head.parameters()} | {2} != {1, 2}:
            raise PerfedError(
                "fedcp's context is made of the matrices of a head of linear layers; this head has others"
            )
        size = torch.Size(shape).numel()
        self.general, self.personal = head, copy.deepcopy(head)
        self.policy = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())
        self.register_buffer("context", torch.ones(size))

    def forward(self, f: Tensor) -> Tensor:
        """Logits of features ``(batch, ...)``."""
        a = self.policy(f.flatten(1) * normalize(self.context, dim=0)).unflatten(1, (2, *f.shape[1:]))
        r = torch.sigmoid(a[:, 0] - a[:, 1])  # softmax of two; exactly no gradient while both heads are the same
        own = r * f
        out: Tensor = self.personal(own) + self.general(f - own)
        return out


@register("fedcp")
class FedCP(FedAvg):
    """Federated conditional policy (Zhang et al. 2023, KDD, Algorithm 1).

    A client minimises ``CE(personal(r f) + general(s f)) + lam MMD(f, f^g)``: f are its features, f^g those of the body
    as received, MMD^2 the mean over a mini-batch with the sum of four Gaussian kernels (variances 10, 15, 20, 50, as in
    the authors' program). The general head stays as received in local training; what the server averages is the mean of
    both heads, beside body and policy. The context v is the sum of the personal head's weights over the classes, as
    they were when the round began. The authors' program draws r by Gumbel softmax; here it is the softmax itself.
    """

    layer_placement: ClassVar[dict[str, Placement]] = {f"{_OWN}*": PERSONAL, "head.context": PERSONAL}
    fits_unused: ClassVar[str] = "train"

    lam: float = Field(5.0, ge=0, description="lambda: weight of the MMD")

    def adapt(self, model: Model) -> Model:
        """Two heads and the policy in place of the head."""
        return model.with_head(PolicyHeads, "fedcp gives every client two heads")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """The shared parameters, and the context: the product of the personal head's matrices, summed over its rows."""
        cohort.load(payload["shared"])
        matrices = [n for n, t in cohort.chain.named_parameters() if n.startswith(_OWN) and t.ndim == 2]
        context = torch.ones(cohort.n, 1, *cohort.chain.output_shapes["head"], dtype=cohort.dtype, device=cohort.device)
        for name in reversed(matrices):
            context = context @ cohort.model[name]
        cohort.model["head.context"] = context[:, 0]

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """All but the general head, then the mean of both heads for the others."""
        self.personalise(cohort, shared=shared)
        trained = [name for name in cohort.trainable(STAGES) if not name.startswith(_COMMON)]
        cohort.fit(trained, epochs=self.local_epochs, loss=self.loss(shared))
        sent = cohort.shared()
        for name in [name for name in sent if name.startswith(_COMMON) and sent[name].is_floating_point()]:
            sent[name] = (sent[name] + cohort.model[name.replace(_COMMON, _OWN)]) / 2
        return Reply(shared=sent, num_samples=cohort.num_samples)

    def loss(self, received: Parameters) -> Loss:
        """``CE + lam MMD^2(f, f^g)``, f^g in evaluation mode."""
        below = {name: t for name, t in received.items() if stage_of(name) != "head"}

        def value(step: Step) -> Tensor:
            with torch.no_grad():
                still = replace(step, trained=frozenset()).with_params({n: step.of(t) for n, t in below.items()})
                f_g = still.representation().flatten(2)
            distance = squared_mmd(step.representation().flatten(2), f_g, step.weight)
            return (step.losses() * step.weight).sum(1) + self.lam * distance

        return value


def squared_mmd(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Squared maximum mean discrepancy ``(n,)`` of ``x`` and ``y`` ``(n, b, d)``, samples weighing ``(n, b)``."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = (a[:, :, None] - b[:, None]).square().sum(3)
        return torch.stack([torch.exp(-squares / (2 * width)) for width in _BANDWIDTHS]).sum(0)

    pairs = kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)
    return torch.einsum("nij,ni,nj->n", pairs, weight, weight)
