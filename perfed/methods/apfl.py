"""APFL: every client evaluates a mixture of the global model and a local model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from perfed.method.declared import ParameterSet
from perfed.method.disclosure import PARAMETERS, Disclosure
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Parameters
from perfed.training.cohort import Cohort
from perfed.training.step import Step, add_penalties, mean_loss


@register("apfl", title="APFL")
class APFL(Method):
    """Mixture ``alpha v + (1 - alpha) w`` of a local and the global model (Deng et al. 2020, Algorithm 1).

    On every mini-batch w takes a step along the gradient of its own loss, and v takes a step along the gradient of the
    mixture's loss (which contains the factor alpha; Adam cancels a constant factor). Both losses include the
    extensions' penalties, and the reported training loss is their sum. Personal parameters are not mixed; they are
    trained on both losses. Batch-norm keeps statistics of w, which are averaged, and statistics of the mixture, which
    stay with v; a personal batch-norm keeps only those of the mixture, which is the evaluated model.
    Departures: alpha is fixed, not learnt; w is averaged after every round of local epochs.
    """

    needs_mean: ClassVar[str] = ""
    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS})
    fits_unused: ClassVar[str] = "train"

    alpha: float = Field(0.25, ge=0, le=1, description="share of the local model in the mixture")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``local``: each client's v."""
        return {"local": ParameterSet("client", like="shared")}

    def epochs_in(self, round_: int) -> int:
        """Return the epochs of both models, the global and the local one."""
        return 2 * self.local_epochs

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, and set w to the plain mean over the round's clients."""
        reply = clients.train(self.train, shared=server.shared)
        server.shared = clients.mean(reply.shared, current=server.shared)

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train w and v on the same mini-batches."""
        cohort.load(shared)
        local, mixed = dict(cohort.state["local"]), cohort.shared_parameters
        objective = add_penalties(mean_loss, cohort.penalties)
        statistics = cohort.personal().keys() - set(cohort.personal_parameters)
        statistics_of_w = {name: cohort.model[name].clone() for name in statistics}

        def loss_of_both(step: Step) -> Tensor:
            fixed, v = {name: tensor.detach() for name, tensor in step.params.items()}, step.set_parameters("local")
            loss_at_w = objective(step.with_params(step.set_parameters("w")))
            return loss_at_w + objective(step.with_params(v | self.mixture(mixed, v, fixed)))

        cohort.penalties = ()  # Both losses include them.
        cohort.fit(STAGES, epochs=self.local_epochs, also={"local": local, "w": statistics_of_w}, loss=loss_of_both)
        cohort.state["local"] = local
        cohort.close_extensions()  # They measure w.
        reply = Reply(shared=cohort.shared())
        cohort.load(local, self.mixture(mixed, local, cohort.model))
        return reply

    def mixture(self, names: Sequence[str], local: Parameters, other: Parameters) -> Parameters:
        """Return ``alpha v + (1 - alpha) w`` of the parameters in ``names``; ``local`` is v and ``other`` is w."""
        return {name: self.alpha * local[name] + (1 - self.alpha) * other[name] for name in names}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load the mixture of v with the newest global model."""
        w = payload["shared"]
        local = cohort.state["local"]
        cohort.load(w, local, self.mixture(cohort.shared_parameters, local, w))
