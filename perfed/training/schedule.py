"""Schedules: numbers among the settings that change from round to round, each a pure function of the round.

A method sees numbers alone: :meth:`Scheduled.in_round` gives the settings of a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    PositiveInt,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from perfed.settings import LISTED, STRICT


class Constant(BaseModel):
    """The same number in every round."""

    model_config = STRICT
    kind: Literal["constant"]
    start: float

    def at(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        return self.start


class Step(BaseModel):
    """``start``, multiplied by ``factor`` behind each of ``rounds``."""

    model_config = STRICT
    kind: Literal["step"]
    start: float
    rounds: Annotated[tuple[PositiveInt, ...], LISTED]
    factor: float = Field(0.1, ge=0)

    def at(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        return self.start * self.factor ** sum(round_ > drop for drop in self.rounds)


class Exponential(BaseModel):
    """``start`` in round 1, and in each round ``factor`` times that of the round before."""

    model_config = STRICT
    kind: Literal["exponential"]
    start: float
    factor: float = Field(gt=0, le=1)

    def at(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        return float(self.start * self.factor ** (round_ - 1))


class Cosine(BaseModel):
    """From ``start`` in round 1 along half a wave to ``end`` in round ``rounds``, where it stays."""

    model_config = STRICT
    kind: Literal["cosine"]
    start: float
    end: float = 0.0
    rounds: int = Field(ge=2)

    def at(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        if round_ >= self.rounds:
            return self.end
        return self.end + (self.start - self.end) * (1 + cos(pi * (round_ - 1) / (self.rounds - 1))) / 2


class WarmUp(BaseModel):
    """From ``start`` in round 1 along a line to ``end`` in round ``rounds``, where it stays."""

    model_config = STRICT
    kind: Literal["warm-up"]
    start: float = 0.0
    end: float
    rounds: int = Field(ge=2)

    def at(self, round_: int) -> float:
        """Return the number in round ``round_``, from 1 on."""
        if round_ >= self.rounds:
            return self.end
        return self.start + (self.end - self.start) * (round_ - 1) / (self.rounds - 1)


Schedule = Constant | Step | Exponential | Cosine | WarmUp
_SCHEDULE: TypeAdapter[Schedule] = TypeAdapter(Annotated[Schedule, Field(discriminator="kind")])
_LATE = 10**6  # by this round every schedule stands still, but one that falls for ever, which has come to 0


class Scheduled(BaseModel):
    """Settings of which every fraction (``float``) may be a schedule: a table with its ``kind``.

    As they are, they hold the numbers of round 1; what a field allows, a schedule's first and last numbers must be.
    """

    model_config = STRICT

    _schedules: dict[tuple[str, ...], Schedule] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _of_round_1(cls, value: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        found = _schedules_in(cls, value) if isinstance(value, Mapping) else {}
        if found:
            cls.model_validate(_with(value, found, _LATE))
        made = check(_with(value, found, 1) if found else value)
        if found:
            made._schedules = found
        return made

    def in_round(self, round_: int) -> Self:
        """Return the settings of round ``round_``; what comes before round 1 has those of round 1."""
        if not self._schedules:
            return self
        now = {name: getattr(self, name) for name, *_ in self._schedules}
        return self.model_copy(update={name: _with(now, self._schedules, max(round_, 1))[name] for name in now})

    def stated(self, name: str) -> Any:
        """Return the setting ``name`` as files say it: a number, or the table of its schedule."""
        value = getattr(self, name)
        for (owner, *stage), schedule in self._schedules.items():
            if owner == name:
                table = schedule.model_dump(mode="json")
                value = {**value, stage[0]: table} if stage else table
        return value


def _with(values: Mapping[str, Any], schedules: Mapping[tuple[str, ...], Schedule], round_: int) -> dict[str, Any]:
    """Return ``values`` with the numbers of round ``round_`` where schedules are."""
    made = dict(values)
    for (name, *stage), schedule in schedules.items():
        number = schedule.at(round_)
        made[name] = {**made[name], stage[0]: number} if stage else number
    return made


def _schedules_in(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[tuple[str, ...], Schedule]:
    """Return the schedules among the values of settings, by name, or name and stage."""
    found: dict[tuple[str, ...], Schedule] = {}
    for name, value in values.items():
        if name not in cls.model_fields:
            continue
        parts: dict[tuple[str, ...], Any] = {(name,): value}
        parts |= {(name, stage): item for stage, item in value.items()} if isinstance(value, Mapping) else {}
        for path, item in parts.items():
            if isinstance(item, Schedule):
                found[path] = item
            elif isinstance(item, Mapping) and "kind" in item:
                if not takes_schedule(cls.model_fields[name].annotation):
                    raise ValueError(f"{name}: cannot be a schedule; fractions among the settings can")
                found[path] = _schedule(item, path)
    return found


def _schedule(table: Mapping[str, Any], path: tuple[str, ...]) -> Schedule:
    try:
        return _SCHEDULE.validate_python(dict(table))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((*path, *(str(part) for part in first["loc"][1:])))
        raise ValueError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def takes_schedule(annotation: Any) -> bool:
    """Return whether a setting of this type may be a schedule: a fraction, or fractions by stage."""
    return annotation is float or any(map(takes_schedule, get_args(annotation)))
