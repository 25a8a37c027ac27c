"""Runs side by side are the runs that there are one after the other, whatever is killed meanwhile."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, getsignal, signal
from typing import Any

import pytest
import torch
from command_line import EXPERIMENT, TINY, is_plain, kill_when, lines_of, perfed, stop_when

import perfed as face
from perfed.codec import flatten
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment import jobs
from perfed.experiment.comparison import ComparisonSpec
from perfed.experiment.config import find_experiment
from perfed.experiment.factory import ROUNDS, ProgressEvent, RunFactory
from perfed.experiment.jobs import Jobs
from perfed.experiment.overrides import override
from perfed.experiment.study import Study
from perfed.methods.local import Local
from perfed.run.directory import RunDirectory
from perfed.system import lock_folder

METHODS = ["local", "hetfedrep", "sklearn:logistic"]
LENGTH = 100  # rounds: a signal takes as long as 30 to reach tasks on Ray
SETTINGS = (*TINY, f"rounds={LENGTH}", "checkpoint_seconds=1000")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Workers begin as forks of the process that has imported perfed already."""
    monkeypatch.setattr(jobs, "START_METHOD", "forkserver")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The comparison with one run after the other."""
    out = tmp_path_factory.mktemp("alone") / "out"
    done = perfed("compare", EXPERIMENT, *SETTINGS, "--methods", ",".join(METHODS), "--seeds", "0..1", "--out", out)
    assert done.code == 0, done.err
    return out


def begin(*arguments: object) -> tuple[object, ...]:
    """The same comparison side by side."""
    return ("compare", EXPERIMENT, *SETTINGS, "--methods", ",".join(METHODS), "--seeds", "0..1", *arguments)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = RunDirectory(directory).load()
    assert found is not None
    return flatten({"server": found.server, **found.clients})


def assert_same(one: Path, other: Path) -> None:
    """Every run's tensors bit for bit, rounds, clients and metrics, and the verdict."""
    for method in METHODS:
        for seed in (0, 1):
            a, b = (out / method.replace(":", ".") / f"seed-{seed}" for out in (one, other))
            mine, theirs = (json.loads((place / "summary.json").read_text()) for place in (a, b))
            for key in ("method", "seed", "rounds", "metrics", "accuracy", "notes"):
                assert without_resumption(mine[key]) == without_resumption(theirs[key]), (a, key)
            assert (a / "clients.csv").read_text() == (b / "clients.csv").read_text()
            if method not in METHODS[:2]:
                continue
            found, right = tensors(a), tensors(b)
            assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
            assert rounds(a) == rounds(b)
            assert (a / "config.toml").read_text() == (b / "config.toml").read_text()
    verdicts = [json.loads((out / "comparison.json").read_text())["verdict"] for out in (one, other)]
    assert verdicts[0] == verdicts[1]


def without_resumption(value: Any) -> Any:
    """Without the notes of a run that was begun again, or went on."""
    if not isinstance(value, list):
        return value
    return [note for note in value if "continued from" not in note and "started again" not in note]


def rounds(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith("_seconds")} for line in lines]


def nobody_works_on(out: Path, seconds: float) -> None:
    """Wait until no process holds any run of the comparison."""
    deadline = time.monotonic() + seconds
    for place in out.glob("*/seed-*"):
        while True:
            try:
                with lock_folder(place):
                    break
            except BlockingIOError:
                assert time.monotonic() < deadline, place
                time.sleep(0.05)


# The same results -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_same_bits_as_one_after_the_other(alone, tmp_path):
    done = perfed(*begin("--jobs", 2, "--json", "-v", "--out", tmp_path / "out"))
    assert done.code == 0, done.err
    assert_same(tmp_path / "out", alone)
    again = perfed("resume", alone, "--json")
    mine, theirs = json.loads(done.out), json.loads(again.out)
    assert mine.keys() == theirs.keys() and mine["verdict"] == theirs["verdict"] and mine["failed"] == []
    said = done.err.splitlines()
    for method in METHODS[:2]:  # what a run has to say is together
        (first,) = [number for number, line in enumerate(said) if line.startswith(f"{method} seed 1: ")]
        assert said[first + 1] == "  engine: stacked, 1 threads"
    assert is_plain(done.err)


