"""Terms: pieces that go inside any method's local training.

A term may keep parameter sets, adds to the payload, adds a penalty to the local loss, may do something after local
training that adds to the reply, and updates its own state from the replies. Every method passes its terms through
(:class:`perfed.method.Method`), so terms and methods combine freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from perfed.errors import PerfedError
from perfed.step import Step

if TYPE_CHECKING:
    from perfed.cohort import Cohort
    from perfed.method import Clients, ParameterSet, Replies, ServerState

Penalty = Callable[[Step], Tensor]


class Term(BaseModel):
    """Base of all terms: does nothing. Hyper-parameters are fields; anything that changes is in parameter sets."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str] = ""

    def sets(self) -> dict[str, ParameterSet]:
        """Parameter sets of the term; names are shared with the method's."""
        return {}

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Before the first round, with all clients."""

    def payload(self, server: ServerState) -> dict[str, Any]:
        """What client programs get from the term's server state."""
        return {}

    def penalty(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """A function of the step that returns one value per active client, added to the local loss."""
        raise NotImplementedError

    def after(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """After local training: what the term adds to the reply."""
        return {}

    def absorb(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Update the server state; ``content`` is what :meth:`after` returned, stacked in ``replies.ids`` order."""

    def finish(self, server: ServerState, clients: Clients) -> None:
        """After each round, with all clients."""


_TERMS: dict[str, type[Term]] = {}


def register_term(cls: type[Term]) -> type[Term]:
    """Class decorator: make the term known under its ``name``."""
    _TERMS[cls.name] = cls
    return cls


def term_class(name: str) -> type[Term]:
    """The registered term called ``name``."""
    if name not in _TERMS:
        raise PerfedError(f"unknown term '{name}'; allowed: {', '.join(sorted(_TERMS))}")
    return _TERMS[name]


def term_names() -> list[str]:
    """Names of all registered terms, sorted."""
    return sorted(_TERMS)


@register_term
class Proximal(Term):
    """FedProx: ``(mu / 2) |w - w_received|^2`` over the trained shared parameters (Li et al. 2020, eq. 2)."""

    name: ClassVar[str] = "proximal"

    mu: float = Field(0.01, ge=0, description="weight of the proximal term")

    def penalty(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """Distance to the shared parameters as they are when training starts."""
        received = {name: tensor.clone() for name, tensor in cohort.shared().items()}

        def value(step: Step) -> Tensor:
            total = step.weight.new_zeros(step.weight.shape[0])
            for name, reference in received.items():
                if step.params[name].requires_grad:
                    total = total + (step.params[name] - step.of(reference)).flatten(1).square().sum(1)
            return self.mu / 2 * total

        return value
