"""MR-MTL: every client has a model of its own, pulled to the mean of all."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from perfed.data.federation import Federation
from perfed.method.declared import ParameterSet
from perfed.method.disclosure import PARAMETERS, Disclosure
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.methods.proximal import STEP, ProximalKind, implicit_notes
from perfed.model.chain import STAGES, Model
from perfed.training.cohort import Cohort
from perfed.training.steprules import ProximalStep


@register("mr-mtl", title="MR-MTL")
class MRMTL(Method):
    """Mean-regularised multi-task learning (Liu et al. 2022, Algorithm A1; Evgeniou & Pontil 2004).

    Client i trains its own w_i on ``f_i(w) + (lam / 2) |w - w_bar|^2``, where w_bar is the plain mean of the clients'
    models in the previous round; a single model is trained, stored and sent. ``lam = 0`` is local training, and a large
    ``lam`` approaches FedAvg. Under privacy of rows the pull to the mean reduces noise at no privacy cost, because
    w_bar is public. Before its first round a client has the common initial model. Personal parameters are trained as
    well, without the pull.
    """

    needs_mean: ClassVar[str] = ""
    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS})
    fits_unused: ClassVar[str] = "train"

    lam: float = Field(1.0, ge=0, description="lambda: how strongly each model is pulled to the mean of all")
    proximal: ProximalKind = Field("explicit", description=STEP)

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``own``: each client's w_i."""
        return {"own": ParameterSet("client", like="shared")}

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then compute the plain mean of the models."""
        reply = clients.train(self.train, shared=server.shared)
        server.shared = clients.mean(reply.shared, current=server.shared)

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train all stages together, starting at the client's own model and pulled to the mean."""
        cohort.load(cohort.state["own"])
        cohort.fit(STAGES, epochs=self.local_epochs, update=ProximalStep(shared, self.lam, self.proximal))
        cohort.state["own"] = cohort.shared()
        return Reply(shared=cohort.shared())

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Return notes on the stages in which explicit proximal steps would diverge."""
        return implicit_notes(self, model, self.lam, self.proximal)

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return nothing, because every client has its own model."""
        return {}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load w_i, the client's own model."""
        cohort.load(cohort.state["own"])
