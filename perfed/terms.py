"""Terms: pieces that go inside any method's local training.

A term may keep parameter sets, adds to the payload, adds a penalty to the local loss, may do something after local
training that adds to the reply, and updates its own state from the replies. Every method passes its terms through
(:class:`perfed.method.Method`), so terms and methods combine freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from perfed.aggregate import masked_mean
from perfed.cohort import Cohort
from perfed.errors import PerfedError
from perfed.method import Clients, FederationInfo, ParameterSet, Replies, ServerState
from perfed.plugins import calling_module, check_free, check_own, own_name
from perfed.settings import STRICT
from perfed.step import Penalty, Step


class Term(BaseModel):
    """Base of all terms: does nothing. Hyper-parameters are fields; anything that changes is in parameter sets."""

    model_config = STRICT

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


_TERMS: dict[str, tuple[type[Term], str]] = {}
"""Class, and the module that registered it."""


def register_term(cls: type[Term]) -> type[Term]:
    """Class decorator: make the term known under its ``name``.

    Raises:
        PerfedError: it has none, or a term of another module has it; the same module may register it again.
    """
    if not cls.name:
        raise PerfedError(f'the term {cls.__name__} has no name; write name: ClassVar[str] = "..." in its class')
    module = calling_module()
    check_free("term", cls.name, _TERMS[cls.name][1] if cls.name in _TERMS else None, module)
    _TERMS[cls.name] = cls, module
    return cls


def term_class(name: str) -> type[Term]:
    """The registered term called ``name``; ``module:NAME`` imports the module first, which registers the term NAME.

    Raises:
        PerfedError: there is none; says what is allowed.
    """
    own = own_name(name, "term")
    check_own("term", name, own, {known: module for known, (_, module) in _TERMS.items()})
    if own not in _TERMS:
        raise PerfedError(f"unknown term '{own}'; allowed: {', '.join(sorted(_TERMS))}, or module:NAME")
    return _TERMS[own][0]


def full_name(name: str) -> str:
    """``module:NAME`` of a term that a module of the user's own has registered; any other name as it is."""
    module = _TERMS[name][1] if name in _TERMS else "__main__"
    return name if module == "__main__" or module.startswith("perfed.") else f"{module}:{name}"


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


@register_term
class Prototypes(Term):
    """Alignment of features to class means, ``(lambda / d) |f(x) - c_y|^2`` averaged over the mini-batch.

    FedPAC's feature alignment (Xu et al. 2023, eq. 8) and FedProto's regulariser (Tan et al. 2022, eq. 8). Features
    are what the head gets. The server keeps the mean feature ("centroid") of every class over all samples of the
    round's clients, with the features of each client's model after local training; a class that nobody of a round
    holds keeps its old centroid. There is no alignment before the first centroids, nor for a class without one.
    """

    name: ClassVar[str] = "prototypes"

    alignment: float = Field(1.0, ge=0, description="lambda, weight of the alignment; 0 turns it off")
    unknown_class: Literal["skip", "own"] = Field(
        "skip", description="a class without a centroid: 'skip' it, or use the client's 'own' mean (authors' program)"
    )
    source: Literal["global", "own"] = Field(
        "global", description="'own': each client aligns to its own earlier means and sends none (FedProto-L)"
    )

    def sets(self) -> dict[str, ParameterSet]:
        """Class means ``(C, d)`` and which are known ``(C,)``: on the server, or own ones on the client."""
        return {"centroids": ParameterSet("server" if self.source == "global" else "client", init=_no_centroids)}

    def payload(self, server: ServerState) -> dict[str, Any]:
        """The centroids."""
        return {"centroids": server.centroids} if self.source == "global" else {}

    def penalty(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """Mean squared distance of the features to the centroids of their classes, where the features are trained."""
        held = payload["centroids"] if self.source == "global" else cohort.state["centroids"]
        means, known = held["mean"], held["known"]
        active = bool(self.alignment and known.any())
        if active and self.unknown_class == "own":
            means = torch.where(known[:, :, None], means, cohort.class_means())
            known = known | (cohort.class_counts > 0)

        def value(step: Step) -> Tensor:
            features = step.representation().flatten(2) if active else step.weight
            if not features.requires_grad:
                return step.weight.new_zeros(step.weight.shape[0])
            rows = torch.arange(len(step.y), device=step.y.device)[:, None]
            target, use = step.of(means)[rows, step.y], step.of(known)[rows, step.y]
            distances = (features - target).square().mean(2) * use
            return self.alignment * (distances * step.weight).sum(1)

        return value

    def after(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Class means of the updated features, and how many samples they are of."""
        means, counts = cohort.class_means(), cohort.class_counts
        if self.source == "global":
            return {"means": means, "counts": counts}
        cohort.state["centroids"] = {"mean": means, "known": counts > 0}
        return {}

    def absorb(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """``c_k = sum_i n_ik c_ik / sum_i n_ik``."""
        if self.source == "own":
            return
        means, counts, old = content["means"], content["counts"], server.centroids
        known = old["known"] | (counts.sum(0) > 0)
        server.centroids = {"mean": masked_mean(means, counts, old["mean"]), "known": known}


def _no_centroids(info: FederationInfo, key: Tensor) -> dict[str, Any]:
    if info.num_classes is None:
        raise PerfedError("the prototypes term needs class labels; these targets are values (regression)")
    mean = torch.zeros(info.num_classes, info.representation, dtype=info.dtype)
    return {"mean": mean, "known": torch.zeros(info.num_classes, dtype=torch.bool)}
