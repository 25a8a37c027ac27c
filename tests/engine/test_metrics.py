"""Metrics by a setting: each against another library or a loop, undefined ones, own ones, and classes held."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from command_line import perfed
from engines import blobs, make, network
from lifelines.utils import concordance_index
from sklearn import metrics as sk

from perfed.data.federation import Federation
from perfed.engine.metrics import (
    METRICS,
    compute_metric,
    describe_metric,
    find_metric,
    main_metric,
    metric,
    metric_of,
    register_described_metrics,
)
from perfed.engine.scores import c_index
from perfed.errors import PerfedError
from perfed.report import load_runs, write_report
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Evaluation

RNG = np.random.default_rng(0)


def logits(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    y = np.random.default_rng(n).integers(0, classes, n)
    return y, np.random.default_rng(n + 1).normal(size=(n, classes)) + 1.5 * np.eye(classes)[y]


def softmax(outputs: np.ndarray) -> np.ndarray:
    return torch.from_numpy(outputs).softmax(1).numpy()


def ece(y, outputs) -> float:
    """A loop over bins ((m - 1) / 15, m / 15]."""
    p, total = softmax(outputs), 0.0
    for m in range(1, 16):
        inside = (p.max(1) > (m - 1) / 15) & (p.max(1) <= m / 15)
        if inside.any():
            total += inside.mean() * abs((p.argmax(1) == y)[inside].mean() - p.max(1)[inside].mean())
    return total


def test_metrics_of_two_classes():
    y, outputs = logits(60, 2)
    p, said = softmax(outputs)[:, 1], outputs.argmax(1)
    expected = {
        "accuracy": sk.accuracy_score(y, said),
        "balanced-accuracy": sk.balanced_accuracy_score(y, said),
        "auc": sk.roc_auc_score(y, p),
        "average-precision": sk.average_precision_score(y, p),
        "f1": sk.f1_score(y, said),
        "log-loss": sk.log_loss(y, p),
        "brier": sk.brier_score_loss(y, p),
        "calibration-error": ece(y, outputs),
    }
    assert {name: compute_metric(name, y, outputs) for name in expected} == pytest.approx(expected)
    of_task = {name for name, item in METRICS.items() if item.task == "classification" and item.score}
    assert of_task == set(expected)


def test_metrics_of_more_classes_some_of_which_are_absent():
    y, outputs = logits(80, 4)
    p, said = softmax(outputs), outputs.argmax(1)
    expected = {
        "balanced-accuracy": sk.balanced_accuracy_score(y, said),
        "auc": sk.roc_auc_score(y, p, multi_class="ovr"),
        "average-precision": sk.average_precision_score(np.eye(4)[y], p),
        "f1": sk.f1_score(y, said, average="macro"),
        "log-loss": sk.log_loss(y, p),
        "brier": np.mean([sum((p[i, c] - (y[i] == c)) ** 2 for c in range(4)) for i in range(80)]),
        "calibration-error": ece(y, outputs),
    }
    assert {name: compute_metric(name, y, outputs) for name in expected} == pytest.approx(expected)
    few = y < 2
    assert compute_metric("auc", y[few], outputs[few]) == pytest.approx(
        np.mean([sk.roc_auc_score(y[few] == c, p[few, c]) for c in (0, 1)])
    )
    recalls = [(said[y == c] == c).mean() for c in (0, 1)]
    assert compute_metric("balanced-accuracy", y[few], outputs[few]) == pytest.approx(np.mean(recalls))


@pytest.mark.parametrize("seed", range(5))
def test_the_auc_is_exactly_the_fraction_of_ordered_pairs_with_ties_as_halves(seed):
    g = np.random.default_rng(seed)
    y, score = g.permutation([0, 1] * 7 + [1] * 16), g.integers(0, 5, 30).astype(float)
    positive, negative = score[y == 1], score[y == 0]
    halves = sum(2 * (a > b) + (a == b) for a in positive for b in negative)
    found = compute_metric("auc", y, np.stack([np.zeros(30), score], 1))
    assert found == halves / (2 * len(positive) * len(negative))
    assert found == pytest.approx(sk.roc_auc_score(y, score), abs=1e-14)


def test_metrics_of_values():
    y, outputs = RNG.normal(size=(30, 2)), RNG.normal(size=(30, 2))
    expected = {
        "mse": sk.mean_squared_error(y, outputs),
        "mae": sk.mean_absolute_error(y, outputs),
        "r2": sk.r2_score(y, outputs),
    }
    assert {name: compute_metric(name, y, outputs) for name in expected} == pytest.approx(expected)
    assert compute_metric("mae", y[:, 0], outputs[:, :1]) == pytest.approx(
        sk.mean_absolute_error(y[:, 0], outputs[:, 0])
    )


def pairs(time, event, hazard) -> float:
    found = all_ = 0.0
    for i in range(len(time)):
        for j in range(len(time)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                all_ += 1
                found += 1.0 if hazard[i] > hazard[j] else 0.5 if hazard[i] == hazard[j] else 0.0
    return found / all_


@pytest.mark.parametrize("seed", range(5))
def test_c_index_is_that_of_lifelines_and_of_a_loop_with_ties_and_censoring(seed):
    g = np.random.default_rng(seed)
    time, event, hazard = g.integers(1, 9, 50).astype(float), g.integers(0, 2, 50).astype(float), g.integers(0, 6, 50)
    found = c_index(np.stack([time, event], 1), hazard[:, None].astype(float))
    assert found == pytest.approx(pairs(time, event, hazard), abs=1e-14)
    assert found == pytest.approx(concordance_index(time, -hazard, event), abs=1e-14)


@pytest.mark.parametrize(
    ("name", "y", "outputs"),
    [
        ("auc", np.zeros(5, int), RNG.normal(size=(5, 2))),
        ("average-precision", np.full(5, 2), RNG.normal(size=(5, 3))),
        ("f1", np.zeros(5, int), RNG.normal(size=(5, 2))),
        ("log-loss", np.zeros(2, int), np.array([[0.0, 1.0], [-np.inf, 1.0]])),
        ("r2", np.ones(5), RNG.normal(size=(5, 1))),
        ("c-index", np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([[0.1], [0.2]])),
    ],
)
def test_what_is_not_defined_is_missing_and_what_is_no_number_is_not(name, y, outputs):
    assert compute_metric(name, y, outputs) is None
    assert np.isnan(compute_metric(name, y, np.full_like(outputs, np.nan)))


# In a run ------------------------------------------------------------------------------------------------------------


def executed(tmp_path, data: Federation, name="local", rounds=1, outputs=None, **evaluation) -> Run:
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_config(f'method = "{name}"\nseed = 0\n')
    model = network(outputs or data.num_outputs)
    run = Run(
        data, make(name), model, name=name, rounds=rounds, directory=directory, evaluation=Evaluation(**evaluation)
    )
    run.execute()
    return run


def table(tmp_path) -> dict[str, dict[str, str]]:
    with (tmp_path / "run" / "clients.csv").open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def test_asked_metrics_stand_beside_the_others_and_are_counted_where_some_clients_have_none(tmp_path):
    data = blobs((9, 8, 7), num_classes=2, labels=[[0, 1], [1]], test=12)
    run = executed(tmp_path, data, metrics=("average-precision", "brier"))
    brier, precision = [], []
    for client in data:
        p = run.predict(client.id, client.test.x).softmax(1)[:, 1].numpy()
        y, row = client.test.y.numpy(), table(tmp_path)[client.id]
        brier.append(sk.brier_score_loss(y, p, labels=[0, 1]))
        assert float(row["brier_before"]) == pytest.approx(brier[-1])
        if len(np.unique(y)) == 2:
            precision.append(sk.average_precision_score(y, p))
            assert float(row["average-precision_before"]) == pytest.approx(precision[-1])
        else:
            assert row["average-precision_before"] == row["auc_before"] == ""
    found = run.summary["metrics"]
    assert [*found] == ["accuracy", "loss", "average-precision", "brier", "auc"]
    assert found["brier"]["mean"] == pytest.approx(np.mean(brier)) and "n" not in found["brier"]
    assert found["average-precision"]["mean"] == pytest.approx(np.mean(precision))
    assert found["average-precision"]["n"] == found["auc"]["n"] == 2
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text())
    assert line["metrics"]["brier"] == found["brier"] and "brier_after" in line["metrics"]
    assert set(run.summary["domains"]) == {"accuracy", "average-precision", "brier", "auc"}
    text = write_report(load_runs([tmp_path / "run"]), tmp_path / "report.html", title="x").read_text()
    assert "average-precision" in text


@pytest.mark.long
def test_survival_in_a_run(tmp_path):
    data = blobs((20, 15), regression=True, test=12)
    clients = []
    for client in data:
        parts = {
            name: replace(s, y=torch.stack([s.y.abs() + 0.1, (torch.arange(len(s)) % 3 > 0).double()], 1))
            for name in ("train", "test")
            if (s := client.split(name)) is not None
        }
        clients.append(replace(client, **parts))
    data = Federation(tuple(clients), None, survival=True)
    assert (data.task, data.num_outputs) == ("survival", 1) and "survival" in repr(data)
    run = executed(tmp_path, data, "fedavg")
    for client in data:
        time, event = client.test.y.numpy().T
        hazard = run.predict(client.id, client.test.x)[:, 0].numpy()
        assert float(table(tmp_path)[client.id]["c-index_before"]) == pytest.approx(
            concordance_index(time, -hazard, event)
        )
    assert [*run.summary["metrics"]] == ["c-index", "loss"]
    (found,) = load_runs([tmp_path / "run"])
    assert found.clients.metric == "c-index"


def test_a_client_predicts_among_the_classes_that_it_holds(tmp_path):
    data = blobs((30, 30), labels=[[0, 1], [1, 2]], test=40)
    among_all = executed(tmp_path / "all", data, "fedavg", rounds=2)
    run = executed(tmp_path / "held", data, "fedavg", rounds=2, classes="held", metrics=("brier",))
    for client in data:
        logits, y = run.predict(client.id, client.test.x), client.test.y
        held = client.train.y.unique()
        right = float((held[logits[:, held].argmax(1)] == y).float().mean())
        loss = float(torch.nn.functional.cross_entropy(logits[:, held], torch.searchsorted(held, y)))
        own, plain = run.client_metrics[client.id], among_all.client_metrics[client.id]
        assert (own["accuracy"], own["loss"]) == pytest.approx((right, loss))
        assert (own["accuracy_all"], own["loss_all"]) == pytest.approx((plain["accuracy"], plain["loss"]))
        brier = np.square(softmax(np.where(np.isin(range(3), held), logits, -np.inf)) - np.eye(3)[y]).sum(1).mean()
        assert own["brier"] == pytest.approx(brier, abs=1e-6)
        assert own["loss"] < own["loss_all"] and own["accuracy"] >= own["accuracy_all"]
    assert run.summary["evaluation"]["classes"] == "held" and "classes" not in among_all.summary["evaluation"]
    text = write_report(load_runs([tmp_path / "held" / "run"]), tmp_path / "report.html", title="x").read_text()
    assert "Accuracy_all (%)" in text


def test_a_loss_among_held_classes_is_missing_where_a_sample_has_another(tmp_path):
    data = blobs((30, 30), labels=[[0, 1], [1, 2]], test=40)
    swapped = tuple(replace(c, test=data.clients[1 - i].test) for i, c in enumerate(data))
    run = executed(tmp_path, replace(data, clients=(swapped[0], data.clients[1])), classes="held")
    assert "loss" not in run.client_metrics["c0"] and "loss_all" in run.client_metrics["c0"]
    assert run.summary["metrics"]["loss"]["n"] == 1 and run.summary["metrics"]["accuracy"]["mean"] <= 1


def test_where_all_clients_hold_all_classes_there_is_one_answer(tmp_path):
    run = executed(tmp_path, blobs((30, 30)), classes="held")
    assert [*run.summary["metrics"]] == ["accuracy", "loss"]


@pytest.mark.parametrize(
    ("given", "regression", "message"),
    [
        ({"metrics": ("aucc",)}, False, "unknown metric 'aucc' .did you mean 'auc'..; allowed: accuracy, balan"),
        ({"metrics": ("loss",)}, False, "unknown metric 'loss'.*; allowed"),
        ({"metrics": ("r2",)}, False, "evaluation.metrics: 'r2' is for regression, but data set 'data' is a class"),
        ({"metrics": ("auc",)}, True, "evaluation.metrics: 'auc' is for classification, but data set 'data' is a regr"),
        ({"classes": "held"}, True, "evaluation.classes = 'held' is for classification, but data set 'data' is a regr"),
    ],
)
def test_metrics_that_cannot_be_had(given, regression, message):
    with pytest.raises(ValueError, match=message):
        Run(
            blobs(regression=regression),
            make("local"),
            network(1 if regression else 3),
            rounds=1,
            evaluation=Evaluation(**given),
        )


# Of one's own --------------------------------------------------------------------------------------------------------

OWN = """
import perfed

