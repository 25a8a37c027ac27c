"""FedProx's extension: local training is pulled to the received model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from perfed.method.declared import FederationInfo
from perfed.method.disclosure import Disclosure
from perfed.method.extension import Extension, register_extension
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step


@register_extension
class Proximal(Extension):
    """FedProx's penalty ``(mu / 2) |w - w_received|^2`` over the trained shared parameters (Li et al. 2020, eq. 2).

    Example:
        >>> from perfed import build_method
        >>> build_method("fedrep", {"extensions": ["proximal"], "mu": 0.1}).extensions
        (Proximal(mu=0.1),)
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure()
    name: ClassVar[str] = "proximal"

    mu: float = Field(0.01, ge=0, description="weight of the proximal term")

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse methods whose clients receive no shared parameters."""
        info.shared_parameters(f"extension '{self.name}' keeps shared parameters near the received ones")

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """Return the squared distance to the shared parameters at the start of training, times mu / 2, as a penalty."""
        received = {name: tensor.clone() for name, tensor in cohort.shared().items()}

        def value(step: Step) -> Tensor:
            total = step.weight.new_zeros(step.weight.shape[0])
            for name, reference in received.items():
                if step.params[name].requires_grad:
                    total = total + (step.params[name] - step.select_rows(reference)).flatten(1).square().sum(1)
            return self.mu / 2 * total

        return value
