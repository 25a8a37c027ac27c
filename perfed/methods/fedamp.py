"""FedAMP: the server mixes for every client the models that are like its own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed import tree
from perfed.data.federation import Federation
from perfed.maths.aggregate import weighted_mean
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import PARAMETERS, Disclosure
from perfed.method.exchange import Clients, Reply, ServerState, each
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.methods.proximal import STEP, ProximalKind, implicit_notes
from perfed.model.chain import STAGES, Model, Parameters
from perfed.training.cohort import Cohort
from perfed.training.steprules import ProximalStep


@register("fedamp", title="FedAMP")
class FedAMP(Method):
    """Federated attentive message passing (Huang et al. 2021, Algorithm 1).

    The method minimises ``sum_i f_i(w_i) + lam sum_{i<j} A(|w_i - w_j|^2)`` with ``A(x) = 1 - exp(-x / sigma)`` in
    turns. The server computes ``u_i = sum_j xi_ij w_j`` with ``xi_ij = alpha A'(|w_i - w_j|^2)`` and ``xi_ii = 1 -
    sum_{j != i} xi_ij``. Client i then minimises ``f_i(w) + lam / (2 alpha) |w - u_i|^2``, starting at u_i, by gradient
    steps (``proximal = "implicit"``: SGD takes a proximal step on the second term after its step on f_i).
    Departures: if the paper's condition xi_ii >= 0 fails (alpha too large), the weights of the other models are divided
    by their sum, so that u_i stays a convex combination; ``alpha`` is constant. Models of clients that have not taken
    part yet are not mixed into others. Personal parameters are trained as well, but not mixed. ``sigma`` has the unit
    of squared distances between models; clients whose squared distance is much larger hardly influence each other.
    """

    needs_mean: ClassVar[str] = "FedAMP mixes the clients' models pair by pair"
    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS}, refused={"client": "its server needs single replies, and noise is on their mean"}
    )
    moves_shared: ClassVar[bool] = False
    fits_unused: ClassVar[str] = ""
    joins: ClassVar[str | None] = None

    alpha: float = Field(1.0, gt=0, description="alpha_k: step of the message passing")
    sigma: float = Field(1.0, gt=0, description="squared distance of two models at which attention falls to 1/e")
    lam: float = Field(1.0, ge=0, description="lambda: weight of the attraction between models")
    proximal: ProximalKind = Field("explicit", description=STEP)

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``models``: w_i of every client, on the server; and ``sent``: whether the client has ever sent it."""
        return {"models": ParameterSet("table", like="shared"), "sent": ParameterSet("table", init=_init_sent)}

    def round(self, server: ServerState, clients: Clients) -> None:
        """Mix the clients' models, run one exchange, and store the clients' new models."""
        ids = sorted({*clients.ids, *(i for i, row in server.sent.items() if row["sent"])})
        models: Any = tree.stack([server.models[i] for i in ids])
        weights = self.attention(models, torch.stack([server.sent[i]["sent"] for i in ids]))
        cloud = {i: weighted_mean(models, weights[ids.index(i)]) for i in clients.ids}
        rows = [ids.index(i) for i in clients.ids]
        clients.show("combination", weights=weights[rows][:, rows].cpu(), clients=clients.ids)
        reply = clients.train(self.train, cloud=each(cloud))
        new = {i: {name: t[row].clone() for name, t in reply.shared.items()} for row, i in enumerate(reply.ids)}
        server.models = {**server.models, **new}
        server.sent = {**server.sent, **{i: {"sent": torch.ones_like(server.sent[i]["sent"])} for i in reply.ids}}

    def attention(self, models: Parameters, sent: Tensor) -> Tensor:
        """Return the weights xi ``(m, m)``, float64, of ``models`` ``(m, ...)``; rows sum to one.

        Args:
            models: each client's model.
            sent: ``(m,)`` boolean, whether the model may be mixed into other models.
        """
        gram = torch.zeros(len(sent), len(sent), dtype=torch.float64, device=sent.device)
        for name in sorted(models):  # The same order of summation in every engine gives the same bits.
            if not models[name].is_floating_point():
                continue  # counters of batch-norm
            flat = models[name].flatten(1).double()
            flat = flat - flat.mean(0)  # Distances stay the same, and cancellation of large numbers is avoided.
            gram += flat @ flat.T
        squares = gram.diagonal()
        distances = (squares[:, None] + squares - 2 * gram).clamp_min(0)
        weights = self.alpha / self.sigma * torch.exp(-distances / self.sigma) * sent
        weights.fill_diagonal_(0)
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1)
        return weights + torch.diag((1 - weights.sum(1)).clamp_min(0))

    def train(self, cohort: Cohort, cloud: dict[str, Any]) -> Reply:
        """Solve the proximal problem around the server's mixture u_i, starting at u_i."""
        cohort.load(cloud)
        cohort.fit(STAGES, epochs=self.local_epochs, update=ProximalStep(cloud, self.lam / self.alpha, self.proximal))
        return Reply(shared=cohort.shared())

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Return notes on the stages in which explicit proximal steps would diverge."""
        return implicit_notes(self, model, self.lam / self.alpha, self.proximal)

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return the model of each client."""
        return {"model": each(server.models)}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load w_i from the server."""
        cohort.load(payload["model"])


def _init_sent(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"sent": torch.tensor(False)}
