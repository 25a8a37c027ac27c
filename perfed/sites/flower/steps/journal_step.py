"""The step of an exchange that writes the answers of sites to the server's journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfed.engine.executor import Exchange
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.transport import Answer
from perfed.sites.flower.wire import get_sequence_number


class JournalStep(ExchangeStep):
    """The step that reads the answers of a repeated exchange from the journal, and writes those of a new exchange.

    The engine passes new answers to :meth:`record_answers` before it turns them into results, so that they are on disk
    before any other step uses them.

    Args:
        journal: The journal of the run.
        notes: The list that receives a line for each damaged file.
        is_needed: Returns whether the answers of an exchange are stored; other exchanges may be repeated.

    Attributes:
        answers: The answers of the current exchange; ``None`` until sites have been asked.
    """

    def __init__(self, journal: Journal, notes: list[str], is_needed: Callable[[Exchange], bool]) -> None:
        self._journal, self._notes, self._is_needed = journal, notes, is_needed
        self._sequence = 0
        self._is_stored = False
        self.answers: Sequence[Answer] | None = None

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Read the answers of the exchange from the journal, if it has them, and return the task unchanged."""
        self._sequence, self._is_stored = get_sequence_number(task.exchange), self._is_needed(task.exchange)
        self.answers = self._journal.load_answers(self._sequence) if self._is_stored else None
        self._notes += self._journal.notes
        self._journal.notes.clear()
        return task

    def record_answers(self, answers: Sequence[Answer]) -> None:
        """Set the answers of the current exchange, and write them to the journal if they are needed there."""
        self.answers = answers
        if self._is_stored:
            self._journal.write(self._sequence, answers)
