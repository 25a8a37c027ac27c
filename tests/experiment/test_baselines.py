"""Rows of a comparison that no federation stands behind: one scikit-learn model per client."""

import csv
import json
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import EXPERIMENT, TINY, perfed
from lifelines import CoxPHFitter
from lifelines.utils import concordance_index
from scipy.optimize import minimize
from sklearn import linear_model
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC
from threadpoolctl import threadpool_info

from perfed.data.federation import Federation
from perfed.data.held_out import with_validation
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.cox import Cox
from perfed.experiment.estimators import baseline_names, new_model, trained, tries
from perfed.experiment.result import compare
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.study import read_comparison
from perfed.training.plan import PlanSettings


class Forest:
    """Leaves of one sample or five, by a loop over the samples and the trees that were not given them."""

    def __init__(self, kind):
        self.kind = kind

    def fit(self, x, y):
        made = [self.kind(random_state=1, min_samples_leaf=leaf).fit(x, y) for leaf in (1, 5)]
        return at_golden_section(made[int(self.out_of_bag(made[1], x, y) < self.out_of_bag(made[0], x, y))], x)

    def out_of_bag(self, forest, x, y):
        errors = []
        for number, row in enumerate(x):
            given = zip(forest.estimators_, forest.estimators_samples_, strict=True)
            trees = [tree for tree, rows in given if number not in rows]
            if self.kind is RandomForestRegressor:
                errors.append(np.mean((np.mean([tree.predict([row])[0] for tree in trees], axis=0) - y[number]) ** 2))
            else:
                said = np.mean([tree.predict_proba([row])[0] for tree in trees], axis=0)
                errors.append(np.mean((said - (forest.classes_ == y[number])) ** 2))
        return np.mean(errors)


def at_golden_section(model, x):
    """Move every threshold between the two neighbouring values of its column, by a loop over nodes."""
    for tree in np.ravel(model.estimators_):
        feature, threshold = tree.tree_.feature, tree.tree_.threshold
        for node in np.flatnonzero(feature >= 0):
            column = x[:, feature[node]].astype(np.float32).astype(np.float64)
            low, high = column[column <= threshold[node]].max(), column[column > threshold[node]].min()
            threshold[node] = np.float32(low + (np.sqrt(5) - 1) / 2 * (high - low))
    return model


class Boosted:
    """Gradient boosting with the thresholds of perfed's trees."""

    def __init__(self, kind):
        self.model = kind(max_depth=2, random_state=1)

    def fit(self, x, y):
        return at_golden_section(self.model.fit(x, y), x)


