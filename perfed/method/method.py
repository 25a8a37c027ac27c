"""Methods: hyper-parameters, the placement of parameters, server programs and client programs.

A method is written once, in the order of its paper. ``round`` runs on the server. The client programs that it calls run
where the data is, on a :class:`~perfed.training.cohort.Cohort` whose tensors all have a leading client axis. The method
object contains only hyper-parameters; everything that changes is in named parameter sets.
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
"""The reason with which a method without a declaration refuses every kind of aggregation except the mean."""


class Method(LocalTraining):
    """The base class of all methods.

    A subclass declares hyper-parameters as fields, its placement, and its programs. The settings of local training are
    fields of every method. Unknown settings are an error.

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
    """A clause that says why the server needs the mean over clients, for the message that refuses other kinds of
    ``[aggregation]``. Empty: rounds average replies only with :meth:`Clients.mean
    <perfed.method.exchange.Clients.mean>`, or average nothing, and every kind can be used. A class that defines
    ``round`` must declare it again."""
    default_placement: ClassVar[dict[str, Placement]] = {"embedding": SHARED, "body": SHARED, "head": SHARED}
    layer_placement: ClassVar[dict[str, Placement]] = {}
    """The placement of parameters and buffers of layers that :meth:`adapt` adds, by name or pattern of names, if it
    differs from the placement of their stage."""
    needs_domains: ClassVar[bool] = False
    uses_validation: ClassVar[bool] = False
    """Whether client programs use validation data; training data stand in at clients without validation data.

    If a run is scored on validation data, the method receives only half of them.
    """
    moves_shared: ClassVar[bool] = True
    """Whether rounds change the model ``server.shared`` from which clients continue. Otherwise policies that need the
    gradient at this model, and optimisers on the server, are refused."""
    fits_unused: ClassVar[str] = "personal parameters"
    """What a client that never took part fits to the newest shared parameters (Tziotis et al. 2023, remark 4.8):
    ``"personal parameters"``; the name of a client program, which receives ``shared``; or ``""`` for nothing."""

    joins: ClassVar[str | None] = "settle"
    """What a client that joins after the run executes in each of its rounds, without other clients: ``"settle"`` for
    the training of :attr:`fits_unused`, or the name of a client program. ``None``: clients cannot join, because the
    server computes a client's model from its earlier replies."""

    disclosure: ClassVar[Disclosure | None] = None
    """The entries that the class sends; ``[privacy]`` refuses classes without a disclosure. It is not inherited."""

    placement: dict[str, Placement] = Field(
        default_factory=dict,
        description="where parameters live: stage, pattern on names or module type -> personal, shared, per-domain "
        "(whole stages) or frozen",
    )
    extensions: Annotated[tuple[Extension, ...], LISTED] = Field(
        (), description="extensions that take part in its rounds (perfed.method.extension)"
    )

    # Server programs ---------------------------------------------------------------------------------------

    def sets(self) -> dict[str, ParameterSet]:
        """Return the parameter sets besides ``shared`` (the shared parameters, whose home is the server)."""
        return {}

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Raise an error, before anything runs, if the method cannot work in this federation.

        Raises:
            PerfedError: the model, the data or the settings do not fit; the message says what is allowed.
        """

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Prepare the server before the first round, with all clients; called after the extensions' preparation."""

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one round; it may use only the server state at its start, the replies, and keyed random numbers."""
        raise NotImplementedError

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Do the method's work after each round, with all clients.

        It is called before the extensions' ``finish``; the two are one transaction.
        """

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return what a client needs from the server for its own model: the payload of :meth:`personalise`."""
        return {"shared": server.shared}

    # Client programs ---------------------------------------------------------------------------------------

    def local_data(self, client: Client, key: Tensor) -> Client:
        """Return the client with the data that it uses in the run, computed from its data before the run starts."""
        return client

    @property
    def finishes(self) -> bool:
        """Whether the method or an extension does work with all clients after each round (:meth:`finish`)."""
        method_finishes = type(self).finish is not Method.finish
        return method_finishes or any(type(extension).finish is not Extension.finish for extension in self.extensions)

    @property
    def changes_data(self) -> bool:
        """Whether the method changes clients' data before the run starts (:meth:`local_data`)."""
        return type(self).local_data is not Method.local_data

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Build each client's own model from its state and ``payload``; runs on a copy that is discarded afterwards."""
        cohort.load(payload["shared"])

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return the outputs (logits) of each client's model for ``x`` ``(clients, batch, ...)``."""
        return cohort.forward(x)

    # Settings ----------------------------------------------------------------------------------------------

    def epochs_in(self, round_: int) -> int:
        """Return the number of local epochs of round ``round_``, summed over phases and models.

        Clocks that measure work in steps use it. One epoch is one gradient for each mini-batch of the client.
        """
        return self.local_epochs

    @property
    def all_settings(self) -> dict[str, Any]:
        """The settings of the method and its extensions, by name.

        If names coincide, the method's setting comes first, then that of the first extension.
        """
        parts = (*reversed(self.extensions), self)
        values = {key: part.to_plain_setting(key) for part in parts for key in part.model_dump(exclude={"extensions"})}
        return {key: values[key] for key in sorted(values)}

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Return lines for the run's notes about the method with these clients and this (adapted) model.

        A note says where the method deviates from its settings.
        """
        return []

    def adapt(self, model: Model) -> Model:
        """Return the model that this method trains; by default the experiment's model."""
        return model

    def places(self, chain: Chain) -> dict[str, Placement]:
        """Return the placement of every parameter and buffer of ``chain``; the most specific rule wins.

        Raises:
            PerfedError: a rule of ``placement`` matches nothing.
        """
        return place_parameters(chain, {**self.default_placement}, {**self.layer_placement, **self.placement})
