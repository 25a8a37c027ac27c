"""The ``[secure_aggregation]`` table, with which the server receives only sums over clients."""

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
"""The names of two entries that are added to every reply: the mean training loss (0 without training), and whether
the client has trained.
"""
ALWAYS: tuple[Term, ...] = ((LOSS,), (TRAINED,))
"""The terms of every sum."""


class SecureAggregation(BaseModel):
    """The settings of secure aggregation: masked replies of which the server sees only sums (Bonawitz et al. 2017).

    Values are rounded to multiples of ``2^-bits`` before they are summed, so that a sum differs from the exact one by
    at most ``2^-(bits + 1)`` per client. A mean weighted with numbers of samples differs by at most ``2^-(bits + 1)``.

    Example:
        >>> SecureAggregation(threshold=3).count_required(4, 4), SecureAggregation().count_required(9, 9)
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
        """Check that the table has a key for each site of a deployment and for no other site.

        Raises:
            PerfedError: keys are missing or there are too many; the message names the sites.
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
        """Check that ``public`` is the key of ``site`` in the table, if there is a table of keys.

        Raises:
            PerfedError: the table has another key or none for the site.
        """
        if self.keys is not None and self.keys.get(site) != public:
            raise PerfedError(
                f"secure_aggregation.keys.{site} of the study is {self.keys.get(site, 'not there')}, and the key of "
                f"this site is {public or 'not there'} ('perfed site key' prints it)"
            )

    def count_required(self, invited: int, invited_per_round: int) -> int:
        """Return how many clients a sum needs.

        It is more than half of the clients, so that two disjoint groups of them can never open a sum each.

        Args:
            invited: the number of clients that were invited.
            invited_per_round: the number of clients that a round invites before any has dropped out.
        """
        return max(self.threshold or 2, max(invited, invited_per_round) // 2 + 1)

    def numbers(self, clients: int) -> FixedPoint:
        """Return the fixed-point format of values of which at most ``clients`` are summed."""
        return FixedPoint(self.bits, clients)

    def check(self, participation: Participation, clients: int, by_name: bool) -> None:
        """Check that the replies of a run can be summed.

        Args:
            participation: the participation of the run.
            clients: the number of clients.
            by_name: whether clients share columns by name, so that the columns of replies differ between clients.

        Raises:
            PerfedError: the policy chooses among replies, the columns of replies differ, or a round has too few
                clients.
        """
        if by_name:
            raise SingleReplies("single replies for columns that clients share by name (data.columns = 'named')")
        if participation.policy != "uniform":
            raise PerfedError(
                f"participation.policy = '{participation.policy}' chooses among single replies, and secure "
                "aggregation reveals only their sum; allowed: uniform"
            )
        count = participation.count(clients)
        if count < self.count_required(count, count):
            raise PerfedError(
                f"secure_aggregation.threshold: a round asks {count} of {clients} clients, and a sum needs "
                f"{self.count_required(count, count)}; allowed: at most the clients of a round, and at least two"
            )


def with_loss(content: Mapping[str, Any], losses: Tensor) -> dict[str, Any]:
    """Return stacked replies with the entries of :data:`ALWAYS`, from losses ``(clients,)`` that may be NaN."""
    trained = torch.isfinite(losses)
    return {**content, LOSS: torch.where(trained, losses.double(), 0.0), TRAINED: trained.double()}


def mean_loss(total: Tensor, trained: Tensor) -> Tensor:
    """Return the mean training loss of the clients that have trained; NaN if none has."""
    return torch.where(trained > 0, total / trained, torch.nan)
