"""``perfed.compare``: the same numbers as runs made one by one, and what can be asked of its result."""

import gc
import html
import json
import re
import shlex
import shutil

import numpy as np
import pandas as pd
import pytest
from command_line import EXPERIMENT, TINY
from command_line import perfed as perfed_command
from sklearn.linear_model import LogisticRegression

import perfed
from perfed.client_model.card import card
from perfed.datasets import dataset_names, load
from perfed.errors import PerfedError
from perfed.experiment.comparison import command_of
from perfed.experiment.config import find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import start

MODEL = {"head": "linear"}
PLAN = {"engine": "stacked", "threads": 1}  # the same bits


@pytest.fixture
def digits():
    return load("digits", {"clients": 4, "samples": 20}, seed=0)


@pytest.mark.long
def test_numbers_are_those_of_runs_made_one_by_one(digits, tmp_path):
    names = dataset_names()
    made = perfed.compare(
        digits,
        ["local", "fedavg", "sklearn:logistic"],
        model=MODEL,
        rounds=3,
        seeds=[0, 1, 2],
        training={"lr": 0.01},
        plan=PLAN,
        evaluation={"metrics": ["log-loss"]},
    )
    assert made.failed == () and dataset_names() == names  # nothing stays behind
    table = made.table.set_index(["metric", "method"])
    for method in ("local", "fedavg"):
        means = []
        for seed in (0, 1, 2):
            settings = {"method": method, "seed": seed, "rounds": 3, "data": {"name": "digits"}, "model": MODEL}
            settings["plan"] = PLAN
            run = start(validate({**settings, "training": {"lr": 0.01}}), federation=digits)
            means.append(run.execute()["accuracy"]["mean"])
            x = digits.clients[1].test.x[:7]
            kept = made.run(method, seed)
            assert kept.predict("001", x).equal(run.predict("001", x))
        assert table.loc[("accuracy", method), "mean"] == pytest.approx(np.mean(means), abs=1e-15)
    arrays = [(c.train.x.numpy(), c.train.y.numpy(), c.test.x.numpy(), c.test.y.numpy()) for c in digits]
    right = [LogisticRegression(max_iter=1000).fit(x, y).score(tx, ty) for x, y, tx, ty in arrays]
    assert table.loc[("accuracy", "sklearn:logistic"), "mean"] == pytest.approx(np.mean(right), abs=1e-15)
    assert table.loc[("accuracy", "fedavg"), "seeds"] == 3
    kept = json.loads((made.path / "comparison.json").read_text())["verdict"]
    assert pd.isna(table.loc[("accuracy", kept["reference"]), "low"])
    for judged in kept["methods"]:
        row = table.loc[("accuracy", judged["method"])]
        assert row["reference"] == kept["reference"] and row["interval_over"] == "clients and seeds"
        assert {name: row[name] for name in ("difference", "low", "high")} == {
            "difference": judged["gain"]["mean"],
            "low": judged["gain"]["low"],
            "high": judged["gain"]["high"],
        }
    assert ("log-loss", "sklearn:logistic") in table.index
    assert "logistic regression per client" in made.verdict and made.best("000") in made.methods
    x, y, tx, _ = arrays[1]
    model, site = LogisticRegression(max_iter=1000).fit(x, y), made.run("sklearn:logistic", 0).site("001")
    assert np.allclose(site.predict_proba(tx)[:, model.classes_], model.predict_proba(tx), atol=1e-12)
    with pytest.raises(PerfedError, match="there is no run of 'fedrep' with seed 0"):
        made.run("fedrep", 0)
    page = made.report(tmp_path / "report.html").read_text()
    assert made.verdict.splitlines()[0] in page
    path = made.path
    assert path.is_dir()
    del made
    gc.collect()
    assert not path.exists()


