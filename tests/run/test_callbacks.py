"""What rides along a run: when it is called, how it ends a run, and that a failed round and a resumed run know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import EXPERIMENT, TINY, perfed
from engines import blobs, every_tensor, make, network

from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read, validate
from perfed.experiment.start import is_done, resume, start
from perfed.run.callback import Callback
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

EVERY = Evaluation(every=1)


def run(*callbacks: Callback, rounds: int = 6, evaluation: Evaluation = EVERY, **options: Any) -> Run:
    method = make("fedrep", local_epochs=2, batch_size=4, lr=0.05)
    data = blobs((12, 9, 30), validation=8, test=20)
    more = {"plan": Plan("stacked"), "evaluation": evaluation, "callbacks": callbacks, **options}
    return Run(data, method, network(), rounds=rounds, **more)


class SiteMetadata(Callback):
    """Keeps what it is told, in its state: the rounds, and a tensor that is their sum."""

    name = "told"

    def begin(self, run):
        self.state.setdefault("rounds", {})
        self.state.setdefault("sum", torch.zeros(()))

    def after_round(self, run, record):
        self.state["rounds"][str(record["round"])] = record["train_loss"]
        self.state["sum"] = self.state["sum"] + record["round"]
        return False

    def end(self, run, summary):
        summary["told"] = len(self.state["rounds"])


class StopAt(Callback):
    """Ends the run with a round."""

    round: int

    def after_round(self, run, record):
        return record["round"] == self.round


class FailAt(Callback):
    """Fails once, after a round that the others have already seen."""

    round: int

    def after_round(self, run, record):
        if record["round"] == self.round and not self.state.get("failed"):
            raise OSError("the network is gone")
        return False


def test_it_is_called_in_order_with_the_line_that_is_written(tmp_path):
    calls: list[tuple[str, str, int]] = []

    class First(Callback):
        def begin(self, run):
            calls.append((self.name, "begin", run.done))

        def after_round(self, run, record):
            assert run.history[-1] is record and run.latest.participants == record["participants"]
            calls.append((self.name, "round", run.done))
            return False

        def end(self, run, summary):
            calls.append((self.name, "end", summary["rounds"]))

    class Second(First):
        pass

    run(First(), Second(), rounds=2, directory=RunDirectory.create(tmp_path / "run")).execute()
    steps = [("begin", 0), ("round", 1), ("round", 2), ("end", 2)]
    assert calls == [(name, *step) for step in steps for name in ("First", "Second")]
    assert len((tmp_path / "run/rounds.jsonl").read_text().splitlines()) == 2


def test_it_may_add_to_the_summary_that_is_written(tmp_path):
    made = run(SiteMetadata(), directory=RunDirectory.create(tmp_path / "run"))
    assert made.execute()["told"] == 6
    assert json.loads((tmp_path / "run/summary.json").read_text())["told"] == 6


@pytest.mark.long
def test_a_round_in_which_one_fails_never_happened():
    """Those before it in the order have seen the round: what they kept of it is gone."""
    whole, told, failing = run(SiteMetadata()), SiteMetadata(), FailAt(round=3)
    whole.execute()
    made = run(told, failing)
    with pytest.raises(OSError, match="the network is gone"):
        made.execute()
    assert made.done == 2 and [record["round"] for record in made.history] == [1, 2]
    assert set(told.state["rounds"]) == {"1", "2"} and told.state["sum"] == 3
    failing.state["failed"] = True
    made.execute()
    assert told.state["sum"] == 21
    found, expected = every_tensor(made.server), every_tensor(whole.server)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
def test_a_run_that_one_ends_is_a_whole_run_of_so_many_rounds(tmp_path):
    evaluation, shorter = Evaluation(every=4), run(rounds=3, evaluation=Evaluation(every=4))
    shorter.execute()
    made = run(StopAt(round=3), evaluation=evaluation, directory=RunDirectory.create(tmp_path / "run"))
    summary = made.execute()
    assert (summary["rounds"], summary["stopped_by"]) == (3, "StopAt")
    assert summary["metrics"] == shorter.summary["metrics"]  # of round 3, which was no round to be evaluated
    assert "stopped_by" not in shorter.summary
    assert max(file.name for file in (tmp_path / "run/checkpoint").glob("state-*.json")) == "state-000003.json"
    again = run(StopAt(round=3), evaluation=evaluation, directory=RunDirectory(tmp_path / "run"))
    again.restore()
    assert again.execute()["metrics"] == summary["metrics"] and again.done == 3


def test_one_that_would_end_the_last_round_ends_nothing():
    assert "stopped_by" not in run(StopAt(round=6)).execute()


@pytest.mark.long
def test_its_state_is_in_checkpoints(tmp_path):
    whole = SiteMetadata()
    run(whole).execute()

    def interrupt(number: int, rounds: int, accuracy: float | None) -> None:
        if number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SiteMetadata(), directory=RunDirectory.create(tmp_path / "run")).execute(interrupt)
    told = SiteMetadata()
    resumed = run(told, directory=RunDirectory(tmp_path / "run"))
    resumed.restore()
    assert resumed.done == 4 and told.state["sum"] == 10
    resumed.execute()
    assert told.state["rounds"] == whole.state["rounds"] and torch.equal(told.state["sum"], whole.state["sum"])
    without = run(directory=RunDirectory(tmp_path / "run"))
    with pytest.raises(PerfedError, match="this run had the callback 'told', whose state is saved"):
        without.restore()


def test_what_cannot_ride_along_is_refused():
    with pytest.raises(PerfedError, match="callbacks: 'told' occurs twice; each may occur once"):
        run(SiteMetadata(), SiteMetadata())
    with pytest.raises(PerfedError, match=r"is not a perfed\.Callback"):
        run(SiteMetadata)  # type: ignore[arg-type]


OWN = """
from perfed import Callback

