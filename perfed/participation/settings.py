"""Who takes part in a round: the ``[participation]`` table; :mod:`perfed.participation.policies` acts on it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field

from perfed.participation.schedule import PhaseRule
from perfed.plugins import known_as
from perfed.settings import STRICT, unless

PolicyName = Literal["uniform", "srpfl", "flanp", "deadline", "overselection", "cyclic"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def policy_name(given: Any) -> Any:
    """A policy's name as files have it, whatever the case of ``given``; all else as it is.

    Example:
        >>> policy_name("SRPFL"), policy_name("sprfl")
        ('srpfl', 'sprfl')
    """
    return known_as(given, POLICIES) or given if isinstance(given, str) else given


class Srpfl(PhaseRule):
    """SRPFL: of the invited clients the first n replies are used; n doubles at the end of each stage.

    Source: Tziotis et al. 2023, Algorithm 1; the number of samples in place of clients: appendix C. The paper gives
    neither n_0 nor the rounds of a stage.
    """

    rule: Literal["plateau", "fixed", "theory"] = Field("plateau", description="when a stage ends")
    contraction: float | None = Field(None, gt=0, lt=1, description="a of theorem 4.7, for rule 'theory'")
    excess: float = Field(1.1, gt=1, lt=math.sqrt(2), description="c-hat of the target error, for rule 'theory'")
    double: Literal["clients", "samples"] = Field("clients", description="what doubles from stage to stage")
    redraw: Literal["round", "stage"] = Field("round", description="how often the invited clients are drawn")


class Flanp(PhaseRule):
    """FLANP: the first n replies of a stage name its clients, which stay in all later stages; n doubles.

    Rule ``gradient`` ends a stage when ``|grad L_n(w)|^2 <= 2 mu V_n`` with ``V_n = accuracy / samples of the n
    clients``. Source: Reisizadeh et al. 2022, Algorithm 1.
    """

    rule: Literal["plateau", "fixed", "gradient"] = Field("plateau", description="when a stage ends")
    mu: float | None = Field(None, gt=0, description="constant of strong convexity, for rule 'gradient'")
    accuracy: float = Field(1.0, gt=0, description="statistical accuracy times samples, for rule 'gradient'")


class Deadline(BaseModel):
    """All replies that arrive within ``seconds`` are used; a round without any changes nothing."""

    model_config = STRICT

    seconds: float | None = Field(None, gt=0, description="after the start of the round, communication included")


class OverSelection(BaseModel):
    """``factor`` times as many clients are invited as are used; the first replies count."""

    model_config = STRICT

    factor: float = Field(1.3, ge=1, description="invited clients per used one")


class Cyclic(BaseModel):
    """One client a round, whatever the rate, so that the model goes from client to client, all of them in turn."""

    model_config = STRICT

    order: Literal["shuffled", "fixed"] = Field("shuffled", description="of a cycle: drawn for each, or that of ids")


class Participation(BaseModel):
    """The ``[participation]`` table: ``max(1, floor(rate * N))`` clients a round, uniformly without replacement.

    Attributes:
        policy: which replies are used; ``uniform``: all. Each other policy has its settings in a table of its name.
        rate: share of the clients that is invited in each round (``overselection``: used).
        last_round: ``"all"``: every client is invited to the last round (FLIC's and FedPAC's protocol), except by the
            policies in stages and the cyclic one.
        fit_unused: a client that was never used is evaluated after fitting its personal parameters to the newest
            shared ones, and keeps those at the end (Tziotis et al. 2023, remark 4.8); not given: with ``srpfl`` only.

    Example:
        >>> Participation(rate=0.1).count(50)
        5
        >>> Participation(policy="deadline", deadline={"seconds": 2.5}).deadline.seconds
        2.5
    """

    model_config = STRICT

    policy: Annotated[PolicyName, BeforeValidator(policy_name)] = "uniform"
    rate: float = Field(1.0, gt=0, le=1)
    last_round: Literal["all", "sampled"] = "all"
    fit_unused: bool | None = None
    srpfl: Srpfl = Srpfl()
    flanp: Flanp = Flanp()
    deadline: Deadline = Deadline()
    overselection: OverSelection = OverSelection()
    cyclic: Cyclic = Field(Cyclic(), exclude_if=unless(Cyclic()))

    @property
    def fits_unused(self) -> bool:
        """Whether clients that were never used fit their personal parameters."""
        return self.policy == "srpfl" if self.fit_unused is None else self.fit_unused

    def count(self, clients: int) -> int:
        """``max(1, floor(rate * clients))``."""
        return max(1, int(self.rate * clients + 1e-9))
