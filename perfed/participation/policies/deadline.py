"""A deadline: replies that arrive in time are used."""

from __future__ import annotations

from pydantic import Field

from perfed.errors import PerfedError
from perfed.participation.clock import Rows
from perfed.participation.policy import Ask, Policy, PolicyContext, PolicySettings, register_policy, take_first


class DeadlineSettings(PolicySettings):
    """All replies that arrive within ``seconds`` are used; a round without any changes nothing."""

    seconds: float | None = Field(None, gt=0, description="after the start of the round, communication included")


@register_policy(
    "deadline",
    settings=DeadlineSettings,
    example="clock.speeds=fixed participation.deadline.seconds=1",
)
class Deadline(Policy[DeadlineSettings]):
    """All replies that arrive within ``seconds`` are used; a round without any changes nothing."""

    strict = False
    chooses_by_time = True

    def __init__(self, settings: DeadlineSettings, context: PolicyContext) -> None:
        super().__init__(settings, context)
        if settings.seconds is None:
            raise PerfedError("participation.policy = 'deadline' needs participation.deadline.seconds")
        self.limit = settings.seconds

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Use the replies within the limit; the round lasts until then unless all have come before."""
        arrivals = ask(self.draw_invited(round_))
        in_time = int((arrivals.seconds <= self.limit).sum())
        if in_time == len(arrivals.rows):
            return take_first(arrivals)
        return arrivals.rows[:in_time], self.limit

    @classmethod
    def check_real_time(cls, settings: DeadlineSettings, fastest: float) -> None:
        """Refuse a deadline before which no site can reply."""
        if settings.seconds is None or settings.seconds < fastest:
            raise PerfedError(
                f"participation.deadline.seconds = {settings.seconds}: these are real seconds in a deployment, where "
                f"an exchange alone takes {fastest:g}; it must be at least {fastest:g}"
            )
