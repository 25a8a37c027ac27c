"""What a method is: hyper-parameters, where parameters live, server programs and client programs.

A method is written once, in its paper's own order. ``round`` runs on the server; the programs it names run where the
data is, on a :class:`~perfed.training.cohort.Cohort` whose tensors all have a leading client axis. The method object
holds hyper-parameters only; everything that changes is in named parameter sets.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import Disclosure
from perfed.method.exchange import Clients, ServerState
from perfed.method.extension import Extension
from perfed.model.chain import Chain, Model
from perfed.model.placement import SHARED, Placement, place_parameters
from perfed.settings import LISTED
from perfed.training.cohort import Cohort
from perfed.training.settings import LocalTraining

UNDECLARED = "this method does not declare that its rounds average replies with clients.mean (Method.needs_mean)"
"""Why a method without a declaration refuses every kind of aggregation but the mean."""


class Method(LocalTraining):
    """Base of all methods. A subclass declares hyper-parameters as fields, its placement, and its programs.

    Local training settings are fields of every method. Unknown settings are an error.

    Example:
        >>> from perfed import PERSONAL, Reply, Run, linear, load, mlp
        >>> class MyFedPer(Method):
        ...     default_placement = {"embedding": SHARED, "body": SHARED, "head": PERSONAL}
        ...     needs_mean = ""
        ...
        ...     def round(self, server, clients):  # on the server
        ...         reply = clients.train(self.train, shared=server.shared)
        ...         server.shared = clients.mean(reply.shared, reply.num_samples, current=server.shared)
        ...
        ...     def train(self, cohort, shared):  # at the clients, with a leading client axis
        ...         cohort.load(shared)
        ...         cohort.fit(("body", "head"), epochs=self.local_epochs)
        ...         return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)
        >>> federation, model = load("digits", {"clients": 4}, seed=0), Model(body=mlp((8,), 4), head=linear(10))
        >>> Run(federation, MyFedPer(lr=0.1), model, rounds=2).execute()["rounds"]
        2
    """

    needs_mean: ClassVar[str] = UNDECLARED
    """Why the server needs the mean over clients, so that ``[aggregation]`` can have no other kind; a clause for the
    message. Empty: the rounds average replies with :meth:`Clients.mean <perfed.method.exchange.Clients.mean>` only, or
    average nothing, and every kind can be used. A class that defines ``round`` declares it anew."""
    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": SHARED}
    layer_placement: ClassVar[dict[str, Placement]] = {}
    """Of parameters and buffers by name, or a pattern of names, where they do not live with their stage: those of the
    layers that :meth:`adapt` adds."""
    needs_domains: ClassVar[bool] = False
    uses_validation: ClassVar[bool] = False
    """Whether client programs use validation data, and training data where a client has none.

    A run that is scored on validation data then keeps half of them from the method.
    """
    moves_shared: ClassVar[bool] = True
    """Whether rounds move the model ``server.shared`` from which clients go on. Else a policy cannot ask for the
    gradient there, and a server's optimiser has no steps to take."""
    fits_unused: ClassVar[str] = "personal parameters"
    """What a client that was never used fits to the newest shared parameters (Tziotis et al. 2023, remark 4.8): its
    ``"personal parameters"``, what the program of this name trains (it gets ``shared``), or ``""``, nothing."""

    joins: ClassVar[str | None] = "settle"
    """What a client that comes after the run does, round by round and alone: ``"settle"``, what :attr:`fits_unused`
    says; or the program of this name. ``None``: the server makes its model from what it has sent, so that it cannot."""

    disclosure: ClassVar[Disclosure | None] = None
    """What the class sends, for ``[privacy]``; it is not inherited. ``[privacy]`` refuses classes without one."""

    placement: dict[str, Placement] = Field(
        default_factory=dict,
        description="where parameters live: stage, pattern on names or module type -> personal, shared, per-domain "
        "(whole stages) or frozen",
    )
    extensions: Annotated[tuple[Extension, ...], LISTED] = Field(
        (), description="what rides along its rounds (perfed.method.extension)"
    )

    # Server programs ---------------------------------------------------------------------------------------

    def sets(self) -> dict[str, ParameterSet]:
        """Parameter sets beside ``shared`` (the shared parameters, at home on the server)."""
        return {}

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse, before anything runs, what the method cannot do.

        Raises:
            PerfedError: a model, data or settings that do not fit; says what is allowed.
        """

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Runs once before the first round, with all clients, after the extensions' own preparation."""

    def round(self, server: ServerState, clients: Clients) -> None:
        """One round. May use only the server state at its start, the replies, and keyed randomness."""
        raise NotImplementedError

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Runs after each round, with all clients, before the extensions' own work; the two are one transaction."""

    def download(self, server: ServerState) -> dict[str, Any]:
        """What a client needs from the server to have its own model: the payload of :meth:`personalise`."""
        return {"shared": server.shared}

    # Client programs ---------------------------------------------------------------------------------------

    def local_data(self, client: Client, key: Tensor) -> Client:
        """What the client makes of its data before the run starts, and then works on."""
        return client

    @property
    def finishes(self) -> bool:
        """Whether the method or an extension works with all clients after each round (:meth:`finish`)."""
        own = type(self).finish is not Method.finish
        return own or any(type(extension).finish is not Extension.finish for extension in self.extensions)

    @property
    def changes_data(self) -> bool:
        """Whether the method says what a client makes of its data (:meth:`local_data`)."""
        return type(self).local_data is not Method.local_data

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Make each client's own model from its state and ``payload``; runs on a copy that is thrown away."""
        cohort.load(payload["shared"])

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Outputs (logits) of each client's model for ``x`` ``(clients, batch, ...)``."""
        return cohort.forward(x)

    # Settings ----------------------------------------------------------------------------------------------

    def epochs_in(self, round_: int) -> int:
        """Local epochs of round ``round_``, all phases and models together: the work that clocks time by steps.

        One epoch is one gradient for each mini-batch of the client.
        """
        return self.local_epochs

    @property
    def all_settings(self) -> dict[str, Any]:
        """Every setting of the method and its extensions; of equal names the method's, then the first extension's."""
        parts = (*reversed(self.extensions), self)
        found = {key: part.to_plain_setting(key) for part in parts for key in part.model_dump(exclude={"extensions"})}
        return {key: found[key] for key in sorted(found)}

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """What a run's notes say of the method with these clients and this (adapted) model: one line for each.

        For what it does in place of what the settings say.
        """
        return []

    def adapt(self, model: Model) -> Model:
        """The model that this method works on: the experiment's."""
        return model

    def places(self, chain: Chain) -> dict[str, Placement]:
        """Placement of every parameter and buffer of ``chain``; the most specific rule wins.

        Raises:
            PerfedError: a rule of ``placement`` matches nothing.
        """
        return place_parameters(chain, {**self.default_placement}, {**self.layer_placement, **self.placement})