@pytest.mark.long
def test_a_search_chooses_the_same(tmp_path):
    given = ("tune", EXPERIMENT, *TINY, "--methods", "local,flic-class", "--grid", "lr=1e-3,1e30", "--seeds", "0..1")
    assert perfed(*given, "--out", tmp_path / "alone").code == 0
    assert perfed(*given, "--jobs", 3, "--out", tmp_path / "out").code == 0
    for name in ("grid.json", "chosen.toml"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "alone" / name).read_text()
    tried = json.loads((tmp_path / "out" / "grid.json").read_text())
    (tmp_path / "out" / "grid.json").write_text(json.dumps(tried[2:3]))
    assert perfed("resume", tmp_path / "out", "--jobs", 2).code == 0
    assert json.loads((tmp_path / "out" / "grid.json").read_text()) == tried


@pytest.mark.long
def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    bad = ("methods.flic-class.lr=1e30", "methods.flic-class.optimizer=sgd", "--seeds", "0..1")
    given = ("compare", EXPERIMENT, *TINY, "--methods", "flic-class,local,hetfedrep", *bad)
    found = [perfed(*given, "--jobs", number, "--json", "--out", tmp_path / str(number)) for number in (1, 3)]
    assert [done.code for done in found] == [2, 2]
    one, other = (json.loads(done.out) for done in found)
    assert one["failed"] == other["failed"] and len(one["failed"]) == 2 and one["verdict"] == other["verdict"]
    assert found[0].err.splitlines()[-1] == found[1].err.splitlines()[-1]
    kept = [json.loads((tmp_path / name / "comparison.json").read_text())["failed"] for name in "13"]
    assert kept[0] == kept[1]


@pytest.mark.long
def test_in_python_with_federations_in_memory(tmp_path):
    clients = load("digits", {"clients": 4, "samples": 20}, seed=0)
    settings = {"model": {"head": "linear"}, "rounds": 2, "plan": {"engine": "stacked", "threads": 1}}
    settings |= {"seeds": [0, 1], "evaluation": {"metrics": ["log-loss"]}}
    for federation, tune in ((clients, None), (of_seed, ["lr=1e-3,1e-2"])):
        one, other = (face.compare(federation, METHODS[::2], jobs=n, tune=tune, **settings) for n in (1, 2))
        assert one.verdict == other.verdict and one.table["mean"].equals(other.table["mean"])
        x = clients.clients[0].test.x
        assert one.run("local", 1).predict("000", x).equal(other.run("local", 1).predict("000", x))


def of_seed(seed: int) -> face.Federation:
    return load("digits", {"clients": 4, "samples": 20}, seed=seed)


# What dies ------------------------------------------------------------------------------------------------------


def planned(out: Path) -> Study:
    table = override(find_experiment(EXPERIMENT), [*SETTINGS, "checkpoint_seconds=0"], METHODS[:2])
    return Study.create(out, ComparisonSpec(table, METHODS, [0, 1]))


def killing(
    times: int, label: str = "local seed 0"
) -> tuple[list[ProgressEvent], Callable[[str, ProgressEvent | None], None]]:
    """What kills the process of a run in its middle, so often, and hears its news."""
    heard: list[ProgressEvent] = []

    def tell(of: str, news: ProgressEvent | None) -> None:
        if of != label or news is None:
            return
        heard.append(news)
        killed = sum(bool(news.remarks) and "its process ended" in news.remarks[0] for news in heard)
        if news.stage == ROUNDS and news.done >= 5 * (killed + 1) and killed < times:
            process = next(p for p in multiprocessing.active_children() if p.name == "perfed job 0")
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, SIGKILL)

    return heard, tell


@pytest.mark.long
def test_a_run_whose_process_is_killed_goes_on_in_another_one(alone, tmp_path):
    study = planned(tmp_path / "out")
    heard, tell = killing(1)
    outcomes = list(study.execute_runs(execute=Jobs(2, tell=tell)))
    assert len(outcomes) == 6 and not any(isinstance(outcome, PerfedError) for *_, outcome in outcomes)
    said = [remark for news in heard for remark in news.remarks]
    assert said[0] == "its process ended (signal SIGKILL); it is tried once more, from its last checkpoint"
    assert said[-1].startswith("continues from round ") and said[-1].endswith(f" to {LENGTH}")
    assert int(said[-1].split()[3]) >= 4  # not from the start
    study.conclude()
    assert_same_but_for_checkpoints(tmp_path / "out", alone)


