"""Per-FedAvg: a global model from which one step of gradient descent makes a good model for each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Parameters
from perfed.training.cohort import Cohort
from perfed.training.step import Step
from perfed.training.steprules import CustomStep, DirectionStep, Gradient


@register("hf-maml", title="HF-MAML")
class HFMAML(Method):
    """Per-FedAvg with the Hessian-free meta-gradient HF-MAML (Fallah et al. 2020, Algorithm 1 and section 3).

    Every local step draws three mini-batches D, D', D'': ``u = w - alpha grad f(w; D)``, then ``w <- w - beta (I -
    alpha hess f(w; D'')) grad f(u; D')``. The meta-gradient replaces the gradient in the local optimiser, so that beta
    is ``lr``; the paper uses plain SGD. Clients evaluate the global model after ``adapt_steps`` steps of length alpha
    on their own training loss. The reported training loss is f(w; D). Personal parameters take the same steps and are
    not averaged. Statistics of batch-norm are updated in every evaluation of a gradient, including those at the shifted
    points.
    """

    needs_mean: ClassVar[str] = ""

    alpha: float = Field(0.01, ge=0, description="rate of the inner step and of adaptation")
    variant: Literal["hessian-free", "first-order", "exact"] = Field(
        "hessian-free",
        description="the Hessian's product with a gradient: from two gradients, left out, or by autograd",
    )
    delta: float = Field(1e-3, gt=0, description="the two gradients are at w +- delta times the gradient")
    adapt_steps: int = Field(1, ge=0, description="steps from the global model before evaluation")
    adapt_batch: Literal["all", "mini-batch"] = Field("all", description="samples of each of these steps")

    def epochs_in(self, round_: int) -> int:
        """Return the local epochs times the gradients of a step, where a Hessian-vector product counts as one."""
        return {"first-order": 2, "exact": 3, "hessian-free": 4}[self.variant] * self.local_epochs

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then compute the plain mean over the round's clients."""
        reply = clients.train(self.train, shared=server.shared)
        server.shared = clients.mean(reply.shared, current=server.shared)

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Take local steps along the meta-gradient, all stages together."""
        cohort.load(shared)
        cohort.fit(
            STAGES,
            epochs=self.local_epochs,
            update=DirectionStep(self.meta_gradient, streams=2 if self.variant == "first-order" else 3),
        )
        return Reply(shared=cohort.shared())

    def meta_gradient(self, w: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
        """Return ``(I - alpha hess f(w; D'')) grad f(w - alpha grad f(w; D); D')``; ``batches`` are D', D, D''."""
        outer = gradient(self._take_inner_step(w, gradient, batches[1:]), batches[0])
        if self.variant == "first-order":
            return outer
        if self.variant == "exact":
            hessian_product = gradient.multiply_hessian(outer, w, batches[2])
        else:
            ahead = gradient({name: t + self.delta * outer[name] for name, t in w.items()}, batches[2])
            behind = gradient({name: t - self.delta * outer[name] for name, t in w.items()}, batches[2])
            hessian_product = {name: (t - behind[name]) / (2 * self.delta) for name, t in ahead.items()}
        return {name: t - self.alpha * hessian_product[name] for name, t in outer.items()}

    def _take_inner_step(self, w: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
        """Return ``w - alpha grad f(w)``, with the gradient on the first of ``batches``."""
        gradients = gradient(w, batches[0])
        return {name: t - self.alpha * gradients[name] for name, t in w.items()}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Take ``adapt_steps`` steps of length alpha from the global model on the local loss, without extensions."""
        cohort.load(payload["shared"])
        cohort.fit(
            STAGES,
            steps=self.adapt_steps,
            samples=cohort.samples().in_batches("all" if self.adapt_batch == "all" else None),
            update=CustomStep(self._take_inner_step),
        )
