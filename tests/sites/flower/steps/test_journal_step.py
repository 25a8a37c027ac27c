"""The journal as a step: on disk before any other step sees an answer, and asked no second time."""

from __future__ import annotations

import pytest
import torch
from exchanges import chunk_of, run_steps, task_of

from perfed.engine.steps.step import ExchangeStep
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.steps.journal_step import JournalStep
from perfed.sites.flower.transport import Answer
from perfed.sites.flower.wire import get_sequence_number

ANSWERS = [Answer("a", b"reply", "", 1.5), Answer("b", None, "no answer", 30.0)]
TASK = task_of("ab")
SEQUENCE = get_sequence_number(TASK.exchange)


class Ask(ExchangeStep):
    """Gives the journal's step the answers, as an engine does."""

    def __init__(self, step: JournalStep) -> None:
        self.step = step

    def send(self, task):
        self.answers_before = self.step.answers
        if self.answers_before is None:
            self.step.record_answers(ANSWERS)
        return task


@pytest.mark.parametrize("used", [1, 0])
def test_answers_are_on_disk_before_another_step_sees_them(used, tmp_path):
    class Look(ExchangeStep):
        def receive(self, result):
            seen.append(Journal(tmp_path).load_answers(SEQUENCE))
            return result

        def collect(self, replies):
            seen.append(Journal(tmp_path).load_answers(SEQUENCE))
            return replies

    seen: list = []
    step = JournalStep(Journal(tmp_path), [], lambda exchange: True)
    # The last step of the list sends last and receives first; Ask has no part in receiving.
    run_steps([Look(), step, Ask(step)], [chunk_of({"a": {"w": torch.zeros(1)}})] * used, TASK)
    assert seen == [ANSWERS] * (used + 1)


def test_answers_of_an_exchange_that_was_done_are_read_and_not_written_again(tmp_path):
    Journal(tmp_path).write(SEQUENCE, ANSWERS)
    journal = Journal(tmp_path)
    journal.write = lambda *arguments: pytest.fail("written again")
    step = JournalStep(journal, [], lambda exchange: True)
    ask = Ask(step)
    run_steps([step, ask], [chunk_of({"a": {"w": torch.zeros(1)}})], TASK)
    assert ask.answers_before == ANSWERS


def test_other_exchanges_are_neither_read_nor_written(tmp_path):
    Journal(tmp_path).write(SEQUENCE, ANSWERS[:1])
    step = JournalStep(Journal(tmp_path), [], lambda exchange: False)
    ask = Ask(step)
    run_steps([step, ask], [], TASK)
    assert ask.answers_before is None and Journal(tmp_path).load_answers(SEQUENCE) == ANSWERS[:1]


def test_a_damaged_file_is_noted_and_its_exchange_is_asked_again(tmp_path):
    Journal(tmp_path).write(SEQUENCE, ANSWERS)
    (file,) = tmp_path.glob("*.answers")
    file.write_bytes(file.read_bytes()[:-1])
    notes: list[str] = []
    step = JournalStep(Journal(tmp_path), notes, lambda exchange: True)
    ask = Ask(step)
    run_steps([step, ask], [], TASK)
    assert ask.answers_before is None and len(notes) == 1 and "is damaged" in notes[0]
    assert Journal(tmp_path).load_answers(SEQUENCE) == ANSWERS
