"""FLANP: the fastest clients begin and stay, and their number doubles from stage to stage."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from perfed.errors import PerfedError
from perfed.participation.clock import Rows
from perfed.participation.policy import Ask, Policy, PolicyContext, register_policy, take_first
from perfed.participation.schedule import PhaseRule, Phases, check_first


class FLANPSettings(PhaseRule):
    """FLANP: the first n replies of a stage name its clients, which stay in all later stages; n doubles.

    Rule ``gradient`` ends a stage when ``|grad L_n(w)|^2 <= 2 mu V_n`` with ``V_n = accuracy / samples of the n
    clients``. Source: Reisizadeh et al. 2022, Algorithm 1.
    """

    rule: Literal["plateau", "fixed", "gradient"] = Field("plateau", description="when a stage ends")
    mu: float | None = Field(None, gt=0, description="constant of strong convexity, for rule 'gradient'")
    accuracy: float = Field(1.0, gt=0, description="statistical accuracy times samples, for rule 'gradient'")


@register_policy("flanp", settings=FLANPSettings, title="FLANP", example="clock.speeds=fixed")
class FLANP(Policy[FLANPSettings]):
    """The first n clients to reply in a stage stay to the end, and n doubles (Reisizadeh et al. 2022)."""

    strict = False
    chooses_by_time = True
    everyone_in_last_round = False

    def __init__(self, settings: FLANPSettings, context: PolicyContext) -> None:
        super().__init__(settings, context)
        self.candidates = self.draw_invited(0)  # drawn once: the clients of a stage stay in all later ones
        check_first("participation.flanp", settings.first, len(self.candidates))
        if (settings.rule == "gradient") != (settings.mu is not None):
            raise PerfedError("participation.flanp.rule = 'gradient' needs participation.flanp.mu, others none")
        self.phases = Phases(settings, None, "participation.flanp")
        self.state = self.phases.state
        self.state["members"] = []

    @classmethod
    def measures_gradient(cls, settings: FLANPSettings) -> bool:
        """Return whether a stage ends by the norm of the gradient."""
        return settings.rule == "gradient"

    def check_method(self, moves_shared: bool) -> None:
        """Refuse rule ``gradient`` where there is no shared model."""
        if self.settings.rule == "gradient" and not moves_shared:
            raise PerfedError(
                "participation.flanp.rule = 'gradient' measures the gradient at the shared model, and this method "
                "moves none; allowed: fixed, plateau"
            )

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Use the clients of the stage, to which the first to reply are added when it begins."""
        members: list[int] = self.state["members"]
        goal = min(self.settings.first << self.phases.number, len(self.candidates))
        self.phases.final = goal == len(self.candidates)
        if len(members) == goal:
            return take_first(ask(np.array(members, np.int64)))
        arrivals = ask(self.candidates)
        new = arrivals.rows[~np.isin(arrivals.rows, members)][: goal - len(members)]
        self.state["members"] = sorted([*members, *new.tolist()])
        is_member = np.isin(arrivals.rows, self.state["members"])
        return arrivals.rows[is_member], float(arrivals.seconds[is_member].max())

    def observe(self, train_loss: float, gradient: float | None, num_samples: int) -> None:
        """End the stage if its rule is fulfilled."""
        settings = self.settings
        if gradient is None or settings.mu is None:
            self.phases.observe(train_loss)
        else:
            self.phases.observe(train_loss, over=gradient <= 2 * settings.mu * settings.accuracy / num_samples)
