"""A run that is really killed and resumed ends with the same bits as one that was never interrupted."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import EXPERIMENT, TINY, contents, kill_when, lines_of, perfed

from perfed.codec import flatten
from perfed.store import RunDirectory

# FLIC with its pre-training, under SRPFL with a clock, a checkpoint after every round.
SETTINGS = (
    *TINY,
    "rounds=12",
    "clients=6",
    "samples_per_client=20",
    "local_epochs=2",
    "methods.flic-class.pretrain_epochs=validated",
    "evaluation.last=10",
    "checkpoint_seconds=0",
    "participation.policy=srpfl",
    "participation.srpfl={first=1, rule='fixed', stage_rounds=[2, 5]}",
    "clock={speeds='dynamic', communication=0.5}",
)


def checkpoints(directory: Path) -> list[str]:
    return sorted(file.name for file in (directory / "checkpoint").glob("state-*.json"))


def killed_after(lines: int, directory: Path, *settings: str) -> Path:
    """A run that was killed as soon as so many rounds were written down."""
    arguments = ("run", EXPERIMENT, *SETTINGS, *settings, "--method", "flic-class", "--out", directory)
    kill_when(lambda: lines_of(directory) >= lines, *arguments)
    assert not (directory / "summary.json").exists()
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint."""
    found = RunDirectory(directory).load()
    assert found is not None
    return flatten({"server": found.server, **found.clients})


