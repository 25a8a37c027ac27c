"""A run that is really killed and resumed ends with the same bits as one that was never interrupted."""

from __future__ import annotations

import csv
import errno
import gc
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_line import EXPERIMENT, TINY, another_process, contents, kill_when, lines_of, perfed, stop_when

from perfed.codec import flatten
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import resume, start
from perfed.methods.flic.flic import FLICClass
from perfed.run.directory import RunDirectory
from perfed.run.evaluation import Evaluator

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


@pytest.mark.long
def test_the_whole_run_is_repeatable(whole, tmp_path):
    """Otherwise the comparisons below would mean nothing: ``config.toml`` runs again, to the same bits."""
    assert perfed("run", whole / "config.toml", "--out", tmp_path / "again").code == 0
    assert_same_run(tmp_path / "again", whole)
    assert perfed("run", whole / "config.toml", "--seed", 1, "--out", tmp_path / "other").code == 0
    assert rounds(tmp_path / "other") != rounds(whole)


@pytest.mark.long
def test_killed_during_the_preparation(whole, tmp_path):
    killed = tmp_path / "run"
    kill_when((killed / "config.toml").exists, "run", EXPERIMENT, *SETTINGS, "--out", killed)
    assert lines_of(killed) == 0 and checkpoints(killed) == []
    result = perfed("resume", killed)
    assert result.code == 0, result.err
    assert_same_run(killed, whole)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code", "word"), [(SIGINT, 130, "interrupted"), (SIGTERM, 143, "terminated")])
def test_a_signal_leaves_a_checkpoint_of_the_last_round_and_the_command_that_goes_on(
    whole, tmp_path, number, code, word
):
    out = tmp_path / "my run"
    settings = (*SETTINGS, "checkpoint_seconds=1000", "--method", "flic-class", "--out", out)
    stopped = stop_when(lambda: lines_of(out) >= 3, number, "run", EXPERIMENT, *settings)
    assert (stopped.code, stopped.err) == (code, f"perfed: {word}; 'perfed resume '{out}'' continues\n")
    done = lines_of(out)
    assert done >= 3 and checkpoints(out) == [f"state-{done:06d}.json"]
    resumed = perfed("resume", out)
    assert resumed.code == 0 and f"flic-class: continues from round {done} to 12" in resumed.out
    assert_same_run(out, whole)


@pytest.mark.long
def test_a_signal_during_a_comparison(tmp_path):
    out = tmp_path / "out"
    settings = (*TINY, "rounds=200", "checkpoint_seconds=1000", "--methods", "local,hetfedrep", "--out", out)
    where = out / "local" / "seed-0"
    stopped = stop_when(lambda: lines_of(where) >= 2, SIGTERM, "compare", EXPERIMENT, *settings)
    assert (stopped.code, stopped.err) == (143, f"perfed: terminated; 'perfed resume {out}' continues\n")
    done = lines_of(where)
    assert done >= 2 and checkpoints(where) == [f"state-{done:06d}.json"]
    resumed = perfed("resume", out)
    assert resumed.code == 0 and f"local seed 0: continues from round {done} to 200" in resumed.out
    assert (out / "hetfedrep" / "seed-0" / "summary.json").exists()


def table(*settings: str) -> Experiment:
    """The experiment of ``whole`` with other settings."""
    return validate(
        override(find_experiment(EXPERIMENT), [*SETTINGS, 'method="flic-class"', *settings], ["flic-class"])
    )


class Stop(Exception):
    """Something that is no error of perfed's."""


@pytest.mark.long
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_an_exception_from_progress_leaves_a_checkpoint(whole, tmp_path, error):
    def stop(number: int, total: int, accuracy: float | None) -> None:
        if number == 5:
            raise error

    run = start(table("checkpoint_seconds=1000"), out=tmp_path / "run")
    with pytest.raises(error):
        run.execute(stop)
    assert checkpoints(tmp_path / "run") == ["state-000005.json"]
    continued = resume(tmp_path / "run")
    assert continued.resumed == 5
    continued.execute()
    assert_same_run(tmp_path / "run", whole)
    assert [record["round"] for record in continued.history] == list(range(1, 13))
    without_times = [{k: v for k, v in r.items() if not k.endswith("_seconds")} for r in continued.history]
    assert without_times == rounds(whole)


