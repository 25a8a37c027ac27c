"""Early stopping by validation: each client's model is that of the round that was best for the client."""

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
    """A callback that keeps the model of each client with the least loss on the client's validation data.

    Training ends when no client has improved in ``patience`` evaluations.
    """

    name = "best"

    @property
    def rounds(self) -> dict[str, int]:
        """The best round so far, by client id; clients without validation data are left out."""
        return self._state_table("rounds")

    @property
    def scores(self) -> dict[str, float]:
        """The validation loss of the model of the best round, by client id."""
        return self._state_table("scores")

    @property
    def clients(self) -> dict[str, Tree]:
        """The state of each client after its best round, for clients with a state."""
        return self._state_table("clients")

    @property
    def servers(self) -> dict[str, Tree]:
        """The server's parameter sets after the best rounds, by the number of the round as text."""
        return self._state_table("servers")

    def _state_table(self, name: str) -> dict[str, Any]:
        """Return the dictionary ``name`` in the state of this callback, which is created if it does not exist."""
        table: dict[str, Any] = self.state.setdefault(name, {})
        return table

    # Along a run -------------------------------------------------------------------------------------------

    def begin(self, run: Running) -> None:
        """Store the states from a checkpoint where the engine stores states, possibly on disk."""
        self.clients.update({client: run.server.hold(state) for client, state in self.clients.items()})

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Keep the models that have a lower validation loss than all earlier ones.

        A client that no round has used yet has no personal model, so training continues until all have been used.
        """
        if "metrics" not in record:
            return False
        waiting = run.progress.totals.never_used(run.federation.ids)
        trained_clients = [client for client in run.federation.ids if client not in waiting]
        metrics = run.server.evaluate("validation", trained_clients, run.done)
        losses = {client: values.get("loss", values.get("mse", inf)) for client, values in metrics.items()}
        self.update(run.done, losses, run.server.snapshot())
        waited = run.done - max(self.rounds.values(), default=0)
        return not waiting and waited >= run.evaluation.patience * run.evaluation.every

    def update(self, number: int, scores: Mapping[str, float], snapshot: Snapshot) -> None:
        """Keep the models after round ``number`` of clients whose loss is below all earlier ones."""
        for client, score in scores.items():
            if score < self.scores.get(client, inf):
                self.rounds[client], self.scores[client] = number, score
                self.clients.pop(client, None)
                if client in snapshot.clients:
                    self.clients[client] = snapshot.clients[client]
        best = map(str, sorted(set(self.rounds.values())))
        self.state["servers"] = {n: self.servers.get(n, snapshot.server) for n in best}

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Add the rounds of the models to the summary, with a note."""
        summary["taken_rounds"] = self.rounds
        if self.rounds:
            first, last = min(self.rounds.values()), max(self.rounds.values())
            which = f"round {first}" if first == last else f"rounds {first} to {last}"
            ended = f"; training ended after round {run.done} of at most {run.rounds}"
            note = f"each client's model is the one with the least loss on its validation data, from {which}"
            summary["notes"].append(note + (ended if run.progress.stopped_by == self.name else ""))

    # The models --------------------------------------------------------------------------------------------

    def group_clients(self, ids: Sequence[str]) -> dict[int | None, list[str]]:
        """Return client ids grouped by best round; ``None`` for clients without one, whose model is the last."""
        groups: dict[int | None, list[str]] = {}
        for client in ids:
            groups.setdefault(self.rounds.get(client), []).append(client)
        return groups

    @contextmanager
    def restore_best(self, server: Server, client: str) -> Iterator[None]:
        """Restore in ``server``, while the context is open, the parameters after the best round of ``client``."""
        number = self.rounds.get(client)
        if number is None:
            yield
            return
        before = server.snapshot()
        last_states = {name: state for name, state in before.clients.items() if name not in self.rounds}
        best = {name: state for name, state in self.clients.items() if self.rounds[name] == number}
        server.restore(replace(before, server=dict(self.servers[str(number)]), clients={**last_states, **best}))
        try:
            yield
        finally:
            server.restore(before)
