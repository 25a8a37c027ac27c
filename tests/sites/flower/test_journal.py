"""The server's journal: what was accepted is on disk, whole, or as if it had never come."""

from __future__ import annotations

import random

import pytest
from faults import damages, full_after, kept_on_disk, killed

from perfed.sites.flower.journal import Journal
from perfed.sites.flower.transport import Answer

ANSWERS = [
    Answer("south", b"\0\1\2" * 1000, "", 0.1 + 0.2),
    Answer("a/b é", None, "it has sent NaN", 3.25),
    Answer("__metadata__", b"", "", 1e-9),
    Answer("north", b"reply", "", 30.0),
]


def answers_of(number: int) -> list[Answer]:
    """Some that show which exchange they are of."""
    return [Answer(site, number.to_bytes(4, "big") * 50_000, "", float(number)) for site in ("north", "south")]


def test_answers_come_back_with_order_times_and_failures(tmp_path):
    journal = Journal(tmp_path / "run" / "journal")
    assert journal.load_answers(0) is None
    journal.write(0, ANSWERS)
    journal.write(10_001, [])
    again = Journal(tmp_path / "run" / "journal")
    assert again.load_answers(0) == ANSWERS and again.load_answers(10_001) == [] and again.load_answers(10_002) is None
    assert not again.notes


def test_they_would_be_there_after_a_power_cut(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal")
    done = kept_on_disk(monkeypatch)
    journal.write(1, ANSWERS)
    assert done == ["content of 000000000001.answers", "000000000001.answers", "journal"]


def test_a_second_time_replaces_the_first(tmp_path):
    journal = Journal(tmp_path)
    journal.write(1, answers_of(1))
    journal.write(1, answers_of(2))
    assert journal.load_answers(1) == answers_of(2) and len(list(tmp_path.iterdir())) == 1


def test_what_a_checkpoint_holds_is_forgotten(tmp_path):
    journal = Journal(tmp_path)
    for number in (0, 9_999, 10_000, 20_000, 100_000):
        journal.write(number, ANSWERS)
    (tmp_path / "notes.answers").write_text("mine")
    journal.remove_before(20_000)
    assert [number for number in (0, 9_999, 10_000, 20_000, 100_000) if journal.load_answers(number)] == [
        20_000,
        100_000,
    ]
    assert (tmp_path / "notes.answers").exists()


def test_every_damage_is_as_if_it_had_not_been_there(tmp_path):
    journal = Journal(tmp_path)
    journal.write(10_000, ANSWERS)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for number, bad in enumerate(damages(whole), start=1):
        file.write_bytes(bad)
        assert journal.load_answers(10_000) is None
        assert len(journal.notes) == number and "exchange 10000 is asked again" in journal.notes[-1]
        assert str(file) in journal.notes[-1] and "\n" not in journal.notes[-1]
    journal.write(10_000, ANSWERS)
    assert file.read_bytes() == whole and journal.load_answers(10_000) == ANSWERS
    file.rename(tmp_path / "000000020000.answers")
    assert journal.load_answers(20_000) is None and "of exchange 10000" in journal.notes[-1]


def test_a_file_that_cannot_be_read_is_asked_again(tmp_path):
    journal = Journal(tmp_path)
    (tmp_path / "000000000001.answers").mkdir()
    assert journal.load_answers(1) is None and "directory" in journal.notes[0]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    journal = Journal(tmp_path)
    journal.write(1, ANSWERS)
    for number in (1, 2):
        with full_after(kib=64), pytest.raises(OSError, match=rf"00000{number}\.answers"):
            journal.write(number, answers_of(number))
        assert journal.load_answers(1) == ANSWERS and len(list(tmp_path.iterdir())) == 1


@pytest.mark.long
def test_sigkill_at_any_moment_leaves_whole_exchanges(tmp_path):
    draw, begun = random.Random(0), 0
    for attempt in range(40):
        journal = Journal(tmp_path / str(attempt))
        last = killed(lambda number, journal=journal: journal.write(number, answers_of(number)), draw.uniform(0, 0.01))
        begun += any(journal.path.glob(".*.tmp"))
        again = Journal(journal.path)
        for number in range(1, last + 1):
            assert again.load_answers(number) == answers_of(number)
        assert again.load_answers(last + 1) in (None, answers_of(last + 1)) and again.load_answers(last + 2) is None
        assert not again.notes and not list(journal.path.glob(".*"))
    assert begun > 5  # some were killed in the midst of writing
