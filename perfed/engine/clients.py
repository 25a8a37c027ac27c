"""The clients of one transaction, as a method's server programs see them; records of what a round did and left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from perfed import rng, tree
from perfed.engine.engine import Engine
from perfed.engine.evaluate import Metrics, Outputs
from perfed.engine.executor import Exchange
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.method.exchange import Each, Fold, Replies, Reply, ServerState
from perfed.method.extension import payload_of, received
from perfed.method.method import Method
from perfed.participation.invitation import Invitation
from perfed.tree import Tree

FIRST_EXCHANGE = {"prepare": 0, "round": 0, "finish": 1000, "observe": 2000, "settle": 3000}
"""Number of the first exchange of each transaction of a round: they must not share random keys."""


@dataclass
class RoundRecord:
    """What a round left behind.

    Attributes:
        participants: sorted ids of the clients used in every exchange.
        train_loss: mean over participants of their mean training loss; NaN where nothing was trained.
        bytes_up, bytes_down: of all replies and payloads.
        after: metrics right after local training, by client id; empty if they were not asked for.
        outputs: what the models said of every sample then, if that was asked for.
        arrays: what the method showed of this round, by name; see :meth:`perfed.method.exchange.Clients.show`.
        counts: the clients that the method counted in this round, by name of what happened to them.
        exchanges: with the clients; of those with everybody after the round one counts, as in ``seconds``.
        seconds: virtual time that the round took.
        replied: virtual seconds of each invited client's reply, by id.
        courses: loss of each local epoch, by id, of the clients of which it is wanted.
    """

    participants: list[str]
    train_loss: float
    bytes_up: int = 0
    bytes_down: int = 0
    after: Metrics = field(default_factory=dict)
    outputs: list[Outputs] = field(default_factory=list)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, list[str]] = field(default_factory=dict)
    exchanges: int = 0
    seconds: float = 0.0
    replied: dict[str, float] = field(default_factory=dict)
    courses: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """All that rounds change.

    Attributes:
        server: the server's sets by name.
        clients: the clients' committed states by id.
        changed: clients whose state changed since :meth:`perfed.engine.server.Server.forget_changes`.
        policy: what the policy remembers.
        trace: of the times that clients take; see :attr:`perfed.participation.clock.Timer.fingerprint`.
    """

    server: dict[str, Any]
    clients: dict[str, Tree]
    changed: frozenset[str]
    policy: dict[str, Any]
    trace: str


class NobodyReplied(Exception):
    """No reply of an exchange can be used: nothing comes of the round."""


class RoundClients:
    """The clients of one transaction.

    Attributes:
        method: with the numbers of the round.
        ids: that the next exchange goes to, sorted; where time is real, those whose replies were used so far.
        invitation: of the round, where time is real.
        arrived: seconds after which the replies of the first exchange came, by id, where time is real.
        seconds: of all exchanges, where time is real.
    """

    def __init__(
        self,
        engine: Engine,
        ids: list[str],
        round_: int,
        kind: str,
        measure: str | None,
        invited: int | None = None,
        keeps: bool = False,
    ) -> None:
        self._engine = engine
        self.method = engine.initialiser.method.in_round(round_)
        self._kind = kind
        self._measure = measure
        self._keeps = keeps
        self._invited = len(ids) if invited is None else invited
        self.ids = sorted(ids)
        self.round = round_
        self.losses: list[torch.Tensor] = []
        self.carrying: list[Replies] = []  # replies of the exchanges that carried extensions
        self.state: ServerState | None = None
        self.invitation: Invitation | None = None
        self.arrived: dict[str, float] = {}
        self.seconds = 0.0
        self.record = RoundRecord(self.ids, float("nan"))

    def key(self, purpose: str) -> torch.Tensor:
        """Randomness of the server in this round for ``purpose``."""
        return rng.key(self._engine.initialiser.seed, "server", purpose, self.round)

    def show(self, name: str, **arrays: Any) -> None:
        """Keep ``arrays`` for the run, under ``name``."""
        self.record.arrays[name] = arrays

    def count(self, name: str, ids: Sequence[str]) -> None:
        """Note that ``name`` happened to the clients ``ids``."""
        self.record.counts[name] = [*self.record.counts.get(name, []), *ids]

    @property
    def info(self) -> FederationInfo:
        """What the server knows about the federation."""
        return self._engine.info

    def run(
        self, program: Callable[..., Reply | None], *, reduce: Mapping[str, Fold] | None = None, **payload: Any
    ) -> Replies:
        """One exchange without extensions (:meth:`Clients.run <perfed.method.exchange.Clients.run>`)."""
        return self.exchange(_program_name(self.method, program), payload, reduce or {})

    def train(
        self,
        program: Callable[..., Reply | None],
        *,
        closing: bool = True,
        reduce: Mapping[str, Fold] | None = None,
        **payload: Any,
    ) -> Replies:
        """One exchange in which extensions travel along (:meth:`perfed.method.exchange.Clients.train`)."""
        extensions = self.method.extensions
        if not extensions:
            return self.run(program, reduce=reduce, **payload)
        assert self.state is not None
        payload["extensions"] = payload_of(extensions, self.state)
        name = _program_name(self.method, program)
        replies = self.exchange(name, payload, reduce or {}, extensions="all" if closing else "penalties")
        if closing:
            self.carrying.append(replies)
        return replies

    def exchange(
        self,
        program: str,
        payload: Mapping[str, Any],
        reduce: Mapping[str, Fold] = MappingProxyType({}),
        *,
        extensions: Literal["nothing", "penalties", "all"] = "nothing",
    ) -> Replies:
        """One exchange; see :class:`perfed.engine.executor.Exchange`."""
        record = self.record
        index = record.exchanges + FIRST_EXCHANGE[self._kind]
        exchange = Exchange(program, self.round, index, self._measure, extensions)
        record.outputs = []
        kept = record.outputs if self._keeps else None
        sent = sum(_sent(value, len(self.ids)) for value in payload.values())
        replies, record.after = self._engine.run(
            exchange, payload, self.ids, reduce, kept, self._asked(), self._arriving
        )
        if self.invitation is not None:
            self._arrived(replies)
        record.exchanges += 1
        for client, losses in self._engine.courses.items():
            record.courses.setdefault(client, []).extend(losses)
        self.losses.append(replies.train_loss)
        # The first exchange goes to all invited clients, those whose replies are not used among them.
        record.bytes_down += sent * self._invited // len(self.ids) if record.exchanges == 1 else sent
        return replies

    def ended(self) -> RoundRecord:
        """What the transaction left behind, with the mean loss of its exchanges."""
        losses = [float(loss[torch.isfinite(loss)].mean()) for loss in self.losses if torch.isfinite(loss).any()]
        if losses:
            self.record.train_loss = sum(losses) / len(losses)
        return self.record

    def _asked(self) -> Invitation | None:
        """Whose replies the next exchange needs; those that were not used in an earlier one are out of the round."""
        if self.invitation is None or self.record.exchanges == 0:
            return self.invitation
        return Invitation.of_all(self.ids, strict=self.invitation.strict)

    def _arrived(self, replies: Replies) -> None:
        """Take note of when the replies came, whose were used, and whose could not be."""
        engine, record = self._engine, self.record
        if record.exchanges == 0:
            self.arrived = dict(engine.arrived)
        self.seconds += max(engine.arrived.values(), default=0.0)
        for name, ids in engine.lost.items():
            self.count(name, ids)
        if not replies.ids:
            raise NobodyReplied
        self.ids = record.participants = replies.ids

    def _arriving(self, client: str, reply: dict[str, Any]) -> dict[str, Any]:
        """Count the bytes of a reply, and let the extensions undo what they did to it at the client."""
        self.record.bytes_up += tree.count_bytes(reply)
        if not self.method.extensions or self._engine.initialiser.secure is not None:
            return reply
        assert self.state is not None
        try:
            return received(self.method.extensions, self.state, reply)
        except PerfedError as error:
            raise PerfedError(f"the reply of client '{client}': {error}") from None


def _program_name(method: Method, program: Callable[..., Any]) -> str:
    owner, name = getattr(program, "__self__", None), getattr(program, "__name__", "")
    if owner is method:
        return name
    for extension in method.extensions:
        if owner is extension:
            return f"{extension.name}.{name}"
    raise PerfedError(f"a client program must be a method of the method or of one of its extensions, not {program!r}")


def _sent(value: Any, clients: int) -> int:
    if isinstance(value, Each):
        return sum(tree.count_bytes(row) for row in value.rows.values())
    return tree.count_bytes(value) * clients
