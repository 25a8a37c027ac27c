"""The server of a run, which executes rounds as transactions of exchanges with the clients."""

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
from perfed.method.extension import end_round, extension_payloads
from perfed.method.method import Method
from perfed.model.chain import Model
from perfed.model.placement import PER_DOMAIN
from perfed.participation.clock import Clock, Population
from perfed.participation.selection import Choice, Selection
from perfed.participation.settings import Participation
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan


class Server:
    """The server of a run: its parameter sets, its engine and its participation policy.

    Args:
        federation: the clients.
        initialiser: the method, model, seed and data type.
        plan: how clients are divided into chunks.
        participation, clock: the settings of which clients take part in a round, and of the time that they need.
        rounds: the number of rounds of the run.
        engine: creates the engine that runs client programs; default: in this process.

    ``working`` and ``drain_notes`` are methods of the engine, and ``hold`` is
    :meth:`~perfed.engine.states.States.keep` of its states.

    Raises:
        PerfedError: the settings of participation or clock do not fit the clients.
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
        federation = initialiser.transform_data(federation)
        self.initialiser, self._finishes = initialiser, initialiser.method.finishes
        self.clock, self.participation = clock or Clock(), participation
        population = Population.from_federation(
            federation, initialiser.method.batch_size, initialiser.method.epochs_in, initialiser.method.epoch_steps
        )
        self.selection = Selection(participation, self.clock, population, initialiser.seed, rounds)
        self.engine = engine(federation.to(dtype=initialiser.dtype, device=initialiser.device), initialiser, plan)
        self.working, self.hold = self.engine.working, self.engine.holder.keep
        self.drain_notes = self.engine.drain_notes
        self.state = initialiser.server_state(federation)
        self.selection.policy.check_method(initialiser.method.moves_shared and bool(self.state.shared))

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.initialiser.method

    @property
    def model(self) -> Model:
        """The stages that the method trains."""
        return self.initialiser.model

    @property
    def plan(self) -> Plan:
        """The plan that divides clients into chunks, with the choices so far."""
        return self.engine.plan

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.initialiser.seed

    @property
    def device(self) -> torch.device:
        """The device of parameters and data."""
        return self.initialiser.device

    @property
    def federation(self) -> Federation:
        """The clients with their data as the method sees them."""
        return self.engine.federation

    @property
    def clients(self) -> Mapping[str, Client]:
        """The clients of :attr:`federation` by id."""
        return self.engine.clients

    @property
    def sets(self) -> dict[str, Any]:
        """The server's parameter sets by name."""
        return self.state.tree()

    @property
    def per_domain(self) -> bool:
        """Whether the model has per-domain parameters."""
        return PER_DOMAIN in self.initialiser.places(self.federation.clients[0].input_shape).values()

    @property
    def linear_head(self) -> str | None:
        """The name of the weight of the linear head with which clients predict; ``None`` if they predict otherwise."""
        return linear_head(self.method, self.initialiser.chain(self.federation.clients[0].input_shape))

    @property
    def speeds(self) -> str:
        """The clock's model of the clients' speeds; ``none`` if it has no such model."""
        return self.clock.speeds

    def measure(self, scoring: Scoring) -> None:
        """Set the metrics of later evaluations."""
        self.engine.scoring = scoring

    def snapshot(self) -> Snapshot:
        """Return the current state for :meth:`restore`, by reference: rounds replace values and do not change them."""
        engine, selection = self.engine, self.selection
        changed, policy = frozenset(engine.changed), copy.deepcopy(selection.policy.state)
        return Snapshot(self.sets, dict(engine.states), changed, policy, selection.timer.fingerprint)

    def restore(self, before: Snapshot) -> None:
        """Restore the state ``before`` and discard all later changes.

        Raises:
            PerfedError: the snapshot belongs to a run with another trace of times or dropouts. Nothing is changed in
                this case.
        """
        if before.trace != self.selection.timer.fingerprint:
            raise PerfedError(f"{self.clock.trace.file}: this run followed a trace with other times")
        self.selection.policy.check_state(before.policy)
        self.state = ServerState(before.server)
        self.engine.discard()
        self.engine.states = dict(before.clients)
        self.engine.changed = set(before.changed)
        self._restore_policy(before.policy)

    def _restore_policy(self, policy: Mapping[str, Any]) -> None:
        """Restore the state of the policy."""
        state = self.selection.policy.state
        state.clear()
        state.update(copy.deepcopy(dict(policy)))

    def put_states_in(self, folder: Path | None) -> None:
        """Set the folder in which states that do not fit into memory are stored, unless one is in use already."""
        self.engine.holder.place = folder

    def forget_changes(self) -> None:
        """Mark all client states as saved."""
        self.engine.changed.clear()

    def prepare(self) -> RoundRecord:
        """Run the method's preparation with all clients, before the first round."""
        clients = self._make_clients([*self.engine.clients], 0, "prepare")
        return self._run_transaction(clients, self._prepare)

    def round(self, number: int, *, measure: str | None = None, keep_outputs: bool = False) -> RoundRecord:
        """Run round ``number`` (from 1), followed by the method's exchanges with all clients after a round.

        Args:
            number: the number of the round.
            measure: the split on which participants score their models right after local training.
            keep_outputs: whether the predictions of these models for every sample are kept in the record.
        """
        policy = copy.deepcopy(self.selection.policy.state)
        choice = self.selection.choose(number)
        if not choice.ids:  # no client replied in time
            return RoundRecord([], float("nan"), seconds=choice.seconds, replied=choice.replied)
        clients = self._make_clients(
            choice.ids, number, "round", split=measure, invited=len(choice.replied), keep_outputs=keep_outputs
        )
        try:
            record = self._run_transaction(clients, self._round)
        except BaseException:
            self._restore_policy(policy)
            raise
        return self._finish_round(record, number, choice)

    def _finish_round(self, record: RoundRecord, number: int, choice: Choice) -> RoundRecord:
        """Inform the policy, run the method's exchanges with all clients after a round, and add up the time."""
        self._observe(record, number)
        record.seconds = choice.seconds + self.clock.communication * max(0, record.exchanges - 1)
        if self._finishes:
            everyone = self._make_clients([*self.engine.clients], number, "finish")
            extra = self._run_transaction(everyone, self._finish)
            record.bytes_up += extra.bytes_up
            record.bytes_down += extra.bytes_down
            record.seconds += self.selection.waiting_for_all(number) if extra.exchanges else 0.0
            record.exchanges += min(1, extra.exchanges)  # the exchanges with all clients count as one
        record.replied = choice.replied
        return record

    def _observe(self, record: RoundRecord, number: int) -> None:
        """Inform the policy about the finished round, with the gradient if the policy measures it."""
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
        """Let clients that were never used fit their personal parameters, if the policy requires it.

        Args:
            ids: the clients that were never used.
            number: the number of the last round.

        Returns:
            The number of bytes sent to them.
        """
        if not ids or not self.participation.fits_unused:
            return 0
        clients = self._make_clients(ids, number, "settle")
        return self._run_transaction(clients, self._settle).bytes_down

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

    def _run_transaction(self, clients: RoundClients, program: Callable[..., None]) -> RoundRecord:
        """Run a server program and commit its changes; if it fails, all changes are discarded."""
        before = self.state.tree()
        try:
            program(self.state, clients)
        except BaseException:
            self.state = ServerState(before)
            self.engine.discard()
            raise
        self.engine.commit(clients.ids if clients.record.exchanges else ())  # nothing is pending without an exchange
        return clients.finish_record()

    def _make_clients(self, ids: Sequence[str], number: int, kind: str, **options: Any) -> RoundClients:
        return RoundClients(self.engine, self.state, ids, number, kind, **options)

    def own_models(self, ids: Sequence[str], round_: int) -> Iterator[Cohort]:
        """Return cohorts of ``ids`` with the clients' personalised models after ``round_``; they are copies."""
        return self.engine.cohorts(ids, self.method.download(self.state), round_)

    def evaluate(
        self,
        split: str,
        ids: Sequence[str] | None = None,
        round_: int = 0,
        outputs: list[Outputs] | None = None,
        never_used: Collection[str] = (),
    ) -> Metrics:
        """Return the metrics of each client's personalised model on ``split``.

        Args:
            split: the split.
            ids: the clients; ``None`` for all.
            round_: the number of the last round.
            outputs: receives the predictions for every sample; ``None`` if they are not needed.
            never_used: clients that were never used. If the policy requires it, they first fit their personal
                parameters on a copy (:meth:`settle`).
        """
        method, evaluated = self.initialiser.method, [*self.engine.clients] if ids is None else ids
        unused = set(never_used) if self.participation.fits_unused else set()
        fitted, trained = [i for i in evaluated if i in unused], [i for i in evaluated if i not in unused]
        payload = method.download(self.state)
        metrics = self.engine.evaluate(payload, trained, split, round_, outputs)
        if fitted:
            payload |= {
                "unused": {"shared": self.state.shared, "extensions": extension_payloads(method.extensions, self.state)}
            }
            metrics |= self.engine.evaluate(payload, fitted, split, round_, outputs, program=":personalise_unused")
        return metrics
