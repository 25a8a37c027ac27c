"""Clipping: each client's gradient has at most a given norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from perfed.method.extension import Extension, register_extension
from perfed.model.chain import Parameters
from perfed.training.cohort import Cohort
from perfed.training.step import Step
from perfed.training.steprules import Transform


@register_extension
class Clip(Extension):
    """Gradients of a larger norm are scaled down: ``g <- g min(1, clip_norm / |g|)`` (Pascanu et al. 2013, alg. 1).

    The norm is over all parameters that a step trains, for each client and mini-batch apart.

    Example:
        >>> from perfed import build_method
        >>> build_method("scaffold", {"extensions": ["clip"], "clip_norm": 0.5}).extensions
        (Clip(clip_norm=0.5),)
    """

    name: ClassVar[str] = "clip"

    clip_norm: float = Field(1.0, gt=0, description="largest norm of a client's gradient")

    def gradient(self, cohort: Cohort, payload: Mapping[str, Any]) -> Transform:
        """Return the gradients with each client's norm cut."""

        def clipped(step: Step, grads: Parameters) -> Parameters:
            squares = [g.flatten(1).square().sum(1) for g in grads.values()]
            factor = (self.clip_norm / sum(squares[1:], squares[0]).sqrt()).clamp(max=1) if squares else step.weight
            return {name: g * factor.view(-1, *[1] * (g.ndim - 1)) for name, g in grads.items()}

        return clipped
