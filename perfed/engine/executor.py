"""The place of clients: runs client programs where their data are, on one chunk of clients at a time."""

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
from perfed.engine.evaluate import Metrics, Outputs, outputs_of, predictions, score
from perfed.engine.initial import Initialiser, group_key, stackable_reason
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
"""From a client's id and its reply to the reply to use instead."""


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round: which program, in which round, as which exchange.

    Attributes:
        program: name of the method's client program, or ``extension.program``, or ``:BUILTIN``
            (:mod:`perfed.engine.builtin_programs`).
        round: from 1; 0 is the preparation.
        index: number of the exchange within the round; -1: on copies, no client's state changes.
        measure: split on which to score the clients' models right after the program, or ``None``.
        extensions: what the method's extensions do: ``"nothing"``, ``"penalties"`` in local training (and what
            they make of gradients), or ``"all"``: also add to the reply.
    """

    program: str
    round: int
    index: int
    measure: str | None = None
    extensions: Literal["nothing", "penalties", "all"] = "nothing"

    @property
    def place(self) -> str:
        """The round, in words."""
        return str(ExchangeId(0, self.round, self.index))

    @property
    def lasting(self) -> bool:
        """Whether clients have new states afterwards."""
        return self.index >= 0


@dataclass(frozen=True)
class ChunkTask:
    """The part of an exchange that one chunk of clients does.

    Attributes:
        exchange: the exchange.
        ids: ids of the clients, which are stacked in one cohort.
        shared: payload that is the same for all.
        rows: each client's own payload, by id; empty where there is none.
        states: each client's state to start from, by id; one without starts from its initial values.
        scoring: what is measured, where the exchange measures.
        keep_outputs: whether the predictions of the measured models for every sample are returned.
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
        ids: of the clients; row j of what follows belongs to ``ids[j]``.
        content: the reply, stacked; what is made client by client is a function of the row, or a list.
        shapes: each client's own shapes of parameters, to which padded ones are cut back.
        losses: mean training loss of each client, NaN where nothing was trained.
        metrics: of each client, where it was measured.
        outputs: what the measured models say of every sample, if that was wanted.
        states: each client's new state by id; empty after work on copies.
        loss_curves: losses of each local epoch, by id, of the clients that are watched.
        diverged: what happened at clients whose training diverged, by id; the chunk has no replies then.
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
        """Read one client's reply, by its row."""
        stacked = {name: value for name, value in self.content.items() if not (callable(value) or type(value) is list)}
        single = {n: v(row) if callable(v) else v[row] for n, v in self.content.items() if n not in stacked}
        reply = tree.select_row(stacked, row, self.shapes[row]) | single
        for change in self.changes:
            reply = change(self.ids[row], reply)
        return reply

    def map_replies(self, change: ReplyChange) -> ChunkResult:
        """Return the same result with ``change(client, reply)`` in the place of each reply, applied when it is read."""
        return replace(self, changes=(*self.changes, change))

    def whole(self) -> ChunkResult:
        """Return the same result with all entries that are made client by client, so that it can be sent elsewhere."""
        rows = range(len(self.ids))
        made = {name: [value(row) for row in rows] for name, value in self.content.items() if callable(value)}
        return replace(self, content={**self.content, **made})


@dataclass(frozen=True)
class Background:
    """What the place of some clients knows of the federation besides these clients.

    Attributes:
        info: what the server knows before the first round.
        shapes: of inputs, each that occurs once, in the order of clients.
        trained: domains that some client has training samples of.
        augment: of training mini-batches.
    """

    info: FederationInfo
    shapes: tuple[Shape, ...]
    trained: tuple[int, ...]
    augment: CropFlip | None

    @classmethod
    def of(cls, federation: Federation, info: FederationInfo) -> Background:
        """Return the background of all clients of the federation."""
        shapes = tuple(dict.fromkeys(client.input_shape for client in federation))
        return cls(info, shapes, tuple(federation.domains_in("train")), federation.augment)


