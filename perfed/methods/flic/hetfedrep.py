"""FedRep with personal embeddings, for clients with different inputs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from perfed.maths.aggregate import Average
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.registry import register
from perfed.methods.fedrep import FedRep
from perfed.model.chain import EMBEDDING, stage_of
from perfed.model.placement import PERSONAL, SHARED, Placement
from perfed.settings import exclude_default
from perfed.training.cohort import Cohort


@register("hetfedrep", title="HetFedRep", differs="features")
class HetFedRep(FedRep):
    """FedRep after a personal embedding, without alignment (Rakotomamonjy et al. 2024, section 5).

    By default all clients have the same weight (omega_i = 1/N), as body and anchors in FLIC's experiments. The
    published numbers of this baseline include an alignment of all embeddings after every round; to reproduce them add
    ``extensions = ["anchors"]`` with ``lambda1 = lambda2 = pretrain_epochs = 0`` and ``realign_epochs = 1``.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})
    default_placement: ClassVar[dict[str, Placement]] = {
        "embedding": PERSONAL,
        "body": SHARED,
        "head": PERSONAL,
    }

    average: Average = "uniform"
    freeze_embedding: bool = Field(
        False,
        description="keep the embedding fixed after pre-training (Rakotomamonjy et al. 2024, section S3.5)",
        exclude_if=exclude_default(False),
    )

    def head_parameters(self, cohort: Cohort) -> tuple[str, ...]:
        """Return the names of the head's parameters, and of the embedding's unless it is frozen."""
        names = super().head_parameters(cohort)
        return tuple(name for name in names if stage_of(name) != EMBEDDING) if self.freeze_embedding else names
