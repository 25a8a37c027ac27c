"""FedBABU: a body trained under a common random head; heads are made when a client evaluates."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, stage_of
from perfed.model.placement import FROZEN, PERSONAL, SHARED, Placement
from perfed.training.cohort import Cohort


@register("fedbabu", title="FedBABU")
class FedBABU(FedAvg):
    """Averaged bodies under a random, untrained head; clients fine-tune a copy (Oh et al. 2022, Algorithm 1).

    The head is drawn from the run's seed: it is the same at all clients, does not change, and is never sent.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS, "num_samples": ROWS}, after_run=lambda method: int(method.finetune_epochs)
    )
    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": FROZEN}

    finetune: Literal["model", "head"] = Field("model", description="part that is fine-tuned before evaluation")
    finetune_epochs: int = Field(5, ge=0, description="local epochs of fine-tuning before evaluation")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Fine-tune a copy of the model, whose head is then personal, on the local loss without extensions."""
        cohort.load(payload["shared"])
        frozen = [name for name, place in cohort.places.items() if place == FROZEN and stage_of(name) == "head"]
        cohort.places = {**cohort.places, **dict.fromkeys(frozen, PERSONAL)}
        cohort.fit(STAGES if self.finetune == "model" else "head", epochs=self.finetune_epochs)