class LocalExecutor:
    """Runs client programs on some of the clients, where their data are.

    It keeps nothing between exchanges: states come with the task and leave with its result.

    Args:
        clients: inputs must already have the run's dtype.
        background: of the federation.
        initialiser: method, model, seed.
        plan: how clients are divided into chunks.

    Attributes:
        layouts: architecture of clients by the shape of their inputs; those that can share a stack have one label.
        noise: where noise of the next work comes from.
        counter: counts what the next work of a single client releases; ``None``: nobody counts it.
        on_metric_error: receives an error in computing metrics, which are then left out; ``None``: it is raised.
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
            PerfedError: the program's reply is none, or it set what is not declared.
        """
        with use_threads(self.plan.untimed_threads):
            return self._run(work)

    def _run(self, work: ChunkTask) -> ChunkResult:
        exchange = work.exchange
        cohort, reply = self.run_program(work)
        metrics: Metrics = {}
        outputs: list[Outputs] = []
        if exchange.measure is not None:
            predicted = predictions(
                self.initialiser.method.in_round(exchange.round), cohort, exchange.measure, self.background.trained
            )
            metrics = self._score(cohort, exchange.measure, predicted, work.scoring)
            if work.keep_outputs and predicted is not None:
                outputs.append(outputs_of(cohort, exchange.measure, predicted, work.scoring))
        shapes = [self.layouts[client.input_shape].shapes for client in cohort.clients]
        states = self._states(cohort, shapes) if exchange.lasting else {}
        return ChunkResult(
            work.ids, reply, shapes, cohort.train_loss, metrics, outputs, states, self._loss_curves(cohort)
        )

    def _score(self, cohort: Cohort, split: str, predicted: Tensor | None, scoring: Scoring) -> Metrics:
        try:
            return score(cohort, split, predicted, scoring)
        except Exception as error:
            if self.on_metric_error is None:
                raise
            self.on_metric_error(error)
            return {}

    def run_program(self, work: ChunkTask) -> tuple[Cohort, Reply]:
        """Run the program of ``work`` and return its clients, side by side, and their stacked reply."""
        with use_threads(self.plan.untimed_threads):
            cohort = self.cohort([self.clients[i] for i in work.ids], work.exchange, work.states)
            if work.exchange.lasting and _replacing(self.initialiser.method.extensions):
                cohort.delivered = self._expand_payload(work)  # apart: programs may train in place what they get
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
        if exchange.lasting and self.initialiser.watched.intersection(cohort.ids):
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
        for extension in _replacing(method.extensions) if exchange.lasting else ():
            reply = extension.outgoing(cohort, reply)
            check_rows(reply, "what extensions made of a reply", cohort.ids)
        return reply

    def _find_program(self, name: str, method: Method) -> tuple[str, Callable[..., Reply | None]]:
        """Return the name of a program of ``method`` in error messages, and the program itself."""
        if name.startswith(":"):
            return name[1:], partial(BUILTIN_PROGRAMS[name[1:]], method)
        extension, _, own = name.rpartition(".")
        owner: Any = next(t for t in method.extensions if t.name == extension) if extension else method
        return f"{extension or type(owner).__name__}.{own}", getattr(owner, own)

    def _expand_payload(self, work: ChunkTask) -> dict[str, Any]:
        """Return the payload with a leading client axis: shared entries are expanded, rows of clients are stacked."""
        arrived: dict[str, Any] = tree.map_leaves(work.shared, lambda _, t: _broadcast(t, len(work.ids)))
        if work.rows:
            arrived.update(tree.stack_padded([work.rows[i] for i in work.ids]))
        return arrived

    def _read_state(self, client: Client, state: Tree | None) -> Mapping[str, Any]:
        if state is None:
            return self.initialiser.client_state(client, self.background.info)
        return state.read() if isinstance(state, State) else state

    def _states(self, cohort: Cohort, shapes: Sequence[Mapping[str, torch.Size]]) -> dict[str, Tree]:
        """Return each client's personal parameters and sets, which share no memory with the cohort."""
        for name in cohort.state:
            if name not in self.initialiser.sets or self.initialiser.sets[name].home != "client":
                raise PerfedError(
                    f"'{name}' is not a declared parameter set at home on the client; declare it in sets()"
                )
        own = {"model": cohort.personal(), **advance_position(cohort.state, cohort.steps_done)}
        return {i: tree.copy_tree(tree.select_row(own, row, shapes[row])) for row, i in enumerate(cohort.ids)}


def make_layouts(shapes: Sequence[Shape], initialiser: Initialiser, plan: Plan) -> dict[Shape, Layout]:
    """Return the architecture of clients by the shape of their inputs; those that can share a stack have one label."""
    layouts: dict[Shape, Layout] = {}
    groups: dict[str, tuple[str, str | None]] = {}
    for shape in shapes:
        chain = initialiser.chain(shape)
        key = group_key(chain)
        if key not in groups:
            found_in = stackable_reason(chain) if plan.engine != "sequential" else None
            label = "" if len(shape) == 1 else " " + "x".join(map(str, shape))
            reason = None
            if found_in is not None:
                layer, reason = found_in
                plan.reasons.setdefault(layer, reason)  # once, whatever the shapes of inputs
            groups[key] = (label + (f" #{len(groups)}" if len(groups) else ""), reason)
        layouts[shape] = Layout(chain, initialiser.places(shape), *groups[key])
    return layouts


def _broadcast(tensor: Tensor, clients: int) -> Tensor:
    """Return ``tensor`` for each of ``clients`` clients."""
    # A program may train what it received in place. For one client that would be the server's own tensor.
    return tensor.unsqueeze(0).clone() if clients == 1 else tensor.unsqueeze(0).expand(clients, *tensor.shape)


def _replacing(extensions: Sequence[Extension]) -> list[Extension]:
    """Return those that replace replies: only they are asked for ``outgoing``."""
    return [extension for extension in extensions if type(extension).outgoing is not Extension.outgoing]
