"""The parts of an exchange: the server's parameter sets, payloads and replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from perfed.aggregation.aggregator import Aggregator
from perfed.aggregation.settings import Aggregation
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.tree import Tree

Fold = Callable[[Any, dict[str, Any]], Any]
"""A function of a total (``None`` before the first client) and one client's complete reply; returns the new total."""


class ServerState:
    """The server's parameter sets as attributes; only declared names exist.

    A set whose home is a table is a dictionary from client id to row.

    Example:
        >>> import torch
        >>> server = ServerState({"shared": {"head.bias": torch.zeros(2)}})
        >>> server.shared = {"head.bias": torch.ones(2)}
        >>> server.shared["head.bias"].tolist()
        [1.0, 1.0]
        >>> server.heads
        Traceback (most recent call last):
        AttributeError: the server has no parameter set 'heads'; declared: shared
    """

    def __init__(self, sets: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_sets", dict(sets))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_sets"][name]
        except KeyError:
            declared_names = ", ".join(sorted(self.__dict__.get("_sets", {})))
            raise AttributeError(f"the server has no parameter set '{name}'; declared: {declared_names}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._sets:
            raise AttributeError(f"'{name}' is not a declared parameter set; declare it in sets()")
        self._sets[name] = value

    def tree(self) -> dict[str, Any]:
        """Return all parameter sets by name."""
        return dict(self._sets)


class Reply(dict[str, Any]):
    """The return value of a client program: nested dictionaries of tensors with a leading client axis.

    An entry that is too large to hold for all clients at once may be a function that maps a client's row in the cohort
    to the client's tensor. It is called once per client, after the program has ended.

    Example:
        >>> import torch
        >>> reply = Reply(shared={"head.weight": torch.zeros(2, 3, 4)}, num_samples=torch.tensor([12, 7]))
        >>> sorted(reply)
        ['num_samples', 'shared']
    """

    @classmethod
    def of(cls, returned: Any, where: str) -> Reply:
        """Return the return value of a program as a reply; ``None`` becomes an empty reply.

        Args:
            returned: the return value.
            where: name of the program, for the message.

        Raises:
            PerfedError: the value is neither a dictionary nor ``None``.
        """
        if returned is not None and not isinstance(returned, dict):
            raise PerfedError(f"{where} returned {_kind(returned)}; a client program returns a Reply, or None")
        return returned if isinstance(returned, cls) else cls(returned or {})


def check_rows(reply: Mapping[str, Any], where: str, ids: Sequence[str], path: str = "") -> None:
    """Check that every tensor of a reply has one row per client.

    Entries that are functions of a client's row are not checked; their tensors are created later, client by client.

    Args:
        reply: the reply, or a nested dictionary of it.
        where: name of the client program.
        ids: the clients of the cohort.
        path: position of ``reply`` in the complete reply, for messages.

    Raises:
        PerfedError: an entry has too few or too many rows, or is not a tensor; the message names the program, the entry
            and the client without a row, or the last client.
    """
    for name, value in reply.items():
        entry = f"{path}{name}"
        if isinstance(value, Mapping):
            check_rows(value, where, ids, f"{entry}/")
        elif isinstance(value, Tensor):
            rows = value.shape[0] if value.ndim else 0
            if rows != len(ids):
                client = f"none for client '{ids[rows]}'" if rows < len(ids) else f"the last client is '{ids[-1]}'"
                raise PerfedError(
                    f"{where}: entry '{entry}' of the reply has shape {tuple(value.shape)}, but its first axis must be "
                    f"the cohort's clients, {len(ids)}: {client}"
                )
        elif path or not callable(value):
            raise PerfedError(
                f"{where}: entry '{entry}' of the reply is {_kind(value)}; a tensor (or dictionaries of them) whose "
                "first axis is the cohort's clients is needed"
            )


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


class Replies:
    """The replies of one exchange, stacked in the sorted order of client ids.

    Attributes:
        ids: sorted client ids; row j of every tensor belongs to ``ids[j]``. Tensors whose shapes differ between clients
            are lists.
        train_loss: mean training loss of each client ``(clients,)``, NaN where nothing was trained.
        aggregator: how the run combines replies (``[aggregation]``), for extensions.

    The value of a folded entry (``reduce``) is its total.

    Example:
        >>> import torch
        >>> replies = Replies(["a", "b"], {"num_samples": torch.tensor([12, 7])}, torch.tensor([0.3, 0.4]))
        >>> dict(zip(replies.ids, replies.num_samples.tolist()))
        {'a': 12, 'b': 7}
    """

    def __init__(self, ids: Sequence[str], content: Mapping[str, Any], train_loss: Tensor) -> None:
        self.ids = list(ids)
        self.content = dict(content)
        self.train_loss = train_loss
        self.aggregator: Aggregator[Any] = Aggregation().aggregator

    def __getattr__(self, name: str) -> Any:
        content = self.__dict__.get("content", {})
        if name not in content:
            raise AttributeError(f"the replies hold no '{name}'; they hold: {', '.join(content) or 'nothing'}")
        return content[name]


@dataclass(frozen=True)
class Each:
    """A payload entry with one row per client, created by :func:`each`.

    Attributes:
        rows: client id -> tensor or nested dictionary of tensors.

    Example:
        >>> import torch
        >>> each({"a": torch.zeros(2), "b": torch.ones(2)}).rows["b"].tolist()
        [1.0, 1.0]
    """

    rows: Mapping[str, Tree | Tensor]


def each(rows: Mapping[str, Tree | Tensor]) -> Each:
    """Return a payload entry that gives every client its row of ``rows`` (client id -> tensor or nested dictionary).

    Example:
        >>> import torch
        >>> models = {"a": torch.zeros(2), "b": torch.ones(2)}
        >>> payload = {"shared": torch.zeros(2), "model": each(models)}  # for clients.train(self.train, **payload)
    """
    return Each(rows)


class Clients(Protocol):
    """The clients of a round, as ``Method.round`` uses them.

    Example:
        >>> from perfed import Method, Model, Run, linear, load
        >>> class Counting(Method):
        ...     def round(self, server, clients: Clients):
        ...         replies = clients.run(self.count, shared=server.shared)
        ...         print(clients.round, clients.ids, replies.num_samples.tolist())
        ...
        ...     def count(self, cohort, shared):
        ...         cohort.load(shared)
        ...         return Reply(num_samples=cohort.num_samples)
        >>> federation, model = load("digits", {"clients": 4}, seed=0), Model(head=linear(10))
        >>> summary = Run(federation, Counting(), model, rounds=1).execute()
        1 ['000', '001', '002', '003'] [12.0, 12.0, 12.0, 12.0]
    """

    @property
    def ids(self) -> list[str]:
        """The ids of the clients that take part in the next exchange, sorted."""

    @property
    def round(self) -> int:
        """The number of the round, starting at 1; 0 during the preparation before the first round."""

    @property
    def info(self) -> FederationInfo:
        """The server's information about the federation."""

    def key(self, purpose: str) -> Tensor:
        """Return the key of the server's random numbers in this round for ``purpose``."""

    def mean(self, stacked: Tree, weights: Tensor | None = None, *, current: Tree) -> dict[str, Any]:
        """Return the weighted mean over clients of every tensor, or the estimator that ``[aggregation]`` selects.

        Args:
            stacked: nested dictionary of ``(clients, ...)`` tensors, from replies.
            weights: ``(clients,)``, not negative, not all zero; ``None``: equal weights. For tensors ``(clients,
                entries, ...)``, weights ``(clients, entries)`` give a client's weight separately for every entry, such
                as a class; 0 if the client lacks the entry.
            current: the server's values that the mean replaces, without the client axis. Bounds on updates are relative
                to these values. An entry whose weights are all zero keeps them.

        Returns:
            The same structure without the client axis.
        """

    def show(self, name: str, **arrays: Tensor | Sequence[str]) -> None:
        """Save ``arrays`` of this round as ``NAME/round-NNNN.npz`` in the run directory if it is an evaluated round."""

    def count(self, name: str, ids: Sequence[str]) -> None:
        """Record that ``name`` happened to these clients: their ids by round, and their number in the summary."""

    def run(
        self, program: Callable[..., Reply | None], *, reduce: Mapping[str, Fold] | None = None, **payload: Any
    ) -> Replies:
        """Run ``program`` on the clients, where their data is, and return their replies: one exchange.

        Args:
            program: a client program; every payload entry that it receives has a leading client axis.
            reduce: by name, folds of entries. Such an entry of the replies is folded as replies arrive, in the sorted
                order of client ids, and then dropped, so that the server never holds all of them.
            payload: tensors or nested dictionaries of tensors, the same for all clients, or :func:`each`.
        """

    def train(
        self,
        program: Callable[..., Reply | None],
        *,
        closing: bool = True,
        reduce: Mapping[str, Fold] | None = None,
        **payload: Any,
    ) -> Replies:
        """Run ``program`` as :meth:`run` does, together with the method's extensions.

        The clients receive the extensions' payloads as :attr:`Cohort.carried <perfed.training.cohort.Cohort.carried>`.
        The extensions' penalties are part of every fit. When the program has ended, extensions add entries to the
        replies, and after the round they update their state on the server.

        Args:
            program, reduce, payload: as in :meth:`run`.
            closing: whether the extensions add to the replies; ``False`` in every exchange before the last one of the
                round.
        """
