"""Where clients are: their data, and client programs run on cohorts of them, one chunk of clients at a time."""

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
    """What a chunk of clients is to do in an exchange.

    Attributes:
        exchange: which.
        ids: of the clients, side by side in one cohort.
        shared: payload that is the same for all.
        rows: each client's own payload, by id; empty where there is none.
        states: each client's state to start from, by id; one without starts from its initial values.
        scoring: what is measured, where the exchange measures.
        keeps: whether what the measured models say of every sample is wanted.
    """

    exchange: Exchange
    ids: tuple[str, ...]
    shared: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    states: Mapping[str, Tree]
    scoring: Scoring
    keeps: bool


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk of clients has done.

    Attributes:
        ids: of the clients; row j of what follows belongs to ``ids[j]``.
        content: the reply, stacked; what is made client by client is a function of the row, or a list.
        shapes: each client's own shapes of parameters, to which padded ones are cut back.
        losses: mean training loss of each client, NaN where nothing was trained.
        metrics: of each client, where it was measured.
        outputs: what the measured models say of every sample, if that was wanted.
        states: each client's new state by id; empty after work on copies.
        courses: loss of each local epoch, by id, of the clients of which it is wanted.
        diverged: what happened at clients whose training diverged, by id; nothing else is there then.
    """

    ids: tuple[str, ...]
    content: Mapping[str, Any]
    shapes: Sequence[Mapping[str, torch.Size]]
    losses: Tensor
    metrics: Metrics = field(default_factory=dict)
    outputs: list[Outputs] = field(default_factory=list)
    states: dict[str, Tree] = field(default_factory=dict)
    courses: dict[str, list[float]] = field(default_factory=dict)
    diverged: dict[str, str] = field(default_factory=dict)

    def reply(self, row: int) -> dict[str, Any]:
        """One client's reply, by its row."""
        stacked = {name: value for name, value in self.content.items() if not (callable(value) or type(value) is list)}
        made = {n: v(row) if callable(v) else v[row] for n, v in self.content.items() if n not in stacked}
        return tree.select_row(stacked, row, self.shapes[row]) | made

    def whole(self) -> ChunkResult:
        """The same with everything made that is made client by client: it can be sent elsewhere."""
        rows = range(len(self.ids))
        made = {name: [value(row) for row in rows] for name, value in self.content.items() if callable(value)}
        return replace(self, content={**self.content, **made})