@pytest.mark.long
@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("place", ["evaluate", "append_round", "finish"])
def test_what_was_done_of_a_round_is_dropped(whole, tmp_path, monkeypatch, error, place):
    """Interrupted when the round's transaction has already changed the state; in memory it goes on as well."""
    owner, name = {
        "evaluate": (Evaluator, "evaluate_round"),
        "append_round": (RunDirectory, "append_round"),
        "finish": (FLICClass, "finish"),
    }[place]
    real, calls = getattr(owner, name), []

    def interrupted(*given: Any) -> Any:
        calls.append(None)
        result = real(*given)
        if len(calls) == 7:
            raise error
        return result

    monkeypatch.setattr(owner, name, interrupted)
    run = start(table("checkpoint_seconds=1000", "evaluation.every=1"), out=tmp_path / "run")
    with pytest.raises(error):
        run.execute()
    assert checkpoints(tmp_path / "run") == ["state-000006.json"] and lines_of(tmp_path / "run") == 6
    copy(tmp_path / "run", tmp_path / "copy")
    run.execute()
    resume(tmp_path / "copy").execute()
    for directory in ("run", "copy"):
        a, b = tensors(tmp_path / directory), tensors(whole)
        assert a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())
        assert [line["participants"] for line in rounds(tmp_path / directory)] == [
            line["participants"] for line in rounds(whole)
        ]
    assert rounds(tmp_path / "run") == rounds(tmp_path / "copy")


@pytest.mark.long
@pytest.mark.parametrize("place", ["prepare", "round"])
def test_a_run_that_goes_on_from_round_0_says_so(whole, tmp_path, monkeypatch, place):
    def interrupt(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    run = start(table(), out=tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Server, place, interrupt)
        run.execute()
    assert checkpoints(tmp_path / "run") == ([] if place == "prepare" else ["state-000000.json"])
    resumed = perfed("resume", tmp_path / "run")
    assert resumed.code == 0 and "flic-class: continues from round 0 to 12" in resumed.out
    says = "no checkpoint was found: started again" if place == "prepare" else "continued from round 0: the preparation"
    assert says in resumed.said and says in "".join(json.loads((tmp_path / "run/summary.json").read_text())["notes"])
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.long
def test_killed_after_the_first_round(whole, tmp_path):
    killed = killed_after(1, tmp_path / "run")
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)


@pytest.mark.long
def test_killed_in_the_middle(whole, interrupted, tmp_path):
    assert 4 <= lines_of(interrupted) < 12
    assert len(checkpoints(interrupted)) == 2
    killed = copy(interrupted, tmp_path / "run")
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)
    assert len(rounds(killed)) == 12


@pytest.mark.long
def test_going_on_with_other_instructions_of_the_processor_is_said(interrupted, tmp_path):
    command = [sys.executable, "-m", "perfed", "resume"]  # torch asks for these when it is imported
    others = {"ATEN_CPU_CAPABILITY": ("default", "avx2"), "ONEDNN_MAX_CPU_ISA": ("AVX2", "SSE41")}
    limits = [(next(v for v in values if v != os.environ.get(name)), name) for name, values in others.items()]
    for limit, said in limits:
        killed = copy(interrupted, tmp_path / limit)
        environment = {**os.environ, said: limit}
        done = subprocess.run([*command, killed], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        (note,) = notes_on_digits(killed)
        assert "last digits may differ" in done.stdout
        assert "on another processor or torch" in note and f"{limit.casefold()}" in note.casefold()
    same = another_process("resume", copy(interrupted, tmp_path / "same"))
    assert same.code == 0 and "last digits" not in same.out and notes_on_digits(tmp_path / "same") == []


def notes_on_digits(run: Path) -> list[str]:
    return [note for note in json.loads((run / "summary.json").read_text())["notes"] if "last digits" in note]


@pytest.mark.long
def test_killed_and_killed_again_while_resuming(whole, interrupted, tmp_path):
    killed = copy(interrupted, tmp_path / "run")
    begun = lines_of(killed)
    kill_when(lambda: lines_of(killed) >= begun + 2, "resume", killed)
    assert not (killed / "summary.json").exists()
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)


