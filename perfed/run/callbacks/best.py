"""The models of a run that stops by validation: each site's own at the round that was best for the site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

from perfed.engine.record import Snapshot
from perfed.engine.server import Server
from perfed.run.callback import Callback, Running
from perfed.tree import Tree


class BestModels(Callback):
    """Keeps of each site the round whose model has the least loss on its validation data, and what that is made of.

    Training ends when nobody has improved in ``patience`` evaluations.
    """

    name = "best"

    @property
    def rounds(self) -> dict[str, int]:
        """The best round so far, by client id; clients without validation data are left out."""
        return self._part("rounds")

    @property
    def scores(self) -> dict[str, float]:
        """The loss of that round's model, by client id."""
        return self._part("scores")

    @property
    def clients(self) -> dict[str, Tree]:
        """Each client's own state after its best round, where it had one."""
        return self._part("clients")

    @property
    def servers(self) -> dict[str, Tree]:
        """The server's parameter sets after these rounds, by the round's number as text."""
        return self._part("servers")

    def _part(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.state.setdefault(name, {})
        return found

    # Along a run -------------------------------------------------------------------------------------------

    def begin(self, run: Running) -> None:
        """Let states that a checkpoint had go to disk, as those of the engine do."""
        self.clients.update({client: run.server.hold(state) for client, state in self.clients.items()})

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Keep the models that are better than all before.

        A client that no round has used yet has no model of its own: training goes on until all have been used.
        """
        if "metrics" not in record:
            return False
        waiting = run.progress.totals.never_used(run.federation.ids)
        used = [client for client in run.federation.ids if client not in waiting]
        found = run.server.evaluate("validation", used, run.done)
        losses = {client: values.get("loss", values.get("mse", inf)) for client, values in found.items()}
        self.update(run.done, losses, run.server.snapshot())
        waited = run.done - max(self.rounds.values(), default=0)
        return not waiting and waited >= run.evaluation.patience * run.evaluation.every

    def update(self, number: int, scores: Mapping[str, float], now: Snapshot) -> None:
        """Keep the models after round ``number`` of the clients whose loss is below all before."""
        for client, score in scores.items():
            if score < self.scores.get(client, inf):
                self.rounds[client], self.scores[client] = number, score
                self.clients.pop(client, None)
                if client in now.clients:
                    self.clients[client] = now.clients[client]
        best = map(str, sorted(set(self.rounds.values())))
        self.state["servers"] = {n: self.servers.get(n, now.server) for n in best}

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Say which rounds the models are of."""
        summary["taken_rounds"] = self.rounds
        if self.rounds:
            first, last = min(self.rounds.values()), max(self.rounds.values())
            which = f"round {first}" if first == last else f"rounds {first} to {last}"
            ended = f"; training ended after round {run.done} of at most {run.rounds}"
            said = f"each client's model is that with the least loss on its validation data: of {which}"
            summary["notes"].append(said + (ended if run.progress.stopped_by == self.name else ""))

    # The models --------------------------------------------------------------------------------------------

    def group_clients(self, ids: Sequence[str]) -> dict[int | None, list[str]]:
        """Return ``ids`` by their best round; ``None`` for those that have none: they take the last."""
        found: dict[int | None, list[str]] = {}
        for client in ids:
            found.setdefault(self.rounds.get(client), []).append(client)
        return found

    @contextmanager
    def restore_best(self, server: Server, client: str) -> Iterator[None]:
        """Let ``server`` stand where it stood after the best round of ``client``, as far as its model goes."""
        number = self.rounds.get(client)
        if number is None:
            yield
            return
        before = server.snapshot()
        others = {name: state for name, state in before.clients.items() if name not in self.rounds}
        own = {name: state for name, state in self.clients.items() if self.rounds[name] == number}
        server.restore(replace(before, server=dict(self.servers[str(number)]), clients={**others, **own}))
        try:
            yield
        finally:
            server.restore(before)
