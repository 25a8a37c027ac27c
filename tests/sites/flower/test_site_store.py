"""A site's states: an exchange is on disk as a whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource

import pytest
import torch
from engines import leaves
from faults import damages, flip, full_after, kept_on_disk, killed

from perfed.errors import PerfedError
from perfed.sites.flower.store import SiteStore


def state(number: int, size: int = 100) -> dict[str, object]:
    """A state that shows which exchange it is of."""
    return {"embedding": {"weight": torch.full((size,), float(number)).bfloat16()}, "none": {}}


def reply(number: int, size: int = 100) -> bytes:
    return number.to_bytes(4, "big") * size


@pytest.fixture
def store(tmp_path):
    with SiteStore(tmp_path / "north", "flic-1") as opened:
        yield opened


def same(found, expected) -> bool:
    one, other = dict(leaves(found)), dict(leaves(expected))
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def file_of(store: SiteStore, number: int):
    (file,) = store.path.glob(f"*{number}.exchange")
    return file


def test_states_and_replies_come_back(store, tmp_path):
    assert store.list_sequences() == [] and store.load_state(0) is None and store.load_reply(10_000) is None
    store.save_exchange(10_000, state(1), b"")
    store.save_exchange(20_001, state(2), reply(2))
    assert same(store.load_state(10_000), state(1)) and same(store.load_state(20_001), state(2))
    assert store.load_reply(10_000) == b"" and store.load_reply(20_001) == reply(2)
    store.close()
    with SiteStore(tmp_path / "north", "flic-1") as again:
        assert again.list_sequences() == [10_000, 20_001]
        assert same(again.load_state(20_001), state(2)) and again.load_reply(20_001) == reply(2)
    with SiteStore(tmp_path / "north", "flic-2") as other:
        assert other.list_sequences() == []


def test_a_state_has_the_history_that_it_was_stored_with(store):
    """States of older versions have none: then states of different exchanges have different ones."""
    store.save_exchange(10_001, state(1), b"", b"history")
    store.save_exchange(20_001, state(2), b"")
    store.save_exchange(30_001, state(3), b"")
    assert store.load_history(0) == b"" and store.load_history(10_001) == b"history"
    assert len({store.load_history(number) for number in (0, 10_001, 20_001, 30_001)}) == 4
    with pytest.raises(PerfedError, match="the state after exchange 40001 is missing"):
        store.load_history(40_001)


def test_a_state_that_is_not_there_is_named(store):
    with pytest.raises(PerfedError, match=r"10001\.exchange: the state after exchange 10001 is missing"):
        store.load_state(10_001)


@pytest.mark.parametrize("number", [0, -1])
def test_the_initial_state_is_nobodys_to_write(store, number):
    with pytest.raises(PerfedError, match=f"exchange {number} cannot be stored"):
        store.save_exchange(number, state(1), b"")


def test_it_would_be_there_after_a_power_cut(store, monkeypatch):
    done = kept_on_disk(monkeypatch)
    store.save_exchange(1, state(1), b"")
    assert done == ["content of 000000000001.exchange", "000000000001.exchange", "flic-1"]


def test_a_second_time_replaces_the_first(store):
    store.save_exchange(10_000, state(1), reply(1))
    store.save_exchange(10_000, state(2), reply(2))
    assert same(store.load_state(10_000), state(2)) and store.load_reply(10_000) == reply(2)


def test_what_is_neither_kept_nor_the_newest_is_forgotten(store):
    for number in (9_999, 10_000, 10_001, 100_000):
        store.save_exchange(number, state(number), b"")
    store.remove_exchanges([10_000, 77])
    assert store.list_sequences() == [10_000, 100_000]
    store.remove_exchanges([])
    assert store.list_sequences() == [100_000]
    assert len(list(store.path.iterdir())) == 1


@pytest.mark.parametrize(
    "run", ["", "..", ".", "../other", "a/b", "/etc", "a\0", "a\n", ".hidden", "-x", "é", "a" * 101]
)
def test_a_run_that_is_no_name_is_refused(tmp_path, run):
    with pytest.raises(PerfedError, match="is not a valid id of a run"):
        SiteStore(tmp_path / "north", run)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "north").write_text("a file")
    with pytest.raises(PerfedError, match=r"north/flic-1: a site's states cannot be stored there: Not a directory"):
        SiteStore(tmp_path / "north", "flic-1")


def attempt(path, said) -> None:
    try:
        SiteStore(path, "flic-1").close()
        said.put("opened")
    except PerfedError as error:
        said.put(str(error))


@pytest.mark.long
def test_one_process_works_on_it(store):
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    for expected in ("another process is working on this site's states", "opened"):
        process = context.Process(target=attempt, args=(store.path.parent, said))
        process.start()
        process.join()
        assert expected in said.get()
        store.close()


def test_every_damage_is_found(store):
    store.save_exchange(10_000, state(1), reply(1))
    file = file_of(store, 10_000)
    whole = file.read_bytes()
    for number, bad in enumerate(damages(whole), start=1):
        file.write_bytes(bad)
        with pytest.raises(PerfedError, match=r"000000010000\.exchange is damaged \(.*\)$"):
            store.load_state(10_000)
        assert store.load_reply(10_000) is None
        assert len(store.notes) == number and "exchange 10000 is done again" in store.notes[-1]
    store.save_exchange(10_000, state(1), reply(1))
    assert file.read_bytes() == whole


def test_files_that_have_changed_places_are_found(store, tmp_path):
    store.save_exchange(10_000, state(1), reply(1))
    store.save_exchange(20_000, state(2), reply(2))
    file_of(store, 10_000).write_bytes(file_of(store, 20_000).read_bytes())
    with pytest.raises(PerfedError, match=r"10000\.exchange is damaged \(it is of exchange 20000 of run 'flic-1'\)"):
        store.load_state(10_000)
    with SiteStore(tmp_path / "north", "flic-2") as other:
        os.link(file_of(store, 20_000), other.path / file_of(store, 20_000).name)
        with pytest.raises(PerfedError, match="of run 'flic-1'"):
            other.load_state(20_000)


def test_one_bit_of_a_weight_is_noticed(store):
    store.save_exchange(10_000, state(1, 1000), reply(1))
    flip(file_of(store, 10_000), file_of(store, 10_000).stat().st_size - 1000)
    with pytest.raises(PerfedError, match="changed"):
        store.load_state(10_000)


def test_a_full_disk_leaves_what_was_there(store):
    store.save_exchange(10_000, state(1), reply(1))
    before = {file.name: file.read_bytes() for file in store.path.iterdir()}
    for number in (10_000, 20_000):
        with full_after(kib=64), pytest.raises(OSError, match=r"000000.0000\.exchange"):
            store.save_exchange(number, state(2, 100_000), reply(2))
        assert {file.name: file.read_bytes() for file in store.path.iterdir()} == before
    store.save_exchange(20_000, state(2, 100_000), reply(2))
    assert store.load_reply(20_000) == reply(2)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_only_at_the_end_leaves_what_was_there(store, monkeypatch, call):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store.save_exchange(10_000, state(1), reply(1))
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"No space left on device: '.*10000\.exchange'"):
        patch.setattr(os, call, full)
        store.save_exchange(10_000, state(2), reply(2))
    assert same(store.load_state(10_000), state(1)) and store.load_reply(10_000) == reply(1)
    assert len(list(store.path.iterdir())) == 1


@pytest.mark.long
def test_sigkill_at_any_moment_leaves_whole_exchanges(tmp_path):
    draw, begun = random.Random(0), 0
    for attempt in range(40):
        opened: list[SiteStore] = []

        def put(number: int, opened: list[SiteStore] = opened) -> None:
            if not opened:
                opened.append(SiteStore(tmp_path, "run"))
            opened[0].save_exchange(number, state(number % 200, 100_000), reply(number, 10_000))
            opened[0].remove_exchanges([number - 1])

        last = killed(put, draw.uniform(0, 0.02), first=attempt * 100_000 + 1)
        begun += any(tmp_path.glob("run/.*.tmp"))
        with SiteStore(tmp_path, "run") as store:
            found = store.list_sequences()
            assert last in found and found[-1] <= last + 1  # older ones may not have been forgotten yet
            for number in found:
                assert same(store.load_state(number), state(number % 200, 100_000))
                assert store.load_reply(number) == reply(number, 10_000)
            assert not store.notes and not list(store.path.glob(".*"))
    assert begun > 5  # some were killed in the midst of writing


@pytest.mark.long
def test_sigkill_while_one_exchange_is_written_again_and_again(tmp_path):
    draw = random.Random(1)
    for _ in range(40):
        opened: list[SiteStore] = []

        def put(number: int, opened: list[SiteStore] = opened) -> None:
            if not opened:
                opened.append(SiteStore(tmp_path, "run"))
            opened[0].save_exchange(7, state(number % 200, 100_000), reply(number % 200, 10_000))

        last = killed(put, draw.uniform(0, 0.01))
        with SiteStore(tmp_path, "run") as store:
            number = int.from_bytes(store.load_reply(7)[:4], "big")
            assert number in (last % 200, (last + 1) % 200)
            assert same(store.load_state(7), state(number, 100_000)) and store.load_reply(7) == reply(number, 10_000)