@pytest.mark.long
def test_killed_when_only_old_checkpoints_exist(whole, interrupted, tmp_path):
    """Rounds behind the last checkpoint are done again; a line that was being written is dropped."""
    killed = copy(interrupted, tmp_path / "run")
    shutil.rmtree(killed / "checkpoint")
    with (killed / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9, "wall_sec')
    assert perfed("resume", killed).code == 0
    assert_same_run(killed, whole)


@pytest.mark.long
def test_an_automatic_plan_is_recorded_and_used_again(tmp_path):
    """The choices made by timing are in ``config.toml``: with them another run gives the same bits."""
    killed = killed_after(2, tmp_path / "run", "--engine", "auto", "plan.threads=2")
    assert "fit embedding+head" in (killed / "config.toml").read_text()
    assert perfed("resume", killed).code == 0
    assert perfed("run", killed / "config.toml", "--out", tmp_path / "whole").code == 0
    assert_same_run(killed, tmp_path / "whole")


@pytest.mark.long
def test_states_on_disk_are_lost_with_the_process_and_not_missed(whole, tmp_path):
    """How much memory holds changes no bit, so it may be another later on; what a killed process leaves is removed."""
    killed = killed_after(4, tmp_path / "run", "plan.hold_megabytes=0")
    (left,) = killed.glob(".scratch-*")
    assert len(list(left.iterdir())) >= len(RunDirectory(killed).load().clients) > 0  # it may be in a later round
    more = copy(killed, tmp_path / "more")
    before, after = (more / "config.toml").read_text(), "hold_megabytes = 1024"
    (more / "config.toml").write_text(before.replace("hold_megabytes = 0", after))
    assert after not in before and after in (more / "config.toml").read_text()
    for directory in (killed, more):
        result = perfed("resume", directory)
        assert result.code == 0, result.err
        gc.collect()
        assert not list(directory.glob(".scratch-*"))
    assert_same_run(more, whole)
    a, b = tensors(killed), tensors(whole)
    assert a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())
    assert rounds(killed) == rounds(whole)


@pytest.mark.long
def test_a_disk_that_is_full_of_states_ends_with_one_line_and_the_run_goes_on(whole, tmp_path):
    run = start(table("plan.hold_megabytes=0"), out=tmp_path / "run")
    held = ExitStack()

    def fill(number: int, total: int, accuracy: float | None) -> None:
        if number == 5:
            held.enter_context(patch.object(Path, "write_bytes", full))

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    none = start(table("plan.hold_megabytes=0"), out=tmp_path / "none")
    with patch.object(Path, "write_bytes", full), pytest.raises(PerfedError, match="No space left on device"):
        none.execute()
    assert not (tmp_path / "none").exists()  # as of any run that comes to nothing
    with held, pytest.raises(PerfedError, match=r"beyond plan.hold_megabytes = 0 cannot .*: No space left on device$"):
        run.execute(fill)
    assert checkpoints(tmp_path / "run")[-1] == "state-000005.json" and lines_of(tmp_path / "run") == 5
    resume(tmp_path / "run").execute()
    a, b = tensors(tmp_path / "run"), tensors(whole)
    assert a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


# Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.long
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
    assert f"checkpoint {newest.name} is damaged" in result.said and "falling back" in result.said
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
    assert (
        "FLIC-Class: before local training" in result.out
        and "Accuracy (%)" in result.out
        and "report.html" in result.out
    )
    assert contents(whole) == before


def edit(directory: Path, before: str, after: str) -> None:
    text = (directory / "config.toml").read_text()
    assert text.count(before) == 1
    (directory / "config.toml").write_text(text.replace(before, after))


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("seed = 0\n", "seed = 5\n", "seed is 5 but was 0 in the finished rounds; only rounds may be increased"),
        ("local_epochs = 2\n", "local_epochs = 3\n", "training.local_epochs is 3 but was 2"),
        ("rounds = 12\n", "rounds = 8\n", "rounds is 8 but was 12"),
        ("rounds = 12\n", "rounds = 20\nname = 'other'\n", "name is 'other' but was 'flic-digits-views'"),
        ("rate = 0.5\n", "", "participation.rate is not set but was 0.5"),
    ],
)
def test_a_run_does_not_go_on_with_another_configuration(whole, interrupted, tmp_path, finished, before, after, says):
    out = copy(whole if finished else interrupted, tmp_path / "run")
    if "name" in after:
        edit(out, 'name = "flic-digits-views"\n', "")
    edit(out, before, after)
    held = contents(out)
    refused = perfed("resume", out)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert refused.err.startswith(f"perfed: {out / 'config.toml'}: {says}"), refused.err
    assert contents(out) == held


@pytest.mark.long
@pytest.mark.parametrize("finished", [True, False])
def test_a_run_goes_on_to_more_rounds(whole, interrupted, tmp_path, finished):
    out = copy(whole if finished else interrupted, tmp_path / "run")
    begun = 12 if finished else int(checkpoints(out)[-1][6:12])
    edit(out, "rounds = 12\n", "rounds = 15\n")
    if finished:  # and is not taken for finished when it is interrupted on the way
        kill_when(lambda: lines_of(out) >= 13, "resume", out)
        assert (out / "summary.json").exists()
    resumed = perfed("resume", out)
    assert resumed.code == 0, resumed.err
    says = f"continued from round {begun} to 15; begun with rounds = 12"
    summary = json.loads((out / "summary.json").read_text())
    assert says in resumed.said and says in summary["notes"] and summary["rounds"] == 15
    assert [line["round"] for line in rounds(out)] == list(range(1, 16))
    if finished:
        assert rounds(out)[:12] == rounds(whole)
    else:  # as if begun with 15, but that the last ten rounds of the twelve were evaluated
        long = tmp_path / "long"
        assert perfed("run", out / "config.toml", "--out", long).code == 0
        a, b = tensors(out), tensors(long)
        assert a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())
        assert rounds(out)[5:] == rounds(long)[5:]
        assert summary["metrics"] == json.loads((long / "summary.json").read_text())["metrics"]
    assert "this run has finished" in perfed("resume", out).out