def assert_same_but_for_checkpoints(one: Path, other: Path) -> None:
    for place in one.glob("*/seed-*/config.toml"):
        place.write_text(place.read_text().replace("checkpoint_seconds = 0.0", "checkpoint_seconds = 1000.0"))
    assert_same(one, other)


@pytest.mark.long
def test_a_run_whose_process_is_killed_twice_has_failed_and_the_others_go_on(tmp_path):
    study = planned(tmp_path / "out")
    outcomes = dict(study.execute_runs(execute=Jobs(2, tell=killing(2)[1])))
    failed = {key: str(outcome) for key, outcome in outcomes.items() if isinstance(outcome, PerfedError)}
    reason = "its process ended 2 times before the run had finished, the last time by signal SIGKILL"
    assert len(outcomes) == 6 and failed == {("", "local", 0): reason}
    assert study.list_unfinished() == [("", "local", 0)]


@pytest.mark.long
def test_ctrl_c_leaves_checkpoints_of_all_runs(alone, tmp_path):
    out = tmp_path / "out"
    stopped = stop_when(lambda: lines_of(out / "local" / "seed-0") >= 3, SIGINT, *begin("--jobs", 2, "--out", out))
    assert (stopped.code, stopped.err) == (130, f"perfed: interrupted; 'perfed resume {out}' continues\n")
    nobody_works_on(out, seconds=0)
    cut = assert_whole_rounds(out)
    resumed = perfed("resume", out, "--jobs", 9)
    assert resumed.code == 0, resumed.err
    assert all(f"{label}: continues from round {done} to {LENGTH}" in resumed.out for label, done in cut.items())
    assert_same(out, alone)


def assert_whole_rounds(out: Path) -> dict[str, int]:
    """The runs that were stopped in their middle have one checkpoint, of their last round: which it is, by label."""
    cut = {}
    for place in out.glob("*/seed-*"):
        states = [file.name for file in (place / "checkpoint").glob("state-*.json")]
        if not (place / "summary.json").exists() and states:
            cut[f"{place.parent.name} seed {place.name[5:]}"] = lines_of(place)
            assert states == [f"state-{lines_of(place):06d}.json"]
    assert 1 <= len(cut) <= 2
    return cut


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_after_a_killed_comparison_nobody_works_on_and_it_goes_on(alone, tmp_path, number):
    out = tmp_path / "out"
    kill_when(lambda: lines_of(out / "local" / "seed-0") >= 3, *begin("--jobs", 2, "--out", out))
    nobody_works_on(out, seconds=20)
    assert_whole_rounds(out)
    assert perfed("resume", out, "--jobs", number).code == 0
    assert_same(out, alone)


# What cannot be -------------------------------------------------------------------------------------------------


def test_what_other_processes_do_not_know_is_refused(tmp_path, forgotten):
    clients = load("digits", {"clients": 4, "samples": 20}, seed=0)
    given = {"model": {"head": "linear"}, "rounds": 1, "seeds": [0, 1], "jobs": 2, "out": tmp_path / "out"}
    with pytest.raises(PerfedError, match=r"^jobs: the federation cannot be sent to other processes \(.*lambda"):
        face.compare(lambda seed: clients, ["local"], **given)

    @face.register("made-here")
    class Here(Local):
        """Made in a function."""

    with pytest.raises(PerfedError, match=r"^jobs: other processes cannot import .*'made-here'.* mine:NAME$"):
        face.compare(clients, ["made-here"], **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_numbers_of_jobs(tmp_path):
    clients = load("digits", {"clients": 4, "samples": 20}, seed=0)
    with pytest.raises(PerfedError, match=r"jobs must be at least 1 \(given: 0\)"):
        face.compare(clients, ["local"], model={"head": "linear"}, rounds=1, jobs=0, out=tmp_path / "out")
    refused = perfed(*begin("--jobs", 0, "--out", tmp_path / "out"))
    assert refused.code == 2 and "--jobs" in refused.err and refused.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert perfed("run", EXPERIMENT, *TINY, "--out", tmp_path / "run").code == 0
    refused = perfed("resume", tmp_path / "run", "--jobs", 2)
    assert refused.code == 2 and "--jobs is for comparisons, searches and campaigns" in refused.err


class Broken(RunFactory):
    """Runs that the machine cannot make."""

    def __call__(self, name: str, method: str, seed: int) -> Any:
        raise MemoryError("of the test")


@pytest.mark.long
def test_what_no_run_can_help_ends_all(tmp_path):
    factory = Broken(planned(tmp_path / "out").comparisons)
    outcomes = Jobs(2)(factory, [("", "local", 0)])
    with pytest.raises(MemoryError, match="of the test") as caught, closing(outcomes):
        next(outcomes)
    assert "in __call__" in "".join(caught.value.__notes__)
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("perfed job")]


