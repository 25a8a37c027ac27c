"""Execution of client programs on one chunk of clients at a time, in the process that has their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from perfed import tree
from perfed.data.augment import CropFlip
from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.engine.builtin_programs import BUILTIN_PROGRAMS
from perfed.engine.evaluate import Metrics, Outputs, outputs_of, predict_split, score
from perfed.engine.initial import Initialiser, find_stacking_obstacle, group_key
from perfed.engine.metrics import Scoring
from perfed.engine.states import State
from perfed.errors import ClientsDiverged, PerfedError
from perfed.method.declared import FederationInfo
from perfed.method.exchange import Reply, check_rows
from perfed.method.extension import BoundExtensions, Extension
from perfed.method.method import Method
from perfed.model.chain import Shape
from perfed.model.placement import Layout
from perfed.rng import Noise
from perfed.system import keep_freed_memory
from perfed.training.batches import advance_position
from perfed.training.cohort import Cohort
from perfed.training.fit import LossCurve
from perfed.training.plan import Plan, use_threads
from perfed.training.private import ReleaseCounter
from perfed.training.view import ExchangeId
from perfed.tree import Tree

ReplyChange = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Returns the reply to use instead, given a client's id and its reply."""


@dataclass(frozen=True)
class Exchange:
    """The identity of an exchange: its program, its round and its number in the round.

    Attributes:
        program: the name of the method's client program, or ``extension.program``, or ``:BUILTIN``
            (:mod:`perfed.engine.builtin_programs`).
        round: the number of the round, from 1; 0 is the preparation.
        index: the number of the exchange in the round; -1 for an exchange on copies, which changes no client's state.
        measure: the split on which the clients' models are scored right after the program, or ``None``.
        extensions: the role of the method's extensions: ``"nothing"``, ``"penalties"`` (they change losses and
            gradients of local training), or ``"all"`` (they also add to the reply).
    """

    program: str
    round: int
    index: int
    measure: str | None = None
    extensions: Literal["nothing", "penalties", "all"] = "nothing"

    @property
    def place(self) -> str:
        """The round and exchange as text for messages."""
        return str(ExchangeId(0, self.round, self.index))

    @property
    def changes_states(self) -> bool:
        """Whether the exchange changes the states of clients."""
        return self.index >= 0


@dataclass(frozen=True)
class ChunkTask:
    """The work of one chunk of clients in an exchange.

    Attributes:
        exchange: the exchange.
        ids: the ids of the clients, which are stacked in one cohort.
        shared: the payload that is the same for all clients.
        rows: the payload of each client, by id; empty if all of the payload is shared.
        states: the state from which each client starts, by id; a client without one starts from its initial values.
        scoring: the metrics to compute, if the exchange scores models.
        keep_outputs: whether the predictions of the scored models for every sample are returned.
    """

    exchange: Exchange
    ids: tuple[str, ...]
    shared: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    states: Mapping[str, Tree]
    scoring: Scoring
    keep_outputs: bool


