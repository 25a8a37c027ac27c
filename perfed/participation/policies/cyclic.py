"""Cyclic participation: one client at a time."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from perfed import rng
from perfed.participation.clock import Rows
from perfed.participation.policy import Policy, PolicySettings, register_policy


class CyclicSettings(PolicySettings):
    """One client a round, whatever the rate, so that the model goes from client to client, all of them in turn."""

    order: Literal["shuffled", "fixed"] = Field("shuffled", description="of a cycle: drawn for each, or that of ids")


@register_policy("cyclic", settings=CyclicSettings)
class Cyclic(Policy[CyclicSettings]):
    """One client a round, so that the model goes from client to client, all of them in turn."""

    everyone_in_last_round = False

    def draw_invited(self, round_: int, count: int | None = None, *words: int) -> Rows:
        """Return the row of the client whose turn it is."""
        cycle, turn = divmod(round_ - 1, len(self.who))
        if self.settings.order == "fixed":
            return np.array([turn])
        return rng.draw_permutation(rng.key(self.seed, "cycle", cycle, self.who.words))[turn : turn + 1].numpy()