@pytest.mark.long
def test_a_comparison_with_an_edited_run_says_which(tmp_path):
    assert perfed("compare", EXPERIMENT, *TINY, "--methods", "local,hetfedrep", "--out", tmp_path / "out").code == 0
    edit(tmp_path / "out" / "local" / "seed-0", "local_epochs = 1\n", "local_epochs = 2\n")
    edit(tmp_path / "out" / "hetfedrep" / "seed-0", "rounds = 3\n", "rounds = 4\n")
    result = perfed("resume", tmp_path / "out")
    assert result.code == 2 and "training.local_epochs" in result.err and "local/seed-0" in result.err
    edit(tmp_path / "out" / "local" / "seed-0", "local_epochs = 2\n", "local_epochs = 1\n")
    assert perfed("resume", tmp_path / "out").code == 0
    assert lines_of(tmp_path / "out" / "hetfedrep" / "seed-0") == 4


@pytest.mark.long
def test_a_seed_that_went_on_is_said_and_a_comparison_does_not_go_on_as_one(tmp_path):
    out = tmp_path / "out"
    assert (
        perfed("compare", EXPERIMENT, *TINY, "--methods", "local,hetfedrep", "--seeds", "0..1", "--out", out).code == 0
    )
    refused = perfed("resume", out, "rounds=5")
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "give each run to resume by itself" in refused.err and "another comparison with rounds=5" in refused.err
    assert perfed("resume", out / "hetfedrep" / "seed-1", "rounds=5").code == 0
    told = perfed("report", out)
    assert told.code == 0 and "HetFedRep: seeds have 3 and 5 rounds." in told.said and "left out" not in told.out
    kept = json.loads((out / "comparison.json").read_text())
    assert [run["seed"] for run in kept["runs"]] == [0, 1, 0, 1]
    assert "HetFedRep: seeds have 3 and 5 rounds." in kept["verdict"]["warnings"]


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "kept"), [(0, [0, 1]), (30, [1])])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, seconds, kept):
    diverging = ("optimizer=sgd", "lr=1e30", "local_epochs=1", "participation.rate=1.0")
    diverging = (*diverging, f"checkpoint_seconds={seconds}")
    out = tmp_path / "run"
    result = perfed("run", EXPERIMENT, *TINY, *diverging, "methods.local.lr=1e30", "--method", "local", "--out", out)
    assert result.code == 2
    assert result.err.startswith("perfed: round 2: training diverged at 4 clients, '000', '001', ")
    assert result.err.count("\n") == 1
    assert checkpoints(out) == [f"state-{number:06d}.json" for number in kept]
    assert [line["round"] for line in rounds(out)] == [1]
    before = tensors(out)
    again = perfed("resume", out)
    assert (again.code, again.err) == (2, result.err)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(out).items())
    assert not (out / "summary.json").exists()


@pytest.mark.long
def test_damaged_lines_of_rounds_are_reported(interrupted, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(interrupted, out)
    lines = (out / "rounds.jsonl").read_text().splitlines(keepends=True)
    (out / "rounds.jsonl").write_bytes(b"\xff\n" + "".join(lines[1:]).encode())
    result = perfed("resume", out)
    assert result.code == 0 and "rounds.jsonl: 1 damaged lines dropped" in result.said
    assert [line["round"] for line in rounds(out)] == list(range(2, 13))


@pytest.mark.parametrize("method", ["flic-class", "hetfedrep"])
def test_divergence_is_one_line_whatever_breaks_first(tmp_path, method):
    """A huge learning rate may reach matrices to be factorised before it reaches a loss."""
    settings = ("optimizer=sgd", "lr=1e30", "local_epochs=3", f"methods.{method}.lr=1e30")
    result = perfed("run", EXPERIMENT, *TINY, *settings, "--method", method, "--out", tmp_path / "run")
    assert result.code == 2
    assert result.err.count("\n") == 1 and "lower the learning rate" in result.err
    assert result.err.startswith(("perfed: round 1: ", "perfed: preparation before round 1: "))