@dataclass(frozen=True)
class ChunkResult:
    """The results of one chunk of clients.

    Attributes:
        ids: the ids of the clients; row j of the other attributes belongs to ``ids[j]``.
        content: the stacked replies; an entry that is computed per client is a function of the row, or a list.
        shapes: the parameter shapes of each client, to which padded parameters are cropped.
        losses: the mean training loss of each client, NaN if it trained nothing.
        metrics: the metrics of each client that was scored.
        outputs: the outputs of the scored models for every sample, if requested.
        states: each client's new state by id; empty after work on copies.
        loss_curves: the loss of each local epoch by id, for the clients that are watched.
        diverged: messages on clients whose training diverged, by id; the chunk has no replies in this case.
        changes: functions of a client's id and reply that are applied, in this order, to each reply when it is read.
    """

    ids: tuple[str, ...]
    content: Mapping[str, Any]
    shapes: Sequence[Mapping[str, torch.Size]]
    losses: Tensor
    metrics: Metrics = field(default_factory=dict)
    outputs: list[Outputs] = field(default_factory=list)
    states: dict[str, Tree] = field(default_factory=dict)
    loss_curves: dict[str, list[float]] = field(default_factory=dict)
    diverged: dict[str, str] = field(default_factory=dict)
    changes: tuple[ReplyChange, ...] = ()

    def reply(self, row: int) -> dict[str, Any]:
        """Return the reply of the client in ``row``, with all changes applied."""
        stacked = {name: value for name, value in self.content.items() if not (callable(value) or type(value) is list)}
        single = {n: v(row) if callable(v) else v[row] for n, v in self.content.items() if n not in stacked}
        reply = tree.select_row(stacked, row, self.shapes[row]) | single
        for change in self.changes:
            reply = change(self.ids[row], reply)
        return reply

    def map_replies(self, change: ReplyChange) -> ChunkResult:
        """Return a copy of the result in which ``change(client, reply)`` is applied to each reply when it is read."""
        return replace(self, changes=(*self.changes, change))

    def with_computed_entries(self) -> ChunkResult:
        """Return a copy of the result without functions in its content, so that it can be sent to another process."""
        rows = range(len(self.ids))
        computed = {name: [value(row) for row in rows] for name, value in self.content.items() if callable(value)}
        return replace(self, content={**self.content, **computed})


@dataclass(frozen=True)
class Background:
    """The facts about the whole federation that an executor of some of its clients needs.

    Attributes:
        info: the facts that the server knows before the first round.
        shapes: the distinct shapes of inputs, in the order of clients.
        trained: the domains of which some client has training samples.
        augment: the augmentation of training mini-batches.
    """

    info: FederationInfo
    shapes: tuple[Shape, ...]
    trained: tuple[int, ...]
    augment: CropFlip | None

    @classmethod
    def from_federation(cls, federation: Federation, info: FederationInfo) -> Background:
        """Return the background of all clients of the federation."""
        shapes = tuple(dict.fromkeys(client.input_shape for client in federation))
        return cls(info, shapes, tuple(federation.domains_in("train")), federation.augment)


