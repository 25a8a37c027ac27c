"""The record of a round, and the snapshot from which a run can be restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perfed.engine.evaluate import Metrics, Outputs
from perfed.tree import Tree


@dataclass
class RoundRecord:
    """The record of a round.

    Attributes:
        participants: the sorted ids of the clients used in every exchange.
        train_loss: the mean over participants of their mean training loss; NaN if nothing was trained.
        bytes_up, bytes_down: the number of bytes of all replies and of all payloads.
        after: metrics right after local training, by client id; empty if clients were not scored.
        outputs: the predictions of these models for every sample, if they are stored.
        arrays: arrays that the method has recorded, by name; see :meth:`perfed.method.exchange.Clients.show`.
        counts: the clients at which an event happened, by the name that the method has given to the event.
        exchanges: the number of exchanges; all those with every client after the round count as one, as in ``seconds``.
        seconds: the virtual duration of the round.
        replied: the virtual seconds after which each invited client replied, by id.
        loss_curves: the loss of each local epoch by id, for the clients that are watched.
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
    loss_curves: dict[str, list[float]] = field(default_factory=dict)

    def count(self, name: str, ids: Sequence[str]) -> None:
        """Add the clients ``ids`` to those at which the event ``name`` happened."""
        self.counts[name] = [*self.counts.get(name, []), *ids]


@dataclass(frozen=True)
class Snapshot:
    """The complete state that rounds change.

    Attributes:
        server: the server's sets by name.
        clients: the clients' committed states by id.
        changed: the clients whose state changed since :meth:`perfed.engine.server.Server.forget_changes`.
        policy: the state of the policy.
        trace: the fingerprint of the clients' times; see :attr:`perfed.participation.clock.Timer.fingerprint`.
    """

    server: dict[str, Any]
    clients: dict[str, Tree]
    changed: frozenset[str]
    policy: dict[str, Any]
    trace: str
