"""Schedules: settings that change from round to round, each a function of the round."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from perfed.settings import LISTED, STRICT


class Kind(BaseModel):
    """Base class of all schedules: a number for each round from 1 on; ``start`` is that of round 1."""

    model_config = STRICT

    start: float

    def value_in_round(self, round_: int) -> float:
        """Return the number in round ``round_``."""
        raise NotImplementedError

    @property
    def last_round(self) -> int:
        """Return a round by which the number has reached both its ends, or fallen below ``start``."""
        rounds = getattr(self, "rounds", 2)
        return 1 + (max(rounds, default=0) if isinstance(rounds, tuple) else rounds)


class Constant(Kind):
    """The same number in every round."""

    kind: Literal["constant"]

    def value_in_round(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        return self.start


class Step(Kind):
    """``start``, multiplied by ``factor`` after each of ``rounds``."""

    kind: Literal["step"]
    rounds: Annotated[tuple[PositiveInt, ...], LISTED]
    factor: float = Field(0.1, ge=0)

    def value_in_round(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        return self.start * self.factor ** sum(round_ > drop for drop in self.rounds)


class Exponential(Kind):
    """``start`` in round 1, and in each round ``factor`` times the number of the previous round."""

    kind: Literal["exponential"]
    factor: float = Field(gt=0, le=1)

    def value_in_round(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        return float(self.start * self.factor ** (round_ - 1))


class Cosine(Kind):
    """Half a cosine wave from ``start`` in round 1 to ``end`` in round ``rounds``, and ``end`` afterwards."""

    kind: Literal["cosine"]
    end: float = 0.0
    rounds: int = Field(ge=2)

    def value_in_round(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        if round_ >= self.rounds:
            return self.end
        return self.end + (self.start - self.end) * (1 + cos(pi * (round_ - 1) / (self.rounds - 1))) / 2


class WarmUp(Kind):
    """A line from ``start`` in round 1 to ``end`` in round ``rounds``, and ``end`` afterwards."""

    kind: Literal["warm-up"]
    start: float = 0.0
    end: float
    rounds: int = Field(ge=2)

    def value_in_round(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        if round_ >= self.rounds:
            return self.end
        return self.start + (self.end - self.start) * (round_ - 1) / (self.rounds - 1)


Schedule = Constant | Step | Exponential | Cosine | WarmUp
_SCHEDULE: TypeAdapter[Schedule] = TypeAdapter(Annotated[Schedule, Field(discriminator="kind")])


def find_schedules(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[tuple[str, ...], Schedule]:
    """Return the schedules among the values of settings, by name, or name and stage.

    Args:
        cls: the class of the settings, whose field types determine which may be a schedule.
        values: the values of the settings by name.

    Raises:
        ValueError: if a schedule is not valid, or a setting cannot be a schedule.
    """
    schedules: dict[tuple[str, ...], Schedule] = {}
    for name, value in values.items():
        if name not in cls.model_fields:
            continue
        parts: dict[tuple[str, ...], Any] = {(name,): value}
        parts |= {(name, stage): item for stage, item in value.items()} if isinstance(value, Mapping) else {}
        for path, item in parts.items():
            if isinstance(item, Schedule):
                schedules[path] = item
            elif isinstance(item, Mapping) and "kind" in item:
                if not accepts_schedule(cls.model_fields[name].annotation):
                    raise ValueError(f"{name}: cannot be a schedule; fractions among the settings can")
                schedules[path] = _parse_schedule(item, path)
    return schedules


def _parse_schedule(table: Mapping[str, Any], path: tuple[str, ...]) -> Schedule:
    try:
        return _SCHEDULE.validate_python(dict(table))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((*path, *(str(part) for part in first["loc"][1:])))
        raise ValueError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def accepts_schedule(annotation: Any) -> bool:
    """Return whether a setting of this type may be a schedule: a fraction, or fractions by stage."""
    return annotation is float or any(map(accepts_schedule, get_args(annotation)))
