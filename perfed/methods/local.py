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
    """Local training: every client trains its own model, and nothing is sent.

    A client trains in the rounds in which it takes part, so that it takes as many local steps as in other methods.
    """

    needs_mean: ClassVar[str] = ""
    disclosure: ClassVar[Disclosure | None] = Disclosure()
    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, PERSONAL)

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse shared parameters, because clients never receive any."""
        if server.shared:
            raise PerfedError(
                f"no parameters are sent by this method, but placement has shared '{next(iter(server.shared))}'"
            )

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, which contains only the extensions' tensors."""
        clients.train(self.train)

    def train(self, cohort: Cohort) -> Reply:
        """Train all stages together, starting at the client's own model."""
        cohort.fit(STAGES, epochs=self.local_epochs)
        return Reply()


@register("local-full", title="Local-Full", differs="nothing")
class LocalFull(Local):
    """Local training of all clients in every round, whether or not they take part; nothing is sent.

    A round without a reply in time (under a deadline) does not count.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure()
    fits_unused: ClassVar[str] = ""  # clients that were never chosen have trained too
    joins: ClassVar[str | None] = "train"

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``trained``: the last round in which a client trained."""
        return {"trained": ParameterSet("client", init=_init_trained)}

    def train(self, cohort: Cohort) -> Reply:
        """Train all stages of the clients that have not trained in this round yet."""
        last_round = cohort.state["trained"]["round"]
        current_round = torch.full_like(last_round, cohort.where.round)
        epochs = np.where((last_round == current_round).cpu().numpy(), 0, self.local_epochs)
        cohort.fit(STAGES, epochs=epochs)
        cohort.state["trained"] = {"round": current_round}
        return Reply()

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Train the clients that did not take part in the round."""
        clients.train(self.train)


def _init_trained(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"round": torch.tensor(0)}
