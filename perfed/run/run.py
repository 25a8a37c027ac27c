"""One training run: the loop over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from perfed.aggregation.settings import Aggregation
from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics
from perfed.engine.initial import Initialiser
from perfed.engine.ray.engine import RayEngine
from perfed.engine.record import RoundRecord
from perfed.engine.rehearsal import check_sums_suffice
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.methods.build import build_method
from perfed.model.chain import Model
from perfed.model.columns import split_first_layer
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.run.callback import Callback, check_installed, copied, named_once, recall
from perfed.run.callbacks import asked_for
from perfed.run.callbacks.best import BestModels
from perfed.run.callbacks.checkpoint import Checkpoints
from perfed.run.callbacks.log import EventLog
from perfed.run.callbacks.progress import Progress, ToldProgress
from perfed.run.callbacks.results import Results, write_arrays
from perfed.run.checkpoint_files import Checkpoint
from perfed.run.directory import RunDirectory
from perfed.run.evaluation import Evaluator, scored_split
from perfed.run.own_model import OwnModels
from perfed.run.round_log import find_lost_rounds
from perfed.run.rounds import Rounds
from perfed.run.settings import Evaluation, Snapshots
from perfed.run.summary import nothing_shared, summary_of, table_of
from perfed.run.totals import RunProgress
from perfed.system import exit_on_sigterm, freeze_objects
from perfed.training.plan import Plan, limit_threads, open_device


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
        server: makes the run's server, in place of one whose clients are here, in this process or on Ray's workers.
        secure: how replies are summed where the server sees their sums alone; ``None``: it sees the replies.
        aggregation: what the server makes of replies that are averaged; default: their mean.
        callbacks: that ride along, in their order, behind those that evaluation and snapshots ask for.

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
        server: Callable[..., Server] | None = None,
        secure: SecureAggregation | None = None,
        aggregation: Aggregation | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if rounds < 1:
            raise PerfedError(f"rounds must be at least 1 (given: {rounds})")
        if isinstance(method, str):
            name, method = name or method, build_method(method)
        check_kinds(federation, method, model)
        self.name, self.plan = name or type(method).__name__, plan or Plan()
        self.rounds, self.seed, self.checkpoint_seconds = rounds, seed, checkpoint_seconds
        self.directory = directory
        self.evaluation, self.snapshots = evaluation or Evaluation(), snapshots or Snapshots()
        self.federation, split, said = scored_split(method, federation, self.evaluation.split, self.name, seed)
        watched = federation.ids[: self.snapshots.clients] if self.snapshots.losses else ()
        model = split_first_layer(model, federation.named_inputs)
        device = open_device(str(device), f"device = '{device}'")
        initialiser = Initialiser(method, model, seed, dtype, device, watched, secure, aggregation)
        if secure is not None:
            secure.check(participation or Participation(), len(federation), federation.clients[0].held is not None)
            check_sums_suffice(self.federation, initialiser)
        server = server or (partial(Server, engine=RayEngine) if self.plan.engine == "ray" else Server)
        self.server = server(
            self.federation, initialiser, self.plan, participation or Participation(), rounds, clock=clock
        )
        self._evaluator = Evaluator(self.evaluation, self.server, self.federation, split, rounds)
        self._rounds = Rounds(self.server, self._evaluator, self.snapshots, rounds)
        own = [*method.notes(federation, initialiser.model), *nothing_shared(self.name, self.server)]
        self.notes: list[str] = [*said, *own, *self._evaluator.notes()]
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.resumed: int | None = None
        self.config: dict[str, Any] = {}
        self.progress, self._checkpoints = RunProgress(), Checkpoints()
        self.latest: RoundRecord | None = None
        self.callbacks = named_once([*asked_for(self.evaluation, self.snapshots), *callbacks, Results()])

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
        self.server.put_states_in(self.directory.path if self.directory else None)
        alone = self.directory.alone() if self.directory else nullcontext()
        behind = [self._checkpoints, EventLog(), *([ToldProgress(tell=progress)] if progress else [])]
        with limit_threads(self.plan.untimed_threads), freeze_objects(), alone, exit_on_sigterm(), ExitStack() as held:
            self.latest, started = None, time.perf_counter() - self.progress.wall
            try:
                check_installed(self.callbacks)
                held.enter_context(self.server.working())
                with self._transaction("preparation before round 1", started):
                    if self.done < 0:
                        self.latest = self._rounds.prepare(self.progress)
                    for callback in self.callbacks:
                        callback.begin(self)
                for callback in behind:
                    callback.begin(self)
                while not self.at_its_end:
                    with self._transaction(f"round {self.done + 1}", started):
                        record = self._round(started)
                    for callback in behind:
                        callback.after_round(self, record)
            except BaseException as error:
                self._checkpoints.interrupted(self, error)
                raise
            self._finish(behind)
        return self.summary

    @property
    def contributors(self) -> Mapping[str, int | None]:
        """The clients whose replies were used, by id: in how many rounds."""
        return dict(sorted(self.progress.totals.taken_part.items()))

    @property
    def at_its_end(self) -> bool:
        """Whether no round follows."""
        return self.done >= self.rounds or bool(self.progress.stopped_by)

    @contextmanager
    def _transaction(self, where: str, started: float) -> Iterator[None]:
        """A round that fails or is interrupted never happened."""
        server, progress, records = self.server.snapshot(), self.progress.copy(), len(self.history)
        states = {callback.name: copied(callback.state) for callback in self.callbacks}
        try:
            with diverging(where):
                yield
            self.progress.wall = time.perf_counter() - started
        except BaseException:
            self.server.restore(server)
            self.progress = progress
            del self.history[records:]
            recall(self.callbacks, states)
            raise
        finally:
            self.notes += self.server.drain_notes()

    def _round(self, started: float) -> dict[str, Any]:
        """Do a round, let the callbacks see it, and return its record."""
        self.latest, record = self._rounds.next(self.progress, started)
        self.history.append(record)
        for callback in self.callbacks:
            if callback.after_round(self, record) and not self.at_its_end:
                self.progress.stopped_by = callback.name
                record["bytes_down"] += self._rounds.settle(self.progress, self.done)
        return record

    def _finish(self, behind: Sequence[Callback]) -> None:
        arrays, notes = self._rounds.concluded(self.progress, self.history, self.taken)
        write_arrays(self, arrays)
        self.notes += [*notes, *self.server.drain_notes()]
        self.summary = summary_of(self.name, self.server, self._evaluator, self.progress, self.notes)
        if lost := find_lost_rounds(self.history, self.done):
            self.summary["lost_rounds"] = lost
        for callback in (*self.callbacks, *behind):
            callback.end(self, self.summary)

    @property
    def client_metrics(self) -> Metrics:
        """Each client's metrics, as the summary is made of: client id -> name -> value; see ``evaluation.last``."""
        return self.progress.totals.metrics

    def client_table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows of ``clients.csv``."""
        return table_of(self.server, self._evaluator, self.progress.totals)

    @property
    def done(self) -> int:
        """The last finished round; 0 is the preparation, -1 is before it."""
        return self.progress.done

    @property
    def taken(self) -> BestModels:
        """Which rounds' models are taken; of clients that are not in it, those of the last."""
        return next((found for found in self.callbacks if isinstance(found, BestModels)), BestModels())

    def go_to(self, found: Checkpoint, *, compared: bool = False) -> None:
        """Stand where ``found`` was written; ``compared``: the data are known to be those that it was written with."""
        self._checkpoints.go_to(self, found, compared=compared)

    def restore(self) -> None:
        """Go back to the last whole checkpoint of the directory; to the start if there is none."""
        self._checkpoints.go_back(self)


def check_kinds(federation: Any, method: Any, model: Any) -> None:
    """Say in one line which of a run's three parts is something else.

    Raises:
        PerfedError: one of them is.
    """
    kinds = (
        ("federation", federation, Federation, "perfed.Federation.from_arrays(...) makes one"),
        ("method", method, Method, "give its name, such as 'fedavg', or perfed.build_method(name, settings)"),
        ("model", model, Model, "perfed.Model(body=..., head=...) makes one"),
    )
    for what, given, wanted, hint in kinds:
        if not isinstance(given, wanted):
            kind = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
            raise PerfedError(f"{what} is {kind}, not a perfed {wanted.__name__}; {hint}")


@contextmanager
def diverging(where: str) -> Iterator[None]:
    """Say in one line that matrices cannot be factorised: they come from values that overflowed."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        reason = str(error).partition(": ")[0]
        raise PerfedError(
            f"{where}: training diverged: {reason} failed on values that are no longer finite; lower the learning rate"
        ) from None
