"""Runs client programs in this process, clients of one architecture stacked in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from perfed import tree
from perfed.data.client import SPLITS, Client
from perfed.data.federation import Federation
from perfed.engine.chores import CHORES
from perfed.engine.evaluate import Outputs, outputs_of, predictions, score
from perfed.engine.inbox import Inbox
from perfed.engine.metrics import Scoring
from perfed.engine.setup import Setup, group_key, stackable_reason
from perfed.errors import PerfedError
from perfed.method.exchange import Each, Fold, Replies, Reply, check_rows
from perfed.method.term import Travelling
from perfed.model.chain import Shape
from perfed.model.placement import Layout
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan
from perfed.training.view import Where
from perfed.tree import Tree

Metrics = dict[str, dict[str, float]]

_COHORT_BYTES = 512 << 20
# Working values, received values, gradients and a moment: what a client's model takes while it trains.
_COPIES = 4


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round: which program, in which round, as which exchange.

    Attributes:
        program: name of the method's client program, or ``term.program``, or ``:CHORE`` (:mod:`perfed.engine.chores`).
        round: from 1; 0 is the preparation.
        index: number of the exchange within the round.
        measure: split on which to score the clients' models right after the program, or ``None``.
        terms: what the method's terms do: ``"nothing"``, ``"penalties"`` in local training, or ``"all"``: also add to
            the reply.
    """

    program: str
    round: int
    index: int
    measure: str | None = None
    terms: Literal["nothing", "penalties", "all"] = "nothing"