class LocalExecutor:
    """Runs client programs on some of the clients of a federation.

    It has no state between exchanges: the clients' states are part of the task and of its result.

    Args:
        clients: the clients, whose inputs must already have the run's dtype.
        background: the facts about the whole federation.
        initialiser: the method, model and seed.
        plan: how clients are divided into chunks.

    Attributes:
        layouts: the architecture of clients by the shape of their inputs; those that can be stacked have one label.
        noise: the source of the noise of the next task.
        counter: counts the releases of a single client in the next task; ``None`` for no counting.
        on_metric_error: receives errors in the computation of metrics, which are then left out; ``None`` to raise them.
    """

    def __init__(self, clients: Iterable[Client], background: Background, initialiser: Initialiser, plan: Plan) -> None:
        keep_freed_memory()
        self.clients = {client.id: client for client in clients}
        self.background = background
        self.initialiser = initialiser
        self.plan = plan
        self.layouts = make_layouts(background.shapes, initialiser, plan)
        self.noise = Noise()
        self.counter: ReleaseCounter | None = None
        self.on_metric_error: Callable[[Exception], None] | None = None

    def attempt(self, work: ChunkTask) -> ChunkResult:
        """Return the result of :meth:`run`, or a result without replies that names the clients that diverged."""
        try:
            return self.run(work)
        except ClientsDiverged as error:
            return ChunkResult((), {}, (), torch.empty(0), diverged=dict(error.messages))

    def run(self, work: ChunkTask) -> ChunkResult:
        """Run the program of ``work`` on its clients.

        Raises:
            ClientsDiverged: training diverged.
            PerfedError: the program's reply is not valid, or it changed a parameter set that is not declared.
        """
        with use_threads(self.plan.untimed_threads):
            return self._run(work)

    def _run(self, work: ChunkTask) -> ChunkResult:
        exchange = work.exchange
        cohort, reply = self.run_program(work)
        metrics: Metrics = {}
        outputs: list[Outputs] = []
        if exchange.measure is not None:
            predicted = predict_split(
                self.initialiser.method.in_round(exchange.round), cohort, exchange.measure, self.background.trained
            )
            metrics = self._score(cohort, exchange.measure, predicted, work.scoring)
            if work.keep_outputs and predicted is not None:
                outputs.append(outputs_of(cohort, exchange.measure, predicted, work.scoring))
        shapes = [self.layouts[client.input_shape].shapes for client in cohort.clients]
        states = self._select_states(cohort, shapes) if exchange.changes_states else {}
        return ChunkResult(
            work.ids, reply, shapes, cohort.train_loss, metrics, outputs, states, self._loss_curves(cohort)
        )

    def _score(self, cohort: Cohort, split: str, predicted: Tensor | None, scoring: Scoring) -> Metrics:
        """Return the metrics of a cohort; without metrics if an error was passed to ``on_metric_error``."""
        try:
            return score(cohort, split, predicted, scoring)
        except Exception as error:
            if self.on_metric_error is None:
                raise
            self.on_metric_error(error)
            return {}

    def run_program(self, work: ChunkTask) -> tuple[Cohort, Reply]:
        """Run the program of ``work`` and return the stacked clients and their stacked reply."""
        with use_threads(self.plan.untimed_threads):
            cohort = self.cohort([self.clients[i] for i in work.ids], work.exchange, work.states)
            if work.exchange.changes_states and _find_reply_extensions(self.initialiser.method.extensions):
                cohort.delivered = self._expand_payload(work)  # a copy, because programs may change their payload
            return cohort, self._call_program(cohort, work.exchange, self._expand_payload(work))

    def cohort(self, clients: Sequence[Client], exchange: Exchange, states: Mapping[str, Tree]) -> Cohort:
        """Return ``clients`` of one architecture, stacked, with their states before ``exchange``."""
        layout, info = self.layouts[clients[0].input_shape], self.background.info
        has_frozen = "frozen" in layout.places.values()
        frozen_models = [self.initialiser.client_model(client) if has_frozen else {} for client in clients]
        client_states = [self._read_state(client, states.get(client.id)) for client in clients]
        model = tree.stack_padded(
            [{**frozen, **state["model"]} for frozen, state in zip(frozen_models, client_states, strict=True)]
        )
        sets = [{name: value for name, value in state.items() if name != "model"} for state in client_states]
        cohort = Cohort(
            clients,
            layout,
            model,
            tree.stack_padded(sets),
            settings=self.initialiser.method.in_round(exchange.round),
            plan=self.plan,
            where=ExchangeId(self.initialiser.seed, exchange.round, exchange.index),
            task=info.task,
            num_classes=info.num_classes,
            num_domains=info.num_domains,
            augment=self.background.augment,
        )
        private = next((p for e in self.initialiser.method.extensions if (p := e.private())), None)
        cohort.private = None if private is None else private.for_cohort(cohort.num_samples, self.noise, self.counter)
        cohort.noise, cohort.counter = self.noise, self.counter
        cohort.discreet = any(extension.discreet for extension in self.initialiser.method.extensions)
        if exchange.changes_states and self.initialiser.watched.intersection(cohort.ids):
            cohort.watch = LossCurve()
        return cohort

    def _loss_curves(self, cohort: Cohort) -> dict[str, list[float]]:
        """Return the losses of each local epoch of the clients that are watched."""
        curve = cohort.watch
        rows = [(i, row) for row, i in enumerate(cohort.ids) if i in self.initialiser.watched]
        return {i: curve.losses(row) for i, row in rows} if isinstance(curve, LossCurve) else {}

    def _call_program(self, cohort: Cohort, exchange: Exchange, payload: dict[str, Any]) -> Reply:
        method = self.initialiser.method.in_round(exchange.round)
        cohort.carried = payload.pop("extensions", {})
        if exchange.extensions != "nothing":
            cohort.extensions = BoundExtensions(method.extensions)
        where, program = self._find_program(exchange.program, method)
        reply = Reply.of(program(cohort, **payload), where)
        if exchange.extensions == "all":
            reply["extensions"] = cohort.extensions_reply()
        check_rows(reply, where, cohort.ids)
        for extension in _find_reply_extensions(method.extensions) if exchange.changes_states else ():
            reply = extension.outgoing(cohort, reply)
            check_rows(reply, "the reply of an extension", cohort.ids)
        return reply

    def _find_program(self, name: str, method: Method) -> tuple[str, Callable[..., Reply | None]]:
        """Return the name of a program of ``method`` in error messages, and the program itself."""
        if name.startswith(":"):
            return name[1:], partial(BUILTIN_PROGRAMS[name[1:]], method)
        extension, _, attribute = name.rpartition(".")
        owner: Any = next(t for t in method.extensions if t.name == extension) if extension else method
        return f"{extension or type(owner).__name__}.{attribute}", getattr(owner, attribute)

    def _expand_payload(self, work: ChunkTask) -> dict[str, Any]:
        """Return the payload with a leading client axis: shared entries are expanded, rows of clients are stacked."""
        payload: dict[str, Any] = tree.map_leaves(work.shared, lambda _, t: _expand_tensor(t, len(work.ids)))
        if work.rows:
            payload.update(tree.stack_padded([work.rows[i] for i in work.ids]))
        return payload

    def _read_state(self, client: Client, state: Tree | None) -> Mapping[str, Any]:
        if state is None:
            return self.initialiser.client_state(client, self.background.info)
        return state.read() if isinstance(state, State) else state

    def _select_states(self, cohort: Cohort, shapes: Sequence[Mapping[str, torch.Size]]) -> dict[str, Tree]:
        """Return each client's personal parameters and sets, which share no memory with the cohort."""
        for name in cohort.state:
            if name not in self.initialiser.sets or self.initialiser.sets[name].home != "client":
                raise PerfedError(
                    f"'{name}' is not a declared parameter set at home on the client; declare it in sets()"
                )
        state = {"model": cohort.personal(), **advance_position(cohort.state, cohort.steps_done)}
        return {i: tree.copy_tree(tree.select_row(state, row, shapes[row])) for row, i in enumerate(cohort.ids)}


