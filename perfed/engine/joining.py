"""A new client after a run: it makes what is its own against what the others share, which stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perfed.data.client import Client
from perfed.engine.clients import RoundClients
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.exchange import ServerState
from perfed.participation.settings import Participation


class _Joining(Server):
    """A run's server while a new client makes what is its own."""

    def make_own(self, client: str, rounds: int) -> None:
        """Let a client that was in no round make what is its own: the preparation, then ``rounds`` rounds alone.

        What the method does then is :attr:`perfed.method.method.Method.joins`. The server's sets stay as they are.
        """
        before = self.sets
        for number in range(rounds + 1):
            kind, program = ("settle", self._catch_up) if number else ("prepare", self._prepare)
            self._transaction(self._make_clients([client], number, kind), program)
            self.state = ServerState(before)

    def _catch_up(self, server: ServerState, clients: RoundClients) -> None:
        method = self.initialiser.method
        if method.joins == "settle":
            self._settle(server, clients)
        elif method.joins is not None:
            clients.exchange(method.joins, {}, extensions="penalties")


def joined(server: Server, client: Client, rounds: int) -> Server:
    """A server with one client more, which has done its preparation and ``rounds`` rounds of local training.

    It trains what the method trains of a client that was never used (:attr:`perfed.method.method.Method.joins`), with
    its extensions, always against the newest shared parameters; parameter sets of the server and of all other
    clients are those of ``server``.

    Raises:
        PerfedError: a method whose server makes each client's model from what the client has sent, or that projects
            the data; a client that does not fit the others (another task, a domain or an input shape of its own).
    """
    method, federation = server.method, server.federation
    if method.joins is None or method.changes_data:
        why = "it has no model for new samples" if method.changes_data else "its server must have heard of every client"
        raise PerfedError(f"a new site cannot join a run of {type(method).__name__}: {why}; train again with it")
    wider = replace(federation, clients=(*federation.clients, client))
    if wider.num_domains != federation.num_domains:
        raise PerfedError(
            f"client '{client.id}' has the domain {wider.domain_name(wider.num_domains - 1)}, which no other client "
            "has, so that nothing is known of it; train again with it"
        )
    new = _Joining(wider, server.initialiser, server.plan, Participation(), rounds, engine=type(server.engine))
    kept = new.snapshot()
    sets = {name: _with_rows(value, server.sets[name], new, name) for name, value in kept.server.items()}
    clients = {**kept.clients, **server.snapshot().clients}
    new.restore(replace(kept, server=sets, clients=clients))
    new.make_own(client.id, rounds)
    return new


def _with_rows(now: Any, before: Any, server: Server, name: str) -> Any:
    """The set as it was; a table with the initial row of a client that it does not know."""
    declared = server.initialiser.sets.get(name)
    return {**now, **before} if declared is not None and declared.home == "table" else before
