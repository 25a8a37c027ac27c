"""How a method bends the step on a mini-batch: near other parameters, by edited gradients, or in a way of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from perfed.model.chain import Parameters
from perfed.training.optim import Proximal
from perfed.training.step import Step


class Gradient(Protocol):
    """Gradient of the loss of a mini-batch; what a :data:`Rule` may call as often as it likes."""

    def __call__(self, params: Parameters, batch: Step) -> Parameters:
        """Gradients at ``params`` (the trained parameters, ``(clients, ...)``) by name; zeros where unused."""

    def along(self, vector: Parameters, params: Parameters, batch: Step) -> Parameters:
        """The Hessian of the loss at ``params`` times ``vector``, by automatic differentiation of the gradient.

        Raises:
            PerfedError: a layer or a term has no second derivative.
        """


Correction = Callable[[Step, Parameters], Parameters]
"""From a step and the gradients at it, ``{name: (clients, ...)}``, to those that the optimiser gets."""
Rule = Callable[[Parameters, Gradient, Sequence[Step]], Parameters]
"""From the trained parameters, the gradient and independent mini-batches to new parameters or a direction."""


@dataclass(frozen=True)
class Near:
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

    def only(self, names: Iterable[str]) -> Near:
        """Near the parameters ``names`` alone."""
        return replace(self, to={name: self.to[name] for name in names if name in self.to})

    def of(self, clients: slice | Tensor) -> Near:
        """For the clients at these positions."""
        return replace(self, to={name: tensor[clients] for name, tensor in self.to.items()})


@dataclass(frozen=True)
class Corrected:
    """The optimiser's step along edited gradients (SCAFFOLD)."""

    by: Correction


@dataclass(frozen=True)
class Directed:
    """The optimiser's step along what ``by`` makes, in place of the gradient (HF-MAML).

    Attributes:
        by: from parameters, gradient and mini-batches to a direction.
        streams: how many independent mini-batches it gets.
    """

    by: Rule
    streams: int = 1


@dataclass(frozen=True)
class Replaced:
    """New values that ``by`` makes itself, in place of the optimiser's step (pFedMe).

    Attributes:
        by: from parameters, gradient and mini-batches to the new parameters.
        streams: how many independent mini-batches it gets.
    """

    by: Rule
    streams: int = 1


Update = Near | Corrected | Directed | Replaced
