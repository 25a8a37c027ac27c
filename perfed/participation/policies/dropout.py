"""Clients that drop out at random."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from perfed import rng
from perfed.errors import PerfedError, shorten_list
from perfed.participation.clock import Rows
from perfed.participation.policy import Ask, Policy, PolicyContext, PolicySettings, register_policy, take_without


class DropoutSettings(PolicySettings):
    """Each invited client drops out of the round with a probability, independently of all other dropouts."""

    probability: float = Field(0.1, ge=0, le=1, description="that an invited client does not reply in a round")
    clients: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        {}, description="probabilities of single clients by their ids, in place of `probability`"
    )


@register_policy("dropout", settings=DropoutSettings, example="participation.dropout.probability=0.3")
class Dropout(Policy[DropoutSettings]):
    """Each invited client drops out with a probability; the replies of the others are used.

    Whether a client drops out depends only on the run's seed, the round and the client's id. A client that drops out
    trains nothing and keeps its state. A round in which all invited clients drop out changes nothing.
    """

    strict = False

    def __init__(self, settings: DropoutSettings, context: PolicyContext) -> None:
        super().__init__(settings, context)
        ids = set(self.who.ids)
        for client in settings.clients:
            if client not in ids:
                raise PerfedError(
                    f"participation.dropout.clients: there is no client '{client}'; allowed: "
                    f"{shorten_list(self.who.ids)}"
                )
        self.probabilities = np.array([settings.clients.get(client, settings.probability) for client in self.who.ids])

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Use the replies of the clients that do not drop out."""
        rows = self.draw_invited(round_)
        keys = rng.key(self.seed, "dropout", round_, self.who.words[torch.from_numpy(rows)])
        numbers = rng.uniform(keys, 1, torch.float64)[:, 0].numpy()
        return take_without(ask(rows), rows[numbers < self.probabilities[rows]])
