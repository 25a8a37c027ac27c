"""A new client after a run: it trains its personal parameters, and the parameters of the others stay unchanged."""

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
    """The server of a run while a new client trains its personal parameters."""

    def train_client(self, client: str, rounds: int) -> None:
        """Run the preparation and ``rounds`` rounds with a client that has taken part in no round, and no others.

        :attr:`perfed.method.method.Method.joins` defines what it trains. The server's sets are not changed.
        """
        before = self.sets
        for number in range(rounds + 1):
            kind, program = ("settle", self._train_round) if number else ("prepare", self._prepare)
            self._run_transaction(self._make_clients([client], number, kind), program)
            self.state = ServerState(before)

    def _train_round(self, server: ServerState, clients: RoundClients) -> None:
        method = self.initialiser.method
        if method.joins == "settle":
            self._settle(server, clients)
        elif method.joins is not None:
            clients.exchange(method.joins, {}, extensions="penalties")


def add_client(server: Server, client: Client, rounds: int) -> Server:
    """Return a server with one more client, after its preparation and ``rounds`` rounds of local training.

    The client trains the parameters that the method trains at clients that were never used
    (:attr:`perfed.method.method.Method.joins`), with its extensions and with the newest shared parameters. The
    parameter sets of the server and of all other clients remain those of ``server``.

    Raises:
        PerfedError: the server of the method computes each client's model from its replies, or the method projects the
            data; or the client does not fit the others (another task, a new domain or an unsuitable input shape).
    """
    method, federation = server.method, server.federation
    if method.joins is None or method.changes_data:
        why = "it has no model for new samples" if method.changes_data else "its server needs replies of every client"
        raise PerfedError(f"a new site cannot join a run of {type(method).__name__}: {why}; train again with it")
    wider = replace(federation, clients=(*federation.clients, client))
    if wider.num_domains != federation.num_domains:
        raise PerfedError(
            f"client '{client.id}' has the domain {wider.domain_name(wider.num_domains - 1)}, which no other client "
            "has, so that no parameters were trained for it; train again with it"
        )
    new = _Joining(wider, server.initialiser, server.plan, Participation(), rounds, engine=type(server.engine))
    initial = new.snapshot()
    sets = {name: _with_new_rows(value, server.sets[name], new, name) for name, value in initial.server.items()}
    clients = {**initial.clients, **server.snapshot().clients}
    new.restore(replace(initial, server=sets, clients=clients))
    new.train_client(client.id, rounds)
    return new


def _with_new_rows(initial: Any, before: Any, server: Server, name: str) -> Any:
    """Return the set as it was before; a table also has the initial rows of clients that are new to it."""
    declared = server.initialiser.sets.get(name)
    return {**initial, **before} if declared is not None and declared.home == "table" else before
