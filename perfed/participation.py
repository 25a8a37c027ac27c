"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from perfed import rng


class Participation(BaseModel):
    """Uniform participation: ``max(1, floor(rate * N))`` clients a round, without replacement.

    Attributes:
        rate: share of the clients in each round.
        last_round: ``"all"``: every client takes part in the last round (FLIC's and FedPAC's protocol).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rate: float = Field(1.0, gt=0, le=1)
    last_round: Literal["all", "sampled"] = "all"

    def choose(self, ids: Sequence[str], seed: int, round_: int, rounds: int) -> list[str]:
        """Ids of the participants of round ``round_`` of ``rounds``, sorted."""
        if self.rate == 1.0 or (round_ == rounds and self.last_round == "all"):
            return sorted(ids)
        count = max(1, int(self.rate * len(ids) + 1e-9))
        keys = torch.stack([rng.key(seed, "participation", round_, client) for client in sorted(ids)])
        chosen = rng.order(keys)[:count].tolist()
        return sorted(sorted(ids)[i] for i in chosen)
