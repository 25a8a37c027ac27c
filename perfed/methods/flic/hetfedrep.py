"""FedRep behind personal embeddings, for clients whose inputs differ."""

from __future__ import annotations

from typing import ClassVar

from perfed.maths.aggregate import Average
from perfed.method.registry import register
from perfed.methods.fedrep import FedRep
from perfed.model.placement import PERSONAL, SHARED, Placement


@register("hetfedrep")
class HetFedRep(FedRep):
    """FedRep behind a personal embedding, without alignment (Rakotomamonjy et al. 2024, section 5).

    Clients have the same weight by default (omega_i = 1/N), in FLIC's experiments for body and anchors alike.
    The published numbers of this baseline were made with an alignment of all embeddings after every round; add
    ``terms=["anchors"]`` with ``lambda1 = lambda2 = 0``, ``pretrain_epochs = 0`` and ``realign_epochs = 1`` for those.
    """

    default_placement: ClassVar[dict[str, Placement]] = {
        "embedding": PERSONAL,
        "body": SHARED,
        "head": PERSONAL,
    }

    average: Average = "uniform"
