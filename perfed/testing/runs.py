"""Runs of a fraction of a second, and the difference between two of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from perfed.aggregation.settings import Aggregation
from perfed.codec import decode, encode
from perfed.data.federation import Federation
from perfed.engine.engine import Engine, InProcessEngine
from perfed.engine.executor import ChunkResult, ChunkTask, LocalExecutor
from perfed.engine.initial import Initialiser
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.engine.server import Server
from perfed.engine.steps.step import ExchangeTask
from perfed.errors import PerfedError
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.method.registry import Entry
from perfed.methods.fedbn import FedBN
from perfed.model.chain import Model
from perfed.model.columns import split_first_layer
from perfed.model.presets import hidden_layer, linear, mlp
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.training.plan import Plan
from perfed.tree import iterate_leaves, split_path


class CodecEngine(InProcessEngine):
    """An engine that converts every payload, reply and client state to bytes and back, as a network would."""

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Yield the results of the chunks, one after the other."""
        for work in self.make_chunk_tasks(task):
            rows, states = ({i: decode(encode(v)) for i, v in trees.items()} for trees in (work.rows, work.states))
            result = self.executor.attempt(replace(work, shared=decode(encode(work.shared)), rows=rows, states=states))
            received = replace(result, states={i: decode(encode(s)) for i, s in result.states.items()})
            yield received.map_replies(lambda client, reply: decode(encode(reply)))


class ForgetfulEngine(InProcessEngine):
    """An engine that gives every chunk of clients the method as it was before the run, as a restarted site would."""

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        super().__init__(federation, initialiser, plan)
        self._before = copy.deepcopy(initialiser.method)

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Yield the results of the chunks, one after the other."""
        for work in self.make_chunk_tasks(task):
            initialiser = copy.copy(self.initialiser)
            initialiser.method = copy.deepcopy(self._before)
            yield LocalExecutor(self.federation, self.background, initialiser, self.plan).attempt(work)


class RecordingEngine(InProcessEngine):
    """An engine that records all tasks of chunks of clients and their results."""

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        super().__init__(federation, initialiser, plan)
        self.record: list[tuple[ChunkTask, ChunkResult]] = []

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Yield the results of the chunks, one after the other."""
        for work in self.make_chunk_tasks(task):
            self.record.append((work, self.executor.attempt(work)))
            yield self.record[-1][1]


EngineName = Literal["stacked", "sequential"]
# name -> arguments of ``build_server``
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "stacked": {"engine": "stacked"},
    "codec": {"engine": "stacked", "chunk": 2, "runner": CodecEngine},
}


def build_network(num_classes: int = 3, *, dropout: float = 0.0, batch_norm: bool = False) -> Model:
    """Return a model with an embedding to 3 numbers, a body to 5, and a linear head."""
    embedding = mlp((6,), 3, dropout=dropout, batch_norm=batch_norm)
    return Model(embedding=embedding, body=hidden_layer(5), head=linear(num_classes))


def build_network_for(method: Method, num_classes: int = 3, *, dropout: float = 0.0) -> Model:
    """Return :func:`build_network`, with batch-norm for the method FedBN."""
    return build_network(num_classes, dropout=dropout, batch_norm=isinstance(method, FedBN))


def make_quick(kind: type[Method] | type[Extension], **settings: Any) -> Any:
    """Return a method or extension with its defaults, but at most two epochs, mini-batches of four, and six trees."""
    short: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        is_number = isinstance(field.default, int) and not isinstance(field.default, bool)
        if name.endswith("epochs") and is_number:
            short[name] = min(2, field.default)
    if "pretrain_epochs" in kind.model_fields:
        short |= {"pretrain_epochs": 1, "pretrain_batch_size": 4}
    if "trees" in kind.model_fields:
        short |= {"trees": 6, "leaves": 8, "depth": 5} | ({"stages": 3} if "stages" in kind.model_fields else {})
    if issubclass(kind, Method):
        short |= {"batch_size": 4, "lr": 1e-2}
    return kind(**{**short, **settings})


def make_quick_entry(registered: Entry, *more_extensions: Extension, **settings: Any) -> Method:
    """Return :func:`make_quick` of a registered method, with the defaults and extensions of its entry."""
    defaults, extensions = dict(registered.defaults or {}), []
    for kind in registered.extensions:
        values = {key: defaults.pop(key) for key in list(defaults) if key in kind.model_fields}
        extensions.append(make_quick(kind, **values))
    method: Method = make_quick(
        registered.method, **{**defaults, "extensions": (*extensions, *more_extensions), **settings}
    )
    return method


def build_server(
    method: Method,
    federation: Federation,
    *,
    model: Model | None = None,
    engine: EngineName = "stacked",
    chunk: int = 0,
    plan: Plan | None = None,
    runner: type[Engine] = InProcessEngine,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    rate: float = 1.0,
    rounds: int = 10,
    seed: int = 0,
    participation: Participation | None = None,
    clock: Clock | None = None,
    secure: SecureAggregation | None = None,
    aggregation: Aggregation | None = None,
) -> Server:
    """Return a server before its preparation; ``participation`` replaces ``rate``."""
    model = split_first_layer(model or build_network_for(method, federation.num_classes or 1), federation.named_inputs)
    initialiser = Initialiser(method, model, seed, dtype, device, secure=secure, aggregation=aggregation)
    plan = plan or Plan(engine, chunk, remember=False)
    policy = participation or Participation(rate=rate)
    return Server(federation, initialiser, plan, policy, rounds, engine=runner, clock=clock)


def run_rounds(server: Server, rounds: int) -> Server:
    """Prepare the server, run ``rounds`` rounds, and return the server."""
    server.prepare()
    for number in range(1, rounds + 1):
        server.round(number)
    return server


def collect_tensors(server: Server) -> dict[tuple[str, ...], Tensor]:
    """Return all state of a run: the server's sets and every client's committed state."""
    tensors = {("server", *split_path(path)): t for path, t in iterate_leaves(server.state.tree())}
    for client, state in server.engine.states.items():
        tensors |= {(client, *split_path(path)): t for path, t in iterate_leaves(dict(state))}
    return tensors


def measure_difference(first_run: Server, second_run: Server) -> float:
    """Return the largest relative difference ``|a - b| / |b|`` over all tensors of two runs; 0 only for equal bits.

    Raises:
        PerfedError: if their tensors have other names, shapes or types, or values that are not finite.
    """
    a, b = collect_tensors(first_run), collect_tensors(second_run)
    if a.keys() != b.keys():
        raise PerfedError(f"two runs hold different tensors: {sorted(map('/'.join, a.keys() ^ b.keys()))}")
    worst = 0.0
    for name, x in a.items():
        y = b[name].to(x.device)
        if x.shape != y.shape or x.dtype != y.dtype:
            raise PerfedError(f"{'/'.join(name)} is {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}")
        if not torch.isfinite(x.double()).all():
            raise PerfedError(f"{'/'.join(name)} holds values that are not finite")
        if x.numel():
            gap, size = (x.double() - y.double()).norm(), y.double().norm()
            worst = max(worst, float(gap / size.clamp_min(1e-30)))
    return worst
