"""SRPFL: the fastest clients begin, and their number doubles from stage to stage."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from perfed.errors import PerfedError
from perfed.participation.clock import Rows
from perfed.participation.policy import Ask, Policy, PolicyContext, register_policy, take_first
from perfed.participation.schedule import PhaseRule, Phases, check_first, stage_lengths


class SRPFLSettings(PhaseRule):
    """SRPFL: of the invited clients the first n replies are used; n doubles at the end of each stage.

    Source: Tziotis et al. 2023, Algorithm 1; the number of samples in place of clients: appendix C. The paper gives
    neither n_0 nor the rounds of a stage.
    """

    rule: Literal["plateau", "fixed", "theory"] = Field("plateau", description="when a stage ends")
    contraction: float | None = Field(None, gt=0, lt=1, description="a of theorem 4.7, for rule 'theory'")
    excess: float = Field(1.1, gt=1, lt=math.sqrt(2), description="c-hat of the target error, for rule 'theory'")
    double: Literal["clients", "samples"] = Field("clients", description="what doubles from stage to stage")
    redraw: Literal["round", "stage"] = Field("round", description="how often the invited clients are drawn")


@register_policy("srpfl", settings=SRPFLSettings, title="SRPFL", example="clock.speeds=fixed")
class SRPFL(Policy[SRPFLSettings]):
    """The first n replies are used, and n doubles at the end of each stage (Tziotis et al. 2023)."""

    strict = False
    chooses_by_time = True
    everyone_in_last_round = False
    fits_unused = True

    def __init__(self, settings: SRPFLSettings, context: PolicyContext) -> None:
        super().__init__(settings, context)
        check_first("participation.srpfl", settings.first, self.count)
        lengths = None
        if (settings.rule == "theory") != (settings.contraction is not None):
            raise PerfedError("participation.srpfl.rule = 'theory' needs participation.srpfl.contraction, others none")
        if settings.contraction is not None:
            lengths = stage_lengths(self.count, settings.first, settings.contraction, excess=settings.excess)
        self.phases = Phases(settings, lengths, "participation.srpfl")
        self.state = self.phases.state

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Use the first n replies, or those until n samples are reached."""
        settings, stage = self.settings, self.phases.number
        words = (-1 - stage,) if settings.redraw == "stage" else ()
        arrivals = ask(self.draw_invited(round_, None, *words))
        if settings.double == "clients":
            self.phases.final = settings.first << stage >= len(arrivals.rows)
            return take_first(arrivals, settings.first << stage)
        total = np.cumsum(arrivals.num_samples)
        if "samples" not in self.state:  # of the first n_0 replies of all
            self.state["samples"] = int(total[min(settings.first, len(total)) - 1])
        goal = min(self.state["samples"] << stage, int(total[-1]))
        self.phases.final = goal == total[-1]
        return take_first(arrivals, int(np.searchsorted(total, goal)) + 1)

    def observe(self, train_loss: float, gradient: float | None, num_samples: int) -> None:
        """End the stage if its rule is fulfilled."""
        self.phases.observe(train_loss)
