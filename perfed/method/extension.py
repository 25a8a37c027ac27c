"""Extensions: what goes inside any method's rounds, one idea in one file.

| where | hook | meaning |
|---|---|---|
| server | ``payload`` | what goes down with the method's payload |
| client | ``private`` | how rows are kept private, in every exchange |
| client | ``loss`` | what is added to the loss of local training |
| client | ``gradient`` | what is made of every gradient of the loss before it is used |
| client | ``client_update`` | after local training: what is added to the reply |
| client | ``outgoing`` | what leaves the client in the place of the reply |
| client | masks | under secure aggregation, once all of the above is done (:mod:`perfed.engine.steps.secure_sums`) |
| server | ``refuses`` | where clients are elsewhere: why a reply is none that ``outgoing`` makes |
| server | ``incoming`` | its inverse, for one client's reply where it arrives, before anything is folded or stacked |
| server | ``on_replies`` | what the server learns from the replies |
| server | ``server_step`` | what is made of the round's result |

Extensions travel with every exchange of a method that trains (:meth:`perfed.method.exchange.Clients.train`), so that
they and methods combine freely; ``outgoing`` and ``incoming`` are asked for every reply. Several compose in the order
in which they are given, ``incoming`` in the reverse order.
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
    """Base of all extensions: does nothing. Hyper-parameters are fields; anything that changes is in parameter sets.

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
    """Whether :meth:`incoming` only does once more what :meth:`outgoing` has done, as clients may be wrong. Where the
    server sees sums alone it is then left out; an extension with any other ``incoming`` is refused there."""
    discreet: ClassVar[bool] = False
    """Whether clients that are elsewhere keep their losses and metrics, and draw noise with secrets of their own."""
    needs_mean: ClassVar[str] = ""
    """Why the extension needs the mean over clients, so that ``[aggregation]`` can have no other kind; a clause for the
    message."""
    disclosure: ClassVar[Disclosure | None] = None
    """What the class sends, for ``[privacy]``; it is not inherited. ``[privacy]`` refuses classes without one."""

    def sets(self) -> dict[str, ParameterSet]:
        """Return the extension's parameter sets; names are shared with the method's."""
        return {}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse, before anything runs, what the extension would do nothing for.

        Args:
            info: of the federation.
            moves_shared: whether the method's rounds move ``server.shared``
                (:attr:`perfed.method.method.Method.moves_shared`).

        Raises:
            PerfedError: a method, model or data that do not fit; says why.
        """

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Do what comes before the first round, with all clients."""

    def payload(self, server: ServerState) -> dict[str, Any]:
        """Return what client programs get from the extension's server state."""
        return {}

    def private(self) -> PrivateTraining | None:
        """Return how the rows of clients are kept private in whatever trains on them; or nothing.

        It holds in every exchange, those without extensions and work on copies among them.
        """
        return None

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty | None:
        """Return a function of the step to one value per active client, added to the local loss; or nothing."""
        return None

    def gradient(self, cohort: Cohort, payload: Mapping[str, Any]) -> Transform | None:
        """Return a function from a step and its gradients ``{name: (clients, ...)}`` to those used; or nothing.

        It gets every gradient of the local loss, what extensions add to it among it. What a method makes of gradients
        (SCAFFOLD's controls, Ditto's pull, pFedMe's steps) comes after it.
        """
        return None

    def client_update(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the extension adds to the reply, after local training."""
        return {}

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return what leaves the clients of ``cohort`` in the place of ``reply``, whose tensors are ``(clients, ...)``.

        It is asked for the reply of every exchange that may change clients' states, with or without training.
        """
        return reply

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply of one client, without a client axis, from what :meth:`outgoing` made of it.

        Raises:
            PerfedError: it is not of that form; clients may be wrong.
        """
        return reply

    def refuses(self, sent: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
        """Return why the ``reply`` of one client to the payload ``sent`` is none that :meth:`outgoing` makes; or "".

        It is asked where clients are elsewhere and replies are seen; neither has a client axis.
        """
        return ""

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Update the server state; ``content`` is :meth:`client_update`'s, stacked in ``replies.ids`` order."""

    def server_step(self, server: ServerState, before: Mapping[str, Any]) -> None:
        """Change, at the end of the method's round, what it made of the server's sets, which were ``before``."""

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Do what comes after each round, with all clients."""


def check_moved(what: str, info: FederationInfo, moves_shared: bool) -> None:
    """Refuse methods without one model that clients send and go on from; for :meth:`Extension.check`.

    Args:
        what: says what the extension does with the shared parameters.
        info, moves_shared: as :meth:`Extension.check` gets them.

    Raises:
        PerfedError: starts with ``what``.
    """
    info.shared_parameters(what)
    if not moves_shared:
        raise PerfedError(
            f"{what}, and clients of this method do not go on from them; allowed: methods that average one model, as "
            "fedavg, fedrep or fedpac"
        )


def payload_of(extensions: Sequence[Extension], server: ServerState) -> dict[str, Any]:
    """Return what ``extensions`` send with an exchange, by the extension's name."""
    return {extension.name: extension.payload(server) for extension in extensions}


def end_round(
    extensions: Sequence[Extension], server: ServerState, carrying: Sequence[Replies], before: Mapping[str, Any]
) -> None:
    """Let every extension learn from the replies of the exchanges that carried it, and take its step.

    ``before``: the server's sets before the method's round.
    """
    for replies in carrying:
        for extension in extensions:
            extension.on_replies(server, replies, replies.extensions[extension.name])
    for extension in extensions:
        extension.server_step(server, before)


def received(extensions: Sequence[Extension], server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
    """Return one client's reply as its program made it, from what :meth:`Extension.outgoing` made of it."""
    for extension in reversed(extensions):
        reply = extension.incoming(server, reply)
    return reply


class BoundExtensions:
    """Extensions at the clients, in one exchange; what :attr:`perfed.training.cohort.Cohort.extensions` is."""

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self._extensions = extensions

    def penalties(self, cohort: Cohort) -> list[Penalty]:
        """Return what each adds to the loss, for the model as it is now."""
        found = (extension.loss(cohort, cohort.carried[extension.name]) for extension in self._extensions)
        return [penalty for penalty in found if penalty is not None]

    def transforms(self, cohort: Cohort) -> list[Transform]:
        """Return what each makes of gradients, for the model as it is now."""
        found = (extension.gradient(cohort, cohort.carried[extension.name]) for extension in self._extensions)
        return [transform for transform in found if transform is not None]

    def reply(self, cohort: Cohort) -> dict[str, Any]:
        """Return what the extensions add to the reply, by name."""
        return {e.name: e.client_update(cohort, cohort.carried[e.name]) for e in self._extensions}


EXTENSIONS: Registry[type[Extension]] = Registry("extension", lambda cls: cls.__module__)
"""What :func:`register_extension` has made known, by name."""


def register_extension(cls: type[Extension]) -> type[Extension]:
    """Class decorator: make the extension known under its ``name``.

    Raises:
        PerfedError: it has none, or an extension of another module has it; the same module may register it again.

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
    """Return the registered extension called ``name``, in any case; ``module:NAME`` imports its module.

    Raises:
        PerfedError: there is none; says what is allowed.

    Example:
        >>> extension_class("proximal")(mu=0.1)
        Proximal(mu=0.1)
    """
    own = EXTENSIONS.resolve_name(name)
    if own not in EXTENSIONS:
        raise PerfedError(f"unknown extension '{own}'; allowed: {', '.join(sorted(EXTENSIONS))}, or module:NAME")
    return EXTENSIONS[own]


def extension_id(name: str) -> str:
    """``name`` as files have it: as it was registered, behind the module where the user has written one.

    Raises:
        PerfedError: as :func:`extension_class`.

    Example:
        >>> extension_id("Proximal")
        'proximal'
    """
    module, colon, _ = name.rpartition(":")
    return f"{module}{colon}{extension_class(name).name}"


def full_name(name: str) -> str:
    """``module:NAME`` of an extension that a module of the user's own has registered; any other name as it is."""
    module = EXTENSIONS[name].__module__ if name in EXTENSIONS else "__main__"
    return name if module == "__main__" or module.startswith("perfed.") else f"{module}:{name}"


def extension_names() -> list[str]:
    """Names of all registered extensions, sorted.

    Example:
        >>> {"anchors", "prototypes", "proximal"} <= set(extension_names())
        True
    """
    return sorted(EXTENSIONS)
