"""The clients of one transaction, to which a method's server programs send their exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from perfed import rng
from perfed.engine.engine import Engine
from perfed.engine.executor import Exchange
from perfed.engine.record import RoundRecord
from perfed.engine.steps.pipeline import make_round_steps
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.method.exchange import Fold, Replies, Reply, ServerState
from perfed.method.method import Method
from perfed.tree import Tree

FIRST_EXCHANGE = {"prepare": 0, "round": 0, "finish": 1000, "observe": 2000, "settle": 3000}
"""The number of the first exchange of each kind of transaction; they differ, so that no random keys are shared."""


class RoundClients:
    """The clients of one transaction.

    Args:
        engine: runs the exchanges.
        state: the server's parameter sets.
        ids: the clients.
        round_: the number of the round.
        kind: the kind of the transaction, a key of :data:`FIRST_EXCHANGE`.
        split: the split on which clients score their models right after each program; ``None`` for no scores.
        invited: the number of clients that receive the first exchange; default: all of ``ids``.
        keep_outputs: whether the predictions of the scored models are kept in the record.

    Attributes:
        method: the method with the numbers of the round.
        ids: the sorted ids of the clients that receive the next exchange: those whose earlier replies were used.
        steps: the steps of each exchange, the one nearest to the server first.
        record: the record of the transaction so far.
        extension_replies: the replies of the exchanges in which extensions added to them.
    """

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        ids: Sequence[str],
        round_: int,
        kind: str,
        *,
        split: str | None = None,
        invited: int | None = None,
        keep_outputs: bool = False,
    ) -> None:
        self._engine = engine
        self._first_exchange = FIRST_EXCHANGE[kind]
        self._losses: list[torch.Tensor] = []
        self.method = engine.initialiser.method.in_round(round_)
        self.ids = sorted(ids)
        self.round = round_
        self.record = RoundRecord(self.ids, float("nan"))
        self.extension_replies: list[Replies] = []
        round_steps = make_round_steps(
            self.method,
            state,
            self.record,
            self.extension_replies,
            engine.initialiser,
            invited=len(self.ids) if invited is None else invited,
            split=split,
            keep_outputs=keep_outputs,
        )
        self.steps: list[ExchangeStep] = [*round_steps, *engine.steps]

    def key(self, purpose: str) -> torch.Tensor:
        """Return the server's random key in this round for ``purpose``."""
        return rng.key(self._engine.initialiser.seed, "server", purpose, self.round)

    def mean(self, stacked: Tree, weights: torch.Tensor | None = None, *, current: Tree) -> dict[str, Any]:
        """Return the mean over clients or its replacement (:meth:`perfed.method.exchange.Clients.mean`)."""
        return self._engine.initialiser.aggregator.aggregate(stacked, weights, current)

    def show(self, name: str, **arrays: Any) -> None:
        """Store ``arrays`` in the record of the round, under ``name``."""
        self.record.arrays[name] = arrays

    def count(self, name: str, ids: Sequence[str]) -> None:
        """Record that the event ``name`` happened at the clients ``ids``."""
        self.record.count(name, ids)

    @property
    def info(self) -> FederationInfo:
        """The facts about the federation that the server knows."""
        return self._engine.info

    def run(
        self, program: Callable[..., Reply | None], *, reduce: Mapping[str, Fold] | None = None, **payload: Any
    ) -> Replies:
        """Run one exchange without extensions (:meth:`Clients.run <perfed.method.exchange.Clients.run>`)."""
        return self.exchange(_find_program_name(self.method, program), payload, reduce or {})

    def train(
        self,
        program: Callable[..., Reply | None],
        *,
        closing: bool = True,
        reduce: Mapping[str, Fold] | None = None,
        **payload: Any,
    ) -> Replies:
        """Run one exchange in which extensions take part (:meth:`perfed.method.exchange.Clients.train`)."""
        name = _find_program_name(self.method, program)
        return self.exchange(name, payload, reduce or {}, extensions="all" if closing else "penalties")

    def exchange(
        self,
        program: str,
        payload: Mapping[str, Any],
        reduce: Mapping[str, Fold] = MappingProxyType({}),
        *,
        extensions: Literal["nothing", "penalties", "all"] = "nothing",
    ) -> Replies:
        """Run one exchange.

        See :class:`perfed.engine.steps.step.ExchangeTask` and :class:`~perfed.engine.executor.Exchange` for the
        arguments.
        """
        role = extensions if self.method.extensions else "nothing"
        exchange = Exchange(program, self.round, self._first_exchange + self.record.exchanges, extensions=role)
        replies = self._engine.run(ExchangeTask(exchange, payload, self.ids, reduce), self.steps)
        replies.aggregator = self._engine.initialiser.aggregator
        self.ids = self.record.participants = replies.ids
        self.record.exchanges += 1
        self._losses.append(replies.train_loss)
        return replies

    def finish_record(self) -> RoundRecord:
        """Return the record of the transaction, with the mean loss of its exchanges."""
        losses = [float(loss[torch.isfinite(loss)].mean()) for loss in self._losses if torch.isfinite(loss).any()]
        if losses:
            self.record.train_loss = sum(losses) / len(losses)
        return self.record


def _find_program_name(method: Method, program: Callable[..., Any]) -> str:
    """Return the name of a client program, with the name of its extension in front if it belongs to one.

    Raises:
        PerfedError: it belongs neither to the method nor to one of its extensions.
    """
    owner, name = getattr(program, "__self__", None), getattr(program, "__name__", "")
    if owner is method:
        return name
    for extension in method.extensions:
        if owner is extension:
            return f"{extension.name}.{name}"
    raise PerfedError(f"a client program must be a method of the method or of one of its extensions, not {program!r}")