def rounds(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith("_seconds")} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    """Tensors bit for bit, rounds, clients and metrics."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and len(a) > 10
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name
    assert rounds(one) == rounds(other)
    with (one / "clients.csv").open() as mine, (other / "clients.csv").open() as theirs:
        assert list(csv.reader(mine)) == list(csv.reader(theirs))
    first, second = (json.loads((where / "summary.json").read_text()) for where in (one, other))
    for key in ("method", "dataset", "seed", "rounds", "metrics", "accuracy", "virtual_time", "plan", "evaluation"):
        assert first[key] == second[key], key


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that was never interrupted."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    result = perfed("run", EXPERIMENT, *SETTINGS, "--out", directory)
    assert result.code == 0, result.err
    return directory


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """A run that was killed after four rounds at the earliest; to be copied before it is resumed."""
    return killed_after(4, tmp_path_factory.mktemp("interrupted") / "run")


def copy(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to))


# Killing -----------------------------------------------------------------------------------------------------


def test_the_whole_run_is_repeatable(whole, tmp_path):
    """Otherwise the comparisons below would mean nothing: ``config.toml`` runs again, to the same bits."""
    assert perfed("run", whole / "config.toml", "--out", tmp_path / "again").code == 0
    assert_same_run(tmp_path / "again", whole)
    assert perfed("run", whole / "config.toml", "--seed", 1, "--out", tmp_path / "other").code == 0
    assert rounds(tmp_path / "other") != rounds(whole)


def test_killed_during_the_preparation(whole, tmp_path):
    killed = tmp_path / "run"
    kill_when((killed / "config.toml").exists, "run", EXPERIMENT, *SETTINGS, "--out", killed)
    assert lines_of(killed) == 0 and checkpoints(killed) == []
    result = perfed("resume", killed)
    assert result.code == 0, result.err
    assert_same_run(killed, whole)


def test_killed_after_the_first_round(whole, tmp_path):
    killed = killed_after(1, tmp_path / "run")
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)


def test_killed_in_the_middle(whole, interrupted, tmp_path):
    assert 4 <= lines_of(interrupted) < 12
    assert len(checkpoints(interrupted)) == 2
    killed = copy(interrupted, tmp_path / "run")
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)
    assert len(rounds(killed)) == 12


def test_killed_and_killed_again_while_resuming(whole, interrupted, tmp_path):
    killed = copy(interrupted, tmp_path / "run")
    begun = lines_of(killed)
    kill_when(lambda: lines_of(killed) >= begun + 2, "resume", killed)
    assert not (killed / "summary.json").exists()
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)


def test_killed_when_only_old_checkpoints_exist(whole, interrupted, tmp_path):
    """Rounds behind the last checkpoint are done again; a line that was being written is dropped."""
    killed = copy(interrupted, tmp_path / "run")
    shutil.rmtree(killed / "checkpoint")
    with (killed / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9, "wall_sec')
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)


def test_an_automatic_plan_is_recorded_and_used_again(tmp_path):
    """The choices made by timing are in ``config.toml``: with them another run gives the same bits."""
    killed = killed_after(2, tmp_path / "run", "--engine", "auto", "plan.threads=2")
    assert "fit embedding+head" in (killed / "config.toml").read_text()
    assert perfed("resume", killed).code == 0
    assert perfed("run", killed / "config.toml", "--out", tmp_path / "whole").code == 0
    assert_same_run(killed, tmp_path / "whole")


# Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["server", "client", "manifest"])
def test_a_damaged_newest_checkpoint(whole, interrupted, tmp_path, what):
    killed = copy(interrupted, tmp_path / "run")
    newest = killed / "checkpoint" / checkpoints(killed)[-1]
    number = newest.stem.removeprefix("state-")
    files = {
        "server": newest.with_name(f"server-{number}.safetensors"),
        "client": next((killed / "checkpoint" / "clients").glob(f"*@{number}.safetensors")),
        "manifest": newest,
    }
    files[what].write_bytes(files[what].read_bytes()[:-20])
    result = perfed("resume", killed)
    assert result.code == 0, result.err
    assert f"checkpoint {newest.name} is damaged" in result.out and "falling back" in result.out
    assert_same_run(killed, whole)


def test_only_damaged_checkpoints(interrupted, tmp_path):
    killed = copy(interrupted, tmp_path / "run")
    for file in (killed / "checkpoint").glob("state-*.json"):
        file.write_text("{")
    before = contents(killed)
    result = perfed("resume", killed)
    assert result.code == 2
    assert "every checkpoint is damaged" in result.err and result.err.count("\n") == 1
    assert contents(killed) == before


# The end -----------------------------------------------------------------------------------------------------


def test_resuming_a_finished_run_prints_its_summary_and_changes_nothing(whole):
    before = contents(whole)
    result = perfed("resume", whole)
    assert result.code == 0
    assert "flic-class: accuracy %: mean" in result.out and "report.html" in result.out
    assert contents(whole) == before


@pytest.mark.parametrize(("seconds", "kept"), [(0, [0, 1]), (30, [1])])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, seconds, kept):
    diverging = ("optimizer=sgd", "lr=1e30", "local_epochs=1", "participation.rate=1.0")
    diverging = (*diverging, f"checkpoint_seconds={seconds}")
    out = tmp_path / "run"
    result = perfed("run", EXPERIMENT, *TINY, *diverging, "methods.local.lr=1e30", "--method", "local", "--out", out)
    assert result.code == 2
    assert result.err.startswith("perfed: round 2: the training loss of client '00")
    assert result.err.count("\n") == 1
    assert checkpoints(out) == [f"state-{number:06d}.json" for number in kept]
    assert [line["round"] for line in rounds(out)] == [1]
    before = tensors(out)
    again = perfed("resume", out)
    assert (again.code, again.err) == (2, result.err)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(out).items())
    assert not (out / "summary.json").exists()


def test_damaged_lines_of_rounds_are_reported(interrupted, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(interrupted, out)
    lines = (out / "rounds.jsonl").read_text().splitlines(keepends=True)
    (out / "rounds.jsonl").write_bytes(b"\xff\n" + "".join(lines[1:]).encode())
    result = perfed("resume", out)
    assert result.code == 0 and "rounds.jsonl: 1 damaged lines dropped" in result.out
    assert [line["round"] for line in rounds(out)] == list(range(2, 13))


@pytest.mark.parametrize("method", ["flic-class", "hetfedrep"])
def test_divergence_is_one_line_whatever_breaks_first(tmp_path, method):
    """A huge learning rate may reach matrices to be factorised before it reaches a loss."""
    settings = ("optimizer=sgd", "lr=1e30", "local_epochs=3", f"methods.{method}.lr=1e30")
    result = perfed("run", EXPERIMENT, *TINY, *settings, "--method", method, "--out", tmp_path / "run")
    assert result.code == 2
    assert result.err.count("\n") == 1 and "lower the learning rate" in result.err
    assert result.err.startswith(("perfed: round 1: ", "perfed: preparation before round 1: "))
