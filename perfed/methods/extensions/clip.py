"""Clipping: the gradient of each client has at most a certain norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed.method.disclosure import Disclosure
from perfed.method.extension import Extension, register_extension
from perfed.model.chain import Parameters
from perfed.training.cohort import Cohort
from perfed.training.step import Step
from perfed.training.steprules import Transform


@register_extension
class Clip(Extension):
    """Clipping of gradients to a norm: ``g <- g min(1, clip_norm / |g|)`` (Pascanu et al. 2013, algorithm 1).

    The norm is over all parameters that a step trains, separately for each client and mini-batch. A gradient whose norm
    is not finite has no direction and is set to zero.

    Example:
        >>> from perfed import build_method
        >>> build_method("scaffold", {"extensions": ["clip"], "clip_norm": 0.5}).extensions
        (Clip(clip_norm=0.5),)
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure()
    name: ClassVar[str] = "clip"

    clip_norm: float = Field(1.0, gt=0, description="largest norm of a client's gradient")

    def gradient(self, cohort: Cohort, payload: Mapping[str, Any]) -> Transform:
        """Return a function that clips the norm of each client's gradient."""

        def clip_gradients(step: Step, grads: Parameters) -> Parameters:
            squares = [g.flatten(1).square().sum(1) for g in grads.values()]
            if not squares:
                return grads
            norms = sum(squares[1:], squares[0]).sqrt()
            factor, overflowed = (self.clip_norm / norms).clamp(max=1), ~torch.isfinite(norms)

            def clip_gradient(gradient: Tensor) -> Tensor:
                shape = (-1, *[1] * (gradient.ndim - 1))
                return (gradient * factor.view(shape)).masked_fill(overflowed.view(shape), 0)

            return {name: clip_gradient(gradient) for name, gradient in grads.items()}

        return clip_gradients
