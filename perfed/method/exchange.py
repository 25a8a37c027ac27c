"""What travels in an exchange: the server's sets, payloads, replies."""

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
"""From a total (``None`` before the first client) and one client's whole reply to the new total."""


class ServerState:
    """The server's parameter sets as attributes; only declared names exist.

    A set at home in a table is a dictionary from client id to its row.

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
            known = ", ".join(sorted(self.__dict__.get("_sets", {})))
            raise AttributeError(f"the server has no parameter set '{name}'; declared: {known}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._sets:
            raise AttributeError(f"'{name}' is not a declared parameter set; declare it in sets()")
        self._sets[name] = value

    def tree(self) -> dict[str, Any]:
        """All sets by name."""
        return dict(self._sets)


class Reply(dict[str, Any]):
    """What a client program returns: nested dictionaries of tensors with a leading client axis.

    An entry that is too large for all clients at once may be a function from a client's row in the cohort to its
    tensor. It is called once per client, after the program has ended.

    Example:
        >>> import torch
        >>> reply = Reply(shared={"head.weight": torch.zeros(2, 3, 4)}, num_samples=torch.tensor([12, 7]))
        >>> sorted(reply)
        ['num_samples', 'shared']
    """

    @classmethod
    def of(cls, returned: Any, where: str) -> Reply:
        """What the program ``where`` returned, as a reply; nothing is an empty one.

        Raises:
            PerfedError: neither a reply nor ``None``.
        """
        if returned is not None and not isinstance(returned, dict):
            raise PerfedError(f"{where} returned {_kind(returned)}; a client program returns a Reply, or None")
        return returned if isinstance(returned, cls) else cls(returned or {})


def check_rows(reply: Mapping[str, Any], where: str, ids: Sequence[str], path: str = "") -> None:
    """Every tensor of a reply has one row per client; entries that are made client by client come later.

    Raises:
        PerfedError: names the program, the entry and the first client that is without a row, or has one too many.
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
        ids: sorted client ids; row j of every tensor belongs to ``ids[j]``. Tensors whose shapes differ between
            clients are lists.
        train_loss: mean training loss of each client ``(clients,)``, NaN where nothing was trained.
        aggregator: how the run combines replies (``[aggregation]``), for extensions.

    An entry that was folded (``reduce``) is its total.

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
    """A payload entry with one row per client: made by :func:`each`.

    Example:
        >>> import torch
        >>> each({"a": torch.zeros(2), "b": torch.ones(2)}).rows["b"].tolist()
        [1.0, 1.0]
    """

    rows: Mapping[str, Tree | Tensor]


def each(rows: Mapping[str, Tree | Tensor]) -> Each:
    """Give every client its own row of ``rows`` (client id -> tensor or nested dictionary).

    Example:
        >>> import torch
        >>> models = {"a": torch.zeros(2), "b": torch.ones(2)}
        >>> payload = {"shared": torch.zeros(2), "model": each(models)}  # for clients.train(self.train, **payload)
    """
    return Each(rows)


class Clients(Protocol):
    """The clients of this round, as ``Method.round`` sees them.

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
        """Ids of the clients that the next exchange goes to, sorted."""

    @property
    def round(self) -> int:
        """Number of the round, from 1; 0 is the preparation before the first."""

    @property
    def info(self) -> FederationInfo:
        """What the server knows about the federation."""

    def key(self, purpose: str) -> Tensor:
        """Randomness of the server in this round for ``purpose``."""

    def mean(self, stacked: Tree, weights: Tensor | None = None, *, current: Tree) -> dict[str, Any]:
        """Return the weighted mean over clients of every tensor, or what ``[aggregation]`` puts in its place.

        Args:
            stacked: nested dictionary of ``(clients, ...)`` tensors, from replies.
            weights: ``(clients,)``, not negative, not all zero; ``None``: equal weights. ``(clients, entries)``: the
                clients' weights in every entry k of tensors ``(clients, entries, ...)``, such as a class; 0 where a
                client lacks it.
            current: the server's values that the mean replaces, without the client axis. A bounded update is one from
                these values. An entry without any weight keeps them.

        Returns:
            The same structure without the client axis.
        """

    def show(self, name: str, **arrays: Tensor | Sequence[str]) -> None:
        """Let the run keep ``arrays`` of this round, if it is an evaluated one, in ``NAME/round-NNNN.npz``."""

    def count(self, name: str, ids: Sequence[str]) -> None:
        """Let the run say that ``name`` happened to these clients: ids by round, numbers in the summary."""

    def run(
        self, program: Callable[..., Reply | None], *, reduce: Mapping[str, Fold] | None = None, **payload: Any
    ) -> Replies:
        """One exchange: run ``program`` where the data is.

        Payload entries are tensors or nested dictionaries of tensors, the same for all, or :func:`each`. In the
        program every entry has a leading client axis.

        Entry ``name`` of the replies is folded with ``reduce[name]`` in the sorted order of client ids as they come,
        and dropped, so that the server need not hold all of them.
        """

    def train(
        self,
        program: Callable[..., Reply | None],
        *,
        closing: bool = True,
        reduce: Mapping[str, Fold] | None = None,
        **payload: Any,
    ) -> Replies:
        """An exchange (:meth:`run`) in which the method's extensions travel along.

        What they send arrives as :attr:`Cohort.carried <perfed.training.cohort.Cohort.carried>`, their penalties are in
        every fit, they add to the replies once the program has ended, and update their state after the round.

        Args:
            program, reduce, payload: as in :meth:`run`.
            closing: whether the extensions add to the replies; not so in an exchange before the round's last.
        """
