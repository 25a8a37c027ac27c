"""What the reported models say of every test sample is kept, and is what each client's metric is made of."""

import csv
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import blobs, make, network
from sklearn.metrics import accuracy_score, roc_auc_score

from perfed.engine.evaluate import Outputs
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.result import compare
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import resume, start
from perfed.participation.settings import Participation
from perfed.run import predictions
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Evaluation


def accuracy(y, outputs):
    return accuracy_score(y, outputs.argmax(1))


def mse(y, outputs):
    return np.mean((y.reshape(len(y), -1) - outputs.reshape(len(y), -1)) ** 2)


def c_index(y, outputs):
    """By a plain loop over pairs."""
    good = pairs = 0.0
    for (t, event), h in zip(y, outputs[:, 0], strict=True):
        for (u, other), g in zip(y, outputs[:, 0], strict=True):
            if event and (u > t or (u == t and not other)):
                pairs += 1
                good += 1.0 if h > g else 0.5 * (h == g)
    return good / pairs


def survival():
    federation = blobs((9, 6, 12), regression=True, test=9)
    rng = np.random.default_rng(3)

    def timed(y):
        return torch.from_numpy(np.stack([rng.integers(1, 6, len(y)), rng.random(len(y)) < 0.7], 1).astype(np.float64))

    return replace(federation, clients=tuple(c.with_targets(timed) for c in federation), survival=True)


def again(where, metric, evaluations=1):
    """Each client's metric, from its predictions alone."""
    found = {}
    for file in predictions.read_predictions(where, evaluations):
        for site, _, own in file.sites():
            found.setdefault(site, []).append(metric(file.targets[own], file.outputs[own]))
    return {site: np.mean(values) for site, values in found.items()}


def reported(where, column):
    with (where / "clients.csv").open() as file:
        return {row["id"]: float(row[column]) for row in csv.DictReader(file) if row[column]}