@pytest.mark.long
def test_a_federation_for_each_seed(tmp_path):
    folds = {seed: load("digits", {"clients": 4, "samples": 20}, seed=seed) for seed in (0, 1)}
    methods = ["local", "sklearn:logistic"]
    made = perfed.compare(lambda seed: folds[seed], methods, model=MODEL, rounds=1, seeds=folds, out=tmp_path / "out")
    assert (tmp_path / "out" / "local" / "seed-1" / "summary.json").is_file()
    run = made.run("local", 1)
    assert run.federation.clients[0].test.x.equal(folds[1].clients[0].test.x)
    assert run.site("000").predict(folds[1].clients[0].test.x[:5]).shape == (5,)
    with pytest.raises(PerfedError, match="already holds results"):
        perfed.compare(folds[0], methods, model=MODEL, rounds=1, out=tmp_path / "out")


@pytest.mark.long
def test_tuned_on_the_validation_samples_that_all_are_trained_without(digits, tmp_path):
    methods = ["local", "fedavg", "sklearn:logistic"]
    settings = {"model": MODEL, "rounds": 2, "seeds": [0], "training": {"local_epochs": 30}}
    made = perfed.compare(digits, methods, tune=["lr=1e-6,1e-2"], out=tmp_path / "out", **settings)
    for method in ("local", "fedavg"):
        assert made.run(method, 0).server.method.lr == 0.01
    sizes = [len(client.train) for client in made.run("local", 0).federation]
    assert all(size < 20 for size in sizes)
    notes = (tmp_path / "out" / "sklearn.logistic" / "seed-0" / "summary.json").read_text()
    assert "C chosen on validation samples, 2 tries" in notes


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"methods": ["local", "fedavgg"]}, "methods: unknown method 'fedavgg'"),
        ({"methods": []}, "methods: at least one is needed"),
        ({"seeds": [1, 1]}, "seeds = "),
        ({"model": perfed.linear(10)}, "model: must be a table of stages"),
        ({"rouns": 3}, "unknown key 'rouns'"),
        ({"method": "fedavg"}, "method: methods, seeds and the federation are given by their own arguments"),
        ({"methods": {"sklearn:svc": {"C": 2}}}, "sklearn:svc has no settings"),
        ({"training": {"lr": -1.0}}, "lr"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(digits, changed, problem, tmp_path):
    given = {"methods": ["local"], "model": MODEL, "rounds": 1, **changed}
    with pytest.raises(PerfedError, match=problem):
        perfed.compare(digits, given.pop("methods"), out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_runs_that_fail_do_not_stop_the_others_and_are_said(digits, tmp_path):
    methods = {"fedavg": {"lr": 1e30, "weight_decay": 1e30, "optimizer": "sgd"}, "local": {}}
    made = perfed.compare(digits, methods, model=MODEL, rounds=3, seeds=[0])
    assert len(made.failed) == 1 and made.failed[0].startswith("fedavg, seed 0: ")
    reason = made.failed[0].removeprefix("fedavg, seed 0: ")
    assert set(made.table["method"]) == {"local"} and made.verdict == f"FedAvg failed in 1 of 1 seed: {reason}"
    assert f"FedAvg failed in 1 of 1 seed: {html.escape(reason)}" in made.report(tmp_path / "r.html").read_text()
    with pytest.raises(PerfedError, match=re.escape(f"fedavg failed with seed 0: {reason}")):
        made.run("fedavg", 0)
    with pytest.raises(PerfedError, match="there is nothing to choose from"):
        made.best("000")


@pytest.mark.long
def test_a_method_that_failed_is_said_by_every_command_until_it_is_done(tmp_path):
    out, settings = tmp_path / "out", ("methods.flic-class.lr=1e30", "methods.flic-class.optimizer=sgd")
    given = ("compare", EXPERIMENT, *TINY, *settings, "--methods", "local,hetfedrep,flic-class", "--seeds", "0..1")
    done = perfed_command(*given, "--out", out)
    assert done.code == 2
    assert "FLIC-Class failed in 2 of 2 seeds: " in done.said
    kept = json.loads((out / "comparison.json").read_text())
    assert [(of["method"], of["seed"]) for of in kept["failed"]] == [("flic-class", 0), ("flic-class", 1)]
    (said,) = [text for text in kept["verdict"]["warnings"] if text.startswith("FLIC-Class failed")]
    assert said == f"FLIC-Class failed in 2 of 2 seeds: {kept['failed'][0]['reason']}"
    again = perfed_command("report", out)
    assert again.code == 0 and " ".join(said.split()) in again.said
    assert html.escape(said) in (out / "report.html").read_text()
    for seed in (0, 1):  # as if it had come to an end since
        shutil.rmtree(out / "flic-class" / f"seed-{seed}", ignore_errors=True)
        shutil.copytree(out / "hetfedrep" / f"seed-{seed}", out / "flic-class" / f"seed-{seed}")
    assert "FLIC-Class failed" not in perfed_command("report", out).said


@pytest.mark.long
def test_seeds_on_the_same_rows_are_said(digits):
    same = perfed.compare(digits, ["local", "fedavg"], model=MODEL, rounds=1, seeds=[0, 1])
    line = (
        "All seeds have the same training and test rows: intervals over seeds only cover the variation of the "
        "training; give a function from a seed to a federation for folds."
    )
    assert line in same.verdict.splitlines()
    tuned = perfed.compare(digits, ["local", "fedavg"], model=MODEL, rounds=1, seeds=[0, 1], tune=["lr=1e-2"])
    assert line.replace("training and test rows", "test rows") in tuned.verdict.splitlines()
    once = perfed.compare(digits, ["local", "fedavg"], model=MODEL, rounds=1, seeds=[0])
    folds = perfed.compare(
        lambda seed: load("digits", {"clients": 4, "samples": 20}, seed=seed),
        ["local", "fedavg"],
        model=MODEL,
        rounds=1,
        seeds=[0, 1],
    )
    assert "All seeds" not in once.verdict and "All seeds" not in folds.verdict


@pytest.mark.long
def test_a_model_of_scikit_learn_is_had_as_the_page_says(tmp_path):
    """It is taken out of its run, has a card, and says what the comparison measured."""
    rng = np.random.default_rng(0)
    frames = {}
    for site in ("north", "south"):
        age, kind = rng.normal(50, 10, 60), rng.choice(["a", "b", "c"], 60)
        frames[site] = pd.DataFrame(
            {"age": age, "kind": kind, "sick": np.where(age + 9 * (kind == "a") > 52, "y", "n")}
        )
    federation = perfed.Federation.from_frames(frames, target="sick", folds=5, seed=0)
    made = perfed.compare(
        federation,
        ["local", "sklearn:logistic"],
        model={"embedding": {"kind": "linear", "out": 4}, "head": "linear"},
        rounds=1,
        seeds=[0],
        out=tmp_path / "out",
    )
    where, client = tmp_path / "out" / "sklearn.logistic" / "seed-0", federation.clients[0]
    site = made.run("sklearn:logistic", 0).site("north")
    assert "Trained by **sklearn:logistic**" in card(site.facts)
    said = site.outputs(*site.check_inputs(client.test.x)).argmax(1)
    score = np.mean(said == client.test.y.numpy())
    rows = (line.split(",") for line in (where / "clients.csv").read_text().splitlines())
    assert float(next(row for row in rows if row[0] == "north")[3]) == pytest.approx(score)
    assert site.predict_proba(frames["north"][["kind", "age"]]).shape == (60, 2)
    assert made.best("north") in made.methods


def test_the_command_of_a_comparison_makes_its_table_again():
    given = ["rounds=3", "clients=4", "methods.fedpac.lr=1e-2", "overlap=none", "evaluation.targets=[0.5, 0.6]"]
    table = override(find_experiment("digits-label-skew"), given, ["fedpac"])
    said = shlex.split(command_of(table, ["local", "fedpac"], [0, 2, 3]))
    assert said[:7] == ["perfed", "compare", "digits-label-skew", "--methods", "local,fedpac", "--seeds", "0,2,3"]
    assert override(find_experiment("digits-label-skew"), said[7:], ["fedpac"]) == table and len(said) == 12
    assert command_of({**table, "name": "mine"}, ["local"], [0]) == ""


def test_a_run_says_who_holds_what(tmp_path):
    fast = ("rounds=1", "clients=3", "plan.engine=stacked", "plan.threads=1")
    out, methods = tmp_path / "made", ("local", "sklearn:svc")
    done = perfed_command("compare", "digits-label-skew", "--methods", ",".join(methods), *fast, "--out", out)
    assert done.code == 0, done.err
    options = {key: value for key, value in find_experiment("digits-label-skew")["data"].items() if key != "name"}
    federation = load("digits", options | {"clients": 3}, seed=0)
    files = [out / name / "seed-0" / "federation.json" for name in ("local", "sklearn.svc")]
    found = [json.loads(file.read_text()) for file in files]
    assert found[0] == found[1] and found[0]["classes"] == list("0123456789")
    for client in federation:
        held = found[0]["clients"][client.id]
        assert held["rows"] == {"train": len(client.train), "test": len(client.test)} and held["inputs"] == 64
        assert held["classes"] == [int((client.train.y == label).sum()) for label in range(10)]


@pytest.mark.long
def test_methods_are_compared_by_the_metric_that_is_asked_for(tmp_path):
    asked = (*TINY, "evaluation.compare_by=log-loss")
    out, methods = tmp_path / "made", "local,hetfedrep,sklearn:logistic"
    done = perfed_command("compare", EXPERIMENT, "--methods", methods, "--seeds", 0, *asked, "--out", out)
    assert done.code == 0, done.err
    found = json.loads((out / "comparison.json").read_text())
    assert found["verdict"]["metric"] == "log-loss"
    means = {run["method"]: run["metrics"]["log-loss"]["mean"] for run in found["runs"]}
    alone = min(("local", "sklearn:logistic"), key=means.__getitem__)
    assert found["verdict"]["reference"] == alone
    (gain,) = [of["gain"]["mean"] for of in found["verdict"]["methods"] if of["method"] == "hetfedrep"]
    assert gain == pytest.approx(means[alone] - means["hetfedrep"], rel=0.05)  # of the clients that have both
    tuned = tmp_path / "tuned"
    grid = ["--grid", "lr=1e-3,1e-2", "samples_per_client=30", "validation_fraction=0.5"]
    assert perfed_command("tune", EXPERIMENT, "--methods", "local", *asked, *grid, "--out", tuned).code == 0
    assert {row["metric"] for row in json.loads((tuned / "grid.json").read_text())} == {"log-loss"}
    refused = perfed_command("compare", EXPERIMENT, "--methods", "local", *TINY, "evaluation.compare_by=aux")
    assert refused.code == 2 and "unknown metric 'aux' (did you mean 'auc'?)" in refused.err
    refused = perfed_command("run", EXPERIMENT, *TINY, "evaluation.compare_by=mse")
    assert refused.code == 2 and "evaluation.compare_by: 'mse' is for regression" in refused.err


@pytest.mark.long
def test_a_gate_fails_where_a_federated_method_is_behind_a_local_one(tmp_path):
    gate = ("--fail-if-worse-than-local", "--seeds", "0..3", *TINY)
    compared = ("compare", EXPERIMENT, "--methods", "local,hetfedrep", *gate)
    done = perfed_command(*compared, "methods.hetfedrep.lr=1e-9", "--out", tmp_path / "worse")
    assert done.code == 3 and done.out.endswith("behind Local: HetFedRep\n"), done.err
    kept = json.loads((tmp_path / "worse" / "comparison.json").read_text())["verdict"]
    assert kept["methods"][0]["gain"]["high"] < 0
    done = perfed_command(*compared, "methods.local.lr=1e-9", "--out", tmp_path / "better")
    assert done.code == 0, done.err
    refused = perfed_command("compare", EXPERIMENT, "--methods", "hetfedrep,flic-hl", *gate, "--out", tmp_path / "none")
    assert refused.code == 2 and "needs a local method among --methods" in refused.err
