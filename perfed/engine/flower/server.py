"""A server whose clients answer when they do: who is used, the policy decides over the replies that have come."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from perfed.engine.clients import NobodyReplied, RoundClients, RoundRecord
from perfed.engine.flower.engine import FlowerEngine
from perfed.engine.server import Server
from perfed.participation.invitation import invite, take
from perfed.participation.policies import Choice


class RealTimeServer(Server):
    """A run's server where time is real; see :class:`~perfed.engine.server.Server` for its arguments."""

    engine: FlowerEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine.strict = self.selection.policy.strict

    def keep(self, kept: Callable[[str], Collection[int]]) -> None:
        """Let sites not forget the states after the exchanges that ``kept`` gives the numbers of, by site."""
        self.engine.kept = kept

    @property
    def speeds(self) -> str:
        """Clients take the time that they take."""
        return "wall"

    def round(self, number: int, *, measure: str | None = None, keeps: bool = False) -> RoundRecord:
        """Round ``number`` (from 1), then the method's work with all clients after it; no word on single samples."""
        invitation = invite(self.selection, number)
        clients = RoundClients(self.engine, list(invitation.ids), number, "round", measure)
        clients.invitation = invitation
        try:
            record = self._transaction(clients, self._round)
        except NobodyReplied:
            counts = clients.record.counts
            return RoundRecord([], float("nan"), seconds=clients.seconds, replied=clients.arrived, counts=counts)
        take(self.selection, number, clients.arrived)
        return self._ended(record, number, Choice(record.participants, clients.seconds, clients.arrived))
