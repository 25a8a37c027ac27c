"""FedGATE: each client tracks by how much its gradients differ from the mean."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.registry import register
from perfed.methods.scaffold import Scaffold
from perfed.training.cohort import Cohort


@register(
    "fedgate",
    title="FedGATE",
    differs="nothing",
    needs="SGD as the optimiser",
    example="digits-label-skew methods.fedgate.optimizer=sgd methods.fedgate.lr=0.03",
)
class FedGATE(Scaffold):
    """Local SGD with gradient tracking (Haddadpour et al. 2021: FedCOMGATE without compression).

    ``w_j <- w_j - lr (g_j - delta_j)``, K times from w; with ``Delta_j = (w - w_j) / (K lr)`` and Delta, its mean over
    the round's clients, ``delta_j <- delta_j + Delta_j - Delta``. The server goes the part ``server_lr`` of the way
    from w to the mean of the w_j.

    Each client keeps ``delta_j + Delta_j``, the mean of its own gradients, and subtracts Delta when it comes with the
    next w: no second exchange is needed. A client takes part without correction at first. One that was left out of
    rounds takes the newest Delta in place of that of its last round (SCAFFOLD's rule; the paper has everybody in every
    round). Under FLANP corrections stay when clients join. Momentum, weight decay, parameters per domain: as in
    :class:`~perfed.methods.scaffold.Scaffold`.
    """

    needs_mean: ClassVar[str] = ""

    def sets(self) -> dict[str, ParameterSet]:
        """``control``: Delta on the server; ``own_control``: ``delta_j + Delta_j``, and whether there is one."""
        sets = super().sets()
        return {name: sets[name] for name in ("control", "own_control")} | {"tracked": ParameterSet("client", init=_no)}

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange, then the server's step and the mean Delta."""
        reply = clients.train(self.train, shared=server.shared, control=server.control)
        server.shared = self.stepped(server.shared, clients.mean(reply.shared, current=server.shared))
        current = {name: server.control[name] for name in reply.mean}
        server.control = {**server.control, **clients.mean(reply.mean, current=current)}

    def train(self, cohort: Cohort, shared: dict[str, Any], control: dict[str, Any]) -> Reply:
        """Corrected local steps, and the mean of the client's own gradients in them."""
        cohort.load(shared)
        own, tracked = cohort.state["own_control"], cohort.state["tracked"]["yes"]
        drift = {}
        for name in cohort.shared_parameters:
            known = tracked.view(-1, *([1] * (control[name].ndim - 1))).to(control[name])
            drift[name] = known * (control[name] - own[name])
        means = self.corrected_steps(cohort, drift, otherwise=control)
        cohort.state["own_control"] = {**own, **{name: mean - drift[name] for name, mean in means.items()}}
        cohort.state["tracked"] = {"yes": torch.ones_like(tracked)}
        return Reply(shared=cohort.shared(), mean=means)


def _no(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"yes": torch.tensor(0.0)}
