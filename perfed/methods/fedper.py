"""Federated averaging of a part of the model: FedPer keeps the head at home, LG-FedAvg the layers below it."""

from __future__ import annotations

from typing import ClassVar

from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.placement import PERSONAL, SHARED, Placement


@register("fedper", title="FedPer")
class FedPer(FedAvg):
    """Shared body, personal head, trained together (Arivazhagan et al. 2019, Algorithm 1)."""

    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})
    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": PERSONAL}


@register("lg-fedavg", title="LG-FedAvg")
class LGFedAvg(FedAvg):
    """Personal body, shared last layers, trained together (Liang et al. 2020, Algorithm 1, supervised case).

    The model determines which layers are shared: those of its head.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})
    default_placement: ClassVar[dict[str, Placement]] = {"embedding": PERSONAL, "body": PERSONAL, "head": SHARED}