CLASSIFIERS = {
    "sklearn:logistic": lambda: LogisticRegression(max_iter=1000),
    "sklearn:svc": SVC,
    "sklearn:random-forest": lambda: Forest(RandomForestClassifier),
    "sklearn:gradient-boosting": lambda: Boosted(GradientBoostingClassifier),
    "sklearn:sklearn.neighbors.KNeighborsClassifier": KNeighborsClassifier,
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


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_row_is_what_scikit_learn_gives_by_hand(name):
    federation = load("digits", {"clients": 3}, seed=1)
    by_hand = [
        np.mean(CLASSIFIERS[name]().fit(*arrays(c, "train")).predict(arrays(c)[0]) == arrays(c)[1]) for c in federation
    ]
    summary = SklearnRun(name, experiment(), federation).execute()
    assert summary["accuracy"] == {
        "mean": pytest.approx(np.mean(by_hand), abs=1e-15),
        "std": pytest.approx(np.std(by_hand), abs=1e-15),
        "min": min(by_hand),
        "p10": pytest.approx(np.percentile(by_hand, 10), abs=1e-15),
        "p90": pytest.approx(np.percentile(by_hand, 90), abs=1e-15),
        "max": max(by_hand),
    }
    assert (summary["method"], summary["rounds"], summary["seed"]) == (name, 0, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_two_classes_have_the_area_under_the_curve(name):
    federation = Federation.from_arrays(sites(lambda rng, x: (x[:, 0] + rng.normal(size=70) > 0).astype(int)))
    expected = []
    for client in federation:
        model = CLASSIFIERS[name]().fit(*arrays(client, "train"))
        x, y = arrays(client)
        decides = hasattr(model, "decision_function")
        margin = model.decision_function(x) if decides else model.predict_proba(x)[:, 1]
        expected.append((np.mean(model.predict(x) == y), roc_auc_score(y, margin)))
    summary = SklearnRun(name, experiment(), federation).execute()
    found = [summary["metrics"][metric]["mean"] for metric in ("accuracy", "auc")]
    assert found == pytest.approx(np.mean(expected, axis=0), abs=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("columns", [None, 1, 2])
def test_regressions(columns):
    def targets(rng, x):
        return x[:, 0] if columns is None else x[:, :columns] + 0.1 * rng.normal(size=(70, columns))

    federation = Federation.from_arrays(sites(targets))
    makers = {"ridge": Ridge, "random-forest": lambda: Forest(RandomForestRegressor)}
    if columns != 2:  # scikit-learn's has one value per sample
        makers["gradient-boosting"] = lambda: Boosted(GradientBoostingRegressor)
    for name, make in makers.items():
        errors = []
        for client in federation:
            x, y = arrays(client, "train")
            model = make().fit(x, y.ravel() if columns == 1 else y)
            x, y = arrays(client)
            errors.append(np.mean((model.predict(x).reshape(y.shape) - y) ** 2))
        summary = SklearnRun(f"sklearn:{name}", experiment(), federation).execute()
        assert summary["metrics"]["mse"]["mean"] == pytest.approx(np.mean(errors), rel=1e-12)
    with pytest.raises(
        PerfedError, match=r"sklearn:svc is not for a regression, .* allowed: sklearn:ridge, sklearn:ran"
    ):
        SklearnRun("sklearn:svc", experiment(), federation).check()


@pytest.mark.long
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_leaves_of_a_forest_are_large_where_targets_are_noise_and_small_where_they_are_not(task):
    def fitted(noise):
        clients, rng = {}, np.random.default_rng(3)
        for name in "abc":
            x = rng.normal(size=(150, 2))
            y = np.sin(3 * x[:, :1]) + noise * rng.normal(size=(150, 1))
            y = y if task == "regression" else (y[:, 0] > 0).astype(int)
            clients[name] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
        federation = Federation.from_arrays(clients)
        baseline = SklearnRun("sklearn:random-forest", experiment(), federation)
        return [baseline.fitted(client).min_samples_leaf for client in federation]

    assert fitted(0.0) == [1, 1, 1] and fitted(3.0) == [5, 5, 5]


@pytest.mark.parametrize(("name", "task"), [("majority", "classification"), ("mean", "regression")])
def test_a_row_says_the_most_frequent_class_or_the_mean(name, task):
    def targets(rng, x):
        return (rng.random(70) < 0.2).astype(int) if task == "classification" else rng.normal(2, 1, size=(70, 1))

    federation = Federation.from_arrays(sites(targets))
    means = [arrays(client, "train")[1].mean() for client in federation]
    tested = [arrays(client)[1] for client in federation]
    asked = experiment(metrics=["log-loss"] * (name == "majority"))
    summary = SklearnRun(f"sklearn:{name}", asked, federation).execute()
    if task == "classification":
        assert max(means) < 0.5
        assert summary["metrics"]["accuracy"]["mean"] == pytest.approx(np.mean([np.mean(y == 0) for y in tested]))
        losses = [log_loss(y, np.full(len(y), p)) for y, p in zip(tested, means, strict=True)]
        assert summary["metrics"]["log-loss"]["mean"] == pytest.approx(np.mean(losses))
    else:
        errors = [np.mean((y - mean) ** 2) for y, mean in zip(tested, means, strict=True)]
        assert summary["metrics"]["mse"]["mean"] == pytest.approx(np.mean(errors))
    assert summary["notes"] == []


@pytest.mark.long
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
    for name in [name for name in CLASSIFIERS if "KNeighbors" not in name]:
        summary = SklearnRun(name, experiment(weights="samples"), federation).execute()
        assert summary["accuracy"]["min"] == 0.3  # six of twenty samples are of class 2
        assert summary["accuracy"]["max"] >= 0.5
    refused = "KNeighborsClassifier, client 'one-class-less': Expected n_neighbors <= n_samples_fit"
    few = {"x_train": x[:3], "y_train": y[:3], "x_test": x, "y_test": y}
    with pytest.raises(PerfedError, match=refused):  # five neighbours of three samples
        SklearnRun(
            "sklearn:sklearn.neighbors.KNeighborsClassifier",
            experiment(),
            Federation.from_arrays({"one-class-less": few}),
        ).execute()
    with pytest.raises(PerfedError, match=r"evaluation.split = 'validation': no client has such data"):
        SklearnRun("sklearn:svc", experiment(split="validation"), federation).check()


def two_classes(**more):
    return Federation.from_arrays(sites(lambda rng, x: (x[:, 0] + rng.normal(size=70) > 0).astype(int), **more))


def test_probabilities_where_the_model_has_them():
    federation, metrics = two_classes(), ("log-loss", "brier", "f1")
    summary = SklearnRun("sklearn:logistic", experiment(metrics=metrics), federation).execute()
    expected = []
    for client in federation:
        x, y = arrays(client)
        p = LogisticRegression(max_iter=1000).fit(*arrays(client, "train")).predict_proba(x)[:, 1]
        expected.append((log_loss(y, p), brier_score_loss(y, p)))
    found = [summary["metrics"][name]["mean"] for name in ("log-loss", "brier")]
    assert found == pytest.approx(np.mean(expected, axis=0), rel=1e-12)
    without = SklearnRun("sklearn:svc", experiment(metrics=metrics), federation).execute()["metrics"]
    assert set(without) == {"accuracy", "auc", "f1"}


def test_a_client_without_a_class_has_no_log_loss_for_it():
    data = sites(lambda rng, x: np.arange(70) % 3)
    data["a"]["y_train"] = np.arange(30) % 2
    metrics = SklearnRun("sklearn:logistic", experiment(metrics=["log-loss"]), Federation.from_arrays(data)).execute()
    assert metrics["metrics"]["log-loss"]["n"] == 2


@pytest.mark.parametrize("of", ["sklearn", "pooled"])
def test_strengths_are_tried_on_validation_samples(of):
    rng = np.random.default_rng(1)
    held = {"x_validation": rng.normal(size=(40, 5)), "y_validation": np.arange(40) % 2}
    held["x_validation"][:, 0] += 2 * held["y_validation"] - 0.7
    federation = two_classes(**held)
    parts = [[client] for client in federation] if of == "sklearn" else [list(federation)]
    right, taken = [], []
    for clients in parts:
        x, y = (np.concatenate(each) for each in zip(*(arrays(c, "train") for c in clients), strict=True))
        held_x, held_y = (np.concatenate(e) for e in zip(*(arrays(c, "validation") for c in clients), strict=True))
        scores = {
            c: LogisticRegression(max_iter=1000, C=c).fit(x, y).score(held_x, held_y) for c in (1, 0.01, 0.1, 10, 100)
        }
        best = max(scores, key=scores.get)  # the first of equal ones
        taken.append(best)
        # What chose has done its part, and the model is trained on all that there is.
        model = LogisticRegression(max_iter=1000, C=best).fit(np.concatenate([x, held_x]), np.concatenate([y, held_y]))
        right += [model.score(*arrays(client)) for client in clients]
    assert any(best != 1 for best in taken)  # else nothing is seen here
    summary = SklearnRun(f"{of}:logistic", experiment(), federation).execute()
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(right), abs=1e-15)
    note = "C chosen on validation samples, 5 tries: "
    note += ", ".join(f"{value:g} ({taken.count(value)} of {len(parts)})" for value in sorted(set(taken)))
    assert summary["notes"][-1] == note
    scored = SklearnRun(f"{of}:logistic", experiment(split="validation"), federation).execute()
    assert not any("chosen" in note for note in scored["notes"])  # what is scored on chooses nothing, nor is it learnt
    right = []
    for clients in parts:
        x, y = (np.concatenate(each) for each in zip(*(arrays(c, "train") for c in clients), strict=True))
        right += [LogisticRegression(max_iter=1000).fit(x, y).score(*arrays(c, "validation")) for c in clients]
    assert scored["accuracy"]["mean"] == pytest.approx(np.mean(right), abs=1e-15)


def test_what_nothing_is_chosen_of_is_trained_on_validation_samples_too():
    held = [with_validation(client, 0.2, True, 1) for client in two_classes()]
    by_hand = [KNeighborsClassifier().fit(*arrays(client, "train")) for client in two_classes()]
    right = [model.score(*arrays(client)) for model, client in zip(by_hand, held, strict=True)]
    federation = replace(two_classes(), clients=tuple(held))
    summary = SklearnRun("sklearn:sklearn.neighbors.KNeighborsClassifier", experiment(), federation).execute()
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(right), abs=1e-15)


@pytest.mark.parametrize("name", ["logistic", "ridge", "svc", "cox", "random-forest", "gradient-boosting"])
def test_as_many_values_of_a_strength_are_tried_as_are_asked_for(name):
    setting, five = tries(f"sklearn:{name}", 5)
    task = {"ridge": "regression", "cox": "survival"}.get(name, "classification")
    default = new_model(f"sklearn:{name}", task, 0).get_params()[setting]
    for number in range(1, 41):
        values = tries(f"sklearn:{name}", number)[1]
        assert len(set(values)) == len(values) == number and values[0] == default
        assert list(values[1:]) == sorted(values[1:]) and min(values) > 0
        if name == "random-forest":
            assert all(isinstance(value, int) for value in values)
        elif number > 2:
            assert (min(values), max(values)) == (min(five), max(five))  # the same ends
            for side in (sorted(v for v in values if v <= default), sorted(v for v in values if v >= default)):
                even = np.geomspace(side[0], side[-1], len(side))
                digit = 10 ** np.floor(np.log10(even))
                assert np.all(np.abs(side - even) <= 0.5001 * digit)  # rounded to one digit or more
    assert {
        "logistic": (1.0, 0.01, 0.1, 10.0, 100.0),
        "ridge": (1.0, 0.01, 0.1, 10.0, 100.0),
        "svc": (1.0, 0.01, 0.1, 10.0, 100.0),
        "cox": (0.1, 0.001, 0.01, 1.0, 10.0),
        "random-forest": (1, 2, 3, 5, 10),
        "gradient-boosting": (0.1, 0.01, 0.03, 0.3, 1.0),
    }[name] == five


@pytest.mark.parametrize("of", ["sklearn", "pooled"])
def test_where_tries_are_asked_for_and_nothing_is_held_out_a_quarter_is_while_choosing(of):
    federation, right, taken = two_classes(), [], []
    held = [with_validation(client, 0.25, True, 1) for client in federation]
    assert all(0 < len(client.split("validation")) <= 8 for client in held)
    for members in [[0], [1], [2]] if of == "sklearn" else [[0, 1, 2]]:
        (x, y), (own_x, own_y), (whole_x, whole_y) = (
            [np.concatenate(e) for e in zip(*(arrays(clients[i], split) for i in members), strict=True)]
            for clients, split in ((held, "train"), (held, "validation"), (federation.clients, "train"))
        )
        scores = {c: LogisticRegression(max_iter=1000, C=c).fit(x, y).score(own_x, own_y) for c in (1.0, 0.01, 100.0)}
        taken.append(max(scores, key=scores.get))
        model = LogisticRegression(max_iter=1000, C=taken[-1]).fit(whole_x, whole_y)
        right += [model.score(*arrays(federation.clients[i])) for i in members]
    asked = experiment().model_copy(update={"baseline_tries": 3})
    summary = SklearnRun(f"{of}:logistic", asked, federation).execute()
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(right), abs=1e-15)
    assert "C chosen on a quarter of the training samples, 3 tries: " in summary["notes"][-1]
    unasked = SklearnRun(f"{of}:logistic", experiment(), federation).execute()
    assert not any("chosen" in note for note in unasked["notes"])


