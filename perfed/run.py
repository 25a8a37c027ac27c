"""One training run: the round loop, evaluation, checkpoints, the summary."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.clock import Clock
from perfed.cohort import Cohort
from perfed.config import Evaluation, Snapshots
from perfed.errors import PerfedError
from perfed.evaluate import (
    Metrics,
    Outputs,
    by_domain,
    client_table,
    predict,
    summarise,
    untrained_domains,
    with_extremes,
)
from perfed.federation import Federation
from perfed.machine import installed_version, usable_device
from perfed.method import Method
from perfed.model import Chain, Model, Parameters
from perfed.participation import Participation
from perfed.placement import PER_DOMAIN
from perfed.plan import Plan, use_threads
from perfed.rounds import RoundRecord, Server
from perfed.snapshots import embedded_samples
from perfed.state import Setup, unstack_parameters
from perfed.store import RunDirectory
from perfed.tally import Tally
from perfed.targets import updated
from perfed.tree import map_leaves

Progress = Callable[[int, int, float | None], None]


class Run:
    """One training run, with or without a directory.

    Args:
        federation: the clients.
        method: with its hyper-parameters.
        model: stages; the method may leave some out.
        name: of the method, for reports.
        rounds, seed, dtype, device, participation, clock, evaluation, snapshots, plan: as in
            :class:`~perfed.config.Experiment`.
        directory: where results and checkpoints go; ``None`` keeps everything in memory.
        checkpoint_seconds: least time between two checkpoints.

    Attributes:
        history: one record per round, as in ``rounds.jsonl``.
        summary: as in ``summary.json``, once the run has ended.
    """

    def __init__(
        self,
        federation: Federation,
        method: Method,
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
        self.federation = federation
        self.name = name or type(method).__name__
        self.rounds = rounds
        self.seed = seed
        self.evaluation = evaluation or Evaluation()
        self.snapshots = snapshots or Snapshots()
        self.plan = plan or Plan()
        self.directory = directory
        self.checkpoint_seconds = checkpoint_seconds
        setup = Setup(method, model, seed, dtype, usable_device(str(device), f"device = '{device}'"))
        self.server = Server(federation, setup, self.plan, participation or Participation(), rounds, clock=clock)
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.notes: list[str] = []
        self._done = self._saved = -1
        self._tally = Tally.empty(self.evaluation.targets)
        self._wall = self._training = 0.0
        if federation.num_domains and self.evaluation.when == "after":
            self.notes.append("no metrics per domain: they are measured before local training (evaluation.when)")
        per_domain = PER_DOMAIN in setup.places(federation.clients[0].input_shape).values()
        self._untrained = untrained_domains(federation, self.evaluation.split) if per_domain else []
        if self._untrained:
            self.notes.append(
                f"domains that nobody trains on, only in {self.evaluation.split} data: {', '.join(self._untrained)}; "
                "outputs there are the means of those with the other domains' parameters"
            )
        if self.evaluation.split != "train" and all(c.split(self.evaluation.split) is None for c in federation):
            raise PerfedError(f"evaluation.split = '{self.evaluation.split}': no client has such data")
        if self.evaluation.targets and federation.num_classes is None:
            raise PerfedError(f"evaluation.targets: are accuracies, but data set '{federation.name}' is a regression")

    # The loop ----------------------------------------------------------------------------------------------

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the end and return the summary.

        Args:
            progress: called after each round with its number, the number of rounds, and the mean accuracy if known.

        Raises:
            PerfedError: the training loss of a client became NaN or infinite; the state before that round is kept as a
                checkpoint. What a client's model says became NaN: the last checkpoint is kept. An error before round 1
                takes the directory away again, as any other exception does before something of a round is written.
        """
        with use_threads(self.plan.threads), nullcontext() if self.directory is None else self.directory.alone():
            started = time.perf_counter() - self._wall
            saved = time.perf_counter()
            if self._done < 0:
                try:
                    with _diverging("preparation before round 1"), self._timed():
                        self.server.prepare()
                except Exception:
                    if self.directory is not None:
                        self.directory.abandon()
                    raise
                self._done = 0
                self._snapshot(0)
                if self.directory is not None and time.perf_counter() - saved >= self.checkpoint_seconds:
                    self._wall = time.perf_counter() - started
                    self._save()
                    saved = time.perf_counter()
            for number in range(self._done + 1, self.rounds + 1):
                try:
                    with _diverging(f"round {number}"):
                        record = self._round(number, started)
                except PerfedError:
                    if self.directory is not None and self.server.committed == self._done != self._saved:
                        self._save()
                    raise
                except Exception:  # a mistake in a method: an empty directory would only be in the way of the next try
                    if self.directory is not None:
                        self.directory.abandon()
                    raise
                self._wall = time.perf_counter() - started
                if self.directory is not None:
                    self.directory.append_round(record)
                    if number == self.rounds or time.perf_counter() - saved >= self.checkpoint_seconds:
                        self._save()
                        saved = time.perf_counter()
                if progress is not None:
                    progress(number, self.rounds, record.get("accuracy", {}).get("mean"))
            self._finish()
        return self.summary

    def _round(self, number: int, started: float) -> dict[str, Any]:
        evaluate = self._evaluates(number)
        with self._timed():
            done = self.server.round(number, measure=self.evaluation.split if evaluate else None)
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
        self._done = number
        self.history.append(record)
        return record

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
        before = self.server.evaluate(settings.split, ids, number, outputs, never_used=unused)
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
        if self.evaluation.weights == "uniform":
            return None
        sizes = {c.id: c.split(self.evaluation.split) for c in self.federation}
        return {client: float(len(split)) for client, split in sizes.items() if split is not None}

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
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
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
            split, rounds = self.evaluation.split, tally.taken_part
            table = client_table(self.federation, split, before, after, rounds, seconds, tally.client_domains)
            self.directory.write_clients(*table)
            self.directory.write_summary(self.summary)

    @property
    def client_metrics(self) -> Metrics:
        """Each client's metrics, as the summary is made of: client id -> name -> value; see ``evaluation.last``."""
        return self._tally.metrics

    def predict(self, client: str, x: Tensor | NDArray[Any], domain: Tensor | NDArray[Any] | None = None) -> Tensor:
        """What one client's own model says of new inputs, as in evaluation.

        Args:
            client: its id.
            x: ``(samples, ...)``, inputs of the client's shape.
            domain: ``(samples,)`` domain ids, for methods that need them.

        Returns:
            Logits ``(samples, C)``, or values.

        Raises:
            PerfedError: an unknown client, inputs of another shape, no domains, or a method that projects the data.
        """
        cohort, method = self._own_model(client), self.server.setup.method
        shape, x = self.server.engine.clients[client].input_shape, torch.as_tensor(x)
        if method.changes_data:
            raise PerfedError(f"{self.name} projects a client's samples together; it has no model for new ones")
        if tuple(x.shape[1:]) != shape:
            raise PerfedError(f"client '{client}' has inputs of shape {shape}, not {tuple(x.shape[1:])}")
        if domain is None and (method.needs_domains or cohort.per_domain):
            raise PerfedError(f"{self.name} needs the domain of every sample")
        cohort.domain = None if domain is None else torch.as_tensor(domain)[None].to(cohort.device)
        trained = self.federation.domains_in("train")
        return predict(method, cohort, x[None].to(cohort.device, cohort.dtype), trained)[0]

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
        }
        self._saved = self._done
        self.directory.save(self._done, self.server.state.tree(), engine.states, engine.changed, progress)
        engine.changed.clear()

    def restore(self) -> None:
        """Go back to the last whole checkpoint of the directory; to the start if there is none."""
        assert self.directory is not None
        found = self.directory.load()
        if found is None:
            self.directory.truncate_rounds(-1)
            return
        timer = self.server.selection.timer
        if found.progress.get("data", self.federation.fingerprint) != self.federation.fingerprint:
            raise PerfedError(
                f"{self.directory.path}: this run was on other clients, samples or targets than those of "
                f"'{self.federation.name}'; continue it with the same (in Python, resume(..., federation=...))"
            )
        if found.progress.get("trace", timer.fingerprint) != timer.fingerprint:
            raise PerfedError(f"{self.server.clock.trace.file}: this run followed a trace with other times")
        self.server.committed = self._saved = found.round
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
        self.notes += self.directory.truncate_rounds(found.round)


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
