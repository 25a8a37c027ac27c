"""The setting of methods that keep a model near another one, and the run's notes about it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

from perfed.method.method import Method
from perfed.model.chain import Model
from perfed.training.optim import Proximal, explicit_is_stable


def _check_optimizer(value: Proximal, info: ValidationInfo) -> Proximal:
    if value == "implicit" and info.data.get("optimizer") == "adam":
        raise ValueError("'implicit' needs optimizer = 'sgd'; Adam adds the term's gradient, 'explicit'")
    return value


ProximalKind = Annotated[Proximal, AfterValidator(_check_optimizer)]
"""The type of the setting ``proximal``: the step of SGD on the quadratic term."""

STEP = "SGD's step on the quadratic term; 'explicit' where it is stable, lr times the term's weight < 2 (1 + momentum)"


def implicit_notes(method: Method, model: Model, pull: float, proximal: Proximal) -> list[str]:
    """Return a note for each stage in which explicit steps on ``pull / 2 |w - near|^2`` are set but would diverge."""
    if method.optimizer == "adam" or proximal == "implicit":
        return []
    return [
        f"{stage}: SGD's steps on the quadratic term are implicit; explicit ones diverge, as lr * {pull:g} = "
        f"{method.lr_of(stage) * pull:g} is not below 2 (1 + momentum) = {2 * (1 + method.momentum):g}"
        for stage in model.factories
        if not explicit_is_stable(method.lr_of(stage), pull, method.momentum)
    ]