def test_one_model_on_all_samples_together():
    federation = two_classes()
    x, y = (np.concatenate(each) for each in zip(*(arrays(c, "train") for c in federation), strict=True))
    model = LogisticRegression(max_iter=1000).fit(x, y)
    summary = SklearnRun("pooled:logistic", experiment(), federation).execute()
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean([model.score(*arrays(c)) for c in federation]))
    assert "brought together" in summary["notes"][0]
    data = sites(lambda rng, x: (x[:, 0] > 0).astype(int))
    data["b"] |= {"x_train": data["b"]["x_train"][:, :4], "x_test": data["b"]["x_test"][:, :4]}
    with pytest.raises(PerfedError, match=r"pooled:logistic: .* clients 'a' and 'b' have different columns"):
        SklearnRun("pooled:logistic", experiment(), Federation.from_arrays(data)).check()


def timed(rng, x, censored=0.3):
    """Times in whole days, so that there are ties, and events; hazards grow with the first column."""
    time = np.ceil(20 * rng.exponential(np.exp(-x[:, 0])))
    return np.stack([time, rng.random(len(x)) > censored], 1)


def of_survival(data):
    return Federation.from_arrays(data, task="survival")


def efron(beta, x, y):
    """Cox partial log-likelihood, by a plain loop over the times of events."""
    hazard, total = np.exp(x @ beta), 0.0
    for time in np.unique(y[y[:, 1] > 0, 0]):
        tied, risk = (y[:, 0] == time) & (y[:, 1] > 0), hazard[y[:, 0] >= time].sum()
        total += np.log(hazard[tied]).sum()
        total -= sum(np.log(risk - l / tied.sum() * hazard[tied].sum()) for l in range(tied.sum()))
    return total


