"""Rules that change the optimiser's step on a mini-batch, and the meaning of combinations of rules.

A step is computed in this order: the gradient of the loss; its changes by each :class:`GradientTransform`; a
:class:`DirectionStep` that replaces the gradient, or a :class:`CustomStep` that replaces everything that follows; the
optimiser's step, with the pull of a :class:`ProximalStep`.
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
    """The gradient of the loss of a mini-batch, which a :data:`Rule` may call any number of times."""

    def __call__(self, params: Parameters, batch: Step) -> Parameters:
        """Return the gradients at ``params`` (the trained parameters, ``(clients, ...)``) by name.

        The gradients of unused parameters are zero.
        """

    def multiply_hessian(self, vector: Parameters, params: Parameters, batch: Step) -> Parameters:
        """Return the Hessian of the loss at ``params`` times ``vector``, by differentiation of the gradient.

        Raises:
            PerfedError: if a layer or an extension has no second derivative, or an extension changes gradients.
        """


Transform = Callable[[Step, Parameters], Parameters]
"""A function from a step and its gradients ``{name: (clients, ...)}`` to the gradients to use."""
Rule = Callable[[Parameters, Gradient, Sequence[Step]], Parameters]
"""A function from trained parameters, gradient and independent mini-batches to new parameters or a direction."""


@dataclass(frozen=True)
class ProximalStep:
    """The optimiser's step on the loss with ``pull / 2 |w - to|^2`` (Ditto, FedAMP).

    Attributes:
        to: the target values of some parameters, ``(clients, ...)`` by name.
        pull: the weight of the term.
        proximal: the step on the term: by its gradient, or with SGD ``"implicit"``, which is stable for any weight and
            is always used if the gradient's step would diverge (:func:`perfed.training.optim.explicit_is_stable`).
    """

    to: Parameters
    pull: float
    proximal: Proximal = "explicit"

    def limit_to(self, names: Iterable[str]) -> ProximalStep:
        """Return the pull on the parameters ``names`` only."""
        return replace(self, to={name: self.to[name] for name in names if name in self.to})

    def for_clients(self, clients: slice | Tensor) -> ProximalStep:
        """Return the pull of the clients at these positions."""
        return replace(self, to={name: tensor[clients] for name, tensor in self.to.items()})


@dataclass(frozen=True)
class GradientTransform:
    """The optimiser's step along changed gradients (SCAFFOLD, and extensions that change gradients)."""

    by: Transform


@dataclass(frozen=True)
class DirectionStep:
    """The optimiser's step along the result of ``by`` instead of the gradient (HF-MAML).

    Attributes:
        by: a function from parameters, gradient and mini-batches to a direction.
        streams: the number of independent mini-batches that it gets.
    """

    by: Rule
    streams: int = 1


@dataclass(frozen=True)
class CustomStep:
    """A step to the result of ``by`` instead of the optimiser's step (pFedMe).

    Attributes:
        by: a function from parameters, gradient and mini-batches to the new parameters.
        streams: the number of independent mini-batches that it gets.
    """

    by: Rule
    streams: int = 1


StepRule = ProximalStep | GradientTransform | DirectionStep | CustomStep


@dataclass(frozen=True)
class StepRules:
    """The rules of one fit, by the place where they act.

    Attributes:
        transforms: functions that change every gradient of the loss, in order.
        rule: the rule that replaces the gradient or the optimiser's step.
        near: the pull that is added to the optimiser's step.
    """

    transforms: tuple[Transform, ...] = ()
    rule: DirectionStep | CustomStep | None = None
    near: ProximalStep | None = None

    @classmethod
    def combine(cls, rules: Iterable[StepRule]) -> StepRules:
        """Return the combination of ``rules``; gradients are transformed in their order.

        Raises:
            PerfedError: if two rules would act in the same place, or a rule would have no effect because of another
                one.
        """
        all_rules = list(rules)
        replacements = [rule for rule in all_rules if isinstance(rule, DirectionStep | CustomStep)]
        near = [rule for rule in all_rules if isinstance(rule, ProximalStep)]
        custom = any(isinstance(rule, CustomStep) for rule in replacements)
        if len(replacements) > 1 or len(near) > 1 or (custom and near):
            names = " and ".join(type(rule).__name__ for rule in (*near, *replacements))
            raise PerfedError(
                f"a step has {names}, which do not combine; allowed: any number of GradientTransform with at most one "
                "ProximalStep and one DirectionStep, or with one CustomStep"
            )
        transforms = tuple(rule.by for rule in all_rules if isinstance(rule, GradientTransform))
        return cls(transforms, replacements[0] if replacements else None, near[0] if near else None)

    @property
    def streams(self) -> int:
        """Return the number of independent mini-batches that a step gets."""
        return self.rule.streams if self.rule else 1

    def for_clients(self, clients: slice | Tensor) -> StepRules:
        """Return the rules of the clients at these positions."""
        return replace(self, near=self.near.for_clients(clients)) if self.near else self

    def transform_gradients(self, step: Step, grads: Parameters) -> Parameters:
        """Return the gradients of a step after all transforms."""
        for transform in self.transforms:
            grads = transform(step, grads)
        return grads
