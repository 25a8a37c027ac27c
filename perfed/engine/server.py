"""The server's side of a run: rounds as transactions of exchanges with the clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.engine.clients import RoundClients
from perfed.engine.engine import Engine, InProcessEngine
from perfed.engine.evaluate import Metrics, Outputs
from perfed.engine.gap import linear_head
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import Scoring
from perfed.engine.record import RoundRecord, Snapshot
from perfed.errors import PerfedError
from perfed.maths.aggregate import weighted_mean
from perfed.method.exchange import ServerState
from perfed.method.extension import end_round, payload_of
from perfed.method.method import Method
from perfed.model.chain import Model
from perfed.model.placement import PER_DOMAIN
from perfed.participation.clock import Clock, Population
from perfed.participation.selection import Choice, Selection
from perfed.participation.settings import Participation
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan


class Server:
    """A run's server: its state, the engine, and who takes part.

    Args:
        federation: the clients.
        initialiser: method, model, seed and dtype.
        plan: how work is cut up.
        participation, clock: who takes part in a round, and how long the clients take.
        rounds: number of rounds of the whole run.
        engine: makes what runs client programs; default: in this process.

    ``working``, ``drain_notes`` and ``hold`` are the engine's own, ``hold`` its
    :meth:`~perfed.engine.states.States.keep`.

    Raises:
        PerfedError: settings of participation or clock that do not fit the clients.
    """

    def __init__(
        self,
        federation: Federation,
        initialiser: Initialiser,
        plan: Plan,
        participation: Participation,
        rounds: int,
        engine: Callable[[Federation, Initialiser, Plan], Engine] = InProcessEngine,
        clock: Clock | None = None,
    ) -> None:
        federation = initialiser.seen(federation)
        self.initialiser, self._finishes = initialiser, initialiser.method.finishes
        self.clock, self.participation = clock or Clock(), participation
        who = Population.of(
            federation, initialiser.method.batch_size, initialiser.method.epochs_in, initialiser.method.epoch_steps
        )
        self.selection = Selection(participation, self.clock, who, initialiser.seed, rounds)
        self.engine = engine(federation.to(dtype=initialiser.dtype, device=initialiser.device), initialiser, plan)
        self.working, self.hold = self.engine.working, self.engine.holder.keep
        self.drain_notes = self.engine.drain_notes
        self.state = initialiser.server_state(federation)
        self.selection.policy.check_method(initialiser.method.moves_shared and bool(self.state.shared))

    @property
    def method(self) -> Method:
        """The method whose rounds these are."""
        return self.initialiser.method

    @property
    def model(self) -> Model:
        """The stages that the method works on."""
        return self.initialiser.model

    @property
    def plan(self) -> Plan:
        """How work is cut up, with the choices made so far."""
        return self.engine.plan

    @property
    def seed(self) -> int:
        """Seed of everything random in the run."""
        return self.initialiser.seed

    @property
    def device(self) -> torch.device:
        """Where parameters and data are."""
        return self.initialiser.device

    @property
    def federation(self) -> Federation:
        """The clients with their data as the method sees them."""
        return self.engine.federation

    @property
    def clients(self) -> Mapping[str, Client]:
        """Those of :attr:`federation` by id."""
        return self.engine.clients

    @property
    def sets(self) -> dict[str, Any]:
        """The server's parameter sets by name."""
        return self.state.tree()

    @property
    def per_domain(self) -> bool:
        """Whether there are parameters of each domain."""
        return PER_DOMAIN in self.initialiser.places(self.federation.clients[0].input_shape).values()

    @property
    def linear_head(self) -> str | None:
        """Name of the weight of the linear head with which clients predict; ``None`` where they predict otherwise."""
        return linear_head(self.method, self.initialiser.chain(self.federation.clients[0].input_shape))

    @property
    def speeds(self) -> str:
        """The clock's model of the clients' speeds; ``none`` where there is none."""
        return self.clock.speeds

    def measure(self, scoring: Scoring) -> None:
        """From here on evaluations measure what ``scoring`` says."""
        self.engine.scoring = scoring

    def snapshot(self) -> Snapshot:
        """The state of now, for :meth:`restore`; by reference, for rounds put new values in the place of old ones."""
        engine, selection = self.engine, self.selection
        changed, policy = frozenset(engine.changed), copy.deepcopy(selection.policy.state)
        return Snapshot(self.sets, dict(engine.states), changed, policy, selection.timer.fingerprint)

    def restore(self, before: Snapshot) -> None:
        """Go back to ``before``: what came after it never happened.

        Raises:
            PerfedError: it followed a trace with other times or dropouts; nothing is changed then.
        """
        if before.trace != self.selection.timer.fingerprint:
            raise PerfedError(f"{self.clock.trace.file}: this run followed a trace with other times")
        self.selection.policy.check_state(before.policy)
        self.state = ServerState(before.server)
        self.engine.discard()
        self.engine.states = dict(before.clients)
        self.engine.changed = set(before.changed)
        self._recall(before.policy)

    def _recall(self, policy: Mapping[str, Any]) -> None:
        """Give the policy back what it remembered."""
        state = self.selection.policy.state
        state.clear()
        state.update(copy.deepcopy(dict(policy)))

    def put_states_in(self, folder: Path | None) -> None:
        """From here on the folder of states that memory need not hold is made in ``folder``, if it is not there yet."""
        self.engine.holder.place = folder

    def forget_changes(self) -> None:
        """From here on clients count as changed anew: the states of now are kept elsewhere."""
        self.engine.changed.clear()

    def prepare(self) -> RoundRecord:
        """What the method does before the first round, with all clients."""
        clients = self._make_clients([*self.engine.clients], 0, "prepare")
        return self._transaction(clients, self._prepare)

    def round(self, number: int, *, measure: str | None = None, keep_outputs: bool = False) -> RoundRecord:
        """Round ``number`` (from 1), then the method's work with all clients after it.

        Args:
            number: of the round.
            measure: split on which participants score their models right after local training.
            keep_outputs: whether the predictions of these models for every sample are kept in the record.
        """
        policy = copy.deepcopy(self.selection.policy.state)
        choice = self.selection.choose(number)
        if not choice.ids:  # no reply in time
            return RoundRecord([], float("nan"), seconds=choice.seconds, replied=choice.replied)
        clients = self._make_clients(
            choice.ids, number, "round", split=measure, invited=len(choice.replied), keep_outputs=keep_outputs
        )
        try:
            record = self._transaction(clients, self._round)
        except BaseException:
            self._recall(policy)
            raise
        return self._finish_round(record, number, choice)

    def _finish_round(self, record: RoundRecord, number: int, choice: Choice) -> RoundRecord:
        """Inform the policy, do the method's work with all clients after the round, and add up the time."""
        self._observe(record, number)
        record.seconds = choice.seconds + self.clock.communication * max(0, record.exchanges - 1)
        if self._finishes:
            everyone = self._make_clients([*self.engine.clients], number, "finish")
            extra = self._transaction(everyone, self._finish)
            record.bytes_up += extra.bytes_up
            record.bytes_down += extra.bytes_down
            record.seconds += self.selection.waiting_for_all(number) if extra.exchanges else 0.0
            record.exchanges += min(1, extra.exchanges)  # those with everybody are one wait
        record.replied = choice.replied
        return record

    def _observe(self, record: RoundRecord, number: int) -> None:
        """Let the policy take note of the finished round, with the gradient if it measures that."""
        policy, gradient = self.selection.policy, None
        if policy.measures_gradient(policy.settings):
            clients = self._make_clients(record.participants, number, "observe")
            reply = clients.exchange(":gradient", {"shared": self.state.shared})
            self.engine.discard()
            mean = weighted_mean(reply.gradient, reply.num_samples)
            gradient = sum(float(g.double().square().sum()) for g in mean.values())
            record.bytes_up += clients.record.bytes_up
            record.bytes_down += clients.record.bytes_down
            record.exchanges += 1
        num_samples = sum(len(self.engine.clients[client].train) for client in record.participants)
        policy.observe(record.train_loss, gradient, num_samples)

    def settle(self, ids: Sequence[str], number: int) -> int:
        """Let clients that were never used fit what is their own, where the policy says so.

        Args:
            ids: the clients that were never used.
            number: of the last round.

        Returns:
            Bytes sent to them.
        """
        if not ids or not self.participation.fits_unused:
            return 0
        clients = self._make_clients(ids, number, "settle")
        return self._transaction(clients, self._settle).bytes_down

    def _settle(self, server: ServerState, clients: RoundClients) -> None:
        clients.exchange(":settle", {"shared": server.shared}, extensions="penalties")

    def _prepare(self, server: ServerState, clients: RoundClients) -> None:
        method = clients.method
        method.check(server, clients.info)
        for extension in method.extensions:
            extension.prepare(server, clients)
        method.prepare(server, clients)

    def _round(self, server: ServerState, clients: RoundClients) -> None:
        method, before = clients.method, server.tree()
        method.round(server, clients)
        end_round(method.extensions, server, clients.extension_replies, before)

    def _finish(self, server: ServerState, clients: RoundClients) -> None:
        method = clients.method
        method.finish(server, clients)
        for extension in method.extensions:
            extension.finish(server, clients)

    def _transaction(self, clients: RoundClients, program: Callable[..., None]) -> RoundRecord:
        before = self.state.tree()
        try:
            program(self.state, clients)
        except BaseException:
            self.state = ServerState(before)
            self.engine.discard()
            raise
        self.engine.commit(clients.ids if clients.record.exchanges else ())  # else nothing is pending
        return clients.finish_record()

    def _make_clients(self, ids: Sequence[str], number: int, kind: str, **options: Any) -> RoundClients:
        return RoundClients(self.engine, self.state, ids, number, kind, **options)

    def own_models(self, ids: Sequence[str], round_: int) -> Iterator[Cohort]:
        """Cohorts of ``ids`` with the clients' own models, as evaluation after ``round_`` uses them; on copies."""
        return self.engine.cohorts(ids, self.method.download(self.state), round_)

    def evaluate(
        self,
        split: str,
        ids: Sequence[str] | None = None,
        round_: int = 0,
        outputs: list[Outputs] | None = None,
        never_used: Collection[str] = (),
    ) -> Metrics:
        """Metrics of each client's own model, made by the method's ``personalise``, on ``split``.

        What the models say of every sample is appended to ``outputs``, if given. Where the policy lets clients that
        were ``never_used`` fit what is their own (:meth:`settle`), they do so before, on a copy.
        """
        method, chosen = self.initialiser.method, [*self.engine.clients] if ids is None else ids
        unused = set(never_used) if self.participation.fits_unused else set()
        fitted, rest = [i for i in chosen if i in unused], [i for i in chosen if i not in unused]
        payload = method.download(self.state)
        metrics = self.engine.evaluate(payload, rest, split, round_, outputs)
        if fitted:
            payload |= {
                "unused": {"shared": self.state.shared, "extensions": payload_of(method.extensions, self.state)}
            }
            metrics |= self.engine.evaluate(payload, fitted, split, round_, outputs, program=":personalise_unused")
        return metrics