@pytest.mark.parametrize("penalizer", [0.0, 0.5])
def test_a_cox_model_is_at_the_optimum_of_the_penalised_partial_likelihood(penalizer):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)) * (1, 3, 0.2)
    y = timed(rng, x)
    scale = x.std(0, ddof=1)

    def loss(beta):
        return -efron(beta, x, y) + penalizer * len(x) / 2 * np.sum((scale * beta) ** 2)

    best = minimize(loss, np.zeros(3), options={"gtol": 1e-8}).x
    model = Cox(penalizer).fit(x.astype(np.float32), y)
    assert model.predict(np.eye(3))[:, 0] == pytest.approx(best, rel=1e-3, abs=1e-4) and abs(best[0]) > 0.2


@pytest.mark.long
@pytest.mark.parametrize("of", ["sklearn", "pooled"])
def test_cox_models_have_the_penalty_that_is_best_on_validation_samples(of):
    rng = np.random.default_rng(3)
    data = sites(timed)
    for own in data.values():
        x = rng.normal(size=(30, 5))
        own |= {"x_validation": x, "y_validation": timed(rng, x)}
    federation, expected = of_survival(data), []
    groups = [[client] for client in federation] if of == "sklearn" else [list(federation)]
    for clients in groups:
        scores = {}
        x, y = (np.concatenate(each) for each in zip(*(arrays(c, "train") for c in clients), strict=True))
        held_x, held_y = (np.concatenate(e) for e in zip(*(arrays(c, "validation") for c in clients), strict=True))
        columns = [f"c{number}" for number in range(5)]

        def fitted(penalizer, x, y, columns=columns):
            table = pd.DataFrame(x.astype(float), columns=columns).assign(time=y[:, 0], event=y[:, 1])
            return CoxPHFitter(penalizer=penalizer).fit(table, "time", "event")

        for penalizer in (0.1, 0.001, 0.01, 1, 10):
            hazard = fitted(penalizer, x, y).predict_log_partial_hazard(pd.DataFrame(held_x, columns=columns))
            scores[penalizer] = concordance_index(held_y[:, 0], -hazard, held_y[:, 1])
        model = fitted(max(scores, key=scores.get), np.concatenate([x, held_x]), np.concatenate([y, held_y]))
        for client in clients:
            x, y = arrays(client)
            hazard = model.predict_log_partial_hazard(pd.DataFrame(x, columns=columns))
            expected.append(concordance_index(y[:, 0], -hazard, y[:, 1]))
    summary = SklearnRun(f"{of}:cox", experiment(), federation).execute()
    assert summary["metrics"]["c-index"]["mean"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert summary["notes"][-1].startswith("penalizer chosen on validation samples, 5 tries: ")


@pytest.mark.long
def test_awkward_sites_of_survival():
    rng = np.random.default_rng(0)
    data = sites(timed)
    data["a"]["x_train"][:, 1] = 2.0  # constant here alone
    data["b"]["y_train"][:, 1] = 0.0  # nobody has the event
    data["c"] |= {
        "x_train": data["c"]["x_train"][:4],
        "y_train": data["c"]["y_train"][:4],
    }  # fewer samples than columns
    x = np.arange(8.0)[:, None] + np.zeros(5)  # all columns say the same, and it orders the events: no finite optimum
    data["d"] = {**data["a"], "x_train": x, "y_train": np.stack([9.0 - x[:, 0], np.ones(8)], 1)}
    data["one"] = {**data["a"], "x_train": x[:1], "y_train": np.ones((1, 2))}
    held = rng.normal(size=(4, 5))
    for own in data.values():  # validation samples without an event choose nothing
        own |= {"x_validation": held, "y_validation": np.stack([np.ones(4), np.zeros(4)], 1)}
    summary = SklearnRun("sklearn:cox", experiment(), of_survival(data)).execute()
    note = "1 of the models were trained without an event and give every sample the same hazard"
    assert (
        note in summary["notes"] and "penalizer chosen on validation samples, 5 tries: 0.1 (5 of 5)" in summary["notes"]
    )
    alone = SklearnRun("sklearn:cox", experiment(), of_survival({"b": data["b"]})).execute()
    assert alone["metrics"]["c-index"]["mean"] == 0.5


def test_without_lifelines_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lifelines", None)
    with pytest.raises(PerfedError, match=r"a Cox model needs the package 'lifelines', .*\[tables\]"):
        SklearnRun("sklearn:cox", experiment(), of_survival(sites(timed))).check()


@pytest.mark.long
def test_a_comparison_of_survival(tmp_path):
    made = compare(
        of_survival(sites(timed)),
        ["fedavg", "sklearn:cox", "pooled:cox"],
        model={"head": "linear"},
        rounds=3,
        seeds=[0, 1],
        out=tmp_path / "made",
    )
    found = json.loads((tmp_path / "made" / "comparison.json").read_text())["verdict"]
    assert found["metric"] == "c-index" and found["reference"] == "sklearn:cox" and "FedAvg" in made.verdict
    assert all(site["gain"]["low"] is not None and site["local"] == "sklearn:cox" for site in found["sites"])
    with pytest.raises(
        PerfedError, match="sklearn:ridge is not for survival, which these data are; allowed: sklearn:cox"
    ):
        SklearnRun("sklearn:ridge", experiment(), of_survival(sites(timed))).check()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sklearn:sklearn.neighbors.KNeighbors", "no class 'KNeighbors' of a module 'sklearn.neighbors'"),
        ("sklearn:nowhere.Model", "no class 'Model' of a module 'nowhere'"),
        ("sklearn:sklearn.metrics.log_loss", "no estimator of scikit-learn's kind"),
        ("sklearn:sklearn.ensemble.VotingClassifier", "cannot be made without settings"),
        ("sklearn:sklearn.linear_model.Lasso", "is not for a classification"),
        ("pooled:ridge", r"is not for a classification.*allowed: pooled:logistic"),
        ("pooled:boosting", r"unknown scikit-learn model 'pooled:boosting'; allowed: pooled:logistic"),
    ],
)
def test_names_that_are_no_model(name, problem):
    with pytest.raises(PerfedError, match=problem):
        SklearnRun(name, experiment(), two_classes()).check()