class InProcessEngine:
    """Keeps the clients' states and runs programs on cohorts.

    Args:
        federation: inputs must already have the run's dtype.
        setup: method, model, seed.
        plan: how work is cut up.

    Attributes:
        states: committed state of each client that has one; a client without starts from its initial values.
        changed: clients whose committed state changed since the set was last cleared.
        scoring: what is measured of the clients' models; the engine's owner may say.
    """

    def __init__(self, federation: Federation, setup: Setup, plan: Plan) -> None:
        self.federation = federation
        self.setup = setup
        self.plan = plan
        self.info = setup.info(federation)
        self.clients = {client.id: client for client in federation}
        self.scoring = Scoring(scale=federation.target_scale)
        self._trained = federation.domains_in("train")
        self.states: dict[str, Tree] = {}
        self.changed: set[str] = set()
        self._pending: dict[str, Tree] = {}
        self._layouts = self._group()

    def _group(self) -> dict[Shape, Layout]:
        """Architecture of the clients whose inputs have a shape; those that can share a stack have the same label."""
        layouts: dict[Shape, Layout] = {}
        groups: dict[str, tuple[str, str | None]] = {}
        for shape in dict.fromkeys(client.input_shape for client in self.federation):
            chain = self.setup.chain(shape)
            key = group_key(chain)
            if key not in groups:
                found_in = stackable_reason(chain) if self.plan.engine != "sequential" else None
                label = "" if len(shape) == 1 else " " + "x".join(map(str, shape))
                reason = None
                if found_in is not None:
                    layer, reason = found_in
                    self.plan.reasons.setdefault(layer, reason)  # once, whatever the shapes of inputs
                groups[key] = (label + (f" #{len(groups)}" if len(groups) else ""), reason)
            layouts[shape] = Layout(chain, self.setup.places(shape), *groups[key])
        return layouts

    # Exchanges ---------------------------------------------------------------------------------------------

    def run(
        self,
        exchange: Exchange,
        payload: Mapping[str, Any],
        ids: Sequence[str],
        reduce: Mapping[str, Fold] | None = None,
        outputs: list[Outputs] | None = None,
    ) -> tuple[Replies, Metrics]:
        """Run a program at ``ids``; their new states stay pending until :meth:`commit`.

        Entries named in ``reduce`` are folded in the sorted order of ids and dropped; their totals are in the replies.
        What the measured models say of every sample is appended to ``outputs``, if given.

        Returns:
            Replies in sorted id order, and each client's metrics if ``exchange.measure`` asks for them.
        """
        inbox = Inbox(ids, reduce or {})
        losses: dict[str, Tensor] = {}
        metrics: Metrics = {}
        for chunk in self._chunks(ids, by_id=bool(reduce)):
            cohort = self.cohort(chunk, exchange)
            reply = self._call(cohort, exchange, self._deliver(payload, cohort.ids))
            if exchange.measure is not None:
                predicted = predictions(self.setup.method, cohort, exchange.measure, self._trained)
                metrics.update(score(cohort, exchange.measure, predicted, self.scoring))
                if outputs is not None and predicted is not None:
                    outputs.append(outputs_of(cohort, exchange.measure, predicted, self.scoring))
            shapes = [self._layouts[client.input_shape].shapes for client in chunk]
            for row, client in enumerate(chunk):
                inbox.add(client.id, partial(self._arriving, reply, row, shapes[row]))
                losses[client.id] = cohort.train_loss[row]
                self._pending[client.id] = self.keep(self._state_of(cohort, row, shapes[row]))
        order = sorted(losses)
        return Replies(order, inbox.content(), torch.stack([losses[i] for i in order])), metrics

    def evaluate(
        self,
        payload: Mapping[str, Any],
        ids: Sequence[str],
        split: str,
        round_: int,
        outputs: list[Outputs] | None = None,
        program: str = "personalise",
    ) -> Metrics:
        """Score each client's own model (``program``, then ``predict``) on ``split``; changes no state.

        What the models say of every sample is appended to ``outputs``, if given.
        """
        ids = [i for i in ids if self.clients[i].split(split) is not None]
        metrics: Metrics = {}
        for cohort in self.cohorts(ids, payload, round_, program):
            predicted = predictions(self.setup.method, cohort, split, self._trained)
            metrics.update(score(cohort, split, predicted, self.scoring))
            if outputs is not None:
                outputs.append(outputs_of(cohort, split, predicted, self.scoring))
        return metrics

    def cohorts(
        self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0, program: str = "personalise"
    ) -> Iterator[Cohort]:
        """Cohorts of the clients' own models, made by ``program`` on copies, one at a time."""
        for chunk in self._chunks(ids):
            exchange = Exchange(program, round_, -1)
            cohort = self.cohort(chunk, exchange)
            self._call(cohort, exchange, self._deliver(payload, cohort.ids))
            yield cohort

    def commit(self, ids: Sequence[str]) -> None:
        """Make the pending states of ``ids`` their committed ones and drop all others."""
        for client in ids:
            if client in self._pending:
                self.states[client] = self._pending[client]
                self.changed.add(client)
        self._pending.clear()

    def discard(self) -> None:
        """Drop all pending states."""
        self._pending.clear()

    # Seams for engines that cross a wire -------------------------------------------------------------------

    def send(self, payload: dict[str, Any]) -> dict[str, Any]:
        """What becomes of one client's payload on its way to the client."""
        return payload

    def receive(self, reply: dict[str, Any]) -> dict[str, Any]:
        """What becomes of one client's reply on its way to the server."""
        return reply

    def keep(self, state: dict[str, Any]) -> dict[str, Any]:
        """What becomes of a client's state when it is put away; must not share memory with the cohort."""
        return tree.copy(state)

    # Parts -------------------------------------------------------------------------------------------------

    def _chunks(self, ids: Sequence[str], *, by_id: bool = False) -> list[list[Client]]:
        """Clients of one architecture cut into chunks, those with more data first or in the order of ids."""
        groups: dict[str, list[Client]] = {}
        for client_id in sorted(ids):
            client = self.clients[client_id]
            groups.setdefault(self._layouts[client.input_shape].label, []).append(client)
        chunks = []
        for members in groups.values():
            if not by_id:
                members.sort(key=lambda client: (-len(client.train), client.id))
            size = {"sequential": 1, "stacked": self.plan.chunk, "auto": 0}[self.plan.engine] or self._fitting(members)
            chunks += [members[i : i + size] for i in range(0, len(members), size)]
        return sorted(chunks, key=lambda chunk: chunk[0].id) if by_id else chunks

    def _fitting(self, members: Sequence[Client]) -> int:
        """How many clients a cohort may have, by the memory of their samples and models; at least 1."""
        model = _COPIES * self._layouts[members[0].input_shape].size
        splits = [s for c in members for name in SPLITS if (s := c.split(name)) is not None]
        data = sum(s.x.numel() * s.x.element_size() for s in splits) // len(members)
        return max(1, _COHORT_BYTES // max(1, model + data))

    def cohort(self, clients: list[Client], exchange: Exchange) -> Cohort:
        """``clients`` of one architecture, side by side, as ``exchange`` finds them."""
        layout = self._layouts[clients[0].input_shape]
        frozen = "frozen" in layout.places.values()
        own = [self.setup.client_model(client) if frozen else {} for client in clients]
        states = [self._current(client) for client in clients]
        model = tree.stack_padded([{**frozen, **state["model"]} for frozen, state in zip(own, states, strict=True)])
        rest = [{name: value for name, value in state.items() if name != "model"} for state in states]
        return Cohort(
            clients,
            layout,
            model,
            tree.stack_padded(rest),
            settings=self.setup.method,
            plan=self.plan,
            where=Where(self.setup.seed, exchange.round, exchange.index),
            task=self.info.task,
            num_classes=self.info.num_classes,
            num_domains=self.info.num_domains,
            augment=self.federation.augment,
        )

    def _current(self, client: Client) -> Any:
        """Pending state of the running round, else the committed one, else the initial one."""
        if client.id in self._pending:
            return self._pending[client.id]
        if client.id not in self.states:
            self.states[client.id] = self.setup.client_state(client, self.info)
        return self.states[client.id]

    def _deliver(self, payload: Mapping[str, Any], ids: list[str]) -> dict[str, Any]:
        """The payload with a leading client axis: broadcast entries are expanded, rows of ``each`` stacked."""
        shared = {name: value for name, value in payload.items() if not isinstance(value, Each)}
        rows = {name: value for name, value in payload.items() if isinstance(value, Each)}
        arrived = tree.map_leaves(self.send(shared), lambda _, t: _broadcast(t, len(ids)))
        if rows:
            own = [self.send({name: value.rows[i] for name, value in rows.items()}) for i in ids]
            arrived.update(tree.stack_padded(own))
        return arrived

    def _call(self, cohort: Cohort, exchange: Exchange, payload: dict[str, Any]) -> Reply:
        method = self.setup.method
        cohort.carried = payload.pop("terms", {})
        if exchange.terms != "nothing":
            cohort.terms = Travelling(method.terms)
        where, program = self._program(exchange.program)
        reply = Reply.of(program(cohort, **payload), where)
        if exchange.terms == "all":
            reply["terms"] = cohort.terms_reply()
        check_rows(reply, where, cohort.ids)
        return reply

    def _program(self, name: str) -> tuple[str, Callable[..., Reply | None]]:
        """What messages call a program, and the program itself."""
        method = self.setup.method
        if name.startswith(":"):
            return name[1:], partial(CHORES[name[1:]], method)
        term, _, own = name.rpartition(".")
        owner: Any = next(t for t in method.terms if t.name == term) if term else method
        return f"{term or type(owner).__name__}.{own}", getattr(owner, own)

    def _arriving(self, reply: Reply, row: int, shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
        """One client's reply, as the server gets it."""
        own = tree.row_of({name: value for name, value in reply.items() if not callable(value)}, row, shapes)
        return self.receive(own | {name: value(row) for name, value in reply.items() if callable(value)})

    def _state_of(self, cohort: Cohort, row: int, shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
        for name in cohort.state:
            if name not in self.setup.sets or self.setup.sets[name].home != "client":
                raise PerfedError(
                    f"'{name}' is not a declared parameter set at home on the client; declare it in sets()"
                )
        own = {"model": cohort.personal(), **cohort.state}
        return tree.row_of(own, row, shapes)


def _broadcast(tensor: Tensor, clients: int) -> Tensor:
    """``tensor`` for each of ``clients`` clients."""
    # A program may train what it received in place. For one client that would be the server's own tensor.
    return tensor.unsqueeze(0).clone() if clients == 1 else tensor.unsqueeze(0).expand(clients, *tensor.shape)
