"""States of clients beyond a number of bytes are on disk: the same bits, no more memory, no file too many."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from engines import blobs, difference, make, serve
from faults import full_after

from perfed import tree
from perfed.codec import encode
from perfed.engine.engine import InProcessEngine
from perfed.engine.states import States
from perfed.errors import PerfedError
from perfed.training.plan import Plan

CPU = torch.device("cpu")
SIZES = (12, 7, 5, 9, 6, 8)


def a_state(value: float, numbers: int = 100) -> dict:
    return {"model": {"b": torch.full((numbers,), value), "a": torch.zeros(0)}, "set": {"empty": {}}}


def states_in(folder: Path, limit: int) -> States:
    states = States(limit, CPU)
    states.place = folder
    return states


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


class Seen:
    """Tensors that were seen: the bytes of those that are still in memory."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[torch.Tensor]] = []

    def add(self, state) -> None:
        tree.map_leaves(state, lambda _, tensor: self._refs.append(weakref.ref(tensor)) or tensor)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for ref in self._refs if (t := ref()) is not None)


class Watched(InProcessEngine):
    """Sees the states that clients hand in."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = Seen()

    def perform(self, task):
        for done in super().perform(task):
            for state in done.states.values():
                self.seen.add(state)
            yield done


def served(method: str, hold: int, **options):
    plan = Plan("stacked", chunk=2, threads=1, hold=hold)
    return serve(make(method), blobs(SIZES), plan=plan, runner=Watched, rate=0.7, **options)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedrep", "ditto", "local-full"])  # the last has every client's before round 1
def test_a_run_with_one_state_in_memory_has_the_bits_of_one_with_all(method, tmp_path, monkeypatch):
    real, read, most = States.read, Seen(), [0]

    def reading(self, number):
        found = real(self, number)
        if self.place is not None:
            read.add(found)
            most[0] = max(most[0], read.bytes)
        return found

    monkeypatch.setattr(States, "read", reading)
    plenty = served(method, 1 << 30)
    plenty.prepare()
    plenty.round(1)
    one = max(tree.count_bytes(state) for state in plenty.engine.states.values())
    few = served(method, one)
    few.put_states_in(tmp_path)
    few.prepare()
    few.round(1)
    for number in (2, 3):
        assert few.round(number, measure="test").after == plenty.round(number, measure="test").after
        assert few.engine.seen.bytes == few.engine.holder.bytes == one < plenty.engine.seen.bytes
        assert len(files(tmp_path)) == len(few.engine.states) - 1
    before = files(tmp_path)
    assert few.evaluate("test") == plenty.evaluate("test")
    assert files(tmp_path) == before and few.engine.seen.bytes == one
    assert one < most[0] <= 3 * one  # a chunk's two states, and that which is in memory
    assert difference(few, plenty) == 0
    assert few.engine.holder.overflowed and not plenty.engine.holder.overflowed


def test_a_round_that_fails_leaves_the_states_that_were_there(tmp_path):
    server = served("ditto", 0)
    server.put_states_in(tmp_path)
    server.prepare()
    server.round(1)
    before, snapshot = {i: encode(state) for i, state in server.engine.states.items()}, server.snapshot()
    there = files(tmp_path)
    server.round(2)
    assert {i: encode(state) for i, state in server.engine.states.items()} != before
    assert set(there) < set(files(tmp_path))  # somebody may go back to them
    server.restore(snapshot)
    assert {i: encode(state) for i, state in server.engine.states.items()} == before
    assert files(tmp_path) == there


@pytest.mark.long
def test_a_file_lasts_as_long_as_its_state(tmp_path):
    states = states_in(tmp_path, 0)
    kept = {number: states.keep(a_state(float(number))) for number in range(3)}
    assert len(files(tmp_path)) == 3 and states.bytes == 0
    assert kept[1]["model"]["b"].tolist() == [1.0] * 100 and set(kept[1]) == {"model", "set"}
    assert encode(kept[1]) == encode(a_state(1.0)) and states.keep(kept[1]) is kept[1]
    kept[1] = None
    assert len(files(tmp_path)) == 2
    del kept, states
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_those_that_were_made_first_go_to_disk_and_those_without_tensors_never(tmp_path):
    states = states_in(tmp_path, 900)
    empty = {"model": {}}
    assert states.keep(empty) is empty
    kept = [states.keep(a_state(float(number))) for number in range(4)]
    assert states.bytes == 800 and len(files(tmp_path)) == 2
    first = files(tmp_path)
    assert all(torch.equal(state["model"]["b"], torch.full((100,), float(n))) for n, state in enumerate(kept))
    assert files(tmp_path) == first and states.bytes == 800  # reading changes nothing
    del kept[2:]
    assert states.bytes == 0 and files(tmp_path) == first


def test_a_disk_that_takes_no_more_is_one_line_and_nothing_is_lost(tmp_path):
    states = states_in(tmp_path / "gone", 500)
    first = states.keep(a_state(1.0))
    with pytest.raises(PerfedError, match=r"gone: clients' states beyond plan.hold_megabytes = 0 cannot be written"):
        states.keep(a_state(2.0))
    assert first["model"]["b"].sum() == 100
    (tmp_path / "gone").mkdir()
    large = states.keep(a_state(3.0, 2000))  # beyond the bound by itself, and others before it
    assert len(files(tmp_path)) == 2 and large["model"]["b"].sum() == 6000
    with full_after(kib=1), pytest.raises(PerfedError, match=r"scratch-.*: File too large"):
        states.keep(a_state(4.0, 2000))
    assert len(files(tmp_path)) == 2 and first["model"]["b"].sum() == 100
    files(tmp_path)[0].unlink()
    with pytest.raises(PerfedError, match=r"1\.safetensors: the state of a client .* cannot be read: No such file"):
        first.read()


@pytest.mark.long
def test_a_fork_leaves_its_parents_files_alone(tmp_path):
    states = states_in(tmp_path, 0)
    kept = states.keep(a_state(5.0))
    child = os.fork()
    if child == 0:
        del kept, states
        gc.collect()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert kept["model"]["b"].sum() == 500
