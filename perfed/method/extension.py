"""Extensions: additions to the rounds of any method, one idea in one file.

| where | hook | meaning |
|---|---|---|
| server | ``payload`` | returns what is sent with the method's payload |
| client | ``private`` | returns how rows are kept private, in every exchange |
| client | ``loss`` | returns a penalty that is added to the loss of local training |
| client | ``gradient`` | returns a function that changes every gradient of the loss before it is used |
| client | ``client_update`` | returns what is added to the reply after local training |
| client | ``outgoing`` | replaces the reply that leaves the client |
| client | masks | under secure aggregation, after all hooks above (:mod:`perfed.engine.steps.secure_sums`) |
| server | ``refuses`` | at real sites: returns why ``outgoing`` cannot have produced a reply |
| server | ``incoming`` | inverts ``outgoing`` for one client's reply on arrival, before replies are folded or stacked |
| server | ``on_replies`` | updates the server state from the replies |
| server | ``server_step`` | changes the result of the round |

Extensions take part in every exchange of a method that trains (:meth:`perfed.method.exchange.Clients.train`), so that
extensions and methods combine freely; ``outgoing`` and ``incoming`` are called for every reply. Several extensions are
applied in the order in which they are listed, ``incoming`` in the reverse order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import Disclosure
from perfed.method.exchange import Clients, Replies, Reply, ServerState
from perfed.plugins import Registry
from perfed.training.cohort import Cohort
from perfed.training.private import PrivateTraining
from perfed.training.settings import Scheduled
from perfed.training.step import Penalty
from perfed.training.steprules import Transform


class Extension(Scheduled):
    """The base class of all extensions; its hooks do nothing.

    Hyper-parameters are fields; everything that changes during a run is in parameter sets.

    Example:
        >>> class SmallHead(Extension):
        ...     name = "small-head"
        ...     strength: float = 0.1
        ...
        ...     def loss(self, cohort, payload):
        ...         return lambda step: self.strength * step.params["head.weight"].square().flatten(1).sum(1)
        >>> from perfed.methods.fedavg import FedAvg
        >>> method = FedAvg(extensions=(SmallHead(strength=0.5),))
    """

    name: ClassVar[str] = ""
    checks_again: ClassVar[bool] = False
    """Whether :meth:`incoming` only repeats the work of :meth:`outgoing`, as a check of clients that may be wrong. It
    is then skipped if the server sees only sums; an extension with any other ``incoming`` is refused in that case."""
    discreet: ClassVar[bool] = False
    """Whether real sites keep their losses and metrics to themselves, and draw noise with secrets of their own."""
    needs_mean: ClassVar[str] = ""
    """A clause that says why the extension needs the mean over clients, for the message that refuses other kinds of
    ``[aggregation]``; empty if every kind can be used."""
    disclosure: ClassVar[Disclosure | None] = None
    """The entries that the class sends; ``[privacy]`` refuses classes without a disclosure. It is not inherited."""

    def sets(self) -> dict[str, ParameterSet]:
        """Return the extension's parameter sets by name; the names must differ from those of the method's sets."""
        return {}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Raise an error, before anything runs, if the extension would have no effect.

        Args:
            info: the server's information about the federation.
            moves_shared: whether the method's rounds change ``server.shared``
                (:attr:`perfed.method.method.Method.moves_shared`).

        Raises:
            PerfedError: the method, the model or the data do not fit; the message says why.
        """

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Prepare the extension before the first round, with all clients."""

    def payload(self, server: ServerState) -> dict[str, Any]:
        """Return the part of the extension's server state that is sent to client programs."""
        return {}

    def private(self) -> PrivateTraining | None:
        """Return how the rows of clients are kept private in all training, or ``None``.

        It applies to every exchange, including exchanges without extensions and training on copies.
        """
        return None

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty | None:
        """Return a function of the step, one value per active client, that is added to the local loss; or ``None``."""
        return None

    def gradient(self, cohort: Cohort, payload: Mapping[str, Any]) -> Transform | None:
        """Return a function from a step and its gradients ``{name: (clients, ...)}`` to new gradients; or ``None``.

        It receives every gradient of the local loss, including the extensions' penalties. The method's own changes of
        gradients (SCAFFOLD's controls, Ditto's pull, pFedMe's steps) are applied after it.
        """
        return None

    def client_update(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that the extension adds to the reply after local training."""
        return {}

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply to send instead of ``reply``, whose tensors are ``(clients, ...)``.

        It is called for the reply of every exchange that may change clients' states, with or without training.
        """
        return reply

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply of one client, without a client axis, recovered from the output of :meth:`outgoing`.

        Raises:
            PerfedError: the reply does not have the form that :meth:`outgoing` produces; clients may be wrong.
        """
        return reply

    def refuses(self, sent: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
        """Return why :meth:`outgoing` cannot have produced the ``reply`` of one client to the payload ``sent``; or "".

        It is called for real sites if the server sees single replies. Neither argument has a client axis.
        """
        return ""

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Update the server state from the replies of one exchange.

        Args:
            server: the server's parameter sets.
            replies: the method's entries of the replies.
            content: the entries of :meth:`client_update`, stacked in the order of ``replies.ids``.
        """

    def server_step(self, server: ServerState, before: Mapping[str, Any]) -> None:
        """Change the server's sets at the end of the method's round; ``before``: the sets before the round."""

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Do the extension's work after each round, with all clients."""


def check_moves_shared(purpose: str, info: FederationInfo, moves_shared: bool) -> None:
    """Check that clients of the method send one shared model and continue from it; for :meth:`Extension.check`.

    Args:
        purpose: a clause that says what the extension does with the shared parameters; error messages start with it.
        info, moves_shared: the arguments of :meth:`Extension.check`.

    Raises:
        PerfedError: no parameter is shared, or rounds do not change the shared model.
    """
    info.shared_parameters(purpose)
    if not moves_shared:
        raise PerfedError(
            f"{purpose}, but this method's clients do not continue from them; allowed: methods that average one model, "
            "such as fedavg, fedrep or fedpac"
        )


def extension_payloads(extensions: Sequence[Extension], server: ServerState) -> dict[str, Any]:
    """Return the payload of every extension by the extension's name."""
    return {extension.name: extension.payload(server) for extension in extensions}


def end_round(
    extensions: Sequence[Extension], server: ServerState, carrying: Sequence[Replies], before: Mapping[str, Any]
) -> None:
    """Run the hooks :meth:`Extension.on_replies` and :meth:`Extension.server_step` of every extension.

    Args:
        extensions: the method's extensions.
        server: the server's parameter sets, after the method's round.
        carrying: the replies of the exchanges that included the extensions.
        before: the server's sets before the method's round.
    """
    for replies in carrying:
        for extension in extensions:
            extension.on_replies(server, replies, replies.extensions[extension.name])
    for extension in extensions:
        extension.server_step(server, before)


def undo_outgoing(extensions: Sequence[Extension], server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
    """Return one client's reply as its program returned it, by inverting ``outgoing`` of every extension."""
    for extension in reversed(extensions):
        reply = extension.incoming(server, reply)
    return reply


class BoundExtensions:
    """The extensions of one exchange at the clients; the type of :attr:`perfed.training.cohort.Cohort.extensions`."""

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self._extensions = extensions

    def penalties(self, cohort: Cohort) -> list[Penalty]:
        """Return the penalties that the extensions add to the loss, for the current model."""
        penalties = (extension.loss(cohort, cohort.carried[extension.name]) for extension in self._extensions)
        return [penalty for penalty in penalties if penalty is not None]

    def transforms(self, cohort: Cohort) -> list[Transform]:
        """Return the functions with which the extensions change gradients, for the current model."""
        transforms = (extension.gradient(cohort, cohort.carried[extension.name]) for extension in self._extensions)
        return [transform for transform in transforms if transform is not None]

    def reply(self, cohort: Cohort) -> dict[str, Any]:
        """Return the entries that the extensions add to the reply, by the extension's name."""
        return {e.name: e.client_update(cohort, cohort.carried[e.name]) for e in self._extensions}


EXTENSIONS: Registry[type[Extension]] = Registry("extension", lambda cls: cls.__module__)
"""The extensions registered with :func:`register_extension`, by name."""


def register_extension(cls: type[Extension]) -> type[Extension]:
    """Register the extension under its ``name``; a class decorator.

    Raises:
        PerfedError: the class has no name, or an extension of another module has the same name. The same module may
            register its extension again.

    Example:
        >>> @register_extension
        ... class SmallBias(Extension):
        ...     name = "small-bias"
        ...
        ...     def loss(self, cohort, payload):
        ...         return lambda step: step.params["head.bias"].square().sum(1)
        >>> from perfed import build_method
        >>> build_method("fedavg", {"extensions": ["small-bias"]}).extensions
        (SmallBias(),)
    """
    if not cls.name:
        raise PerfedError(f'the extension {cls.__name__} has no name; write name: ClassVar[str] = "..." in its class')
    EXTENSIONS.check_free(cls.name, cls.__module__)
    EXTENSIONS[cls.name] = cls
    return cls


def extension_class(name: str) -> type[Extension]:
    """Return the registered extension called ``name``, in any case; ``module:NAME`` first imports its module.

    Raises:
        PerfedError: no extension has this name; the message lists the allowed names.

    Example:
        >>> extension_class("proximal")(mu=0.1)
        Proximal(mu=0.1)
    """
    bare = EXTENSIONS.resolve_name(name)
    if bare not in EXTENSIONS:
        raise PerfedError(f"unknown extension '{bare}'; allowed: {', '.join(sorted(EXTENSIONS))}, or module:NAME")
    return EXTENSIONS[bare]


def extension_id(name: str) -> str:
    """Return the name of an extension as run files store it: as registered, after the module if ``name`` has one.

    Raises:
        PerfedError: no extension has this name.

    Example:
        >>> extension_id("Proximal")
        'proximal'
    """
    module, colon, _ = name.rpartition(":")
    return f"{module}{colon}{extension_class(name).name}"


def qualified_extension_name(name: str) -> str:
    """Return ``module:NAME`` for an extension of a user's module, and any other name unchanged."""
    module = EXTENSIONS[name].__module__ if name in EXTENSIONS else "__main__"
    return name if module == "__main__" or module.startswith("perfed.") else f"{module}:{name}"


def extension_names() -> list[str]:
    """Return the names of all registered extensions, sorted.

    Example:
        >>> {"anchors", "prototypes", "proximal"} <= set(extension_names())
        True
    """
    return sorted(EXTENSIONS)
