"""The log of what leaves a site: complete, in order, and any change to it shows."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import time
from itertools import permutations
from pathlib import Path

import pytest
import torch
from faults import flip, full_after, killed

from perfed.errors import PerfedError
from perfed.sites.flower.audit_log import OutgoingLog
from perfed.sites.flower.hash_chain import BEGINNING, read_log, verify_log
from perfed.sites.flower.message import pack


def message(number: int, size: int = 3) -> bytes:
    header = {"run": "flic-1", "round": number, "program": "train", "sequence": number * 10_000, "site": "north"}
    return pack(header, {"shared": {"weight": torch.zeros(2, size).bfloat16()}, "n": torch.tensor(number), "e": {}})


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "outgoing.jsonl"


@pytest.fixture
def five(path) -> list[bytes]:
    """The lines of a log of five messages."""
    with OutgoingLog(path) as log:
        for number in range(1, 6):
            log.append(message(number))
    assert verify_log(path) is None
    return path.read_bytes().splitlines(keepends=True)


def notes(path: Path) -> list[str]:
    return [line["note"] for line in read_log(path) if "note" in line]


def test_a_line_says_what_the_message_holds(path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9 + 0.5)
    with OutgoingLog(path) as log:
        log.append(message(7))
    (line,) = read_log(path)
    assert (line["run"], line["round"], line["program"]) == ("flic-1", 7, "train")
    assert line["header"] == {"sequence": 70_000, "site": "north"}
    assert line["entries"] == [
        {"name": "e///empty", "shape": [0], "dtype": "float32"},
        {"name": "n", "shape": [], "dtype": "int64"},
        {"name": "shared/weight", "shape": [2, 3], "dtype": "bfloat16"},
    ]
    assert line["bytes"] == len(message(7)) and line["sha256"] == hashlib.sha256(message(7)).hexdigest()
    assert line["time"] == "2001-09-09T01:46:40.500+00:00"


def test_the_chain_is_what_anybody_can_compute(five):
    previous = "0" * 64
    assert previous == BEGINNING
    for line in five:
        entry = json.loads(line)
        said = entry.pop("hash")
        assert entry["previous"] == previous
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == said
        previous = said


def test_it_goes_on_where_it_was(path, five):
    with OutgoingLog(path) as log:
        assert log.head == json.loads(five[-1])["hash"]
        log.append(message(6))
        head = log.head
    assert [line["round"] for line in read_log(path)] == [1, 2, 3, 4, 5, 6]
    assert path.read_bytes().startswith(b"".join(five))
    assert verify_log(path) is None and verify_log(path, head) is None and verify_log(path, BEGINNING) is None


@pytest.mark.parametrize("at", range(5))
def test_a_changed_line_is_named(path, five, at):
    for old, new in ((b'"train"', b'"tests"'), (b'"bytes":', b'"bytes": '), (b'"round":', b'"round":1'), (b"{", b"[")):
        changed = five[at].replace(old, new, 1)
        assert changed != five[at]
        path.write_bytes(b"".join([*five[:at], changed, *five[at + 1 :]]))
        assert verify_log(path) == f"{path}: line {at + 1} has been changed"
        assert [line["round"] for line in read_log(path)] == list(range(1, at + 1))
        with pytest.raises(PerfedError, match=f"line {at + 1} has been changed; the log is not continued"):
            OutgoingLog(path)


def test_every_bit_counts(path, five):
    whole = b"".join(five)
    end = len(five[0]) + len(five[1])
    for position in (*range(len(five[0]), end, 7), end - 1):
        path.write_bytes(whole)
        flip(path, position)
        assert verify_log(path) == f"{path}: line 2 has been changed"


def test_a_line_changed_with_its_hash_breaks_the_next(path, five):
    entry = json.loads(five[1])
    del entry["hash"]
    entry["program"] = "nothing"
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    entry["hash"] = hashlib.sha256(text.encode()).hexdigest()
    five[1] = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(b"".join(five))
    assert verify_log(path) == (
        f"{path}: line 3 does not follow the line before it: lines were removed, added or reordered"
    )


@pytest.mark.parametrize("at", range(4))
def test_a_removed_or_doubled_line_is_named(path, five, at):
    path.write_bytes(b"".join(five[:at] + five[at + 1 :]))
    assert f"line {at + 1} does not follow" in verify_log(path)
    path.write_bytes(b"".join(five[: at + 1] + five[at:]))
    assert f"line {at + 2} does not follow" in verify_log(path)


def test_every_other_order_is_named(path, five):
    for order in permutations(range(5)):
        path.write_bytes(b"".join(five[number] for number in order))
        broken = next((at for at, number in enumerate(order, start=1) if at != number + 1), None)
        assert verify_log(path) is None if broken is None else f"line {broken} does not follow" in verify_log(path)


def test_lines_removed_at_the_end_show_to_who_knows_the_head(path, five):
    head = json.loads(five[-1])["hash"]
    path.write_bytes(b"".join(five[:3]))
    assert verify_log(path) is None
    assert verify_log(path, head) == f"{path}: lines at the end were removed: none of the 3 has the hash {head}"


def test_a_torn_last_line_is_mended_and_noted(path, five):
    for length in (*range(1, len(five[4]), 41), len(five[4]) - 1):
        path.write_bytes(b"".join(five[:4]) + five[4][:length])
        assert "line 5 is incomplete after a crash" in verify_log(path)
        assert len(read_log(path)) == 4
        with OutgoingLog(path) as log:
            log.append(message(6))
        assert verify_log(path) is None
        line = f"a line that a crash left incomplete was removed ({length} bytes); its message has not left"
        assert notes(path) == [line]
        assert [line.get("round") for line in read_log(path)] == [1, 2, 3, 4, None, 6]


def test_a_torn_only_line_is_mended(path):
    path.write_bytes(bytes(4096))  # as a power cut may leave it
    with OutgoingLog(path) as log:
        log.append(message(1))
    assert verify_log(path) is None and "4096 bytes" in notes(path)[0]


def test_a_clock_that_jumps_back_is_noted_and_changes_nothing(path, monkeypatch):
    with OutgoingLog(path) as log:
        for number, seconds in enumerate((1e9, 2e9, 1.5e9, 1.5e9, 1.6e9)):
            monkeypatch.setattr(time, "time", lambda seconds=seconds: seconds)
            log.append(message(number))
    monkeypatch.setattr(time, "time", lambda: 1e9)
    with OutgoingLog(path) as log:  # opened again, it still knows
        log.append(message(5))
    assert verify_log(path) is None
    assert [line["round"] for line in read_log(path) if "note" not in line] == [0, 1, 2, 3, 4, 5]
    assert ["note" in line for line in read_log(path)] == [False, False, True, False, False, False, True, False]
    assert notes(path)[0] == "the clock has jumped back: a line before this one says 2033-05-18T03:33:20.000+00:00"


def test_only_messages_leave(path):
    with OutgoingLog(path) as log:
        for body in (b"", b"the table itself", message(1)[:-1]):
            with pytest.raises(PerfedError):
                log.append(body)
    assert path.read_bytes() == b""


def test_the_line_is_on_disk_when_append_returns(path, monkeypatch):
    synced: list[bytes] = []
    sync = os.fsync

    def noting(handle: int) -> None:
        sync(handle)
        synced.append(path.read_bytes())

    with OutgoingLog(path) as log:
        monkeypatch.setattr(os, "fsync", noting)
        log.append(message(1))
    assert synced == [path.read_bytes()] != [b""]


def test_a_full_disk_leaves_the_log_as_it_was(path):
    with OutgoingLog(path) as log:
        while path.stat().st_size < 2048 - 700:
            log.append(message(1))
        before = path.read_bytes()
        with full_after(kib=2):
            for _ in range(2):
                with pytest.raises(OSError, match=r"outgoing\.jsonl"):
                    log.append(pack({"run": "x" * 1000}, {}))
                assert path.read_bytes() == before
        log.append(message(2))
        assert path.read_bytes().startswith(before) and verify_log(path) is None and not notes(path)


def test_a_disk_that_is_full_only_at_the_end_leaves_the_log_as_it_was(path, five, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with OutgoingLog(path) as log:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(os, "fsync", full)
            log.append(message(6))
        assert path.read_bytes() == b"".join(five)
        log.append(message(7))
    assert [line["round"] for line in read_log(path)] == [1, 2, 3, 4, 5, 7] and verify_log(path) is None


def attempt(path: Path, said) -> None:
    try:
        OutgoingLog(path).close()
        said.put("opened")
    except PerfedError as error:
        said.put(str(error))


@pytest.mark.long
def test_one_process_writes_it_and_others_read(path):
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    log = OutgoingLog(path)
    log.append(message(1))
    for expected in ("another process is writing this log", "opened"):
        process = context.Process(target=attempt, args=(path, said))
        process.start()
        process.join()
        assert expected in said.get()
        assert len(read_log(path)) == 1
        log.close()


def test_a_broken_log_is_let_go(path, five):
    path.write_bytes(b"".join(five[1:]))
    for _ in range(2):  # neither held by the first attempt nor mended by it
        with pytest.raises(PerfedError, match="line 1 does not follow"):
            OutgoingLog(path)
    assert path.read_bytes() == b"".join(five[1:])


def test_nothing_is_written_to_a_log_that_was_closed(path, tmp_path):
    with OutgoingLog(path) as log:
        pass
    others = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(4)]
    for other in others:  # one of them has the number that the log's handle had
        os.write(other, b"precious")
    with pytest.raises(OSError, match="outgoing"):
        log.append(message(1))
    for other in others:
        os.close(other)
    assert path.read_bytes() == b""
    assert [(tmp_path / str(number)).read_bytes() for number in range(4)] == [b"precious"] * 4


def test_a_log_that_is_not_there_is_named(path):
    for ask in (read_log, verify_log):
        with pytest.raises(PerfedError, match="there is no log"):
            ask(path)
    assert not path.exists()


@pytest.mark.long
def test_sigkill_at_any_moment_loses_nothing_that_was_written(path):
    draw, messages, torn = random.Random(0), {}, 0
    for attempt in range(40):
        opened: list[OutgoingLog] = []

        def append(number: int, opened: list[OutgoingLog] = opened) -> None:
            if not opened:
                opened.append(OutgoingLog(path))
            opened[0].append(message(number))

        first = attempt * 100_000 + 1
        last = killed(append, draw.uniform(0, 0.01), first)
        messages[first] = last
        torn += not path.read_bytes().endswith(b"\n")
    OutgoingLog(path).close()
    assert verify_log(path) is None
    found = [line["round"] for line in read_log(path) if "note" not in line]
    for first, last in messages.items():
        mine = [number for number in found if first <= number < first + 100_000]
        assert mine in (list(range(first, last + 1)), list(range(first, last + 2)))
    assert len(notes(path)) == torn
