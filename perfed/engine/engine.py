"""Engines, which run exchanges: they divide clients into chunks, store their states, and pass replies to the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perfed.data.client import SPLITS, Client
from perfed.data.federation import Federation
from perfed.engine.collector import ReplyCollector
from perfed.engine.evaluate import Metrics, Outputs
from perfed.engine.executor import Background, ChunkResult, ChunkTask, Exchange, LocalExecutor, make_layouts
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import Scoring
from perfed.engine.states import States
from perfed.engine.steps.divergence_check import DivergenceCheck
from perfed.engine.steps.pipeline import make_run_steps, make_score_steps
from perfed.engine.steps.secure_sums import SecureSums
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.method.exchange import Each, Replies
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan
from perfed.tree import Tree

_COHORT_BYTES = 512 << 20
COHORT_CLIENTS = 4096  # a client needs about 20 kB in addition to its tensors; larger cohorts are not faster
# The memory of a client's model during training: parameters, received parameters, gradients and a moment.
_COPIES = 4


class Engine(ABC):
    """Base class of engines, which store the states of clients and run exchanges with them.

    A subclass decides where client programs are executed.

    Args:
        federation: the clients, whose inputs must already have the run's dtype.
        initialiser: the method, model and seed.
        plan: how clients are divided into chunks.

    Attributes:
        steps: the steps of all exchanges in rounds, the one nearest to the network last.
        evaluation_steps: the steps of all evaluations.
        states: the committed states by client id; a client without one starts from its initial values.
        holder: stores committed and pending states, in memory up to ``plan.hold`` bytes and otherwise on disk.
        changed: the clients whose committed state changed since the set was last cleared.
        scoring: the metrics that clients compute; the server may replace it.
        notes: notes for the user that the engine has collected.
    """

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        self.federation = federation
        self.initialiser = initialiser
        self.plan = plan
        self.info = initialiser.info(federation)
        self.background = Background.from_federation(federation, self.info)
        self.clients = {client.id: client for client in federation}
        self.scoring = Scoring(scale=federation.target_scale)
        self.notes: list[str] = []
        self.states: dict[str, Tree] = {}
        self.holder = States(plan.hold, initialiser.device)
        self.changed: set[str] = set()
        divergence_check = DivergenceCheck()
        self.steps = [*make_run_steps(initialiser, self.clients, self.make_secure_sums), divergence_check]
        self.evaluation_steps: list[ExchangeStep] = [divergence_check]
        self._pending: dict[str, Tree] = {}
        self._layouts = make_layouts(self.background.shapes, initialiser, plan)

    @abstractmethod
    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Run the program of a task on its clients, and return the results of one chunk of clients after the other.

        Implementations take the chunks from :meth:`make_chunk_tasks` and return the results in the same order.
        """

    @abstractmethod
    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """Return cohorts of the clients' personalised models, one at a time; they are copies.

        Args:
            ids: the clients.
            payload: the payload of the method's program ``personalise``.
            round_: the number of the round.
        """

    def make_secure_sums(self) -> ExchangeStep:
        """Return the step of secure aggregation."""
        assert self.initialiser.secure is not None
        return SecureSums(self.initialiser.secure.numbers(len(self.clients)))

    def run(self, task: ExchangeTask, steps: Sequence[ExchangeStep]) -> Replies:
        """Run one exchange; new states of clients stay pending until :meth:`commit`.

        Args:
            task: the program, its payload and the clients.
            steps: the steps around the work of the clients, the one nearest to the server first.

        Returns:
            The replies in the sorted order of client ids.
        """
        for step in steps:
            task = step.send(task)
        collector = ReplyCollector(task.ids, task.reduce)
        for result in self.perform(task):
            for step in reversed(steps):
                result = step.receive(result)
            collector.add(result)
            if task.exchange.changes_states:
                self._pending.update({client: self.holder.keep(state) for client, state in result.states.items()})
        replies = collector.stack()
        for step in reversed(steps):
            replies = step.collect(replies)
        return replies

    def evaluate(
        self,
        payload: Mapping[str, Any],
        ids: Sequence[str],
        split: str,
        round_: int,
        outputs: list[Outputs] | None = None,
        program: str = "personalise",
    ) -> Metrics:
        """Score each client's personalised model (``program``, then ``predict``) on ``split``; changes no state.

        The predictions for every sample are appended to ``outputs``, if it is given.
        """
        ids = [i for i in ids if self.clients[i].split(split) is not None]
        metrics, predictions = Metrics(), list[Outputs]()
        steps = make_score_steps(split, metrics, None if outputs is None else predictions)
        self.run(ExchangeTask(Exchange(program, round_, -1), payload, ids), [*steps, *self.evaluation_steps])
        if outputs is not None:
            outputs += predictions
        return metrics

    def commit(self, ids: Sequence[str]) -> None:
        """Make the pending states of ``ids`` their committed ones and drop all others."""
        committed = self._pending.keys() & set(ids)
        self.states.update({client: self._pending[client] for client in sorted(committed)})
        self.changed |= committed
        self._pending.clear()

    def discard(self) -> None:
        """Drop all pending states."""
        self._pending.clear()

    def drain_notes(self) -> list[str]:
        """Return and clear the notes collected since the last call."""
        notes = [*self.notes]
        self.notes.clear()
        return notes

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep resources outside this process, such as workers, for the duration of the ``with`` block."""
        yield

    # Chunks ------------------------------------------------------------------------------------------------

    def make_chunk_tasks(self, task: ExchangeTask) -> Iterator[ChunkTask]:
        """Return a task for each chunk of clients, with the states from which its clients start."""
        shared = {name: value for name, value in task.payload.items() if not isinstance(value, Each)}
        tables = {name: value.rows for name, value in task.payload.items() if isinstance(value, Each)}
        for chunk in self._divide_clients(task.ids, by_id=bool(task.reduce)):
            ids = tuple(client.id for client in chunk)
            rows = {i: {name: table[i] for name, table in tables.items()} for i in ids} if tables else {}
            states = {i: state for i in ids if (state := self._pending.get(i, self.states.get(i))) is not None}
            yield ChunkTask(task.exchange, ids, shared, rows, states, self.scoring, task.keep_outputs)

    def _divide_clients(self, ids: Sequence[str], *, by_id: bool) -> list[list[Client]]:
        """Return chunks of clients with the same architecture, ordered by decreasing data size or by id."""
        groups: dict[str, list[Client]] = {}
        for client_id in sorted(ids):
            client = self.clients[client_id]
            groups.setdefault(self._layouts[client.input_shape].label, []).append(client)
        chunks = []
        for members in groups.values():
            if not by_id:
                members.sort(key=lambda client: (-len(client.train), client.id))
            size = self._choose_chunk_size(members)
            chunks += [members[i : i + size] for i in range(0, len(members), size)]
        return sorted(chunks, key=lambda chunk: chunk[0].id) if by_id else chunks

    def _choose_chunk_size(self, members: Sequence[Client]) -> int:
        """Return how many of the clients are one chunk; some engines override it."""
        size = {"sequential": 1, "stacked": self.plan.chunk}.get(self.plan.engine, 0)
        return size or self._count_fitting_clients(members)

    def _count_fitting_clients(self, members: Sequence[Client]) -> int:
        """Return how many clients fit into one cohort, by the memory of their samples and models; from 1 to 4096."""
        model = _COPIES * self._layouts[members[0].input_shape].size
        splits = [s for c in members for name in SPLITS if (s := c.split(name)) is not None]
        data = sum(s.bytes for s in splits) // len(members)
        return max(1, min(COHORT_CLIENTS, _COHORT_BYTES // max(1, model + data)))


class InProcessEngine(Engine):
    """An engine that runs all clients in this process, one chunk of stacked clients after the other."""

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        super().__init__(federation, initialiser, plan)
        self.executor = LocalExecutor(federation, self.background, initialiser, plan)

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Run the chunks one after the other and return their results."""
        return map(self.executor.attempt, self.make_chunk_tasks(task))

    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """Return cohorts of the clients' personalised models, on copies, one at a time."""
        for chunk in self.make_chunk_tasks(ExchangeTask(Exchange("personalise", round_, -1), payload, ids)):
            yield self.executor.run_program(chunk)[0]
