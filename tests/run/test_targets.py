"""Time to accuracy: what counts as reached, and that a resumed run remembers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from command_line import EXPERIMENT, TINY, perfed
from engines import blobs, every_tensor, make, network

from perfed.engine.evaluate import spread
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import is_done, resume, start
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.run.callbacks.targets import describe_targets, init_targets, update_targets
from perfed.run.run import Run
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

TARGETS = (0.1, 0.3, 0.5, 1.0)


def line(number: int, accuracy: float | None = None) -> dict[str, Any]:
    times = {"round": number, "virtual_time": 2.5 * number, "training_seconds": 0.1 * number}
    times |= {"bytes_up": 100_000, "bytes_down": 200_000 * number}
    return times if accuracy is None else times | {"accuracy": {"mean": accuracy}}


def test_the_first_evaluated_round_at_the_target_counts():
    found = init_targets([0.7, 0.8, 0.9])
    lines = [line(1), line(2, 0.5), line(3, 0.75), line(4), line(5, 0.8), line(6, 0.6), line(7, 0.85)]
    for number in range(1, 8):
        found = update_targets(found, lines[:number])
    assert [target["round"] for target in found] == [3, 5, None]
    when = {"round": 5, "virtual_time": 12.5, "training_seconds": 0.5}
    assert found[1] == {"accuracy": 0.8, **when, "bytes_up": 500_000, "bytes_down": 3_000_000}
    assert found[2] == {"accuracy": 0.9, **dict.fromkeys((*when, "bytes_up", "bytes_down"))}
    assert describe_targets(found) == [
        "70 %: round 3, virtual time 7.5 s, 1.5 MB up and down",
        "80 %: round 5, virtual time 12.5 s, 3.5 MB up and down",
        "90 %: not reached",
    ]


def test_rounding_of_the_mean_misses_no_target():
    mean = spread([0.7] * 3)["mean"]
    assert mean < 0.7
    assert update_targets(init_targets([0.7]), [line(1, mean)])[0]["round"] == 1
    assert update_targets(init_targets([0.7]), [line(1, 0.69999)])[0]["round"] is None


def experiment(*settings: str) -> Experiment:
    targets = f"evaluation.targets={list(TARGETS)}"
    given = [*TINY, "rounds=12", "evaluation.every=1", "checkpoint_seconds=0", targets, *settings]
    return validate({**override(find_experiment(EXPERIMENT), given, ["local"]), "method": "local"})


def by_hand(directory: Path) -> list[dict[str, Any]]:
    """The targets of a run as its rounds.jsonl says them."""
    lines = [json.loads(text) for text in (directory / "rounds.jsonl").read_text().splitlines()]
    found = []
    for target in TARGETS:
        reached = [one for one in lines if "accuracy" in one and one["accuracy"]["mean"] >= target]
        when = {key: reached[0][key] if reached else None for key in ("round", "virtual_time", "training_seconds")}
        until = lines[: reached[0]["round"]] if reached else []
        sent = {key: sum(one[key] for one in until) if reached else None for key in ("bytes_up", "bytes_down")}
        found.append({"accuracy": target, **when, **sent})
    return found


class Interrupted(Exception):
    pass


@pytest.mark.long
def test_a_resumed_run_remembers_the_targets_it_had_reached(tmp_path):
    def stop(number: int, total: int, accuracy: float | None) -> None:
        if number == 8:
            raise Interrupted

    with pytest.raises(Interrupted):
        start(experiment(), out=tmp_path / "run").execute(stop)
    before = by_hand(tmp_path / "run")
    resume(tmp_path / "run").execute()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["targets"] == by_hand(tmp_path / "run")
    rounds = [target["round"] for target in before]
    assert rounds[0] is not None and rounds[0] < 8 and rounds[-1] is None
    assert [target for target in summary["targets"] if target["round"] in range(1, 9)] == [
        target for target in before if target["round"] is not None
    ]


@pytest.mark.long
def test_only_evaluated_rounds_count_and_the_command_says_when(tmp_path):
    settings = ("evaluation.every=5", f"evaluation.targets={list(TARGETS)}", "rounds=12")
    result = perfed("run", EXPERIMENT, *TINY, *settings, "--method", "local", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert "virtual time" not in result.out  # without a clock
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["targets"]
    assert found == by_hand(tmp_path / "run")
    assert {target["round"] for target in found} <= {5, 10, 12, None}
    assert f"Local: 10 %: round {found[0]['round']}\n" in result.out
    assert "Local: 100 %: not reached" in result.out


def stopping(rounds: int, stop: str, targets: tuple[float, ...] = (0.4, 0.6), **options: Any) -> Run:
    """FedRep under SRPFL, whose slower clients are never used here."""
    staged = {"first": 2, "rule": "fixed", "stage_rounds": 100}
    evaluation = Evaluation(every=1, targets=targets, stop=stop)
    policy = Participation(policy="srpfl", srpfl=staged)
    data, method = blobs((12, 9, 30, 8), test=20), make("fedrep", local_epochs=2, batch_size=4, lr=0.02)
    given = {"participation": policy, "clock": Clock(speeds="fixed"), "evaluation": evaluation, "plan": Plan("stacked")}
    return Run(data, method, network(), rounds=rounds, **given, **options)


@pytest.mark.long
def test_a_run_that_ends_with_its_targets_is_the_run_of_so_many_rounds():
    made, whole = stopping(30, "targets"), stopping(30, "last")
    summary = made.execute()
    whole.execute()
    reached = [target["round"] for target in whole.summary["targets"]]
    assert summary["rounds"] == made.done == max(reached) < 30 and min(reached) < max(reached)
    assert summary["targets"] == [{**t, "training_seconds": ANY} for t in whole.summary["targets"]]
    assert any(f"ended after round {max(reached)} of at most 30" in note for note in summary["notes"])
    assert [line["accuracy"] for line in made.history] == [line["accuracy"] for line in whole.history[: max(reached)]]
    exact = stopping(max(reached), "last")
    exact.execute()
    tensors, expected = every_tensor(made.server), every_tensor(exact.server)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)  # unused clients have settled
    assert made.client_metrics == exact.client_metrics and summary["metrics"] == exact.summary["metrics"]
    assert sum(line["bytes_down"] for line in made.history) == sum(line["bytes_down"] for line in exact.history)
    assert not stopping(3, "targets", (1.0,)).execute()["targets"][0]["round"]  # never reached: to the last round


@pytest.mark.long
def test_a_run_that_has_ended_with_its_targets_is_done(tmp_path):
    table = experiment("evaluation.stop=targets", "evaluation.targets=[0.1]")
    start(table, out=tmp_path / "run").execute()
    assert is_done(tmp_path / "run") and (tmp_path / "run" / "predictions").is_dir()
    assert resume(tmp_path / "run").execute()["rounds"] < 12


@pytest.mark.long
def test_training_seconds_leave_evaluations_out(monkeypatch):
    """Time stands still but in rounds, which take one second, and in evaluations, which take a hundred."""
    now = [0.0]
    monkeypatch.setattr("perfed.run.run.time.perf_counter", lambda: now[0])

    def slowly(work, seconds):
        def wrapped(*given, **more):
            now[0] += seconds
            return work(*given, **more)

        return wrapped

    monkeypatch.setattr(Server, "round", slowly(Server.round, 1.0))
    monkeypatch.setattr(Server, "evaluate", slowly(Server.evaluate, 100.0))
    run = Run(blobs(), make("local"), network(), rounds=3, evaluation=Evaluation(every=1, targets=(0.01,)))
    summary = run.execute()
    assert [line["training_seconds"] for line in run.history] == [1.0, 2.0, 3.0]
    assert [line["wall_seconds"] for line in run.history] == [1.0, 102.0, 203.0]
    assert (summary["training_seconds"], summary["wall_seconds"]) == (3.0, 303.0)
    assert summary["targets"][0]["training_seconds"] == float(summary["targets"][0]["round"])


@pytest.mark.long
def test_a_comparison_prints_and_keeps_the_times(tmp_path):
    settings = (
        "evaluation.targets=[0.05, 1.0]",
        "clock.communication=2",
        "--methods",
        "local,hetfedrep",
        "--seeds",
        "0,1",
    )
    result = perfed("compare", EXPERIMENT, *TINY, *settings, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"]
    for row in rows:
        summary = json.loads((tmp_path / "out" / row["method"] / f"seed-{row['seed']}" / "summary.json").read_text())
        assert row["targets"] == summary["targets"] and row["virtual_time"] == summary["virtual_time"]
    printed = result.out[result.out.index("virtual time to accuracy") : result.out.index("what to use at each site")]
    assert "time to 5 %" in printed and "Speed-up" not in printed
    for method, title in (("local", "Local"), ("hetfedrep", "HetFedRep")):
        first = [row["targets"][0]["virtual_time"] for row in rows if row["method"] == method]
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{title} ")]
        assert f" {sum(first) / 2:.4g}" in line and "not reached" in line


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("[0.0]", "evaluation.targets.0: input should be greater than 0 (given: 0.0)"),
        ("[0.5, 70]", "evaluation.targets.1: input should be less than or equal to 1 (given: 70)"),
        ("[0.5, 0.5]", "evaluation.targets: must name each accuracy once (given: [0.5, 0.5])"),
        ("0.7", "evaluation.targets: input should be a valid tuple (given: 0.7)"),
    ],
)
def test_impossible_targets_are_refused(targets, message, tmp_path):
    result = perfed("run", EXPERIMENT, *TINY, f"evaluation.targets={targets}", "--out", tmp_path / "run")
    assert (result.code, result.err) == (2, f"perfed: {message}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": "targets"}, "stop = 'targets' needs targets"),
        ({"stop": "targets", "targets": (0.5,), "last": 2}, "stop = 'targets' takes one model of each client"),
    ],
)
def test_ending_with_targets_needs_them_and_one_model_of_each_client(settings, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(**settings)


def test_a_regression_has_no_accuracy_to_reach():
    federation = blobs(regression=True)
    with pytest.raises(PerfedError, match=r"evaluation\.targets: are accuracies, but .* is a regression"):
        Run(federation, make("local"), network(1), rounds=1, evaluation=Evaluation(targets=(0.7,)))
