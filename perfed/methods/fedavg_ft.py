"""FedAvg and FedProx with fine-tuning before evaluation."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.registry import register
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES
from perfed.training.cohort import Cohort


@register(
    "fedprox-ft",
    title="FedProx-FT",
    extensions=(Proximal,),
    summary="FedProx; each client evaluates a copy fine-tuned on its own data, without the proximal term",
)
@register("fedavg-ft", title="FedAvg-FT")
class FedAvgFT(FedAvg):
    """FedAvg; each client evaluates a copy fine-tuned on its own data (Collins et al. 2021, section 5)."""

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS, "num_samples": ROWS}, after_run=lambda method: int(method.finetune_epochs)
    )

    finetune_epochs: int = Field(10, ge=0, description="local epochs of fine-tuning before evaluation")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Fine-tune a copy of the global model on the local loss, without extensions."""
        cohort.load(payload["shared"])
        cohort.fit(STAGES, epochs=self.finetune_epochs)
