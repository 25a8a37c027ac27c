"""One training run: the round loop, evaluation, checkpoints, the summary."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import isnan, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.federation import Federation, new_inputs
from perfed.data.held_out import scored_apart
from perfed.engine.evaluate import (
    Metrics,
    Outputs,
    by_domain,
    client_table,
    predict,
    sample_counts,
    summarise,
    untrained_domains,
    with_extremes,
)
from perfed.engine.server import RoundRecord, Server
from perfed.engine.setup import Setup, unstack_parameters
from perfed.errors import PerfedError
from perfed.experiment.build import build_method
from perfed.machine import installed_version, peak_memory_mb, sigterm_as_exit
from perfed.method.method import Method
from perfed.model.chain import Chain, Model, Parameters
from perfed.model.placement import PER_DOMAIN, SENT
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.run.directory import Checkpoint, RunDirectory
from perfed.run.settings import Evaluation, Snapshots
from perfed.run.snapshots import embedded_samples
from perfed.run.tally import Tally
from perfed.run.targets import updated
from perfed.training.cohort import Cohort
from perfed.training.device import arithmetic, usable_device
from perfed.training.plan import Plan, use_threads
from perfed.tree import map_leaves

Progress = Callable[[int, int, float | None], None]


class Run:
    """One training run, with or without a directory.

    Args:
        federation: the clients.
        method: with its hyper-parameters, or the name of one, which then has its defaults.
        model: stages; the method may leave some out.
        name: of the method, for reports.
        rounds, seed, dtype, device, participation, clock, evaluation, snapshots, plan: as in
            :class:`~perfed.experiment.config.Experiment`.
        directory: where results and checkpoints go; ``None`` keeps everything in memory.
        checkpoint_seconds: least time between two checkpoints.

    Attributes:
        history: one record per round, as in ``rounds.jsonl``; of a resumed run those before it too.
        summary: as in ``summary.json``, once the run has ended.
        resumed: the round behind which a resumed run goes on.
        config: what the run was made of, as in ``config.toml``; checkpoints keep it.
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
    ) -> None:
        if rounds < 1:
            raise PerfedError(f"rounds must be at least 1 (given: {rounds})")
        if isinstance(method, str):
            name, method = name or method, build_method(method)
        _check_kinds(federation, method, model)
        self.name = name or type(method).__name__
        self.rounds = rounds
        self.seed = seed
        self.evaluation = evaluation or Evaluation()
        self.notes: list[str] = []
        self.federation, self._scored = self._split_for(method, federation)
        self.snapshots = snapshots or Snapshots()
        self.plan = plan or Plan()
        self.directory = directory
        self.checkpoint_seconds = checkpoint_seconds
        setup = Setup(method, model, seed, dtype, usable_device(str(device), f"device = '{device}'"))
        self.server = Server(self.federation, setup, self.plan, participation or Participation(), rounds, clock=clock)
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.notes += method.notes(federation, setup.model)
        self.resumed: int | None = None
        self.config: dict[str, Any] = {}
        self._done = self._saved = -1
        self._tally = Tally.empty(self.evaluation.targets)
        self._wall = self._training = 0.0
        self.notes += self._nothing_shared()
        if federation.num_domains and self.evaluation.when == "after":
            self.notes.append("no metrics per domain: they are measured before local training (evaluation.when)")
        per_domain = PER_DOMAIN in setup.places(federation.clients[0].input_shape).values()
        self._untrained = untrained_domains(self.federation, self._scored) if per_domain else []
        if self._untrained:
            self.notes.append(
                f"domains that nobody trains on, only in {self.evaluation.split} data: {', '.join(self._untrained)}; "
                "outputs there are the means of those with the other domains' parameters"
            )
        if all(client.split(self._scored) is None for client in self.federation):
            raise PerfedError(f"evaluation.split = '{self.evaluation.split}': no client has such data")
        if self.evaluation.targets and federation.num_classes is None:
            raise PerfedError(f"evaluation.targets: are accuracies, but data set '{federation.name}' is a regression")

    def _nothing_shared(self) -> list[str]:
        """What a method that shares parameters is on a model without them."""
        method, shared = self.server.setup.method, self.server.state.shared
        stages = [s for s, place in method.default_placement.items() if place in SENT]
        if shared or not stages:
            return []
        terms = [term.name for term in method.terms]
        same = (
            "'flic-class'"
            if terms == ["anchors"]
            else f"'local'{' with the terms ' if terms else ''}{', '.join(terms)}"
        )
        return [f"{self.name} shares parameters of {', '.join(stages)} only, and this model has none: it is {same}"]

    def _split_for(self, method: Method, federation: Federation) -> tuple[Federation, str]:
        """The clients' data as the method sees them, and the split that is scored.

        What a method that uses validation data has weighed cannot be what it is scored on.
        """
        split: str = self.evaluation.split
        if not method.uses_validation:
            return federation, split
        if split == "validation":
            federation, split = scored_apart(federation, self.seed), "test"
            self.notes.append(f"half of the validation samples are {self.name}'s own; the scores are on the others")
        lacking = sum(client.split("validation") is None for client in federation)
        if lacking:
            self.notes.append(
                f"{lacking} of {len(federation)} clients have no validation data for {self.name}, which uses their "
                "training data in place of them (data.validation_fraction)"
            )
        return federation, split

    # The loop ----------------------------------------------------------------------------------------------

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the end and return the summary.

        Whatever ends it early, also Ctrl-C, SIGTERM (``SystemExit(143)``) and an exception from ``progress``, leaves a
        checkpoint of the last whole round; what was done of a further one is dropped.

        Args:
            progress: called after each round with its number, the number of rounds, and the mean accuracy if known.

        Raises:
            PerfedError: a client's training loss, or what its model says, became NaN or infinite. An error before
                round 1 takes the directory away again, as any other exception does before round 1 has ended.
        """
        alone = nullcontext() if self.directory is None else self.directory.alone()
        with use_threads(self.plan.threads), alone, sigterm_as_exit():
            started = time.perf_counter() - self._wall
            saved = time.perf_counter()
            try:
                for number in range(self._done + 1, self.rounds + 1):
                    with self._transaction(number):
                        if number > 0:
                            self._round(number, started)
                        else:
                            self._prepare(started)
                    due = time.perf_counter() - saved >= self.checkpoint_seconds
                    if self.directory is not None and (due or number == self.rounds):
                        self._save()
                        saved = time.perf_counter()
                    if progress is not None and number > 0:
                        progress(number, self.rounds, self.history[-1].get("accuracy", {}).get("mean"))
            except BaseException as error:
                self._interrupted(error)
                raise
            self._finish()
        return self.summary

    @contextmanager
    def _transaction(self, number: int) -> Iterator[None]:
        """A round that fails or is interrupted never happened."""
        before, tally, records = self.server.snapshot(), self._tally.copy(), len(self.history)
        spent = self._wall, self._training
        try:
            with _diverging(f"round {number}" if number > 0 else "preparation before round 1"):
                yield
        except BaseException:
            if self._done < number:
                self.server.restore(before)
                self._tally = tally
                self._wall, self._training = spent
                del self.history[records:]
            raise

    def _interrupted(self, error: BaseException) -> None:
        """Keep what is done; where that is nothing, an empty directory would only be in the way of the next try."""
        mistake = isinstance(error, Exception) and (self._done < 0 or not isinstance(error, PerfedError))
        if self.directory is None:
            return
        if self._done <= 0 and mistake:
            self.directory.abandon()
        elif self._done >= 0:
            with suppress(OSError):  # a full disk has been reported
                self.directory.truncate_rounds(self._done)
                if self._done != self._saved:
                    self._save()

    def _prepare(self, started: float) -> None:
        with self._timed():
            self.server.prepare()
        self._snapshot(0)
        self._wall = time.perf_counter() - started
        self._done = 0

    def _round(self, number: int, started: float) -> None:
        evaluate = self._evaluates(number)
        with self._timed():
            done = self.server.round(number, measure=self._scored if evaluate else None)
            self._tally.add(done)
            if number == self.rounds:
                done.bytes_down += self.server.settle(self._never_used, number)
        record: dict[str, Any] = {
            "round": number,
            "wall_seconds": time.perf_counter() - started,
            "training_seconds": self._training,
            "virtual_time": self._tally.virtual_time,
            "participants": done.participants,
            "train_loss": done.train_loss,
        }
        evaluate &= bool(done.participants) or (self.evaluation.who, self.evaluation.when) == ("all", "before")
        if evaluate:
            record.update(self._evaluate(number, done))
            self._tally.targets = updated(self._tally.targets, record)
        if evaluate and self.directory is not None:
            for name, arrays in done.arrays.items():
                self.directory.write_arrays(name, number, {key: np.asarray(value) for key, value in arrays.items()})
        if any(done.counts.values()):
            record["counts"] = {name: ids for name, ids in done.counts.items() if ids}
        record.update(exchanges=done.exchanges, bytes_up=done.bytes_up, bytes_down=done.bytes_down)
        self._snapshot(number)
        self.history.append(record)
        if self.directory is not None:
            self.directory.append_round(record)
        self._wall = time.perf_counter() - started
        self._done = number

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time to that of training."""
        started = time.perf_counter()
        yield
        self._training += time.perf_counter() - started

    @property
    def _never_used(self) -> list[str]:
        return [client for client in self.federation.ids if client not in self._tally.taken_part]

    def _evaluates(self, number: int) -> bool:
        return number % self.evaluation.every == 0 or number > self.rounds - self.evaluation.last

    def _evaluate(self, number: int, done: RoundRecord) -> dict[str, Any]:
        settings = self.evaluation
        ids = done.participants if settings.who == "participants" else None
        # Outputs are those of ``personalise``, before local training.
        outputs: list[Outputs] | None = [] if self.federation.num_domains and settings.when == "before" else None
        unused = [] if number == self.rounds else self._never_used  # at the end they have settled
        before = self.server.evaluate(self._scored, ids, number, outputs, never_used=unused)
        for client, values in before.items():
            if any(isnan(value) for value in values.values()):
                raise PerfedError(
                    f"round {number}: the model of client '{client}' gives values that are no numbers; lower the "
                    "learning rate or look at this client's data"
                )
        chosen, self._tally.other = (before, done.after) if settings.when == "before" else (done.after, before)
        metrics, domains = summarise(chosen, self._weights()), {}
        found: Metrics = {}
        if outputs:
            found, self._tally.client_domains = by_domain(outputs, self.federation)
            domains = {"domains": with_extremes(found)}
        self._tally.evaluated(chosen, found, settings.last)
        if settings.when == "before" and done.after:
            metrics.update({f"{name}_after": value for name, value in summarise(done.after, self._weights()).items()})
        return {"metrics": metrics, **({"accuracy": metrics["accuracy"]} if "accuracy" in metrics else {}), **domains}

    def _weights(self) -> dict[str, float] | None:
        uniform = self.evaluation.weights == "uniform"
        return None if uniform else sample_counts(self.federation, self._scored)

    # The end -----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        tally = self._tally
        if not tally.taken_part:
            self.notes.append("no client's reply was used in any round")
        metrics = summarise(tally.metrics, self._weights())
        counted = [f"{name.replace('_', ' ')}: {n} (clients in rounds.jsonl)" for name, n in tally.counts.items() if n]
        self.summary = {
            "method": self.name,
            "dataset": self.federation.name,
            "seed": self.seed,
            "rounds": self.rounds,
            "metrics": metrics,
            **({"accuracy": metrics["accuracy"]} if "accuracy" in metrics else {}),
            **({"domains": tally.domains} if tally.domains else {}),
            **({"untrained_domains": self._untrained} if self._untrained else {}),
            **({"targets": tally.targets} if tally.targets else {}),
            "evaluation": self.evaluation.model_dump(),
            "wall_seconds": self._wall,
            "training_seconds": self._training,
            "virtual_time": tally.virtual_time,
            **({"counts": tally.counts} if tally.counts else {}),
            **({} if (peak := peak_memory_mb()) is None else {"peak_memory_mb": peak}),
            "settings": self.server.setup.method.all_settings,
            "plan": self.plan.to_dict(),
            "notes": [*self.plan.describe(), *self.notes, *counted],
            "versions": {
                "perfed": installed_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        if "oracle_accuracy" in self.federation.notes:
            self.summary["oracle_accuracy"] = float(self.federation.notes["oracle_accuracy"])
        if self.directory is not None:
            before, after = tally.metrics, tally.other
            if self.evaluation.when == "after":
                before, after = after, before
            seconds = tally.seconds if self.server.clock.speeds != "none" else {}
            split, rounds = self._scored, tally.taken_part
            table = client_table(self.federation, split, before, after, rounds, seconds, tally.client_domains)
            self.directory.write_clients(*table)
            self.directory.write_summary(self.summary)

    @property
    def client_metrics(self) -> Metrics:
        """Each client's metrics, as the summary is made of: client id -> name -> value; see ``evaluation.last``."""
        return self._tally.metrics

    def predict(self, client: str, x: Any, domain: Tensor | NDArray[Any] | None = None) -> Tensor:
        """What one client's own model says of new inputs, as in evaluation.

        Args:
            client: its id.
            x: ``(samples, ...)``, inputs of the client's shape: an array, a tensor, or a data frame with its columns.
            domain: ``(samples,)`` domain ids, for methods that need them.

        Returns:
            Logits ``(samples, C)``, column j of which is of the class ``federation.classes[j]``, or values.

        Raises:
            PerfedError: an unknown client, inputs of another shape or with other columns, values that are not finite,
                no domains or unknown ones, or a method that projects the data.
        """
        cohort, method = self._own_model(client), self.server.setup.method
        if method.changes_data:
            raise PerfedError(f"{self.name} projects a client's samples together; it has no model for new ones")
        own = self.server.engine.clients[client]
        inputs, ids = new_inputs(own, x, domain, self.federation.num_domains)
        if ids is None and (method.needs_domains or cohort.per_domain):
            raise PerfedError(f"{self.name} needs the domain of every sample")
        cohort.domain = None if ids is None else ids[None].to(cohort.device)
        trained = self.federation.domains_in("train")
        return predict(method, cohort, inputs[None].to(cohort.device, cohort.dtype), trained)[0]

    def model(self, client: str) -> tuple[Chain, Parameters]:
        """One client's own model: the modules with its parameters loaded, and those parameters by name.

        Raises:
            PerfedError: an unknown client, or a method that predicts with more than these modules.
        """
        cohort, method = self._own_model(client), self.server.setup.method
        if type(method).predict is not Method.predict or method.changes_data or cohort.per_domain:
            raise PerfedError(f"{self.name} predicts with more than one chain of modules; use predict() of the run")
        shapes = {name: tensor.shape for name, tensor in cohort.chain.tensors().items()}
        parameters = unstack_parameters(cohort.model, 0, shapes)
        chain = self.server.setup.model.build(cohort.chain.input_shape).to(cohort.dtype)
        chain.load_state_dict(parameters)
        return chain.eval(), parameters

    def _own_model(self, client: str) -> Cohort:
        if client not in self.server.engine.clients:
            raise PerfedError(f"unknown client '{client}'; ids are: {', '.join(self.federation.ids[:5])}, ...")
        payload = self.server.setup.method.download(self.server.state)
        (cohort,) = self.server.engine.cohorts([client], payload, self._done)
        return cohort

    def _snapshot(self, number: int) -> None:
        if self.directory is not None and number in self.snapshots.rounds:
            arrays = embedded_samples(self.server, self.federation.ids[: self.snapshots.clients], number)
            if arrays is not None:
                self.directory.write_arrays("snapshots", number, arrays)

    # Checkpoints -------------------------------------------------------------------------------------------

    def _save(self) -> None:
        assert self.directory is not None
        engine = self.server.engine
        progress = {
            "tally": self._tally.plain(),
            "policy": self.server.selection.policy.state,
            "wall_seconds": self._wall,
            "training_seconds": self._training,
            "notes": self.notes,
            "plan": self.plan.to_dict(),
            "data": self.federation.fingerprint,
            "trace": self.server.selection.timer.fingerprint,
            "arithmetic": arithmetic(self.server.setup.device),
            "config": self.config,
        }
        self.directory.save(self._done, self.server.state.tree(), engine.states, engine.changed, progress)
        self._saved = self._done
        engine.changed.clear()

    def restore(self) -> None:
        """Go back to the last whole checkpoint of the directory; to the start if there is none."""
        assert self.directory is not None
        found = self.directory.load()
        self.resumed = 0 if found is None else found.round
        if found is None:
            self.directory.truncate_rounds(-1)
            self.notes.append("no checkpoint was there: begun again from round 0")
            return
        timer = self.server.selection.timer
        if found.progress.get("data", self.federation.fingerprint) != self.federation.fingerprint:
            raise PerfedError(
                f"{self.directory.path}: this run was on other clients, samples or targets than those of "
                f"'{self.federation.name}'; continue it with the same (in Python, resume(..., federation=...))"
            )
        if found.progress.get("trace", timer.fingerprint) != timer.fingerprint:
            raise PerfedError(f"{self.server.clock.trace.file}: this run followed a trace with other times")
        self._saved = found.round
        device = self.server.setup.device
        for name, value in found.server.items():
            setattr(self.server.state, name, map_leaves(value, lambda _, t: t.to(device)))
        for client, state in found.clients.items():
            self.server.engine.states[client] = map_leaves(state, lambda _, t: t.to(device))
        self._done = found.round
        self._tally = Tally.of_plain(found.progress.get("tally", {}))
        self.server.selection.policy.state.update(found.progress["policy"])
        self._wall = found.progress["wall_seconds"]
        self._training = found.progress.get("training_seconds", self._wall)  # older ones have one time for both
        self.notes = [*found.progress["notes"], *found.notes]
        self.plan.paths.update(Plan.from_dict(found.progress["plan"]).paths)
        self.history, damaged = self.directory.truncate_rounds(found.round)
        for record in self.history:  # JSON has no NaN
            record["train_loss"] = nan if record["train_loss"] is None else record["train_loss"]
        self.notes += [*damaged, *self._continued(found)]

    def _continued(self, found: Checkpoint) -> list[str]:
        """What a run that was interrupted has to say beside its results."""
        notes, begun = [], found.progress.get("config", {}).get("rounds", self.rounds)
        if found.round == 0:
            notes.append("continued from round 0: the preparation was done")
        if begun < self.rounds:
            notes.append(f"continued from round {found.round} to {self.rounds}; begun with rounds = {begun}")
        before, now = found.progress.get("arithmetic"), arithmetic(self.server.setup.device)
        if before not in (None, now):
            notes.append(
                f"continued after round {found.round} on another processor or torch ({now}; before: {before}): from "
                "here on the last digits may differ from those of a run that was never interrupted"
            )
        return notes


def _check_kinds(federation: Any, method: Any, model: Any) -> None:
    """Say in one line which of a run's three parts is something else."""
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
def _diverging(where: str) -> Iterator[None]:
    """Matrices that cannot be factorised come from values that overflowed: say so in one line."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        reason = str(error).partition(": ")[0]
        raise PerfedError(
            f"{where}: training diverged: {reason} failed on values that are no longer finite; lower the learning rate"
        ) from None
