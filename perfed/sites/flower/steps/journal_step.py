"""The step that keeps the answers of sites in the server's journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfed.engine.executor import ChunkResult, Exchange
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.method.exchange import Replies
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.transport import Answer
from perfed.sites.flower.wire import sequence_of


class JournalStep(ExchangeStep):
    """Looks up the answers of an exchange that was done before, and writes those of a new one.

    It is the step nearest to the network: answers are on disk before any other step sees them.

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
        self._unwritten = False
        self.answers: Sequence[Answer] | None = None

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Look for the answers in the journal."""
        self._sequence = sequence_of(task.exchange)
        self._unwritten = self._is_needed(task.exchange)
        self.answers = self._journal.answers(self._sequence) if self._unwritten else None
        self._unwritten &= self.answers is None
        self._notes += self._journal.notes
        self._journal.notes.clear()
        return task

    def receive(self, result: ChunkResult) -> ChunkResult:
        """Write the answers, when the first of them is used."""
        self.write()
        return result

    def collect(self, replies: Replies) -> Replies:
        """Write the answers, if none of them was used."""
        self.write()
        return replies

    def write(self) -> None:
        """Write the answers, if they are to be kept and are not in the journal yet."""
        if self._unwritten and self.answers is not None:
            self._journal.write(self._sequence, self.answers)
            self._unwritten = False
