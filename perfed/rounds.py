"""The server's side of a run: rounds as transactions of exchanges with the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from perfed import rng
from perfed.engine.inprocess import Exchange, InProcessEngine, Metrics
from perfed.errors import PerfedError
from perfed.evaluate import Outputs
from perfed.federation import Federation
from perfed.method import Each, Replies, Reply, ServerState
from perfed.participation import Participation
from perfed.plan import Plan
from perfed.state import Setup


@dataclass
class RoundRecord:
    """What a round left behind.

    Attributes:
        participants: sorted ids of the clients used in every exchange.
        train_loss: mean over participants of their mean training loss; NaN where nothing was trained.
        bytes_up, bytes_down: of all replies and payloads.
        after: metrics right after local training, by client id; empty if they were not asked for.
        arrays: what the method showed of this round, by name; see :meth:`perfed.method.Clients.show`.
        counts: what the method counted in this round, by name.
    """

    participants: list[str]
    train_loss: float
    bytes_up: int
    bytes_down: int
    after: Metrics
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class _Clients:
    """The clients of one transaction."""

    def __init__(self, engine: InProcessEngine, ids: list[str], round_: int, stage: str, measure: str | None) -> None:
        self._engine = engine
        self._stage = stage
        self._measure = measure
        self._exchanges = 0
        self.ids = sorted(ids)
        self.round = round_
        self.bytes_up = 0
        self.bytes_down = 0
        self.after: Metrics = {}
        self.losses: list[torch.Tensor] = []
        self.arrays: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, int] = {}

    def key(self, purpose: str) -> torch.Tensor:
        """See :class:`perfed.method.Clients`."""
        return rng.key(self._engine.setup.seed, "server", purpose, self.round)

    def show(self, name: str, **arrays: Any) -> None:
        """See :class:`perfed.method.Clients`."""
        self.arrays[name] = arrays

    def count(self, name: str, number: int) -> None:
        """See :class:`perfed.method.Clients`."""
        self.counts[name] = self.counts.get(name, 0) + number

    def run(self, program: Callable[..., Reply | None], **payload: Any) -> Replies:
        """One exchange; see :class:`perfed.method.Clients`."""
        # Preparation, round and finish of the same number must not share random keys.
        index = self._exchanges + {"prepare": 0, "round": 0, "finish": 1000}[self._stage]
        exchange = Exchange(_program_name(self._engine, program), self.round, index, self._measure)
        replies, metrics = self._engine.run(exchange, payload, self.ids)
        self._exchanges += 1
        self.after = metrics
        self.losses.append(replies.train_loss)
        self.bytes_up += sum(_size(value) for value in replies.content.values())
        self.bytes_down += sum(_sent(value, len(self.ids)) for value in payload.values())
        return replies


def _program_name(engine: InProcessEngine, program: Callable[..., Any]) -> str:
    owner, name = getattr(program, "__self__", None), getattr(program, "__name__", "")
    if owner is engine.setup.method:
        return name
    for term in engine.setup.method.all_terms:
        if owner is term:
            return f"{term.name}.{name}"
    raise PerfedError(f"a client program must be a method of the method or of one of its terms, not {program!r}")


def _size(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list):
        return sum(_size(item) for item in value)
    return sum(_size(item) for item in value.values())


def _sent(value: Any, clients: int) -> int:
    if isinstance(value, Each):
        return sum(_size(row) for row in value.rows.values())
    return _size(value) * clients


class Server:
    """A run's server: its state, the engine, and who takes part.

    Args:
        federation: the clients.
        setup: method, model, seed and dtype.
        plan: how work is cut up.
        participation: who takes part in a round.
        rounds: number of rounds of the whole run.
    """

    def __init__(
        self,
        federation: Federation,
        setup: Setup,
        plan: Plan,
        participation: Participation,
        rounds: int,
        engine: type[InProcessEngine] = InProcessEngine,
    ) -> None:
        self.setup = setup
        self.participation = participation
        self.rounds = rounds
        self.engine = engine(federation.to(dtype=setup.dtype, device=setup.device), setup, plan)
        self.state = setup.server_state(federation)

    def prepare(self) -> RoundRecord:
        """What the method does before the first round, with all clients."""
        clients = _Clients(self.engine, self.engine.federation.ids, 0, "prepare", None)
        return self._transaction(clients, self.setup.method.prepare)

    def round(self, number: int, *, measure: str | None = None) -> RoundRecord:
        """Round ``number`` (from 1), then the method's work with all clients after it.

        Args:
            number: of the round.
            measure: split on which participants score their models right after local training.
        """
        ids = self.participation.choose(self.engine.federation.ids, self.setup.seed, number, self.rounds)
        clients = _Clients(self.engine, ids, number, "round", measure)
        record = self._transaction(clients, self.setup.method.round)
        everyone = _Clients(self.engine, self.engine.federation.ids, number, "finish", None)
        extra = self._transaction(everyone, self.setup.method.finish)
        record.bytes_up += extra.bytes_up
        record.bytes_down += extra.bytes_down
        return record

    def _transaction(self, clients: _Clients, program: Callable[..., None]) -> RoundRecord:
        before = self.state.tree()
        try:
            program(self.state, clients)
        except BaseException:
            self.state = ServerState(before)
            self.engine.discard()
            raise
        self.engine.commit(clients.ids)
        losses = [float(loss[torch.isfinite(loss)].mean()) for loss in clients.losses if torch.isfinite(loss).any()]
        mean = sum(losses) / len(losses) if losses else float("nan")
        return RoundRecord(
            clients.ids,
            mean,
            clients.bytes_up,
            clients.bytes_down,
            clients.after,
            clients.arrays,
            clients.counts,
        )

    def evaluate(
        self, split: str, ids: list[str] | None = None, round_: int = 0, outputs: list[Outputs] | None = None
    ) -> Metrics:
        """Metrics of each client's own model, made by the method's ``personalise``, on ``split``.

        What the models say of every sample is appended to ``outputs``, if given.
        """
        payload = self.setup.method.download(self.state)
        chosen = self.engine.federation.ids if ids is None else ids
        return self.engine.evaluate(payload, chosen, split, round_, outputs)
