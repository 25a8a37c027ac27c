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
    the round's clients, ``delta_j <- delta_j + Delta_j - Delta``. The server moves w by the fraction ``server_lr`` of
    the way to the mean of the w_j.

    Each client stores ``delta_j + Delta_j``, the mean of its own gradients, and subtracts Delta when it arrives with
    the next w, so that no second exchange is needed. The first participation of a client is not corrected. A client
    that missed rounds uses the newest Delta instead of that of its last round (SCAFFOLD's rule; in the paper all
    clients take part in every round). Under FLANP corrections are kept when further clients join. Momentum, weight
    decay and per-domain parameters are treated as in :class:`~perfed.methods.scaffold.Scaffold`.
    """

    needs_mean: ClassVar[str] = ""

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``control``, Delta; ``own_control``, ``delta_j + Delta_j``; and ``tracked``, whether it exists."""
        sets = super().sets()
        return {name: sets[name] for name in ("control", "own_control")} | {
            "tracked": ParameterSet("client", init=_init_tracked)
        }

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then take the server's step and compute the mean Delta."""
        reply = clients.train(self.train, shared=server.shared, control=server.control)
        server.shared = self.take_server_step(server.shared, clients.mean(reply.shared, current=server.shared))
        current = {name: server.control[name] for name in reply.mean}
        server.control = {**server.control, **clients.mean(reply.mean, current=current)}

    def train(self, cohort: Cohort, shared: dict[str, Any], control: dict[str, Any]) -> Reply:
        """Take corrected local steps, and send the mean of the client's corrected gradients in them."""
        cohort.load(shared)
        own_control, tracked = cohort.state["own_control"], cohort.state["tracked"]["yes"]
        drift = {}
        for name in cohort.shared_parameters:
            has_control = tracked.view(-1, *([1] * (control[name].ndim - 1))).to(control[name])
            drift[name] = has_control * (control[name] - own_control[name])
        means = self.corrected_steps(cohort, drift, otherwise=control)
        cohort.state["own_control"] = {**own_control, **{name: mean - drift[name] for name, mean in means.items()}}
        cohort.state["tracked"] = {"yes": torch.ones_like(tracked)}
        return Reply(shared=cohort.shared(), mean=means)


def _init_tracked(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"yes": torch.tensor(0.0)}