def test_metrics_by_domain():
    data = sites(
        lambda rng, x: (x[:, 0] > 0).astype(int), domain_train=np.zeros(30, int), domain_test=np.arange(40) % 2
    )
    federation = Federation.from_arrays(data)
    summary = SklearnRun("sklearn:svc", experiment(), federation).execute()
    right = []
    for client in federation:
        x, y = arrays(client)
        right.append(SVC().fit(*arrays(client, "train")).predict(x) == y)
    by_domain = np.concatenate(right).reshape(-1, 2).mean(axis=0)
    assert [summary["domains"]["accuracy"][name] for name in "01"] == pytest.approx(by_domain)


def test_models_that_do_not_converge_are_counted(monkeypatch):
    federation = Federation.from_arrays(sites(lambda rng, x: (x[:, 0] > 0).astype(int)))
    assert SklearnRun("sklearn:logistic", experiment(), federation).execute()["notes"] == []
    monkeypatch.setattr(linear_model, "LogisticRegression", lambda max_iter: LogisticRegression(max_iter=1))
    notes = SklearnRun("sklearn:logistic", experiment(), federation).execute()["notes"]
    assert notes == ["3 of the models did not converge"]


@pytest.mark.parametrize(
    ("name", "plan", "threads"),
    [
        ("sklearn:logistic", {"threads": 2}, 1),  # a client has few rows
        ("pooled:logistic", {"threads": 2}, 2),
        ("pooled:logistic", {}, 1),
    ],
)
def test_a_model_has_one_thread_unless_it_is_pooled_and_the_plan_has_more(name, plan, threads, monkeypatch):
    class Watched(LogisticRegression):
        def fit(self, x, y):
            seen.update(pool["num_threads"] for pool in threadpool_info())
            return super().fit(x, y)

    seen = set()
    monkeypatch.setattr(linear_model, "LogisticRegression", Watched)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    federation = Federation.from_arrays(sites(lambda rng, x: (x[:, 0] > 0).astype(int)))
    settings = experiment().model_copy(update={"plan": PlanSettings(**plan)})
    SklearnRun(name, settings, federation).execute()
    assert max(seen) == threads


