"""Over-selection: more clients are invited than are used."""

from __future__ import annotations

import math

from pydantic import Field

from perfed.participation.clock import Rows
from perfed.participation.policy import Ask, Policy, PolicySettings, register_policy, take_first


class OverSelectionSettings(PolicySettings):
    """``factor`` times as many clients are invited as are used; the first replies count."""

    factor: float = Field(1.3, ge=1, description="invited clients per used one")


@register_policy("overselection", settings=OverSelectionSettings, example="clock.speeds=fixed rate=0.5")
class OverSelection(Policy[OverSelectionSettings]):
    """The first replies are used of ``factor`` times as many invited clients."""

    strict = False
    chooses_by_time = True

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Use the first replies, as many as the rate says; in the last round those of all clients."""
        if self.invites_everyone(round_):
            return super().select(round_, ask)
        invited = math.ceil(min(self.settings.factor * self.count, len(self.who)) - 1e-9)
        return take_first(ask(self.draw_invited(round_, invited)), self.count)
