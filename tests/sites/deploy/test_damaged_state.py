"""Files that a site and a server go on with, damaged: refused in one line, or taken as not there with a note."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from damage import DAMAGES

from perfed.data.reading import check_seal, read_json, seal
from perfed.errors import PerfedError
from perfed.sites.deploy.spending import LEDGER, RUNS, SECRET, LedgerLine, read_ledger
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.store import SiteStore
from perfed.sites.flower.transport import Answer

DAMAGED = pytest.mark.parametrize("damage", DAMAGES, ids=lambda how: how.__name__)
ADMITTED = [(number, f"train test {number:064x}") for number in (10_001, 20_001, 30_001)]


@pytest.fixture
def asked(tmp_path):
    """The list of what a site was asked in three exchanges."""
    with SiteStore(tmp_path / RUNS, "run-1") as store:
        for number, content in ADMITTED:
            assert store.admit_request(number, content)
            store.save_exchange(number, {"weight": torch.ones(2)}, b"reply")
        return store.path / "asked"


def test_a_whole_list_admits_each_exchange_with_three_payloads(asked):
    with asked.open("a") as file:
        file.write("40001 train te")  # a process that was killed while it wrote
    with SiteStore(asked.parents[1], "run-1") as again:
        assert again.admit_request(*ADMITTED[0])
        assert again.admit_request(40_001, "train test other") and again.admit_request(40_001, "train test second")
        assert again.admit_request(40_001, "train test third") and not again.admit_request(40_001, "train test fourth")
    with SiteStore(asked.parents[1], "run-1") as again:
        assert again.admit_request(40_001, "train test third") and not again.admit_request(40_001, "train test fourth")


@DAMAGED
def test_a_damaged_list_of_what_was_asked_is_refused(asked, damage):
    damage(asked)
    with pytest.raises(PerfedError, match=r"asked: .*; the server could repeat exchanges more often") as error:
        SiteStore(asked.parents[1], "run-1")
    assert "\n" not in str(error.value)


def test_a_list_of_another_run_is_refused(asked):
    with SiteStore(asked.parents[1], "run-2") as other:
        other.admit_request(10_001, "train test other")
    shutil.copy(other.path / "asked", asked)
    with pytest.raises(PerfedError, match="2 of 3 lines are missing"):
        SiteStore(asked.parents[1], "run-1")


def test_a_list_without_checksums_is_refused(asked):
    asked.write_text("".join(f"{number} {content}\n" for number, content in ADMITTED))
    with pytest.raises(PerfedError, match="line 1 has changed"):
        SiteStore(asked.parents[1], "run-1")


@DAMAGED
def test_a_damaged_ledger_is_refused(asked, tmp_path, damage):
    (asked.parent / SECRET).write_bytes(bytes(32))
    answers = {str(number): content for number, content in ADMITTED}
    lines = [
        LedgerLine(run, "x", "study", "sample", 1e-3, 2.0, 1, {"1": 3}, answers=answers) for run in ("run-0", "run-1")
    ]
    (tmp_path / LEDGER).write_text(json.dumps([seal(vars(line)) for line in lines], indent=1) + "\n")
    (asked.parent / "x.noted").write_text(str(lines[0].count))
    assert [line.run for line in read_ledger(tmp_path)] == ["run-0", "run-1"]
    damage(tmp_path / LEDGER)
    with pytest.raises(PerfedError, match=LEDGER) as error:
        read_ledger(tmp_path)
    assert "\n" not in str(error.value)


@DAMAGED
def test_a_sealed_file_that_is_damaged_is_refused(tmp_path, damage):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(seal({"run": "run-1", "numbers": [1, 2.5], "by": {"3": None}}), indent=1) + "\n")
    assert check_seal(read_json(file), file) == {"run": "run-1", "numbers": [1, 2.5], "by": {"3": None}}
    damage(file)
    with pytest.raises(PerfedError, match=r"run\.json"):
        check_seal(read_json(file), file)


def test_answers_of_another_run_are_asked_again(tmp_path):
    Journal(tmp_path / "one", "run-1").write(10_001, [Answer("north", b"reply", "", 1.0)])
    (tmp_path / "one").rename(tmp_path / "other")
    journal = Journal(tmp_path / "other", "run-2")
    assert journal.load_answers(10_001) is None and "it is of run 'run-1'" in journal.notes[0]
