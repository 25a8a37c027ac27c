"""Settings of local training: the optimiser, its rates, mini-batches and epochs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, PositiveInt, PrivateAttr, field_validator

from perfed.model.chain import STAGES
from perfed.settings import LISTED, STRICT, unless


class LocalTraining(BaseModel):
    """How a client trains: settings that every method has."""

    model_config = STRICT

    optimizer: Literal["adam", "sgd"] = Field("adam", description="local optimiser")
    lr: float | dict[str, float] = Field(1e-3, description="learning rate, or one per stage (missing stages: 1e-3)")
    lr_drops: Annotated[tuple[PositiveInt, ...], LISTED] = Field(
        (), description="rounds after which every local learning rate is multiplied by lr_factor", exclude_if=unless(())
    )
    lr_factor: float = Field(0.1, ge=0, description="see lr_drops", exclude_if=unless(0.1))
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float | dict[str, float] = Field(0.0, description="weight decay, or one per stage (others: 0)")
    decay: Literal["weights", "all"] = Field("weights", description="what weight decay acts on; biases only with 'all'")
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="of a sample's class in the loss of classification: 1, or n / (classes held x n of the class), so "
        "that rare classes count as much",
        exclude_if=unless("none"),
    )
    batch_size: int = Field(100, ge=1, description="samples of a local mini-batch")
    local_epochs: int = Field(10, ge=0, description="local epochs per round")

    _lr_scale: float = PrivateAttr(1.0)

    @field_validator("lr", "weight_decay")
    @classmethod
    def _known_stages(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for name, number in value.items() if isinstance(value, dict) else (("", value),):
            if name and name not in STAGES:
                raise ValueError(f"'{name}' is not a stage; allowed: {', '.join(STAGES)}")
            if not 0 <= number < float("inf"):
                raise ValueError("must be a finite number, at least 0")
        return value

    def in_round(self, round_: int) -> Self:
        """The settings with the learning rates of round ``round_`` (from 1): ``lr_factor`` for each drop before it."""
        drops = sum(round_ > drop for drop in self.lr_drops)
        if drops == 0:
            return self
        made = self.model_copy()
        made._lr_scale = self.lr_factor**drops
        return made

    def lr_of(self, stage: str) -> float:
        """Learning rate of ``stage``, in the round that these are the settings of."""
        return self.first_lr_of(stage) * self._lr_scale

    def first_lr_of(self, stage: str) -> float:
        """Learning rate of ``stage`` in the first round."""
        return self.lr.get(stage, 1e-3) if isinstance(self.lr, dict) else self.lr

    def weight_decay_of(self, stage: str) -> float:
        """Weight decay of ``stage``."""
        return self.weight_decay.get(stage, 0.0) if isinstance(self.weight_decay, dict) else self.weight_decay
