"""The models that a run takes where it stops by validation: each site's own at the round that was best for the site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from perfed.engine.clients import Snapshot
from perfed.engine.server import Server
from perfed.tree import Tree


@dataclass
class Taken:
    """Of each site the round whose model has the least loss on its validation data, and what that model is made of.

    Attributes:
        rounds: the best round so far, by client id; clients without validation data are left out.
        scores: the loss then.
        servers: the server's parameter sets after these rounds.
        clients: each client's own state after its best round, where it had one.
        stopped: whether nobody had improved for long enough.
    """

    rounds: dict[str, int] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    servers: dict[int, dict[str, Any]] = field(default_factory=dict)
    clients: dict[str, Tree] = field(default_factory=dict)
    stopped: bool = False

    def look(self, number: int, scores: Mapping[str, float], now: Snapshot) -> None:
        """Keep the models after round ``number`` of the clients whose loss is below all before."""
        for client, score in scores.items():
            if score < self.scores.get(client, float("inf")):
                self.rounds[client], self.scores[client] = number, score
                self.clients.pop(client, None)
                if client in now.clients:
                    self.clients[client] = now.clients[client]
        self.servers = {n: self.servers.get(n, now.server) for n in sorted(set(self.rounds.values()))}

    def waited(self, number: int) -> int:
        """Rounds since the last one that was best for somebody."""
        return number - max(self.rounds.values(), default=0)

    def copy(self) -> Taken:
        """One that later rounds do not change."""
        return replace(
            self, rounds={**self.rounds}, scores={**self.scores}, servers={**self.servers}, clients={**self.clients}
        )

    def groups(self, ids: Sequence[str]) -> dict[int | None, list[str]]:
        """``ids`` by their best round; ``None`` for those that have none: they take the last."""
        found: dict[int | None, list[str]] = {}
        for client in ids:
            found.setdefault(self.rounds.get(client), []).append(client)
        return found

    @contextmanager
    def at(self, server: Server, client: str) -> Iterator[None]:
        """Let ``server`` stand where it stood after the best round of ``client``, as far as its model goes."""
        number = self.rounds.get(client)
        if number is None:
            yield
            return
        before = server.snapshot()
        others = {name: state for name, state in before.clients.items() if name not in self.rounds}
        own = {name: state for name, state in self.clients.items() if self.rounds[name] == number}
        server.restore(replace(before, server=self.servers[number], clients={**others, **own}))
        try:
            yield
        finally:
            server.restore(before)

    def tensors(self) -> dict[str, Any]:
        """What is tensors of it, for a checkpoint."""
        return {"servers": {str(n): sets for n, sets in self.servers.items()}, "clients": dict(self.clients)}

    def plain(self) -> dict[str, Any]:
        """What else there is of it, as values that JSON has."""
        return {"rounds": self.rounds, "scores": self.scores, "stopped": self.stopped}

    @classmethod
    def of(cls, plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> Taken:
        """The inverse of :meth:`plain` and :meth:`tensors`."""
        servers = {int(n): dict(sets) for n, sets in tensors.get("servers", {}).items()}
        return cls(**plain, servers=servers, clients=dict(tensors.get("clients", {})))
