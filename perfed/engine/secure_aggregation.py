"""The ``[secure_aggregation]`` table: the server gets sums over clients, and no client's reply."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, Field, field_validator
from torch import Tensor

from perfed.errors import PerfedError, shorten_list
from perfed.maths.sums import FixedPoint, SingleReplies, Term
from perfed.participation.settings import Participation
from perfed.settings import STRICT, exclude_default

LOSS, TRAINED = ":loss", ":trained"
"""Beside the entries of a reply: the mean training loss, 0 where nothing was trained, and whether something was."""
ALWAYS: tuple[Term, ...] = ((LOSS,), (TRAINED,))
"""Terms of every sum."""


class SecureAggregation(BaseModel):
    """Replies are summed over clients under masks (Bonawitz et al. 2017); the server sees the sums alone.

    A sum is that of the replies' values rounded to multiples of ``2^-bits``, so that each differs from the plain one
    by at most ``2^-(bits + 1)`` for each client. A weighted mean, whose weights are numbers of samples, differs by at
    most ``2^-(bits + 1)`` in all.

    Example:
        >>> SecureAggregation(threshold=3).needed(4, 4), SecureAggregation().needed(9, 9)
        (3, 5)
    """

    model_config = STRICT

    threshold: int | None = Field(
        None,
        ge=2,
        description="fewest clients whose replies make a sum; never fewer than more than half of those asked",
    )
    bits: int = Field(24, ge=8, le=40, description="binary digits behind the point of what is summed")
    keys: dict[str, str] | None = Field(
        None,
        description="public key of each site of a deployment, as 'perfed site key' prints it; sites then check each "
        "other's keys",
        exclude_if=exclude_default(None),
    )

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, keys: dict[str, str] | None) -> dict[str, str] | None:
        for site, key in (keys or {}).items():
            if not re.fullmatch("[0-9a-f]{64}", key):
                raise ValueError(f"the key of site '{site}' is {key!r:.80}; 64 digits of 'perfed site key' are needed")
        if keys is not None and len({*keys.values()}) < len(keys):
            raise ValueError("two sites have the same key")
        return keys

    def check_sites(self, sites: Sequence[str]) -> None:
        """Do nothing where the table has a key for each of the sites of a deployment, and for no other.

        Raises:
            PerfedError: it lacks some, or has too many; names them.
        """
        if self.keys is None:
            return
        for names, problem in (({*sites} - self.keys.keys(), "lacks"), (self.keys.keys() - {*sites}, "has unknown")):
            if names:
                raise PerfedError(
                    f"secure_aggregation.keys {problem} {shorten_list(sorted(names))}; a key for each site is needed: "
                    f"{shorten_list(sorted(sites))}"
                )

    def check_key(self, site: str, public: str) -> None:
        """Do nothing where ``public`` is the key of ``site`` in the table, or there is no table.

        Raises:
            PerfedError: the table has another one, or none.
        """
        if self.keys is not None and self.keys.get(site) != public:
            raise PerfedError(
                f"secure_aggregation.keys.{site} of the study is {self.keys.get(site, 'not there')}, and the key of "
                f"this site is {public or 'not there'} ('perfed site key' prints it)"
            )

    def needed(self, asked: int, usual: int) -> int:
        """How many clients a sum needs: with more than half of all, no two sums can be opened at once.

        Args:
            asked: how many are asked.
            usual: how many a round asks, before any has dropped out.
        """
        return max(self.threshold or 2, max(asked, usual) // 2 + 1)

    def numbers(self, clients: int) -> FixedPoint:
        """How values are rounded where at most ``clients`` are summed."""
        return FixedPoint(self.bits, clients)

    def check(self, participation: Participation, clients: int, by_name: bool) -> None:
        """Refuse what cannot be summed.

        Args:
            participation: of the run.
            clients: how many there are.
            by_name: whether clients share columns by name, so that each has replies of its own columns.

        Raises:
            PerfedError: a policy that chooses among replies, replies of each client's own columns, or a round with too
                few clients.
        """
        if by_name:
            raise SingleReplies("single replies for columns that clients share by name (data.columns = 'named')")
        if participation.policy != "uniform":
            raise PerfedError(
                f"participation.policy = '{participation.policy}' chooses among the replies that have come, and "
                "secure aggregation knows their sum alone; allowed: uniform"
            )
        count = participation.count(clients)
        if count < self.needed(count, count):
            raise PerfedError(
                f"secure_aggregation.threshold: a round asks {count} of {clients} clients, and a sum needs "
                f"{self.needed(count, count)}; allowed: at most the clients of a round, of which there must be two"
            )


def with_loss(content: Mapping[str, Any], losses: Tensor) -> dict[str, Any]:
    """Return stacked replies with the terms of every sum, from training losses ``(clients,)``, NaN without training."""
    trained = torch.isfinite(losses)
    return {**content, LOSS: torch.where(trained, losses.double(), 0.0), TRAINED: trained.double()}


def mean_loss(total: Tensor, trained: Tensor) -> Tensor:
    """Return the mean training loss of the clients that have trained; NaN if none has."""
    return torch.where(trained > 0, total / trained, torch.nan)
