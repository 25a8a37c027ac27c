"""The run directory: whole files or none, two checkpoints, and what happens when one of them is damaged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from engines import blobs, make, network

from perfed.errors import PerfedError
from perfed.run.checkpoint_files import Checkpoint
from perfed.run.directory import RESULTS, RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Evaluation, Snapshots
from perfed.system import write_atomic


def state(value: float) -> dict[str, object]:
    return {"model": {"head.weight": torch.full((2, 3), value)}, "empty": {}}


def save(run: RunDirectory, round_: int, *changed: str) -> None:
    """Clients "a" and "b" whose tensors hold the round; only ``changed`` are said to have changed."""
    clients = {client: state(round_ if client in changed else 0) for client in ("a", "b")}
    run.save(round_, {"shared": {"w": torch.tensor([float(round_)])}}, clients, set(changed), {"wall_seconds": 1.5})


def load(path: Path) -> Checkpoint:
    found = RunDirectory(path).load()
    assert found is not None
    return found


def three_checkpoints(path: Path) -> RunDirectory:
    """After rounds 1 to 3, client "a" changing in every round and "b" in none."""
    run = RunDirectory.create(path)
    for round_ in (1, 2, 3):
        save(run, round_, "a")
    return run


def names(path: Path) -> set[str]:
    folder = path / "checkpoint"
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


# Atomic writing ----------------------------------------------------------------------------------------------


def test_a_crash_while_writing_leaves_the_old_content(tmp_path, monkeypatch):
    file = tmp_path / "config.toml"
    write_atomic(file, "old")

    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("survivors", [0, 1, 2])
def test_a_crash_during_a_checkpoint_leaves_the_one_before(tmp_path, monkeypatch, survivors):
    """The process dies after ``survivors`` files of the third checkpoint (client, server, manifest)."""
    run = RunDirectory.create(tmp_path / "run")
    save(run, 1, "a")
    save(run, 2, "a")
    replace, done = os.replace, []

    def crash(source: Path, target: Path) -> None:
        if len(done) == survivors:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save(run, 3, "a")
    monkeypatch.undo()
    found = load(tmp_path / "run")
    assert found.round == 2
    assert found.notes == []
    assert float(found.clients["a"]["model"]["head.weight"][0, 0]) == 2


# What is kept ------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    assert run.load() is None
    progress = {"recent": [{"a": {"loss": 1 / 3, "mse": math.inf, "accuracy": math.nan}}], "taken_part": {"a": 2}}
    server = {"shared": {"w": torch.tensor([1.5, -0.0]), "n": torch.tensor(3)}, "anchors": {"mean": torch.ones(2, 2)}}
    run.save(7, server, {"a/1 ü": state(0.25)}, {"a/1 ü"}, progress)
    found = load(tmp_path / "run")
    assert found.round == 7
    assert found.server["shared"]["n"].dtype == torch.int64
    assert torch.equal(found.server["shared"]["w"], server["shared"]["w"])
    assert found.clients["a/1 ü"]["empty"] == {}
    assert found.progress["taken_part"] == {"a": 2}
    values = found.progress["recent"][0]["a"]
    assert values["loss"] == 1 / 3 and values["mse"] == math.inf and math.isnan(values["accuracy"])


def test_only_changed_clients_are_rewritten_and_two_checkpoints_kept(tmp_path):
    three_checkpoints(tmp_path / "run")
    assert names(tmp_path / "run") == {
        "state-000002.json",
        "state-000003.json",
        "server-000002.safetensors",
        "server-000003.safetensors",
        "clients/000000@000002.safetensors",  # client "a"
        "clients/000000@000003.safetensors",
        "clients/000001@000001.safetensors",  # client "b", written once
    }


def test_a_resumed_run_does_not_rewrite_unchanged_clients_either(tmp_path):
    three_checkpoints(tmp_path / "run")
    file = tmp_path / "run" / "checkpoint" / "clients" / "000001@000001.safetensors"
    written = file.stat().st_mtime_ns
    again = RunDirectory(tmp_path / "run")
    again.load()
    save(again, 4, "a")
    assert file.stat().st_mtime_ns == written
    assert "clients/000001@000004.safetensors" not in names(tmp_path / "run")
    assert load(tmp_path / "run").round == 4


def test_left_over_temporary_files_are_removed(tmp_path):
    run = three_checkpoints(tmp_path / "run")
    (run.checkpoints / ".server-000003.safetensors.1.tmp").write_bytes(b"half")
    save(run, 4, "a")
    assert not [name for name in names(tmp_path / "run") if name.endswith(".tmp")]


# Damage ------------------------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip, empty, Path.unlink], ids=["truncated", "flipped", "empty", "gone"])
@pytest.mark.parametrize(
    "name", ["server-000003.safetensors", "clients/000000@000003.safetensors", "state-000003.json"]
)
def test_a_damaged_checkpoint_falls_back_on_the_one_before_and_says_so(tmp_path, name, damage):
    three_checkpoints(tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint" / name)
    found = load(tmp_path / "run")
    assert found.round == 2
    assert float(found.server["shared"]["w"]) == 2
    if (tmp_path / "run" / "checkpoint" / "state-000003.json").exists():
        assert len(found.notes) == 1
        assert "state-000003.json is damaged" in found.notes[0] and "falling back" in found.notes[0]


def test_a_damaged_checkpoint_does_not_count_among_the_last_two(tmp_path):
    three_checkpoints(tmp_path / "run")
    truncate(tmp_path / "run" / "checkpoint" / "server-000003.safetensors")
    resumed = RunDirectory(tmp_path / "run")
    resumed.load()
    save(resumed, 2 + 3, "a")  # checkpoints go by time: the next one need not be of round 3
    truncate(tmp_path / "run" / "checkpoint" / "server-000005.safetensors")
    assert load(tmp_path / "run").round == 2


def test_all_checkpoints_damaged_is_an_error(tmp_path):
    three_checkpoints(tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoint").glob("server-*"):
        truncate(file)
    with pytest.raises(PerfedError, match=r"every checkpoint is damaged.*server-000003\.safetensors has changed"):
        RunDirectory(tmp_path / "run").load()


# Other files -------------------------------------------------------------------------------------------------


def test_rounds_after_the_checkpoint_and_a_torn_line_are_dropped(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    done = {"train_loss": float("nan"), "virtual_time": 1.0, "bytes_up": 8, "bytes_down": 8}
    for number in (1, 2, 3):
        run.append_round({"round": number, **done})
    file = tmp_path / "run" / "rounds.jsonl"
    with file.open("a") as torn:
        torn.write('{"round": 4, "train_lo')
    run.truncate_rounds(4)
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()] == [1, 2, 3]
    run.truncate_rounds(2)
    run.append_round({"round": 3, **done})
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert json.loads(file.read_text().splitlines()[0])["train_loss"] is None  # JSON has no NaN


def test_a_missing_metric_is_an_empty_cell(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_clients(["id", "accuracy"], [["a, b", 0.5], ["c", None], ["d", float("nan")]])
    assert (tmp_path / "run" / "clients.csv").read_text().splitlines() == ["id,accuracy", '"a, b",0.5', "c,", "d,"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_directory_with_results_is_refused(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(PerfedError, match="already holds results"):
        RunDirectory.create(tmp_path)
    assert (tmp_path / name).read_text() == "precious"


def test_a_directory_with_other_files_is_fine_but_a_file_is_not(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunDirectory.create(tmp_path)
    with pytest.raises(PerfedError, match="not a directory"):
        RunDirectory.create(tmp_path / "notes.txt")
    with pytest.raises(PerfedError, match="cannot be created"):
        RunDirectory.create(tmp_path / "notes.txt" / "below")


@pytest.mark.long
def test_a_run_in_memory_is_one_with_a_directory_that_writes_nothing(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    kept = {"snapshots": Snapshots(rounds=(0, 1), losses=True), "evaluation": Evaluation(targets=(0.1,))}
    made = [
        Run(blobs(), make("flic-class"), network(), rounds=2, checkpoint_seconds=0.0, directory=directory, **kept)
        for directory in (None, RunDirectory.create(tmp_path / "run"))
    ]
    in_memory, on_disk = (run.execute() for run in made)
    assert in_memory["metrics"] == on_disk["metrics"] and made[0].history[1].keys() == made[1].history[1].keys()
    assert not [*(tmp_path / "here").iterdir()] and (tmp_path / "run/snapshots/round-0001.npz").exists()
    with pytest.raises(PerfedError, match="has no directory, so that there is no checkpoint"):
        made[0].restore()
