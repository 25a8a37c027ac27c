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
from perfed.run.callback import Callback, check_installed, copy_state, require_unique_names, restore_states
from perfed.run.callbacks import build_required_callbacks
from perfed.run.callbacks.best import BestModels
from perfed.run.callbacks.checkpoint import Checkpoints
from perfed.run.callbacks.log import EventLog
from perfed.run.callbacks.progress import Progress, ProgressReporter
from perfed.run.callbacks.results import Results, write_arrays
from perfed.run.checkpoint_files import Checkpoint
from perfed.run.directory import RunDirectory
from perfed.run.evaluation import Evaluator, choose_scored_split
from perfed.run.own_model import PersonalModels
from perfed.run.round_log import find_lost_rounds
from perfed.run.rounds import RoundRunner
from perfed.run.settings import Evaluation, Snapshots
from perfed.run.summary import build_client_table, build_summary, warn_nothing_shared
from perfed.run.totals import RunProgress
from perfed.system import exit_on_sigterm, freeze_objects
from perfed.training.plan import Plan, limit_threads, open_device


class Run(PersonalModels):
    """A training run, with or without a directory.

    Args:
        federation: the clients.
        method: a method with its hyper-parameters, or the name of a method with default settings.
        model: the stages of the model; the method may leave some out.
        name: name of the method in reports.
        rounds, seed, dtype, device, participation, clock, evaluation, snapshots, plan: as in
            :class:`~perfed.experiment.config.Experiment`.
        directory: directory of results and checkpoints; ``None``: results stay in memory.
        checkpoint_seconds: time between two checkpoints, in seconds.
        server: function that creates the server; by default its clients are in this process or on Ray's workers.
        secure: how replies are summed if the server only sees sums; ``None``: it sees the replies.
        aggregation: how the server aggregates replies that are averaged; by default by their mean.
        callbacks: callbacks in the order of their calls, after those that evaluation and snapshots need.

    Attributes:
        history: one record per round, as in ``rounds.jsonl``, including the rounds before a resumption.
        summary: the content of ``summary.json``, once the run has ended.
        resumed: the round after which a resumed run continues; ``None`` if the run was not resumed.
        config: configuration of the run, as in ``config.toml``; it is saved in checkpoints.

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
        check_types(federation, method, model)
        self.name, self.plan = name or type(method).__name__, plan or Plan()
        self.rounds, self.seed, self.checkpoint_seconds = rounds, seed, checkpoint_seconds
        self.directory = directory
        self.evaluation, self.snapshots = evaluation or Evaluation(), snapshots or Snapshots()
        self.federation, split, split_notes = choose_scored_split(
            method, federation, self.evaluation.split, self.name, seed
        )
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
        self._rounds = RoundRunner(self.server, self._evaluator, self.snapshots, rounds)
        method_notes = [*method.notes(federation, initialiser.model), *warn_nothing_shared(self.name, self.server)]
        self.notes: list[str] = [*split_notes, *method_notes, *self._evaluator.notes()]
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.resumed: int | None = None
        self.config: dict[str, Any] = {}
        self.progress, self._checkpoints = RunProgress(), Checkpoints()
        self.latest: RoundRecord | None = None
        self.callbacks = require_unique_names(
            [*build_required_callbacks(self.evaluation, self.snapshots), *callbacks, Results()]
        )

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the end and return the summary.

        If the run ends early, also by Ctrl-C, SIGTERM (``SystemExit(143)``) or an exception from ``progress``, it saves
        a checkpoint of the last finished round; an unfinished round is undone.

        Args:
            progress: function that is called after the preparation (round 0) and after each round, with the number of
                the round, the number of rounds, and the mean accuracy or ``None``.

        Raises:
            PerfedError: if a client's training loss or its model's outputs become NaN or infinite. The directory is
                removed after this error before round 1, and after any other exception before the end of round 1.
        """
        self.server.put_states_in(self.directory.path if self.directory else None)
        lock = self.directory.lock() if self.directory else nullcontext()
        later_callbacks = [self._checkpoints, EventLog(), *([ProgressReporter(tell=progress)] if progress else [])]
        with limit_threads(self.plan.untimed_threads), freeze_objects(), lock, exit_on_sigterm(), ExitStack() as stack:
            self.latest, started = None, time.perf_counter() - self.progress.wall
            try:
                check_installed(self.callbacks)
                stack.enter_context(self.server.working())
                with self._undo_on_failure("preparation before round 1", started):
                    if self.done < 0:
                        self.latest = self._rounds.prepare(self.progress)
                    for callback in self.callbacks:
                        callback.begin(self)
                for callback in later_callbacks:
                    callback.begin(self)
                while not self.at_its_end:
                    with self._undo_on_failure(f"round {self.done + 1}", started):
                        record = self._run_round(started)
                    for callback in later_callbacks:
                        callback.after_round(self, record)
            except BaseException as error:
                self._checkpoints.save_interrupted(self, error)
                raise
            self._finish(later_callbacks)
        return self.summary

    @property
    def contributors(self) -> Mapping[str, int | None]:
        """The number of rounds in which the reply of each client was used, by id."""
        return dict(sorted(self.progress.totals.taken_part.items()))

    @property
    def at_its_end(self) -> bool:
        """Whether no round follows."""
        return self.done >= self.rounds or bool(self.progress.stopped_by)

    @contextmanager
    def _undo_on_failure(self, where: str, started: float) -> Iterator[None]:
        """Restore the state before a round if the round fails or is interrupted."""
        server, progress, records = self.server.snapshot(), self.progress.copy(), len(self.history)
        states = {callback.name: copy_state(callback.state) for callback in self.callbacks}
        try:
            with report_divergence(where):
                yield
            self.progress.wall = time.perf_counter() - started
        except BaseException:
            self.server.restore(server)
            self.progress = progress
            del self.history[records:]
            restore_states(self.callbacks, states)
            raise
        finally:
            self.notes += self.server.drain_notes()

    def _run_round(self, started: float) -> dict[str, Any]:
        """Run a round, call the callbacks, and return the round's record."""
        self.latest, record = self._rounds.run_next(self.progress, started)
        self.history.append(record)
        for callback in self.callbacks:
            if callback.after_round(self, record) and not self.at_its_end:
                self.progress.stopped_by = callback.name
                record["bytes_down"] += self._rounds.settle_clients(self.progress, self.done)
        return record

    def _finish(self, later_callbacks: Sequence[Callback]) -> None:
        arrays, notes = self._rounds.evaluate_final_models(self.progress, self.history, self.best_models)
        write_arrays(self, arrays)
        self.notes += [*notes, *self.server.drain_notes()]
        self.summary = build_summary(self.name, self.server, self._evaluator, self.progress, self.notes)
        if lost := find_lost_rounds(self.history, self.done):
            self.summary["lost_rounds"] = lost
        for callback in (*self.callbacks, *later_callbacks):
            callback.end(self, self.summary)

    @property
    def client_metrics(self) -> Metrics:
        """The metrics of each client, whose mean is in the summary: values by client id and name of the metric."""
        return self.progress.totals.metrics

    def client_table(self) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and rows of ``clients.csv``."""
        return build_client_table(self.server, self._evaluator, self.progress.totals)

    @property
    def done(self) -> int:
        """The number of the last finished round; 0 is the preparation, -1 is before it."""
        return self.progress.done

    @property
    def best_models(self) -> BestModels:
        """The rounds whose models are used; other clients have the model of the last round."""
        return next((callback for callback in self.callbacks if isinstance(callback, BestModels)), BestModels())

    def resume_from(self, checkpoint: Checkpoint, *, compared: bool = False) -> None:
        """Restore the state of a checkpoint; ``compared``: the data are known to be those of the checkpoint."""
        self._checkpoints.resume_from(self, checkpoint, compared=compared)

    def restore(self) -> None:
        """Restore the newest undamaged checkpoint of the directory; without one, the run starts from the beginning."""
        self._checkpoints.resume_latest(self)


def check_types(federation: Any, method: Any, model: Any) -> None:
    """Check the types of the three main arguments of a run.

    Raises:
        PerfedError: if one has another type; names the argument.
    """
    kinds = (
        ("federation", federation, Federation, "perfed.Federation.from_arrays(...) creates one"),
        ("method", method, Method, "give its name, such as 'fedavg', or perfed.build_method(name, settings)"),
        ("model", model, Model, "perfed.Model(body=..., head=...) creates one"),
    )
    for name, value, expected, hint in kinds:
        if not isinstance(value, expected):
            kind = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            raise PerfedError(f"{name} is {kind}, not a perfed {expected.__name__}; {hint}")


@contextmanager
def report_divergence(where: str) -> Iterator[None]:
    """Raise a PerfedError of one line if a matrix cannot be factorised because its values have overflowed."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        reason = str(error).partition(": ")[0]
        raise PerfedError(
            f"{where}: training diverged: {reason} failed on values that are no longer finite; lower the learning rate"
        ) from None
