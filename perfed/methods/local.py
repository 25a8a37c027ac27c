"""Local training, the baseline without communication."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import Disclosure
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES
from perfed.model.placement import PERSONAL, Placement
from perfed.training.cohort import Cohort


@register("local", title="Local", differs="nothing")
class Local(Method):
    """Every client trains a model of its own; nothing is sent.

    Takes part like every other method (equal local steps): a client trains in the rounds it is chosen for.
    """

    needs_mean: ClassVar[str] = ""
    disclosure: ClassVar[Disclosure | None] = Disclosure()
    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, PERSONAL)

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse shared parameters, which would never be received."""
        if server.shared:
            raise PerfedError(
                f"no parameters are sent by this method, but placement has shared '{next(iter(server.shared))}'"
            )

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange in which nothing but the extensions' tensors travels."""
        clients.train(self.train)

    def train(self, cohort: Cohort) -> Reply:
        """Train all stages together, from the client's own model."""
        cohort.fit(STAGES, epochs=self.local_epochs)
        return Reply()


@register("local-full", title="Local-Full", differs="nothing")
class LocalFull(Local):
    """Every client trains a model of its own in every round, whoever takes part; nothing is sent.

    A round in which no reply comes in time (a deadline) is none.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure()
    fits_unused: ClassVar[str] = ""  # clients that were never chosen have trained too
    joins: ClassVar[str | None] = "train"

    def sets(self) -> dict[str, ParameterSet]:
        """``trained``: the last round in which a client trained."""
        return {"trained": ParameterSet("client", init=_never)}

    def train(self, cohort: Cohort) -> Reply:
        """All stages together, of the clients that have not trained in this round yet."""
        done = cohort.state["trained"]["round"]
        now = torch.full_like(done, cohort.where.round)
        epochs = np.where((done == now).cpu().numpy(), 0, self.local_epochs)
        cohort.fit(STAGES, epochs=epochs)
        cohort.state["trained"] = {"round": now}
        return Reply()

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Those who did not take part train too."""
        clients.train(self.train)


def _never(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"round": torch.tensor(0)}
