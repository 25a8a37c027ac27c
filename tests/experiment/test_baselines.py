"""Rows of a comparison that no federation stands behind: one scikit-learn model per client."""

import csv
import json

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, perfed
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score
from sklearn.svm import SVC

from perfed.data.federation import Federation
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment import baselines
from perfed.experiment.baselines import Baseline, baseline_names
from perfed.experiment.compare import Comparison
from perfed.experiment.config import validate

CLASSIFIERS = {
    "sklearn:logistic": lambda: LogisticRegression(max_iter=1000),
    "sklearn:svc": SVC,
    "sklearn:random-forest": lambda: RandomForestClassifier(random_state=1),
}


def experiment(**evaluation):
    table = {"rounds": 1, "seed": 1, "data": {"name": "digits"}, "model": {"head": "linear"}, "evaluation": evaluation}
    return validate(table)


def arrays(client, split="test"):
    part = getattr(client, split)
    return part.x.numpy(), part.y.numpy()


def sites(make, **more):
    """Three sites of 30 training and 40 test samples, by ``make(rng, x) -> y``."""
    rng = np.random.default_rng(0)
    found = {}
    for name in "abc":
        x = rng.normal(size=(70, 5))
        y = make(rng, x)
        found[name] = {"x_train": x[:30], "y_train": y[:30], "x_test": x[30:], "y_test": y[30:], **more}
    return found


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_row_is_what_scikit_learn_gives_by_hand(name):
    federation = load("digits", {}, seed=1)
    by_hand = [
        np.mean(CLASSIFIERS[name]().fit(*arrays(c, "train")).predict(arrays(c)[0]) == arrays(c)[1]) for c in federation
    ]
    summary = Baseline(name, experiment(), federation).execute()
    assert summary["accuracy"] == {
        "mean": pytest.approx(np.mean(by_hand), abs=1e-15),
        "std": pytest.approx(np.std(by_hand), abs=1e-15),
        "min": min(by_hand),
        "p10": pytest.approx(np.percentile(by_hand, 10), abs=1e-15),
        "p90": pytest.approx(np.percentile(by_hand, 90), abs=1e-15),
        "max": max(by_hand),
    }
    assert (summary["method"], summary["rounds"], summary["seed"]) == (name, 0, 1)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_two_classes_have_the_area_under_the_curve(name):
    federation = Federation.from_arrays(sites(lambda rng, x: (x[:, 0] + rng.normal(size=70) > 0).astype(int)))
    expected = []
    for client in federation:
        model = CLASSIFIERS[name]().fit(*arrays(client, "train"))
        x, y = arrays(client)
        margin = model.predict_proba(x)[:, 1] if "forest" in name else model.decision_function(x)
        expected.append((np.mean(model.predict(x) == y), roc_auc_score(y, margin)))
    summary = Baseline(name, experiment(), federation).execute()
    found = [summary["metrics"][metric]["mean"] for metric in ("accuracy", "auc")]
    assert found == pytest.approx(np.mean(expected, axis=0), abs=1e-12)


@pytest.mark.parametrize("columns", [None, 1, 2])
def test_regressions(columns):
    def targets(rng, x):
        return x[:, 0] if columns is None else x[:, :columns] + 0.1 * rng.normal(size=(70, columns))

    federation = Federation.from_arrays(sites(targets))
    for name, make in (("ridge", Ridge), ("random-forest", lambda: RandomForestRegressor(random_state=1))):
        errors = []
        for client in federation:
            x, y = arrays(client, "train")
            model = make().fit(x, y.ravel() if columns == 1 else y)
            x, y = arrays(client)
            errors.append(np.mean((model.predict(x).reshape(y.shape) - y) ** 2))
        summary = Baseline(f"sklearn:{name}", experiment(), federation).execute()
        assert summary["metrics"]["mse"]["mean"] == pytest.approx(np.mean(errors), rel=1e-12)
    with pytest.raises(
        PerfedError, match=r"sklearn:svc is not for a regression, .* allowed: sklearn:ridge, sklearn:ran"
    ):
        Baseline("sklearn:svc", experiment(), federation)


def test_awkward_clients():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2, 2)), np.arange(20) % 3
    federation = Federation.from_arrays(
        {
            "all": {"x_train": x, "y_train": y, "x_test": x, "y_test": y},
            "one-class": {"x_train": x, "y_train": np.full(20, 2), "x_test": x, "y_test": y},
            "one-sample": {"x_train": x[:1], "y_train": y[:1], "x_test": x, "y_test": y},
            "no-test": {"x_train": x, "y_train": y},
        }
    )
    for name in CLASSIFIERS:
        summary = Baseline(name, experiment(weights="samples"), federation).execute()
        assert summary["accuracy"]["min"] == 0.3  # six of twenty samples are of class 2
        assert summary["accuracy"]["max"] >= 0.5
    with pytest.raises(PerfedError, match=r"evaluation.split = 'validation': no client has such data"):
        Baseline("sklearn:svc", experiment(split="validation"), federation)


