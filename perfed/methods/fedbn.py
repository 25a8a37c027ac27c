"""FedBN: batch-norm stays at home."""

from __future__ import annotations

from typing import ClassVar

from perfed.errors import PerfedError
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import Chain
from perfed.model.placement import PERSONAL, Placement, place_parameters

RULE = "BatchNorm"


@register(
    "fedbn",
    title="FedBN",
    differs="features",
    needs="a model with batch-norm",
    example="digits-label-skew model.body.batch_norm=true",
)
class FedBN(FedAvg):
    """FedAvg with personal batch-norm, running statistics included (Li et al. 2021, Algorithm 1).

    A client that has not taken part yet has batch-norm's initial values. The presets ``mlp`` and ``cnn`` contain
    batch-norm if ``batch_norm = true``.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS, "num_samples": ROWS},
        refused={"sample": "batch-norm's statistics combine many rows"},
    )

    def places(self, chain: Chain) -> dict[str, Placement]:
        """Return the placement as for every method, but with batch-norm personal unless ``placement`` says otherwise.

        Raises:
            PerfedError: the model has no batch-norm, or a rule of ``placement`` matches nothing.
        """
        if not any(type(module).__name__.startswith(RULE) for module in chain.modules()):
            stage = f"model.{chain.stages[0]}"
            raise PerfedError(
                f"fedbn keeps batch-norm personal, but the model has none; add {stage}.batch_norm=true, and "
                f"{stage}.kind=mlp where it is neither mlp nor cnn"
            )
        return place_parameters(chain, self.default_placement, {RULE: PERSONAL, **self.placement})
