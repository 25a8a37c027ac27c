"""Terms: pieces that go inside any method's local training.

A term may keep parameter sets, adds to the payload, adds a penalty to the local loss, may do something after local
training that adds to the reply, and updates its own state from the replies. Terms travel with every exchange of a
method that trains (:meth:`perfed.method.exchange.Clients.train`), so terms and methods combine freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Replies, ServerState
from perfed.plugins import check_free, check_own, known_as, own_name
from perfed.training.cohort import Cohort
from perfed.training.settings import Scheduled
from perfed.training.step import Penalty


class Term(Scheduled):
    """Base of all terms: does nothing. Hyper-parameters are fields; anything that changes is in parameter sets.

    Example:
        >>> class SmallHead(Term):
        ...     name = "small-head"
        ...     strength: float = 0.1
        ...
        ...     def penalty(self, cohort, payload):
        ...         return lambda step: self.strength * step.params["head.weight"].square().flatten(1).sum(1)
        >>> from perfed.methods.fedavg import FedAvg
        >>> method = FedAvg(terms=(SmallHead(strength=0.5),))
    """

    name: ClassVar[str] = ""

    def sets(self) -> dict[str, ParameterSet]:
        """Parameter sets of the term; names are shared with the method's."""
        return {}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse, before anything runs, what the term would do nothing for.

        Args:
            info: of the federation.
            moves_shared: whether the method's rounds move ``server.shared``
                (:attr:`perfed.method.method.Method.moves_shared`).

        Raises:
            PerfedError: a method, model or data that do not fit; says why.
        """

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Before the first round, with all clients."""

    def payload(self, server: ServerState) -> dict[str, Any]:
        """What client programs get from the term's server state."""
        return {}

    def penalty(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty | None:
        """A function of the step that returns one value per active client, added to the local loss; or nothing."""
        return None

    def after(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """After local training: what the term adds to the reply."""
        return {}

    def absorb(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Update the server state; ``content`` is what :meth:`after` returned, stacked in ``replies.ids`` order."""

    def step(self, server: ServerState, before: Mapping[str, Any]) -> None:
        """At the end of the method's round: may change what it made of the server's sets, which were ``before``."""

    def finish(self, server: ServerState, clients: Clients) -> None:
        """After each round, with all clients."""


def payload_of(terms: Sequence[Term], server: ServerState) -> dict[str, Any]:
    """What ``terms`` send with an exchange, by the term's name."""
    return {term.name: term.payload(server) for term in terms}


def absorb(terms: Sequence[Term], server: ServerState, carrying: Sequence[Replies], before: Mapping[str, Any]) -> None:
    """Let every term update its state from the replies of the exchanges that carried it, and end the round.

    ``before``: the server's sets before the method's round.
    """
    for replies in carrying:
        for term in terms:
            term.absorb(server, replies, replies.terms[term.name])
    for term in terms:
        term.step(server, before)


class Travelling:
    """Terms at the clients, in one exchange; what :attr:`Cohort.terms <perfed.training.cohort.Cohort.terms>` is."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self._terms = terms

    def penalties(self, cohort: Cohort) -> list[Penalty]:
        """Of each term, for the model as it is now."""
        found = (term.penalty(cohort, cohort.carried[term.name]) for term in self._terms)
        return [penalty for penalty in found if penalty is not None]

    def reply(self, cohort: Cohort) -> dict[str, Any]:
        """What the terms add to the reply, by name."""
        return {term.name: term.after(cohort, cohort.carried[term.name]) for term in self._terms}


TERMS: dict[str, tuple[type[Term], str]] = {}
"""What :func:`register_term` has made known: by name the class, and the module that registered it."""


def register_term(cls: type[Term]) -> type[Term]:
    """Class decorator: make the term known under its ``name``.

    Raises:
        PerfedError: it has none, or a term of another module has it; the same module may register it again.

    Example:
        >>> @register_term
        ... class SmallBias(Term):
        ...     name = "small-bias"
        ...
        ...     def penalty(self, cohort, payload):
        ...         return lambda step: step.params["head.bias"].square().sum(1)
        >>> from perfed import build_method
        >>> build_method("fedavg", {"terms": ["small-bias"]}).terms
        (SmallBias(),)
    """
    if not cls.name:
        raise PerfedError(f'the term {cls.__name__} has no name; write name: ClassVar[str] = "..." in its class')
    module, taken = cls.__module__, known_as(cls.name, TERMS)
    check_free("term", cls.name, None if taken is None else TERMS[taken][1], module)
    TERMS[cls.name] = cls, module
    return cls


def term_class(name: str) -> type[Term]:
    """The registered term called ``name``, in any case; ``module:NAME`` imports the module first, which registers it.

    Raises:
        PerfedError: there is none; says what is allowed.

    Example:
        >>> term_class("proximal")(mu=0.1)
        Proximal(mu=0.1)
    """
    bare = own_name(name, "term")
    own = known_as(bare, TERMS) or bare
    check_own("term", name, own, {known: module for known, (_, module) in TERMS.items()})
    if own not in TERMS:
        raise PerfedError(f"unknown term '{own}'; allowed: {', '.join(sorted(TERMS))}, or module:NAME")
    return TERMS[own][0]


def term_id(name: str) -> str:
    """``name`` as files have it: as it was registered, behind the module where the user has written one.

    Raises:
        PerfedError: as :func:`term_class`.

    Example:
        >>> term_id("Proximal")
        'proximal'
    """
    module, colon, _ = name.rpartition(":")
    return f"{module}{colon}{term_class(name).name}"


def full_name(name: str) -> str:
    """``module:NAME`` of a term that a module of the user's own has registered; any other name as it is."""
    module = TERMS[name][1] if name in TERMS else "__main__"
    return name if module == "__main__" or module.startswith("perfed.") else f"{module}:{name}"


def term_names() -> list[str]:
    """Names of all registered terms, sorted.

    Example:
        >>> {"anchors", "prototypes", "proximal"} <= set(term_names())
        True
    """
    return sorted(TERMS)