def test_metrics_by_domain():
    data = sites(
        lambda rng, x: (x[:, 0] > 0).astype(int), domain_train=np.zeros(30, int), domain_test=np.arange(40) % 2
    )
    federation = Federation.from_arrays(data)
    summary = Baseline("sklearn:svc", experiment(), federation).execute()
    right = []
    for client in federation:
        x, y = arrays(client)
        right.append(SVC().fit(*arrays(client, "train")).predict(x) == y)
    by_domain = np.concatenate(right).reshape(-1, 2).mean(axis=0)
    assert [summary["domains"]["accuracy"][name] for name in "01"] == pytest.approx(by_domain)


def test_models_that_do_not_converge_are_counted(monkeypatch):
    federation = Federation.from_arrays(sites(lambda rng, x: (x[:, 0] > 0).astype(int)))
    assert Baseline("sklearn:logistic", experiment(), federation).execute()["notes"] == []
    monkeypatch.setattr(baselines, "LogisticRegression", lambda max_iter: LogisticRegression(max_iter=1))
    notes = Baseline("sklearn:logistic", experiment(), federation).execute()["notes"]
    assert notes == ["3 of the models did not converge"]


def test_rows_of_a_comparison(tmp_path):
    names = ("local", "sklearn:logistic", "sklearn:svc")
    out = tmp_path / "made"
    done = perfed("compare", EXPERIMENT, *TINY, "--methods", ",".join(names), "--seeds", "0..1", "--out", out)
    assert done.code == 0, done.err
    assert all(f"{name} seed 1: " in done.out for name in names)
    rows = json.loads((out / "comparison.json").read_text())
    assert [(row["method"], row["seed"]) for row in rows] == [(name, seed) for name in names for seed in (0, 1)]
    options = {"clients": 4, "samples_per_client": 12}
    for row in rows[2:4]:
        federation = load("digits-views", options, seed=row["seed"])
        model = CLASSIFIERS["sklearn:logistic"]
        by_hand = [np.mean(model().fit(*arrays(c, "train")).predict(arrays(c)[0]) == arrays(c)[1]) for c in federation]
        assert row["accuracy"]["mean"] == pytest.approx(np.mean(by_hand), abs=1e-15)
    place = Comparison.read(out).directory("sklearn:svc", 0)
    clients = list(csv.DictReader((place / "clients.csv").open()))
    assert {client["rounds"] for client in clients} == {"0"} and {client["accuracy_after"] for client in clients} == {
        ""
    }
    page = (out / "report.html").read_text()
    assert "<td>sklearn:svc</td>" in page and "<p>Execution plan, seed 0</p><pre>{}</pre>" not in page
    assert "4 clients · 3 rounds" in page


def test_a_comparison_with_rows_missing_is_resumed(tmp_path):
    out = tmp_path / "made"
    names = "local,sklearn:svc,sklearn:logistic"
    assert perfed("compare", EXPERIMENT, *TINY, "--methods", names, "--out", out).code == 0
    before = json.loads((out / "comparison.json").read_text())
    for name in ("sklearn:svc", "sklearn:logistic"):
        (Comparison.read(out).directory(name, 0) / "summary.json").unlink()
    assert perfed("resume", out).code == 0
    after = json.loads((out / "comparison.json").read_text())
    assert [(row["method"], row["accuracy"]) for row in after] == [(row["method"], row["accuracy"]) for row in before]


def test_baselines_alone(tmp_path):
    done = perfed("compare", "digits-label-skew", "--methods", "sklearn:svc", "--out", tmp_path / "made")
    assert done.code == 0, done.err
    assert "sklearn:svc seed 0: 88." in done.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("compare", EXPERIMENT, "--methods", "local,sklearn:svm"), ("'sklearn:svm'", "allowed: ", *baseline_names())),
        (("compare", EXPERIMENT, "--methods", "local,sklearn:ridge"), ("sklearn:ridge is not for a classification",)),
        (
            ("tune", EXPERIMENT, "--methods", "sklearn:svc", "--grid", "lr=1,2"),
            ("'sklearn:svc' is no method", "compare"),
        ),
        (("run", EXPERIMENT, "--method", "sklearn:svc"), ("'sklearn:svc' is no method", "perfed compare")),
    ],
)
def test_what_is_not_there_is_one_line(arguments, parts, tmp_path):
    done = perfed(*arguments, *TINY, "--out", tmp_path / "new")
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1
    assert all(part in done.err for part in parts), done.err
    assert not (tmp_path / "new").exists()
