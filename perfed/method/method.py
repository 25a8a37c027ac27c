"""What a method is: hyper-parameters, where parameters live, server programs and client programs.

A method is written once, in its paper's own order. ``round`` runs on the server; the programs it names run where the
data is, on a :class:`~perfed.training.cohort.Cohort` whose tensors all have a leading client axis. The method object
holds hyper-parameters only; everything that changes is in named parameter sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field, field_validator
from torch import Tensor

from perfed.data.federation import Client, Federation
from perfed.model.chain import STAGES, Chain, Model, Parameters
from perfed.model.placement import SHARED, Placement, place
from perfed.settings import STRICT
from perfed.training.cohort import Cohort
from perfed.training.fit import Gradient
from perfed.training.step import Penalty, Step

if TYPE_CHECKING:
    from perfed.method.term import Term
from perfed.method.exchange import Clients, ParameterSet, Replies, Reply, ServerState


class Method(BaseModel):
    """Base of all methods. A subclass declares hyper-parameters as fields, its placement, and its programs.

    Local training settings are fields of every method. Unknown settings are an error.
    """

    model_config = STRICT

    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": SHARED}
    without: ClassVar[tuple[str, ...]] = ()
    needs_domains: ClassVar[bool] = False
    uses_validation: ClassVar[bool] = False
    """Whether client programs use validation data, and training data where a client has none.

    A run that is scored on validation data then keeps half of them from the method.
    """
    moves_shared: ClassVar[bool] = True
    """Whether rounds change ``server.shared``; else a policy cannot ask for the gradient there."""

    optimizer: Literal["adam", "sgd"] = Field("adam", description="local optimiser")
    lr: float | dict[str, float] = Field(1e-3, description="learning rate, or one per stage (missing stages: 1e-3)")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float | dict[str, float] = Field(0.0, description="weight decay, or one per stage (others: 0)")
    decay: Literal["weights", "all"] = Field("weights", description="what weight decay acts on; biases only with 'all'")
    batch_size: int = Field(100, ge=1, description="samples of a local mini-batch")
    local_epochs: int = Field(10, ge=0, description="local epochs per round")
    placement: dict[str, Placement] = Field(
        default_factory=dict,
        description="where parameters live: stage, pattern on names or module type -> personal, shared, per-domain "
        "(whole stages) or frozen",
    )
    terms: tuple[Any, ...] = Field((), description="terms added to local training (perfed.method.term)")

    @field_validator("lr", "weight_decay")
    @classmethod
    def _known_stages(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for name, number in value.items() if isinstance(value, dict) else (("", value),):
            if name and name not in STAGES:
                raise ValueError(f"'{name}' is not a stage; allowed: {', '.join(STAGES)}")
            if not 0 <= number < float("inf"):
                raise ValueError("must be a finite number, at least 0")
        return value

    def lr_of(self, stage: str) -> float:
        """Learning rate of ``stage``."""
        return self.lr.get(stage, 1e-3) if isinstance(self.lr, dict) else self.lr

    def weight_decay_of(self, stage: str) -> float:
        """Weight decay of ``stage``."""
        return self.weight_decay.get(stage, 0.0) if isinstance(self.weight_decay, dict) else self.weight_decay

    # Server programs ---------------------------------------------------------------------------------------

    def sets(self) -> dict[str, ParameterSet]:
        """Parameter sets beside ``shared`` (the shared parameters, at home on the server)."""
        return {}

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Runs once before the first round, with all clients."""
        for term in self.all_terms:
            term.prepare(server, clients)

    def round(self, server: ServerState, clients: Clients) -> None:
        """One round. May use only the server state at its start, the replies, and keyed randomness."""
        raise NotImplementedError

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Runs after each round, with all clients, as a transaction of its own."""
        for term in self.all_terms:
            term.finish(server, clients)

    def download(self, server: ServerState) -> dict[str, Any]:
        """What a client needs from the server to have its own model: the payload of :meth:`personalise`."""
        return {"shared": server.shared}

    # Client programs ---------------------------------------------------------------------------------------

    def local_data(self, client: Client, key: Tensor) -> Client:
        """What the client makes of its data before the run starts, and then works on."""
        return client

    @property
    def changes_data(self) -> bool:
        """Whether the method says what a client makes of its data (:meth:`local_data`)."""
        return type(self).local_data is not Method.local_data

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Make each client's own model from its state and ``payload``; runs on a copy that is thrown away."""
        cohort.load(payload["shared"])

    def gradient(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Gradient of each client's mean training loss in the shared parameters, at the received ones, for policies.

        Without terms, in one mini-batch of all samples; dropout is drawn as in training.
        """
        cohort.load(shared)
        names = cohort.shared_parameters
        found = {name: torch.zeros_like(cohort.model[name]) for name in names}

        def note(params: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
            for name, value in gradient(params, batches[0]).items():
                found[name][torch.from_numpy(batches[0].rows)] = value
            return params

        with cohort.rehearsal():
            cohort.fit(names, steps=1, batch_size="all", step=note)
        return Reply(gradient=found, num_samples=cohort.num_samples)

    def settle(self, cohort: Cohort, shared: dict[str, Any], terms: dict[str, Any]) -> None:
        """Fit what is a client's own to the newest shared parameters, for clients that were never used.

        Source: Tziotis et al. 2023, remark 4.8. These are the personal parameters; a method that keeps a client's own
        model in a parameter set says here how that is trained.
        """
        cohort.load(shared)
        cohort.fit(cohort.personal_parameters, epochs=self.local_epochs, penalties=self.penalties(cohort, terms))

    def personalise_unused(self, cohort: Cohort, unused: dict[str, Any], **payload: Any) -> None:
        """:meth:`settle` with what ``unused`` holds, then :meth:`personalise` with its ``payload``."""
        self.settle(cohort, **unused)
        self.personalise(cohort, **payload)

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Outputs (logits) of each client's model for ``x`` ``(clients, batch, ...)``."""
        return cohort.forward(x)

    # Terms -------------------------------------------------------------------------------------------------

    def epochs_in(self, round_: int) -> int:
        """Local epochs of round ``round_``, all phases and models together: the work that clocks time by steps.

        One epoch is one gradient for each mini-batch of the client.
        """
        return self.local_epochs

    @property
    def all_settings(self) -> dict[str, Any]:
        """Every setting of the method and its terms; where names are the same, the method's, then the first term's."""
        parts = (*reversed(self.all_terms), self)
        found = {key: getattr(part, key) for part in parts for key in type(part).model_fields if key != "terms"}
        return {key: found[key] for key in sorted(found)}

    @property
    def all_terms(self) -> tuple[Term, ...]:
        """The terms, typed."""
        return self.terms

    def term_payload(self, server: ServerState) -> dict[str, Any]:
        """Payload of all terms; a method passes it to its programs as ``terms``."""
        return {term.name: term.payload(server) for term in self.all_terms}

    def penalties(self, cohort: Cohort, terms: Mapping[str, Any]) -> list[Penalty]:
        """The terms' penalties, for :meth:`Cohort.fit <perfed.training.cohort.Cohort.fit>`."""
        return [term.penalty(cohort, terms[term.name]) for term in self.all_terms]

    def after_terms(self, cohort: Cohort, terms: Mapping[str, Any]) -> dict[str, Any]:
        """What the terms add to a reply, under ``terms``; runs after local training."""
        return {term.name: term.after(cohort, terms[term.name]) for term in self.all_terms}

    def absorb_terms(self, server: ServerState, replies: Replies) -> None:
        """Let every term update its state from the replies."""
        for term in self.all_terms:
            term.absorb(server, replies, replies.terms[term.name])

    # Settings ----------------------------------------------------------------------------------------------

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """What a run's notes say of the method with these clients and this (adapted) model: one line for each.

        For what it does in place of what the settings say.
        """
        return []

    def adapt(self, model: Model) -> Model:
        """The model this method works on: stages named in ``without`` are left out."""
        kept = {name: factory for name, factory in model.factories.items() if name not in self.without}
        return Model(**kept)

    def places(self, chain: Chain) -> dict[str, Placement]:
        """Placement of every parameter and buffer of ``chain``; the most specific rule wins.

        Raises:
            PerfedError: a rule of ``placement`` matches nothing.
        """
        return place(chain, {**self.default_placement}, self.placement)