CASES = {
    "before": ("fedavg", {}),
    "after": ("fedrep", {"when": "after"}),
    "the mean of three rounds": ("fedavg", {"last": 3}),
    "three rounds after training": ("fedavg", {"last": 3, "when": "after"}),
    "participants": ("fedrep", {"who": "participants"}),
    "among the classes held": ("local", {"classes": "held"}),
    "the taken models": ("fedrep", {"stop": "validated", "patience": 2}),
    "on validation data": ("fedavg", {"split": "validation"}),
    "by domain": ("feddar-wa", {}),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_they_give_each_clients_reported_metric(case, dtype, tmp_path):
    name, settings = CASES[case]
    data = blobs((12, 9, 30), labels=[[0, 1], [0, 1, 2]], validation=8, test=(20, 7, 11))
    evaluation = Evaluation(**{"every": 1, **settings})
    policy = Participation(rate=0.7)
    where = tmp_path / "run"
    method = make(name, local_epochs=2, batch_size=4, lr=0.05)
    options = {"rounds": 6, "dtype": dtype, "participation": policy, "directory": RunDirectory.create(where)}
    Run(data, method, network(), evaluation=evaluation, **options).execute()
    moment = "after" if evaluation.when == "after" else "before"
    assert len(list((where / "predictions").iterdir())) == evaluation.last
    found = again(where, accuracy, evaluation.last)
    assert found == pytest.approx(reported(where, f"accuracy_{moment}"), abs=1e-12) and found
    if evaluation.classes == "held":
        outputs = predictions.read_predictions(where)[0]
        assert np.isinf(outputs.outputs[: outputs.counts[0], 2]).all()


@pytest.mark.parametrize("task", ["regression", "survival"])
@pytest.mark.parametrize("name", ["fedavg", "baseline"])
def test_values_and_hazards_are_in_the_unit_of_the_data(task, name, tmp_path):
    data = blobs((12, 9, 30), regression=True, test=12).standardised() if task == "regression" else survival()
    where, metric = tmp_path / "run", {"regression": mse, "survival": c_index}[task]
    if name == "fedavg":
        Run(data, make(name), network(1), rounds=2, directory=RunDirectory.create(where)).execute()
    else:
        table = {"rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}}
        SklearnRun(
            {"regression": "sklearn:ridge", "survival": "sklearn:cox"}[task], validate(table), data, where
        ).execute()
    column = {"regression": "mse_before", "survival": "c-index_before"}[task]
    assert again(where, metric) == pytest.approx(reported(where, column), rel=1e-9)


@pytest.mark.long
def test_baselines_keep_them_and_a_comparison_has_the_same_rows_of_all(tmp_path):
    data = blobs((12, 9, 30), num_classes=2, test=(20, 7, 11))
    methods = ["fedavg", "sklearn:logistic", "sklearn:random-forest", "sklearn:svc", "pooled:logistic"]
    made = compare(data, methods, model={"head": "linear"}, rounds=2, seeds=[0], out=tmp_path / "made")
    marks = []
    for method in methods:
        where = tmp_path / "made" / method.replace(":", ".") / "seed-0"
        assert again(where, accuracy) == pytest.approx(reported(where, "accuracy_before"), abs=1e-12)
        areas = again(where, lambda y, outputs: roc_auc_score(y, np.nan_to_num(outputs[:, 1] - outputs[:, 0])))
        assert areas == pytest.approx(reported(where, "auc_before"), abs=1e-12)
        file = predictions.read_predictions(where)[0]
        marks.append((file.ids, file.counts.tolist(), file.marks.tolist(), file.targets.tolist()))
    assert all(mark == marks[0] for mark in marks) and marks[0][0] == ["c0", "c1", "c2"]
    assert made.verdict


@pytest.mark.long
def test_a_run_that_goes_on_keeps_those_of_its_new_end(tmp_path):
    table = {
        "name": "x",
        "method": "fedavg",
        "rounds": 2,
        "data": {"name": "digits", "clients": 4},
        "model": {"head": "linear"},
    }
    start(validate(table), out=tmp_path / "run").execute()
    assert again(tmp_path / "run", accuracy) == pytest.approx(reported(tmp_path / "run", "accuracy_before"))
    before = reported(tmp_path / "run", "accuracy_before")
    resume(tmp_path / "run", rounds=5).execute()
    after = reported(tmp_path / "run", "accuracy_before")
    assert after != before and again(tmp_path / "run", accuracy) == pytest.approx(after)


def test_too_many_are_not_kept_and_it_is_said(tmp_path, monkeypatch):
    data = blobs((12, 9, 30), test=(20, 7, 11))
    assert not predictions.exceeds_limit(data, "test") and 3 * 38 == 114
    monkeypatch.setattr(predictions, "LARGEST_SIZE", 113)
    assert predictions.exceeds_limit(data, "test")
    run = Run(data, make("fedavg"), network(), rounds=2, directory=RunDirectory.create(tmp_path / "run"))
    assert predictions.NOT_SAVED_NOTE in run.execute()["notes"] and predictions.read_predictions(tmp_path / "run") == []
    table = validate({"rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}})
    made = SklearnRun("sklearn:svc", table, data, tmp_path / "svc").execute()
    assert predictions.NOT_SAVED_NOTE in made["notes"] and not (tmp_path / "svc" / "predictions").exists()
    monkeypatch.setattr(predictions, "LARGEST_SIZE", 114)
    assert not predictions.exceeds_limit(data, "test") and predictions.exceeds_limit(data, "test", 2)


def test_numbers_are_short_only_where_that_changes_none():
    data = blobs((5,), test=2)
    for value, kind in ((0.5, np.float32), (0.1, np.float64), (-np.inf, np.float32)):
        outputs = np.array([[value, 1.0, 0.0]] * 2)
        part = Outputs(np.array(["c0", "c0"]), None, np.array([0, 1]), outputs)
        assert predictions.build_arrays([part], data, "test")["outputs"].dtype == kind


def test_a_damaged_file_is_one_line(tmp_path):
    (tmp_path / "predictions").mkdir()
    file = tmp_path / "predictions" / "round-0001.npz"
    file.write_bytes(b"PK nothing")
    with pytest.raises(PerfedError, match=r"round-0001.npz: cannot be read"):
        predictions.read_predictions(tmp_path)
    shutil.rmtree(tmp_path / "predictions")
    assert predictions.read_predictions(tmp_path) == []
