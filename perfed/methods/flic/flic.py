"""FLIC: clients with different feature spaces, aligned with shared Gaussian anchors."""

from __future__ import annotations

from typing import ClassVar

from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.registry import register
from perfed.methods.flic.anchors import Anchors
from perfed.methods.flic.hetfedrep import HetFedRep
from perfed.model.chain import Model
from perfed.model.placement import PERSONAL, Placement


@register("flic-hl", title="FLIC-HL", extensions=(Anchors,), differs="features", needs="class labels or values")
class FLICHL(HetFedRep):
    """FLIC with a shared hidden layer: personal embedding and head, anchors (Rakotomamonjy et al. 2024)."""

    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})


@register("flic-class", title="FLIC-Class", extensions=(Anchors,), differs="features", needs="class labels or values")
class FLICClass(HetFedRep):
    """FLIC with only a personal linear head on top of the aligned embeddings (Rakotomamonjy et al. 2024)."""

    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})
    default_placement: ClassVar[dict[str, Placement]] = {"embedding": PERSONAL, "head": PERSONAL}

    def adapt(self, model: Model) -> Model:
        """Return the experiment's model without its body."""
        return Model(**{stage: factory for stage, factory in model.factories.items() if stage != "body"})
