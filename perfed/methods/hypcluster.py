"""HypCluster / IFCA: several shared models, of which each client trains the one that fits its data best."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from perfed.method.declared import ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Parameters
from perfed.training.cohort import Cohort


@register("hypcluster", title="HypCluster")
class HypCluster(Method):
    """k shared models; each client trains its best one (Mansour et al. 2020, Algorithm 1; IFCA, Ghosh et al. 2020).

    The best model is the one with the smallest loss on all of the client's training data. The k models start from
    different random values; a model that no client of a round chose does not change. In the mean of their cluster,
    clients have the weight n_i (IFCA: 1). Personal parameters, if there are any, are one set per client, which is used
    with any chosen model.
    """

    needs_mean: ClassVar[str] = ""
    moves_shared: ClassVar[bool] = False
    fits_unused: ClassVar[str] = ""

    clusters: int = Field(3, ge=1, description="number k of shared models")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``models``: a bank of k on the server."""
        return {"models": ParameterSet("server", like="shared", bank=self.clusters)}

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then compute the mean of each cluster."""
        reply = clients.train(self.train, models=server.models)
        weights = F.one_hot(reply.choice, self.clusters) * reply.num_samples[:, None]
        entries = [select_bank_entry(server.models, j) for j in range(self.clusters)]
        entries = [
            clients.mean(reply.model, weights[:, j], current=entry) if weights[:, j].any() else entry
            for j, entry in enumerate(entries)
        ]
        server.models = {name: torch.stack([entry[name] for entry in entries]) for name in server.models}

    def choose(self, cohort: Cohort, models: Parameters) -> Tensor:
        """Load each client's best model, and return its number, ``(n,)``."""
        losses = cohort.losses(models).view(cohort.n, -1)  # one column if there are no shared parameters
        choice = losses.argmin(1)
        cohort.load({name: bank[torch.arange(cohort.n), choice] for name, bank in models.items()})
        return choice

    def train(self, cohort: Cohort, models: Parameters) -> Reply:
        """Train each client's best model, all stages together."""
        choice = self.choose(cohort, models)
        cohort.fit(STAGES, epochs=self.local_epochs)
        return Reply(
            model=cohort.shared(),
            choice=choice,
            num_samples=cohort.num_samples,
        )

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return all k models, from which the client chooses."""
        return {"models": server.models}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load each client's best model, as received."""
        self.choose(cohort, payload["models"])


def select_bank_entry(bank: Parameters, entry: int) -> Parameters:
    """Return one entry of a bank whose home is the server."""
    return {name: tensor[entry] for name, tensor in bank.items()}
