"""Settings of a run: what is evaluated and when, and which embedded samples are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, field_validator

from perfed.settings import STRICT

# TOML has lists only.
_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class Evaluation(BaseModel):
    """Which accuracy is reported.

    Attributes:
        every: evaluate after every so many rounds, and after the last.
        split: on which data.
        who: all clients, or the round's participants.
        when: ``"before"`` local training: the model a client would start its next round with (received parameters,
            own personal ones, after ``personalise``); ``"after"``: as local training left it, before aggregation.
        last: the summary is the mean over this many last rounds (all of them are evaluated); 1: the last round.
        weights: ``"uniform"`` mean over clients, or weighted by their number of ``"samples"`` in the split.
        targets: mean accuracies (fractions); the summary says when each was first reached in an evaluated round.

    Example:
        >>> evaluation = Evaluation(every=5, last=3, targets=[0.8, 0.9])  # for Run(..., evaluation=evaluation)
        >>> evaluation.split, evaluation.targets
        ('test', (0.8, 0.9))
    """

    model_config = STRICT

    every: int = Field(10, ge=1)
    split: Literal["test", "validation", "train"] = "test"
    who: Literal["all", "participants"] = "all"
    when: Literal["before", "after"] = "before"
    last: int = Field(1, ge=1)
    weights: Literal["uniform", "samples"] = "uniform"
    targets: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], _LIST] = ()

    @field_validator("targets")
    @classmethod
    def _each_once(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must name each accuracy once")
        return value


class Snapshots(BaseModel):
    """Embedded samples kept for the report: of which clients (the first ones) and after which rounds (0: start)."""

    model_config = STRICT

    clients: int = Field(3, ge=0)
    rounds: Annotated[tuple[NonNegativeInt, ...], _LIST] = ()
