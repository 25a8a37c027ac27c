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

    Minimises ``sum_i f_i(w_i) + lam sum_{i<j} A(|w_i - w_j|^2)``, ``A(x) = 1 - exp(-x / sigma)``, by turns: the server
    makes ``u_i = sum_j xi_ij w_j`` with ``xi_ij = alpha A'(|w_i - w_j|^2)`` and ``xi_ii = 1 - sum_{j != i} xi_ij``;
    client i then minimises ``f_i(w) + lam / (2 alpha) |w - u_i|^2``, starting at u_i, by gradient steps
    (``proximal = "implicit"``: SGD takes a proximal step on the second term after its step on f_i).
    Departures: where the paper's condition xi_ii >= 0 fails (alpha not small enough), the weights of the others are
    divided by their sum, so that u_i stays a convex combination; ``alpha`` is constant. The models of clients that have
    not taken part yet are sent to nobody. Parameters that are placed personal are trained along and not mixed.
    ``sigma`` is in units of squared distances of models; clients much farther apart than that do not meet.
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
        """``models``: w_i of every client on the server; ``sent``: whether the client has ever sent it."""
        return {"models": ParameterSet("table", like="shared"), "sent": ParameterSet("table", init=_never)}

    def round(self, server: ServerState, clients: Clients) -> None:
        """Messages, one exchange, and the clients' new models."""
        ids = sorted({*clients.ids, *(i for i, row in server.sent.items() if row["sent"])})
        models: Any = tree.stack([server.models[i] for i in ids])
        weights = self.attention(models, torch.stack([server.sent[i]["sent"] for i in ids]))
        cloud = {i: weighted_mean(models, weights[ids.index(i)]) for i in clients.ids}
        chosen = [ids.index(i) for i in clients.ids]
        clients.show("combination", weights=weights[chosen][:, chosen].cpu(), clients=clients.ids)
        reply = clients.train(self.train, cloud=each(cloud))
        new = {i: {name: t[row].clone() for name, t in reply.shared.items()} for row, i in enumerate(reply.ids)}
        server.models = {**server.models, **new}
        server.sent = {**server.sent, **{i: {"sent": torch.ones_like(server.sent[i]["sent"])} for i in reply.ids}}

    def attention(self, models: Parameters, sent: Tensor) -> Tensor:
        """The weights xi ``(m, m)``, float64, of ``models`` ``(m, ...)``; rows sum to one.

        Args:
            models: each client's model.
            sent: ``(m,)`` boolean, whose models others may get.
        """
        gram = torch.zeros(len(sent), len(sent), dtype=torch.float64, device=sent.device)
        for name in sorted(models):  # sums in the same order in every engine: the same bits
            if not models[name].is_floating_point():
                continue  # counters of batch-norm
            flat = models[name].flatten(1).double()
            flat = flat - flat.mean(0)  # distances do not change, and differences of large numbers do not matter
            gram += flat @ flat.T
        squares = gram.diagonal()
        distances = (squares[:, None] + squares - 2 * gram).clamp_min(0)
        others = self.alpha / self.sigma * torch.exp(-distances / self.sigma) * sent
        others.fill_diagonal_(0)
        others = others / others.sum(1, keepdim=True).clamp_min(1)
        return others + torch.diag((1 - others.sum(1)).clamp_min(0))

    def train(self, cohort: Cohort, cloud: dict[str, Any]) -> Reply:
        """The proximal problem, from and around the cloud's model u_i."""
        cohort.load(cloud)
        cohort.fit(STAGES, epochs=self.local_epochs, update=ProximalStep(cloud, self.lam / self.alpha, self.proximal))
        return Reply(shared=cohort.shared())

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Where explicit steps would diverge."""
        return implicit_notes(self, model, self.lam / self.alpha, self.proximal)

    def download(self, server: ServerState) -> dict[str, Any]:
        """Each client's own model."""
        return {"model": each(server.models)}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load w_i, as the server has it."""
        cohort.load(payload["model"])


def _never(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"sent": torch.tensor(False)}