@pytest.mark.long
def test_rows_of_a_comparison(tmp_path):
    names = ("local", "sklearn:logistic", "sklearn:svc")
    out = tmp_path / "made"
    done = perfed("compare", EXPERIMENT, *TINY, "--methods", ",".join(names), "--seeds", "0..1", "--out", out)
    assert done.code == 0, done.err
    assert all(f"{name} seed 1: " in done.out for name in names)
    rows = json.loads((out / "comparison.json").read_text())["runs"]
    assert [(row["method"], row["seed"]) for row in rows] == [(name, seed) for name in names for seed in (0, 1)]
    options = {"clients": 4, "samples_per_client": 12}
    for row in rows[2:4]:
        federation = load("digits-views", options, seed=row["seed"])
        model = CLASSIFIERS["sklearn:logistic"]
        by_hand = [np.mean(model().fit(*arrays(c, "train")).predict(arrays(c)[0]) == arrays(c)[1]) for c in federation]
        assert row["accuracy"]["mean"] == pytest.approx(np.mean(by_hand), abs=1e-15)
    place = read_comparison(out).directory("sklearn:svc", 0)
    clients = list(csv.DictReader((place / "clients.csv").open()))
    assert {client["rounds"] for client in clients} == {"0"} and {client["accuracy_after"] for client in clients} == {
        ""
    }
    page = (out / "report.html").read_text()
    assert '<tr data-method="sklearn:svc"' in page and "<p>Execution plan, seed 0</p><pre>{}</pre>" not in page
    assert "4 clients · 3 rounds" in page


