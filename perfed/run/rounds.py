"""The execution of rounds: training, evaluation, and the record of each round."""

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
    """A class that executes the rounds of a run and updates its progress.

    Args:
        server: server of the run.
        evaluator: evaluates the personal models of clients.
        snapshots: settings that decide which arrays of methods are stored.
        rounds: number of rounds of the run.
    """

    def __init__(self, server: Server, evaluator: Evaluator, snapshots: Snapshots, rounds: int) -> None:
        self._server, self._evaluator, self._snapshots, self._rounds = server, evaluator, snapshots, rounds

    def prepare(self, progress: RunProgress) -> RoundRecord:
        """Execute the preparation before round 1 and return its outcome."""
        with _measure_training_time(progress):
            outcome = self._server.prepare()
        progress.done = 0
        return outcome

    def run_next(self, progress: RunProgress, started: float) -> tuple[RoundRecord, dict[str, Any]]:
        """Execute the next round.

        Args:
            progress: progress of the run, which is updated.
            started: start time of the run by :func:`time.perf_counter`, less the time before it was resumed.

        Returns:
            The outcome of the round, and its line of ``rounds.jsonl``.
        """
        evaluator, totals, number = self._evaluator, progress.totals, progress.done + 1
        due = evaluator.is_due(number)
        with _measure_training_time(progress):
            measure = evaluator.split if due else None
            outcome = self._server.round(number, measure=measure, keep_outputs=evaluator.keeps_outputs(number, "after"))
            totals.add(outcome)
            if number == self._rounds:
                outcome.bytes_down += self.settle_clients(progress, number)
        progress.done = number
        record: dict[str, Any] = {
            "round": number,
            "wall_seconds": time.perf_counter() - started,
            "training_seconds": progress.training,
            "virtual_time": totals.virtual_time,
            "participants": outcome.participants,
            "train_loss": outcome.train_loss,
        }
        measured = due and evaluator.has_models(outcome)
        if not self._snapshots.keeps_round(number, measured):
            outcome.arrays = {}
        if measured:
            record.update(evaluator.evaluate_round(number, outcome, totals))
        if any(outcome.counts.values()):
            record["counts"] = {name: ids for name, ids in outcome.counts.items() if ids}
        record.update(exchanges=outcome.exchanges, bytes_up=outcome.bytes_up, bytes_down=outcome.bytes_down)
        return outcome, record

    def settle_clients(self, progress: RunProgress, number: int) -> int:
        """Let clients that no round has used fit their personal parameters; return the bytes sent to them."""
        return self._server.settle(progress.totals.never_used(self._server.federation.ids), number)

    def evaluate_final_models(
        self, progress: RunProgress, history: Sequence[Mapping[str, Any]], best: BestModels
    ) -> tuple[Mapping[str, Mapping[str, Any]], list[str]]:
        """Evaluate the final models, unless they are those of the last evaluated rounds.

        Returns:
            Their outputs as arrays to be stored, and notes.
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
    """Add the time in the context to the training time."""
    started = time.perf_counter()
    yield
    progress.training += time.perf_counter() - started
