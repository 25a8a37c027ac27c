"""Settings of local training, and settings that follow a schedule."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    PositiveInt,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from perfed.model.chain import STAGES
from perfed.settings import LISTED, STRICT, check_whole_numbers, exclude_default
from perfed.training.schedule import Schedule, Step, find_schedules


class Scheduled(BaseModel):
    """Settings in which every fraction (``float``) may be a schedule: a table with its ``kind``.

    The attributes have the values of round 1. The first and last numbers of a schedule must be allowed for its field.
    """

    model_config = STRICT

    _schedules: dict[tuple[str, ...], Schedule] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _parse_schedules(cls, value: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, Mapping):
            check_whole_numbers(value)
        schedules = find_schedules(cls, value) if isinstance(value, Mapping) else {}
        if schedules:
            cls.model_validate(
                _insert_numbers(value, schedules, max(schedule.last_round for schedule in schedules.values()))
            )
        settings = check(_insert_numbers(value, schedules, 1) if schedules else value)
        if schedules:
            settings._schedules = schedules
        return settings

    def in_round(self, round_: int) -> Self:
        """Return the settings of round ``round_``, also inside a tuple of settings; before round 1 those of round 1."""
        changes: dict[str, Any] = {}
        for name, value in self:
            if isinstance(value, tuple) and value and isinstance(value[0], Scheduled):
                parts = tuple(part.in_round(round_) for part in value)
                changes |= {name: parts} if any(map(operator.is_not, parts, value)) else {}
        if self._schedules:
            current = {name: getattr(self, name) for name, *_ in self._schedules}
            changes |= {name: _insert_numbers(current, self._schedules, max(round_, 1))[name] for name in current}
        return self.model_copy(update=changes) if changes else self

    def to_plain_setting(self, name: str) -> Any:
        """Return the setting ``name`` as in files: a number, or the table of its schedule."""
        value = getattr(self, name)
        for (owner, *stage), schedule in self._schedules.items():
            if owner == name:
                table = schedule.model_dump(mode="json")
                value = {**value, stage[0]: table} if stage else table
        return value


def _insert_numbers(
    values: Mapping[str, Any], schedules: Mapping[tuple[str, ...], Schedule], round_: int
) -> dict[str, Any]:
    """Return ``values`` with schedules replaced by their numbers in round ``round_``."""
    updated = dict(values)
    for (name, *stage), schedule in schedules.items():
        number = schedule.value_in_round(round_)
        updated[name] = {**updated[name], stage[0]: number} if stage else number
    return updated


class LocalTraining(Scheduled):
    """Settings of local training, which every method has."""

    optimizer: Literal["adam", "sgd"] = Field("adam", description="local optimiser")
    lr: float | dict[str, float] = Field(1e-3, description="learning rate, or one per stage (missing stages: 1e-3)")
    lr_drops: Annotated[tuple[PositiveInt, ...], LISTED] = Field(
        (),
        description="rounds after which every local learning rate is multiplied by lr_factor",
        exclude_if=exclude_default(()),
    )
    lr_factor: float = Field(0.1, ge=0, description="see lr_drops", exclude_if=exclude_default(0.1))
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float | dict[str, float] = Field(0.0, description="weight decay, or one per stage (others: 0)")
    decay: Literal["weights", "all"] = Field("weights", description="what weight decay acts on; biases only with 'all'")
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="of a sample's class in the loss of classification: 1, or n / (classes held x n of the class), so "
        "that rare classes count as much",
        exclude_if=exclude_default("none"),
    )
    precision: Literal["full", "bf16"] = Field(
        "full",
        description="of the network's layers in local training; with 'bf16' numbers of 16 bits, where a trial of "
        "engine = 'auto' finds that they are faster",
        exclude_if=exclude_default("full"),
    )
    batch_size: int = Field(100, ge=1, description="samples of a local mini-batch")
    local_epochs: int = Field(10, ge=0, description="local epochs per round")
    local_steps: int | None = Field(
        None,
        ge=1,
        description="mini-batch steps per round in place of passes over the data: an epoch of any phase is then "
        "local_steps / local_epochs steps, which go on in a client's data where its last ones stopped",
        exclude_if=exclude_default(None),
    )

    _lr_scale: float = PrivateAttr(1.0)

    @field_validator("lr", "weight_decay")
    @classmethod
    def _check_stages(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for name, number in value.items() if isinstance(value, dict) else (("", value),):
            if name and name not in STAGES:
                raise ValueError(f"'{name}' is not a stage; allowed: {', '.join(STAGES)}")
            if not 0 <= number < float("inf"):
                raise ValueError("must be a finite number, at least 0")
        return value

    @field_validator("local_steps")
    @classmethod
    def _check_local_steps(cls, value: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("local_epochs", 1)
        if value is not None and (epochs == 0 or value % epochs):
            raise ValueError(
                f"must be a multiple of local_epochs = {epochs}: an epoch is local_steps / local_epochs steps"
            )
        return value

    @property
    def epoch_steps(self) -> int | None:
        """Return the mini-batch steps of an epoch, the same for every client.

        It is ``None`` for one pass over the client's data.
        """
        return None if self.local_steps is None else self.local_steps // self.local_epochs

    def in_round(self, round_: int) -> Self:
        """Return the settings of round ``round_`` (from 1), with the numbers of schedules and the learning rate after
        its drops.
        """
        settings = super().in_round(round_)
        if self.lr_drops:
            settings = settings.model_copy()
            settings._lr_scale = Step(
                kind="step", start=1.0, rounds=self.lr_drops, factor=self.lr_factor
            ).value_in_round(round_)
        return settings

    def lr_of(self, stage: str) -> float:
        """Return the learning rate of ``stage`` in the round of these settings."""
        return self.first_lr_of(stage) * self._lr_scale

    def first_lr_of(self, stage: str) -> float:
        """Return the learning rate of ``stage`` without ``lr_drops``."""
        return self.lr.get(stage, 1e-3) if isinstance(self.lr, dict) else self.lr

    def weight_decay_of(self, stage: str) -> float:
        """Return the weight decay of ``stage``."""
        return self.weight_decay.get(stage, 0.0) if isinstance(self.weight_decay, dict) else self.weight_decay
