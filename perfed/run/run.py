"""One training run: the loop over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from math import nan
from typing import Any

import numpy as np
import torch

from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics
from perfed.engine.server import Server
from perfed.engine.setup import Setup
from perfed.errors import PerfedError
from perfed.machine import sigterm_as_exit
from perfed.method.method import Method
from perfed.methods.build import build_method
from perfed.model.chain import Model
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.run import checkpoint
from perfed.run.checkpoint import Standing
from perfed.run.checkpoint_files import Checkpoint
from perfed.run.directory import RunDirectory
from perfed.run.diverging import diverging
from perfed.run.evaluation import Evaluator, scored_split
from perfed.run.memory import Memory
from perfed.run.own_model import OwnModels
from perfed.run.parts import check_kinds
from perfed.run.settings import Evaluation, Snapshots
from perfed.run.snapshots import course_arrays, embedded_samples
from perfed.run.summary import leave, nothing_shared, summary_of
from perfed.run.taken import Taken
from perfed.run.tally import Tally
from perfed.training.device import usable_device
from perfed.training.plan import Plan, use_threads

Progress = Callable[[int, int, float | None], None]


class Run(OwnModels):
    """One training run, with or without a directory.

    Args:
        federation: the clients.
        method: with its hyper-parameters, or the name of one, which then has its defaults.
        model: stages; the method may leave some out.
        name: of the method, for reports.
        rounds, seed, dtype, device, participation, clock, evaluation, snapshots, plan: as in
            :class:`~perfed.experiment.config.Experiment`.
        directory: where results and checkpoints go (``None``: kept in memory), these ``checkpoint_seconds`` apart.
        server: makes the run's server, in place of one whose clients are in this process.

    Attributes:
        history: one record per round, as in ``rounds.jsonl``; of a resumed run those before it too.
        summary: as in ``summary.json``, once the run has ended.
        resumed: the round behind which a resumed run goes on.
        config: what the run was made of, as in ``config.toml``; checkpoints keep it.

    Example:
        >>> from perfed import linear, load
        >>> run = Run(load("digits", {"clients": 4}, seed=0), "fedavg", Model(head=linear(10)), rounds=2)
        >>> summary = run.execute()  # with "accuracy" among others
        >>> run.predict("000", run.federation.clients[0].test.x[:5]).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        federation: Federation,
        method: Method | str,
        model: Model,
        *,
        name: str = "",
        rounds: int,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        participation: Participation | None = None,
        clock: Clock | None = None,
        evaluation: Evaluation | None = None,
        snapshots: Snapshots | None = None,
        plan: Plan | None = None,
        directory: RunDirectory | None = None,
        checkpoint_seconds: float = 30.0,
        server: Callable[..., Server] = Server,
    ) -> None:
        if rounds < 1:
            raise PerfedError(f"rounds must be at least 1 (given: {rounds})")
        if isinstance(method, str):
            name, method = name or method, build_method(method)
        check_kinds(federation, method, model)
        self.name, self.plan = name or type(method).__name__, plan or Plan()
        self.rounds, self.seed, self.checkpoint_seconds = rounds, seed, checkpoint_seconds
        self.evaluation, self.snapshots = evaluation or Evaluation(), snapshots or Snapshots()
        self.directory: RunDirectory | Memory = directory or Memory()
        self.federation, split, said = scored_split(method, federation, self.evaluation.split, self.name, seed)
        watched = federation.ids[: self.snapshots.clients] if self.snapshots.losses else ()
        setup = Setup(method, model, seed, dtype, usable_device(str(device), f"device = '{device}'"), watched)
        self.server = server(self.federation, setup, self.plan, participation or Participation(), rounds, clock=clock)
        self._evaluator = Evaluator(self.evaluation, self.server, self.federation, split, rounds)
        own = [*method.notes(federation, setup.model), *nothing_shared(self.name, self.server)]
        self.notes: list[str] = [*said, *own, *self._evaluator.notes()]
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.resumed: int | None = None
        self.config: dict[str, Any] = {}
        taken, self._saved = Taken() if self.evaluation.stop == "validated" else None, -1
        self._standing = Standing(Tally.empty(self.evaluation.targets), taken=taken)

    # The loop ----------------------------------------------------------------------------------------------

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the end and return the summary.

        Whatever ends it early, also Ctrl-C, SIGTERM (``SystemExit(143)``) and an exception from ``progress``, leaves a
        checkpoint of the last whole round; what was done of a further one is dropped.

        Args:
            progress: called after the preparation (0) and each round with number, rounds, mean accuracy if known.

        Raises:
            PerfedError: a client's training loss, or what its model says, became NaN or infinite. An error before
                round 1 takes the directory away again, as any other exception does before round 1 has ended.
        """
        self.server.put_states_in(self.directory.path)
        with use_threads(self.plan.threads), self.directory.alone(), sigterm_as_exit(), ExitStack() as held:
            started = time.perf_counter() - self._standing.wall
            saved = time.perf_counter()
            try:
                held.enter_context(self.server.working())
                while not self._at_its_end:
                    number = self._standing.done + 1
                    with self._transaction(number):
                        if number > 0:
                            self._round(number, started)
                        else:
                            self._prepare(started)
                    if time.perf_counter() - saved >= self.checkpoint_seconds or self._at_its_end:
                        self._save()
                        saved = time.perf_counter()
                    if progress is not None:
                        progress(number, self.rounds, (self.history or [{}])[-1].get("accuracy", {}).get("mean"))
            except BaseException as error:
                self._interrupted(error)
                raise
            self._finish()
        return self.summary

    @property
    def _at_its_end(self) -> bool:
        return self.done >= self.rounds or self.taken.stopped or self._standing.tally.stopped

    @contextmanager
    def _transaction(self, number: int) -> Iterator[None]:
        """A round that fails or is interrupted never happened."""
        before, standing, records = self.server.snapshot(), self._standing.copy(), len(self.history)
        try:
            with diverging(f"round {number}" if number > 0 else "preparation before round 1"):
                yield
        except BaseException:
            if self._standing.done < number:
                self.server.restore(before)
                self._standing = standing
                del self.history[records:]
            raise
        finally:
            self.notes += self.server.told()

    def _interrupted(self, error: BaseException) -> None:
        """Keep what is done; where that is nothing, an empty directory would only be in the way of the next try."""
        done = self._standing.done
        mistake = isinstance(error, Exception) and (done < 0 or not isinstance(error, PerfedError))
        if done <= 0 and mistake:
            self.directory.abandon()
        elif done >= 0:
            with suppress(OSError):  # a full disk has been reported
                self.directory.truncate_rounds(done)
                if done != self._saved:
                    self._save()

    def _prepare(self, started: float) -> None:
        with self._timed():
            done = self.server.prepare()
        self._snapshot(0, done.courses)
        self._standing.wall = time.perf_counter() - started
        self._standing.done = 0

    def _round(self, number: int, started: float) -> None:
        standing, tally, evaluator = self._standing, self._standing.tally, self._evaluator
        due = evaluator.is_due(number)
        with self._timed():
            measure = evaluator.split if due else None
            done = self.server.round(number, measure=measure, keeps=evaluator.keeps(number, "after"))
            tally.add(done)
            if number == self.rounds:
                done.bytes_down += self.server.settle(tally.never_used(self.federation.ids), number)
        record: dict[str, Any] = {
            "round": number,
            "wall_seconds": time.perf_counter() - started,
            "training_seconds": standing.training,
            "virtual_time": tally.virtual_time,
            "participants": done.participants,
            "train_loss": done.train_loss,
        }
        measured = due and evaluator.has_models(done)
        if not self.snapshots.shows(number, measured):
            done.arrays = {}
        if measured:
            record.update(evaluator.measure(number, done, tally))
            if standing.taken is not None:
                evaluator.take(standing.taken, number, tally)
        self._write_arrays(number, done.arrays)
        if any(done.counts.values()):
            record["counts"] = {name: ids for name, ids in done.counts.items() if ids}
        record.update(exchanges=done.exchanges, bytes_up=done.bytes_up, bytes_down=done.bytes_down)
        self._snapshot(number, done.courses)
        self.history.append(record)
        if evaluator.reached(tally, self.history) and number < self.rounds:
            tally.stopped = True
            record["bytes_down"] += self.server.settle(tally.never_used(self.federation.ids), number)
        self.directory.append_round(record)
        standing.wall = time.perf_counter() - started
        standing.done = number

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time to that of training."""
        started = time.perf_counter()
        yield
        self._standing.training += time.perf_counter() - started

    def _write_arrays(self, number: int, found: Mapping[str, Mapping[str, Any]]) -> None:
        for name, arrays in found.items():
            self.directory.write_arrays(name, number, {key: np.asarray(value) for key, value in arrays.items()})

    def _snapshot(self, number: int, courses: Mapping[str, list[float]]) -> None:
        self._write_arrays(number, course_arrays(courses))
        if number in self.snapshots.rounds:
            arrays = embedded_samples(self.server, self.snapshots, number)
            if arrays is not None:
                self.directory.write_arrays("snapshots", number, arrays)

    def _finish(self) -> None:
        if not self._standing.tally.taken_part:
            self.notes.append("no client's reply was used in any round")
        if self.evaluation.stop != "last":
            self._write_arrays(self.done, self._evaluator.measure_taken(self.taken, self.done, self._standing.tally))
            self.notes += self.server.told()
        self.summary = summary_of(self.name, self.server, self._evaluator, self._standing, self.notes)
        leave(self.directory, self.server, self._evaluator, self._standing.tally, self.summary)

    # What it leaves behind ---------------------------------------------------------------------------------

    @property
    def client_metrics(self) -> Metrics:
        """Each client's metrics, as the summary is made of: client id -> name -> value; see ``evaluation.last``."""
        return self._standing.tally.metrics

    @property
    def done(self) -> int:
        """The last finished round; 0 is the preparation, -1 is before it."""
        return self._standing.done

    @property
    def taken(self) -> Taken:
        """Which rounds' models are taken; of clients that are not in it, those of the last."""
        return self._standing.taken or Taken()

    # Checkpoints -------------------------------------------------------------------------------------------

    def _save(self) -> None:
        data = self.federation.fingerprint
        checkpoint.save(self.directory, self.server, self._standing, data, self.notes, self.config)
        self._saved = self._standing.done

    def go_to(self, found: Checkpoint, *, compared: bool = False) -> None:
        """Stand where ``found`` was written; ``compared``: the data are known to be those that it was written with."""
        self._standing = checkpoint.restore(found, self.server, None if compared else self.federation)
        self._saved = found.round

    def restore(self) -> None:
        """Go back to the last whole checkpoint of the directory; to the start if there is none."""
        self.server.put_states_in(self.directory.path)
        found = self.directory.load(self.server.hold)
        self.resumed = 0 if found is None else found.round
        if found is None:
            self.directory.truncate_rounds(-1)
            self.notes.append("no checkpoint was there: begun again from round 0")
            return
        self.go_to(found)
        self.history, damaged = self.directory.truncate_rounds(found.round)
        for record in self.history:  # JSON has no NaN
            record["train_loss"] = nan if record["train_loss"] is None else record["train_loss"]
        continued = checkpoint.continued(found, self.server, self.rounds)
        self.notes = [*found.progress["notes"], *found.notes, *damaged, *continued]
