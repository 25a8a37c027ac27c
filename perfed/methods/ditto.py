"""Ditto: FedAvg, and for every client a model of its own that stays near the global one."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from perfed.data.federation import Federation
from perfed.method.declared import ParameterSet
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.exchange import Reply, ServerState
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.methods.proximal import STEP, ProximalKind, implicit_notes
from perfed.model.chain import STAGES, Model
from perfed.training.cohort import Cohort
from perfed.training.steprules import ProximalStep


@register("ditto", title="Ditto")
class Ditto(FedAvg):
    """FedAvg, and local models v that minimise ``f(v) + (lam / 2) |v - w|^2`` (Li et al. 2021, Algorithm 1).

    w is the global model as received. Both models are trained for ``local_epochs``. Personal parameters are trained
    with w and fixed while v is trained. With ``proximal = "implicit"``, SGD replaces the gradient of the quadratic term
    by ``v <- (v + lr lam w) / (1 + lr lam)`` after its step on f. This has the same fixed point and is stable even
    where explicit steps diverge.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})
    fits_unused: ClassVar[str] = "train"

    lam: float = Field(1.0, ge=0, description="lambda: how strongly v is pulled to the global model")
    proximal: ProximalKind = Field("explicit", description=STEP)

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``local``: each client's v."""
        return {"local": ParameterSet("client", like="shared")}

    def epochs_in(self, round_: int) -> int:
        """Return the epochs of both models, w and v."""
        return 2 * self.local_epochs

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train w on the local loss, then v on the local loss near the received w."""
        cohort.load(shared)
        cohort.fit(STAGES, epochs=self.local_epochs)
        cohort.close_extensions()  # They measure w.
        reply = Reply(shared=cohort.shared(), num_samples=cohort.num_samples)
        cohort.fit(
            cohort.shared_parameters,
            epochs=self.local_epochs,
            params=cohort.state["local"],
            update=ProximalStep(shared, self.lam, self.proximal),
        )
        cohort.load(cohort.state["local"])
        return reply

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Return notes on the stages in which explicit proximal steps would diverge."""
        return implicit_notes(self, model, self.lam, self.proximal)

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return nothing, because every client has its own model."""
        return {}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load v, the client's own model."""
        cohort.load(cohort.state["local"])
