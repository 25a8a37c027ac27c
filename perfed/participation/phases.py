"""The phases of a policy's schedule, in which the number of clients is the same: the "stages" of SRPFL and FLANP.

Settings, messages and checkpoints keep the papers' word; elsewhere a stage is a part of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from perfed.errors import PerfedError
from perfed.settings import STRICT


class PhaseRule(BaseModel):
    """How many clients the first phase has, and when a phase ends; the number doubles from phase to phase."""

    model_config = STRICT

    first: int = Field(4, ge=1, description="n_0, clients used in the first stage")
    rule: str
    stage_rounds: int | list[int] | None = Field(
        None, description="for rule 'fixed': rounds of every stage, or of each (the last number for all later ones)"
    )
    patience: int = Field(5, ge=1, description="for rule 'plateau': rounds without a lower training loss")
    tolerance: float = Field(1e-3, ge=0, description="for rule 'plateau': relative decrease that counts as lower")


class Phases:
    """The phase that a run is in.

    Args:
        settings: of the policy.
        lengths: rounds of each phase, for rules that know them beforehand other than by ``stage_rounds``.
        where: table of the settings, for messages.

    Attributes:
        state: plain data, changed in place.
        final: all clients take part; the policy says so in every round. The phase then does not end.
    """

    def __init__(self, settings: PhaseRule, lengths: Sequence[int] | None, where: str) -> None:
        if settings.rule == "fixed":
            given = settings.stage_rounds
            if given is None:
                raise PerfedError(f"{where}.rule = 'fixed' needs {where}.stage_rounds")
            lengths = given if isinstance(given, list) else [given]
            if not lengths or min(lengths) < 1:
                raise PerfedError(f"{where}.stage_rounds must be at least 1 (given: {given})")
        self.settings = settings
        self.lengths = lengths
        self.final = False
        self.state: dict[str, Any] = {"stage": 0, "rounds": 0, "best": None, "stale": 0}

    @property
    def number(self) -> int:
        """Of the phase, from 0."""
        return int(self.state["stage"])

    def observe(self, train_loss: float, over: bool = False) -> None:
        """A round has ended; ``over`` ends its phase where the policy has a rule of its own."""
        state = self.state
        state["rounds"] += 1
        if self.lengths is not None:
            over = state["rounds"] >= self.lengths[min(self.number, len(self.lengths) - 1)]
        elif self.settings.rule == "plateau":
            best = state["best"]
            lower = best is None or train_loss < best - self.settings.tolerance * abs(best)
            state["best"] = train_loss if lower else best
            state["stale"] = 0 if lower else state["stale"] + 1
            over = state["stale"] >= self.settings.patience
        if over and not self.final:
            state.update(stage=self.number + 1, rounds=0, best=None, stale=0)


def check_first(where: str, first: int, clients: int) -> None:
    """Raise a :class:`PerfedError` unless n_0 is at most the number of invited clients."""
    if first > clients:
        few = f"{clients} client{'s are' if clients != 1 else ' is'} invited to a round (participation.rate)"
        raise PerfedError(f"{where}.first is {first}, but only {few}; lower it")