@dataclass(frozen=True)
class Background:
    """What a host knows of the federation beyond its own clients.

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
        """Of all its clients."""
        shapes = tuple(dict.fromkeys(client.input_shape for client in federation))
        return cls(info, shapes, tuple(federation.domains_in("train")), federation.augment)


class LocalExecutor:
    """Some of the clients, at one place: runs client programs where their data are.

    It keeps nothing between exchanges: states come with the work and go back with what was done.

    Args:
        clients: inputs must already have the run's dtype.
        background: of the federation.
        initialiser: method, model, seed.
        plan: how work is cut up.

    Attributes:
        layouts: architecture of clients by the shape of their inputs; those that can share a stack have one label.
        noise: where noise of the next work comes from.
        counter: counts what the next work of a single client releases; ``None``: nobody counts it.
    """

    def __init__(self, clients: Iterable[Client], background: Background, initialiser: Initialiser, plan: Plan) -> None:
        keep_freed_memory()
        self.clients = {client.id: client for client in clients}
        self.background = background
        self.initialiser = initialiser
        self.plan = plan
        self.layouts = layouts_of(background.shapes, initialiser, plan)
        self.noise = Noise()
        self.counter: ReleaseCounter | None = None

    def attempt(self, work: ChunkTask) -> ChunkResult:
        """:meth:`run`, or at which of the clients training diverged."""
        try:
            return self.run(work)
        except ClientsDiverged as error:
            return ChunkResult(work.ids, {}, (), torch.empty(0), diverged=dict(error.messages))

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
        cohort, reply = self.worked(work)
        metrics: Metrics = {}
        outputs: list[Outputs] = []
        if exchange.measure is not None:
            predicted = predictions(
                self.initialiser.method.in_round(exchange.round), cohort, exchange.measure, self.background.trained
            )
            metrics = score(cohort, exchange.measure, predicted, work.scoring)
            if work.keeps and predicted is not None:
                outputs.append(outputs_of(cohort, exchange.measure, predicted, work.scoring))
        shapes = [self.layouts[client.input_shape].shapes for client in cohort.clients]
        states = self._states(cohort, shapes) if exchange.lasting else {}
        return ChunkResult(work.ids, reply, shapes, cohort.train_loss, metrics, outputs, states, self._courses(cohort))

    def worked(self, work: ChunkTask) -> tuple[Cohort, Reply]:
        """The clients of ``work`` after its program, side by side, and their reply."""
        with use_threads(self.plan.untimed_threads):
            cohort = self.cohort([self.clients[i] for i in work.ids], work.exchange, work.states)
            if work.exchange.lasting and _replacing(self.initialiser.method.extensions):
                cohort.delivered = self._delivered(work)  # apart: programs may train in place what they get
            return cohort, self._call(cohort, work.exchange, self._delivered(work))

    def cohort(self, clients: Sequence[Client], exchange: Exchange, states: Mapping[str, Tree]) -> Cohort:
        """``clients`` of one architecture, side by side, as ``exchange`` finds them."""
        layout, info = self.layouts[clients[0].input_shape], self.background.info
        frozen = "frozen" in layout.places.values()
        own = [self.initialiser.client_model(client) if frozen else {} for client in clients]
        found = [self._state(client, states.get(client.id)) for client in clients]
        model = tree.stack_padded([{**frozen, **state["model"]} for frozen, state in zip(own, found, strict=True)])
        rest = [{name: value for name, value in state.items() if name != "model"} for state in found]
        made = Cohort(
            clients,
            layout,
            model,
            tree.stack_padded(rest),
            settings=self.initialiser.method.in_round(exchange.round),
            plan=self.plan,
            where=ExchangeId(self.initialiser.seed, exchange.round, exchange.index),
            task=info.task,
            num_classes=info.num_classes,
            num_domains=info.num_domains,
            augment=self.background.augment,
        )
        private = next((p for e in self.initialiser.method.extensions if (p := e.private())), None)
        made.private = None if private is None else private.for_cohort(made.num_samples, self.noise, self.counter)
        made.noise, made.counter = self.noise, self.counter
        made.discreet = any(extension.discreet for extension in self.initialiser.method.extensions)
        if exchange.lasting and self.initialiser.watched.intersection(made.ids):
            made.watch = LossCurve()
        return made

    def _courses(self, cohort: Cohort) -> dict[str, list[float]]:
        """What was seen of the clients that are watched."""
        seen = cohort.watch
        rows = [(i, row) for row, i in enumerate(cohort.ids) if i in self.initialiser.watched]
        return {i: seen.losses(row) for i, row in rows} if isinstance(seen, LossCurve) else {}

    def _call(self, cohort: Cohort, exchange: Exchange, payload: dict[str, Any]) -> Reply:
        method = self.initialiser.method.in_round(exchange.round)
        cohort.carried = payload.pop("extensions", {})
        if exchange.extensions != "nothing":
            cohort.extensions = BoundExtensions(method.extensions)
        where, program = self._program(exchange.program, method)
        reply = Reply.of(program(cohort, **payload), where)
        if exchange.extensions == "all":
            reply["extensions"] = cohort.extensions_reply()
        check_rows(reply, where, cohort.ids)
        for extension in _replacing(method.extensions) if exchange.lasting else ():
            reply = extension.outgoing(cohort, reply)
            check_rows(reply, "what extensions made of a reply", cohort.ids)
        return reply

    def _program(self, name: str, method: Method) -> tuple[str, Callable[..., Reply | None]]:
        """What messages call a program of ``method``, and the program itself."""
        if name.startswith(":"):
            return name[1:], partial(BUILTIN_PROGRAMS[name[1:]], method)
        extension, _, own = name.rpartition(".")
        owner: Any = next(t for t in method.extensions if t.name == extension) if extension else method
        return f"{extension or type(owner).__name__}.{own}", getattr(owner, own)

    def _delivered(self, work: ChunkTask) -> dict[str, Any]:
        """The payload with a leading client axis: what is shared is expanded, each client's own stacked."""
        arrived: dict[str, Any] = tree.map_leaves(work.shared, lambda _, t: _broadcast(t, len(work.ids)))
        if work.rows:
            arrived.update(tree.stack_padded([work.rows[i] for i in work.ids]))
        return arrived

    def _state(self, client: Client, state: Tree | None) -> Mapping[str, Any]:
        if state is None:
            return self.initialiser.client_state(client, self.background.info)
        return state.read() if isinstance(state, State) else state

    def _states(self, cohort: Cohort, shapes: Sequence[Mapping[str, torch.Size]]) -> dict[str, Tree]:
        """Each client's own parameters and sets, which share no memory with the cohort."""
        for name in cohort.state:
            if name not in self.initialiser.sets or self.initialiser.sets[name].home != "client":
                raise PerfedError(
                    f"'{name}' is not a declared parameter set at home on the client; declare it in sets()"
                )
        own = {"model": cohort.personal(), **advance_position(cohort.state, cohort.steps_done)}
        return {i: tree.copy_tree(tree.select_row(own, row, shapes[row])) for row, i in enumerate(cohort.ids)}


def layouts_of(shapes: Sequence[Shape], initialiser: Initialiser, plan: Plan) -> dict[Shape, Layout]:
    """Architecture of clients by the shape of their inputs; those that can share a stack have the same label."""
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
    """``tensor`` for each of ``clients`` clients."""
    # A program may train what it received in place. For one client that would be the server's own tensor.
    return tensor.unsqueeze(0).clone() if clients == 1 else tensor.unsqueeze(0).expand(clients, *tensor.shape)


def _replacing(extensions: Sequence[Extension]) -> list[Extension]:
    """Return those that replace replies: only they are asked for ``outgoing``."""
    return [extension for extension in extensions if type(extension).outgoing is not Extension.outgoing]