@pytest.mark.long
def test_a_comparison_with_rows_missing_is_resumed(tmp_path):
    out = tmp_path / "made"
    names = "local,sklearn:svc,sklearn:logistic"
    assert perfed("compare", EXPERIMENT, *TINY, "--methods", names, "--out", out).code == 0
    before = json.loads((out / "comparison.json").read_text())["runs"]
    for name in ("sklearn:svc", "sklearn:logistic"):
        (read_comparison(out).directory(name, 0) / "summary.json").unlink()
    assert perfed("resume", out).code == 0
    after = json.loads((out / "comparison.json").read_text())["runs"]
    assert [(row["method"], row["accuracy"]) for row in after] == [(row["method"], row["accuracy"]) for row in before]


@pytest.mark.long
def test_baselines_alone(tmp_path):
    names = "sklearn:svc,pooled:svc"
    done = perfed("compare", "digits-label-skew", "--methods", names, "--out", tmp_path / "made")
    assert done.code == 0, done.err
    assert "sklearn:svc seed 0: 88." in done.out and "(data brought together)" in done.said
    assert "SVC (data brought together)</th>" in (tmp_path / "made" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("compare", EXPERIMENT, "--methods", "local,sklearn:svm"), ("'sklearn:svm'", "allowed: ", *baseline_names())),
        (("compare", EXPERIMENT, "--methods", "local,sklearn:ridge"), ("sklearn:ridge is not for a classification",)),
        (
            ("tune", EXPERIMENT, "--methods", "sklearn:svc", "--grid", "lr=1,2"),
            ("'sklearn:svc' is not a method", "compare"),
        ),
        (("run", EXPERIMENT, "--method", "sklearn:svc"), ("'sklearn:svc' is not a method", "perfed compare")),
    ],
)
def test_what_is_not_there_is_one_line(arguments, parts, tmp_path):
    done = perfed(*arguments, *TINY, "--out", tmp_path / "new")
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1
    assert all(part in done.err for part in parts), done.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name",
    [
        "random-forest",
        "gradient-boosting",
        "sklearn.tree.DecisionTreeClassifier",
        "sklearn.ensemble.ExtraTreesClassifier",
        "sklearn.ensemble.AdaBoostClassifier",
        "sklearn.ensemble.BaggingClassifier",
    ],
)
def test_rounding_of_whole_numbers_does_not_change_what_trees_say(name):
    """New rows hold whole numbers between those of the training rows, where scikit-learn puts its thresholds."""
    generator = np.random.default_rng(0)
    ages = generator.choice(np.arange(20, 90, 2), (150, 3)).astype(np.float64)
    y = (ages[:, 0] - ages[:, 1] + 10 * generator.normal(size=150) > 0).astype(int)
    mean, deviation = ages.mean(0), ages.std(0)
    x = ((ages - mean) / deviation).astype(np.float32)
    model = trained(f"sklearn:{name}", new_model(f"sklearn:{name}", "classification", 0), x, y, tuned=True)
    assert (
        model.predict_proba(x) == new_model(f"sklearn:{name}", "classification", 0).fit(x, y).predict_proba(x)
    ).all()
    new = generator.integers(20, 90, (300, 3)).astype(np.float64)
    plain, less, more = (
        model.predict_proba(((new * factor - mean) / deviation).astype(np.float32))
        for factor in (1, 1 - 1e-7, 1 + 1e-7)
    )
    assert (plain == less).all() and (plain == more).all()