SCRIPT = """
import perfed
from perfed.methods.local import Local

@perfed.register("mine")
class Mine(Local):
    '''Another name.'''

def federation(seed):
    return perfed.load("digits", {"clients": 4, "samples": 20}, seed=seed)

def work():
    made = perfed.compare(federation, ["local", "mine"], model={"head": "linear"}, rounds=1, seeds=[0], jobs=2)
    print(made.failed, len(made.table), made.table["mean"].nunique())
"""


@pytest.mark.long
def test_a_script_with_a_method_of_its_own(tmp_path):
    """Processes that begin anew; without the line that Python asks for, one line says so."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "\nif __name__ == '__main__':\n    work()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "() 4 2\n"), done.stderr
    script.write_text(SCRIPT + "\nwork()\n")
    refused = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert refused.returncode == 1 and "jobs: the first process ended before it could do anything" in refused.stderr


# On Ray ---------------------------------------------------------------------------------------------------------


def test_ray_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = perfed(*begin("--jobs", 2, "--ray-address", "127.0.0.1:1", "--out", tmp_path / "out"))
    assert refused.code == 2 and "[ray]" in refused.err and refused.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray of two processors."""
    ray = pytest.importorskip("ray", reason="ray is not installed (perfed[ray])")
    ray.shutdown()  # of another file's tests
    before = getsignal(SIGTERM)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    signal(SIGTERM, before)


@pytest.mark.long
def test_on_ray_the_same_bits(alone, tmp_path, cluster):
    done = perfed(*begin("--jobs", 2, "--ray-address", cluster, "--out", tmp_path / "out"))
    assert done.code == 0, done.err
    assert_same(tmp_path / "out", alone)


@pytest.mark.long
def test_on_ray_a_signal_leaves_checkpoints_and_processes_here_go_on(alone, tmp_path, cluster):
    out = tmp_path / "out"
    given = begin("--jobs", 2, "--ray-address", cluster, "--out", out)
    stopped = stop_when(lambda: lines_of(out / "local" / "seed-0") >= 3, SIGTERM, *given)
    assert (stopped.code, stopped.err) == (
        143,
        f"perfed: terminated; 'perfed resume {out} --ray-address {cluster}' continues\n",
    )
    assert_whole_rounds(out)
    assert perfed("resume", out, "--jobs", 2).code == 0
    assert_same(out, alone)


@pytest.mark.long
def test_on_ray_a_task_that_is_killed_goes_on_in_another_one(alone, tmp_path, cluster):
    study = planned(tmp_path / "out")
    place, said = tmp_path / "out" / "local" / "seed-0", []

    def tell(label: str, news: ProgressEvent | None) -> None:
        if label == "local seed 0" and news is not None:
            said.extend(news.remarks)
            if news.stage == ROUNDS and news.done >= 5 and not said:
                kill_holder(place)

    outcomes = list(study.execute_runs(execute=Jobs(2, cluster, tell)))
    assert len(outcomes) == 6 and not any(isinstance(outcome, PerfedError) for *_, outcome in outcomes)
    assert "it is tried once more" in said[0] and said[-1].startswith("continues from round ")
    study.conclude()
    assert_same_but_for_checkpoints(tmp_path / "out", alone)


def kill_holder(place: Path) -> None:
    """Kill the process that works on a run: the one that has its folder open."""
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if handle.readlink() == place and handle.parts[2] != str(os.getpid()):
                os.kill(int(handle.parts[2]), SIGKILL)
