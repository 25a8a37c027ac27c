"""One round after the other: trained, measured, and said in a record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perfed.engine.record import RoundRecord
from perfed.engine.server import Server
from perfed.run.callbacks.best import BestModels
from perfed.run.evaluation import Evaluator
from perfed.run.round_log import was_evaluated
from perfed.run.settings import Snapshots
from perfed.run.totals import RunProgress


class RoundRunner:
    """Does a run's rounds, and counts them in its progress.

    Args:
        server: of the run.
        evaluator: measures the clients' own models.
        snapshots: which of the arrays that methods show are kept.
        rounds: of the whole run.
    """

    def __init__(self, server: Server, evaluator: Evaluator, snapshots: Snapshots, rounds: int) -> None:
        self._server, self._evaluator, self._snapshots, self._rounds = server, evaluator, snapshots, rounds

    def prepare(self, progress: RunProgress) -> RoundRecord:
        """Do what comes before round 1, and return what came back."""
        with _measure_training_time(progress):
            done = self._server.prepare()
        progress.done = 0
        return done

    def run_next(self, progress: RunProgress, started: float) -> tuple[RoundRecord, dict[str, Any]]:
        """Do the next round.

        Args:
            progress: of the run; the round is counted in it.
            started: when the run was, less what earlier sittings took, by :func:`time.perf_counter`.

        Returns:
            What came back, and the line of ``rounds.jsonl``.
        """
        evaluator, totals, number = self._evaluator, progress.totals, progress.done + 1
        due = evaluator.is_due(number)
        with _measure_training_time(progress):
            measure = evaluator.split if due else None
            done = self._server.round(number, measure=measure, keep_outputs=evaluator.keeps_outputs(number, "after"))
            totals.add(done)
            if number == self._rounds:
                done.bytes_down += self.settle_clients(progress, number)
        progress.done = number
        record: dict[str, Any] = {
            "round": number,
            "wall_seconds": time.perf_counter() - started,
            "training_seconds": progress.training,
            "virtual_time": totals.virtual_time,
            "participants": done.participants,
            "train_loss": done.train_loss,
        }
        measured = due and evaluator.has_models(done)
        if not self._snapshots.keeps_round(number, measured):
            done.arrays = {}
        if measured:
            record.update(evaluator.evaluate_round(number, done, totals))
        if any(done.counts.values()):
            record["counts"] = {name: ids for name, ids in done.counts.items() if ids}
        record.update(exchanges=done.exchanges, bytes_up=done.bytes_up, bytes_down=done.bytes_down)
        return done, record

    def settle_clients(self, progress: RunProgress, number: int) -> int:
        """Let clients that were never used fit what is their own, in the last round; return the bytes sent to them."""
        return self._server.settle(progress.totals.never_used(self._server.federation.ids), number)

    def evaluate_final_models(
        self, progress: RunProgress, history: Sequence[Mapping[str, Any]], best: BestModels
    ) -> tuple[Mapping[str, Mapping[str, Any]], list[str]]:
        """Measure the models that the run takes, where they are not those of the last evaluated rounds.

        Returns:
            What they say of every sample, as arrays to be kept, and notes.
        """
        settings, totals = self._evaluator.settings, progress.totals
        notes = [] if totals.taken_part else ["no client's reply was used in any round"]
        evaluated = was_evaluated(progress.done, history, settings, self._rounds)
        unmeasured = bool(progress.stopped_by) and not evaluated  # a callback ends any round
        if settings.stop != "last" or (unmeasured and settings.one_model_each):
            return self._evaluator.evaluate_best(best, progress.done, totals), notes
        if unmeasured:
            notes.append(f"training ended after round {progress.done}, and metrics are of evaluated rounds before it")
        return {}, notes


@contextmanager
def _measure_training_time(progress: RunProgress) -> Iterator[None]:
    """Add the time to that of training."""
    started = time.perf_counter()
    yield
    progress.training += time.perf_counter() - started
