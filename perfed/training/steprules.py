"""How the step on a mini-batch departs from the optimiser's own: rules, and what several of them mean together.

A step goes through four places, in this order: the gradient of the loss; what :class:`GradientTransform` makes of it;
a :class:`DirectionStep` in its place, or a :class:`CustomStep` in the place of all that follows; the optimiser's step,
with the pull of a :class:`ProximalStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from perfed.errors import PerfedError
from perfed.model.chain import Parameters
from perfed.training.optim import Proximal
from perfed.training.step import Step


class Gradient(Protocol):
    """Gradient of the loss of a mini-batch; what a :data:`Rule` may call as often as it likes."""

    def __call__(self, params: Parameters, batch: Step) -> Parameters:
        """Return gradients at ``params`` (the trained parameters, ``(clients, ...)``) by name; zeros where unused."""

    def along(self, vector: Parameters, params: Parameters, batch: Step) -> Parameters:
        """Return the Hessian of the loss at ``params`` times ``vector``, by differentiation of the gradient.

        Raises:
            PerfedError: a layer or an extension has no second derivative, or an extension changes gradients.
        """


Transform = Callable[[Step, Parameters], Parameters]
"""From a step and the gradients at it, ``{name: (clients, ...)}``, to those that are used."""
Rule = Callable[[Parameters, Gradient, Sequence[Step]], Parameters]
"""From the trained parameters, the gradient and independent mini-batches to new parameters or a direction."""


@dataclass(frozen=True)
class ProximalStep:
    """The optimiser's step on the loss with ``pull / 2 |w - to|^2`` (Ditto, FedAMP).

    Attributes:
        to: some of the parameters, ``(clients, ...)`` by name.
        pull: weight of the term.
        proximal: the step on it: by its gradient, or with SGD ``"implicit"``, stable for any strength, which it is also
            where the gradient's would diverge (:func:`perfed.training.optim.explicit_is_stable`).
    """

    to: Parameters
    pull: float
    proximal: Proximal = "explicit"

    def only(self, names: Iterable[str]) -> ProximalStep:
        """Return the pull on the parameters ``names`` alone."""
        return replace(self, to={name: self.to[name] for name in names if name in self.to})

    def of(self, clients: slice | Tensor) -> ProximalStep:
        """Return the pull of the clients at these positions."""
        return replace(self, to={name: tensor[clients] for name, tensor in self.to.items()})


@dataclass(frozen=True)
class GradientTransform:
    """The optimiser's step along edited gradients (SCAFFOLD, and what extensions make of gradients)."""

    by: Transform


@dataclass(frozen=True)
class DirectionStep:
    """The optimiser's step along what ``by`` makes, in place of the gradient (HF-MAML).

    Attributes:
        by: from parameters, gradient and mini-batches to a direction.
        streams: how many independent mini-batches it gets.
    """

    by: Rule
    streams: int = 1


@dataclass(frozen=True)
class CustomStep:
    """New values that ``by`` makes itself, in place of the optimiser's step (pFedMe).

    Attributes:
        by: from parameters, gradient and mini-batches to the new parameters.
        streams: how many independent mini-batches it gets.
    """

    by: Rule
    streams: int = 1


StepRule = ProximalStep | GradientTransform | DirectionStep | CustomStep


@dataclass(frozen=True)
class StepRules:
    """Rules of one fit, in the places where they act.

    Attributes:
        transforms: of every gradient of the loss, one after the other.
        rule: in the place of the gradient or of the optimiser's step.
        near: what the optimiser's step is pulled to.
    """

    transforms: tuple[Transform, ...] = ()
    rule: DirectionStep | CustomStep | None = None
    near: ProximalStep | None = None

    @classmethod
    def of(cls, rules: Iterable[StepRule]) -> StepRules:
        """Return the rules in their places; gradients are transformed in the order given.

        Raises:
            PerfedError: two rules would have the same place, or nothing is left for one of them to act on.
        """
        given = list(rules)
        replacing = [rule for rule in given if isinstance(rule, DirectionStep | CustomStep)]
        near = [rule for rule in given if isinstance(rule, ProximalStep)]
        custom = any(isinstance(rule, CustomStep) for rule in replacing)
        if len(replacing) > 1 or len(near) > 1 or (custom and near):
            names = " and ".join(type(rule).__name__ for rule in (*near, *replacing))
            raise PerfedError(
                f"a step has {names}, which do not combine; allowed: any number of GradientTransform with at most one "
                "ProximalStep and one DirectionStep, or with one CustomStep"
            )
        transforms = tuple(rule.by for rule in given if isinstance(rule, GradientTransform))
        return cls(transforms, replacing[0] if replacing else None, near[0] if near else None)

    @property
    def streams(self) -> int:
        """Number of independent mini-batches that a step gets."""
        return self.rule.streams if self.rule else 1

    def for_clients(self, clients: slice | Tensor) -> StepRules:
        """Return the rules of the clients at these positions."""
        return replace(self, near=self.near.of(clients)) if self.near else self

    def transformed(self, step: Step, grads: Parameters) -> Parameters:
        """Return what the transforms make of the gradients at a step."""
        for transform in self.transforms:
            grads = transform(step, grads)
        return grads
