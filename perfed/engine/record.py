"""Records of what a round did, and of what a run can go back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perfed.engine.evaluate import Metrics, Outputs
from perfed.tree import Tree


@dataclass
class RoundRecord:
    """What a round did.

    Attributes:
        participants: sorted ids of the clients used in every exchange.
        train_loss: mean over participants of their mean training loss; NaN where nothing was trained.
        bytes_up, bytes_down: of all replies and payloads.
        after: metrics right after local training, by client id; empty if no split was given.
        outputs: predictions of these models for every sample, if they are kept.
        arrays: arrays that the method shows of this round, by name; see :meth:`perfed.method.exchange.Clients.show`.
        counts: the clients that the method counted in this round, by name of what happened to them.
        exchanges: with the clients; of those with everybody after the round one counts, as in ``seconds``.
        seconds: virtual time that the round took.
        replied: virtual seconds of each invited client's reply, by id.
        loss_curves: losses of each local epoch, by id, of the clients that are watched.
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
        """Add the clients ``ids`` to those to which ``name`` happened."""
        self.counts[name] = [*self.counts.get(name, []), *ids]


@dataclass(frozen=True)
class Snapshot:
    """Everything that rounds change.

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
