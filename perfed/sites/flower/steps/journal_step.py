"""The step that keeps the answers of sites in the server's journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfed.engine.executor import Exchange
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.transport import Answer
from perfed.sites.flower.wire import get_sequence_number


class JournalStep(ExchangeStep):
    """Looks up the answers of an exchange that was done before, and writes those of a new one.

    The engine gives it new answers (:meth:`record_answers`) before it makes results of them, so that they are on disk before any
    step sees them.

    Args:
        journal: the journal of the run.
        notes: receives a line for each file that is damaged.
        is_needed: returns whether the answers of an exchange are kept; others may be asked again.

    Attributes:
        answers: the answers of the current exchange; ``None`` until sites have been asked.
    """

    def __init__(self, journal: Journal, notes: list[str], is_needed: Callable[[Exchange], bool]) -> None:
        self._journal, self._notes, self._is_needed = journal, notes, is_needed
        self._sequence = 0
        self._is_kept = False
        self.answers: Sequence[Answer] | None = None

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Look for the answers in the journal."""
        self._sequence, self._is_kept = get_sequence_number(task.exchange), self._is_needed(task.exchange)
        self.answers = self._journal.load_answers(self._sequence) if self._is_kept else None
        self._notes += self._journal.notes
        self._journal.notes.clear()
        return task

    def record_answers(self, answers: Sequence[Answer]) -> None:
        """Take the answers of sites that have been asked, and write them if they are to be kept."""
        self.answers = answers
        if self._is_kept:
            self._journal.write(self._sequence, answers)
