"""Fed-RoD: one body with two heads, a generic one for everybody and a personal one for each client."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from perfed.method.declared import ParameterSet
from perfed.method.disclosure import CLASS_COUNTS, PARAMETERS, ROWS, Disclosure
from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model
from perfed.training.cohort import Cohort
from perfed.training.step import Loss, Step


@register("fedrod", title="Fed-RoD", needs="class labels")
class FedRoD(FedAvg):
    """Generic model by balanced softmax, personal head on its logits (Chen & Chao 2022, Algorithm 1).

    A client has two heads on the same features, with generic logits g and personal logits p. It minimises ``CE(g + log
    n_ic) + CE(g + p)``, where only the personal head receives the gradient of the second term, and predicts with ``g +
    p``. The server averages bodies and generic heads as FedAvg does. The reported training loss is the sum of both
    terms.

    Both heads start from the same values. The variant whose personal heads come from a hypernetwork is not implemented.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS, "num_samples": ROWS}, counts=(CLASS_COUNTS,)
    )
    fits_unused: ClassVar[str] = "train"

    def adapt(self, model: Model) -> Model:
        """Return the model unchanged, after checking that it has a head."""
        return model.replace_head(lambda head, shape: head, "fedrod gives every client a second head")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``personal_head``, which never leaves the client."""
        return {"personal_head": ParameterSet("client", like="head")}

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train generic model and personal head, each on its own term, with the same mini-batches."""
        cohort.load(shared)
        personal = dict(cohort.state["personal_head"])
        cohort.fit(STAGES, epochs=self.local_epochs, also={"personal": personal}, loss=self.loss(cohort))
        cohort.state["personal_head"] = personal
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def loss(self, cohort: Cohort) -> Loss:
        """Return the loss ``CE(g + log n_ic) + CE(stop(g) + p(stop(features)))``."""
        log_counts = cohort.class_counts.clamp_min(1.0).log()

        def value(step: Step) -> Tensor:
            g = step.output()
            p = step.apply("head", step.representation().detach(), params=step.set_parameters("personal"))
            balanced = step.losses(g + step.select_rows(log_counts)[:, None])
            personal = step.losses(g.detach() + p)
            return ((balanced + personal) * step.weight).sum(1)

        return value

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return the logits ``g + p``, the sum of those of the shared and the personal head."""
        features = cohort.forward(x, stages=cohort.chain.stages_before("head"))
        g = cohort.forward(features, stages=("head",))
        return g + cohort.forward(features, stages=("head",), params=cohort.state["personal_head"])