@perfed.metric("true-of-two", direction="lower", unit="cases")
def missed(y, outputs):
    return float(((y == 2) & (outputs.argmax(1) != 2)).sum()) if (y == 2).any() else float("nan")

@perfed.metric("broken", direction="higher")
def broken(y, outputs):
    return outputs["no"]
"""


@pytest.mark.long
def test_a_metric_of_one_s_own_on_the_command_line_and_in_the_report_of_another_process(tmp_path, monkeypatch):
    (tmp_path / "my_metrics.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    toml = """
name = "x"
rounds = 1
model = { head = "linear" }
data = { name = "digits", clients = 4 }
evaluation = { metrics = ["my_metrics:true-of-two", "f1"] }
"""
    (tmp_path / "x.toml").write_text(toml)
    result = perfed("run", "x.toml", "--method", "local", "--out", "out")
    assert result.code == 0, result.out + result.err
    assert "True-of-two (cases) " in result.out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["own_metrics"] == {"true-of-two": {"higher_is_better": False, "unit": "cases"}}
    assert "true-of-two_before" in (tmp_path / "out" / "clients.csv").read_text().splitlines()[0]
    monkeypatch.delitem(METRICS, "true-of-two")  # as in a process that has not imported the module
    load_runs([tmp_path / "out"])
    assert metric_of("true-of-two").unit == "cases" and describe_metric("true-of-two", 3.0) == "true-of-two 3 cases"
    result = perfed("run", "x.toml", 'evaluation.metrics=["my_metrics:broken"]', "--method", "local", "--out", "other")
    assert result.code == 2 and "my_metrics.py, line 10, in broken: IndexError" in result.out + result.err


def test_names_of_metrics_are_taken_once():
    with pytest.raises(PerfedError, match=r"metric 'auc' is registered twice, by 'perfed\.engine\.metrics' and by"):
        metric("auc", direction="higher")(lambda y, outputs: 0.0)
    for name, direction, message in (
        ("a_b", "higher", "is not a valid name"),
        ("ab", "up", "direction = 'up' is not allowed"),
    ):
        with pytest.raises(PerfedError, match=message):
            metric(name, direction=direction)
    register_described_metrics({"seen-elsewhere": {"higher_is_better": True, "unit": "%"}})
    metric("seen-elsewhere", direction="lower")(lambda y, outputs: 0.0)  # the process has it itself now
    assert not find_metric("seen-elsewhere")[1].higher_is_better
    assert main_metric({"loss": 0, "c-index": 0}) == "c-index" and main_metric({}) is None