class Plateau(Callback):
    '''Ends the run with a round.'''
    at: int = 2

    def after_round(self, run, record):
        return record["round"] == self.at

class Broken(Callback):
    def after_round(self, run, record):
        return 1 / 0

limit = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_callbacks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def with_callbacks(*given: Any) -> Experiment:
    return validate({**TABLE, "callbacks": list(given)})


@pytest.mark.parametrize("given", ["my_callbacks:Plateau", {"name": "my_callbacks:Plateau", "at": 3}])
def test_own_ones_have_names_in_toml(own, tmp_path, given):
    experiment = with_callbacks(given)
    assert read(experiment.to_toml(), "config.toml") == experiment
    summary = start(experiment, out=tmp_path / "run").execute()
    assert (summary["rounds"], summary["stopped_by"]) == (2 if isinstance(given, str) else 3, "Plateau")
    assert is_done(tmp_path / "run")
    assert resume(tmp_path / "run").execute()["metrics"] == summary["metrics"]


def test_two_runs_of_one_experiment_have_callbacks_of_their_own(own):
    experiment = with_callbacks({"name": "my_callbacks:Plateau", "at": 1})
    one, other = start(experiment), start(experiment)
    assert not {id(callback) for callback in one.callbacks} & {id(callback) for callback in other.callbacks}


@pytest.mark.long
def test_the_command_line_names_them_too(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["rounds=4", "callbacks=[my_callbacks:Plateau]", "--method", "local", "--out", "run"]
    ended = perfed("run", EXPERIMENT, *TINY, *given)
    assert ended.code == 0, ended.err
    assert json.loads(Path("run/summary.json").read_text())["stopped_by"] == "Plateau"
    broken = perfed("run", EXPERIMENT, *TINY, "callbacks=[my_callbacks:Broken]", "--out", "other")
    assert broken.code == 2 and broken.err.count("\n") == 1
    assert "my_callbacks.py, line 13, in after_round: ZeroDivisionError" in broken.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tensorbord", r"unknown callback 'tensorbord' \(did you mean 'tensorboard'\?\); allowed: tensorboard, mlflow"),
        ("nowhere_at_all:Plateau", "callback 'nowhere_at_all:Plateau': cannot be loaded: No module named"),
        ("my_callbacks:Plato", "callback 'my_callbacks:Plato': cannot be loaded: .* has no attribute 'Plato'"),
        ("my_callbacks:limit", "callback 'my_callbacks:limit' is not a class of a callback"),
        (
            {"name": "my_callbacks:Plateau", "att": 1},
            r"unknown key 'callbacks\.my_callbacks:Plateau\.att'; allowed",
        ),
        ({"name": "my_callbacks:Plateau", "at": "x"}, r"callbacks\.my_callbacks:Plateau\.at: .*integer \(given: 'x'\)"),
        ({"at": 1}, "callbacks: each is a name, or a table with a name and settings"),
    ],
)
def test_names_and_settings_that_are_not_there_are_one_line(own, given, said):
    with pytest.raises(PerfedError, match=said):
        with_callbacks(given)


TABLE = {
    "method": "fedrep",
    "rounds": 8,
    "checkpoint_seconds": 0.0,
    "data": {"name": "digits", "clients": 3, "validation_fraction": 0.3},
    "model": {"body": {"kind": "mlp", "hidden": [8]}, "head": "linear"},
    "training": {"lr": 0.05, "local_epochs": 1},
    "plan": {"threads": 1},
}