def make_layouts(shapes: Sequence[Shape], initialiser: Initialiser, plan: Plan) -> dict[Shape, Layout]:
    """Return the architecture of clients by the shape of their inputs; those that can be stacked have one label."""
    layouts: dict[Shape, Layout] = {}
    groups: dict[str, tuple[str, str | None]] = {}
    for shape in shapes:
        chain = initialiser.chain(shape)
        key = group_key(chain)
        if key not in groups:
            obstacle = find_stacking_obstacle(chain) if plan.engine != "sequential" else None
            label = "" if len(shape) == 1 else " " + "x".join(map(str, shape))
            reason = None
            if obstacle is not None:
                layer, reason = obstacle
                plan.reasons.setdefault(layer, reason)  # only once for all shapes of inputs
            groups[key] = (label + (f" #{len(groups)}" if len(groups) else ""), reason)
        layouts[shape] = Layout(chain, initialiser.places(shape), *groups[key])
    return layouts


def _expand_tensor(tensor: Tensor, clients: int) -> Tensor:
    """Return ``tensor`` with a leading axis of ``clients`` clients."""
    # A program may train its payload in place. With one client, an expanded view would be the server's tensor.
    return tensor.unsqueeze(0).clone() if clients == 1 else tensor.unsqueeze(0).expand(clients, *tensor.shape)


def _find_reply_extensions(extensions: Sequence[Extension]) -> list[Extension]:
    """Return the extensions that override ``outgoing``, and so change replies before they are sent."""
    return [extension for extension in extensions if type(extension).outgoing is not Extension.outgoing]
