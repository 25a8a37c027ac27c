"""The row ``blend``: weights from rows that were held out everywhere, and mixtures that are what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import perfed
from scipy.special import softmax

from perfed import Federation, compare
from perfed.client_model.export import export, onnx_file
from perfed.client_model.load import load_site
from perfed.errors import PerfedError
from perfed.experiment.blend import with_own_models
from perfed.experiment.config import validate
from perfed.experiment.factory import open_run
from perfed.experiment.study import read_comparison
from perfed.maths.blending import Probabilities, learn_weights
from perfed.methods.titles import display_name
from perfed.run import predictions
from perfed.testing.federations import make_survival_data

SMALL = (
    "clients=4",
    "samples=40",
    "test_samples=60",
    "rounds=4",
    "plan.engine=stacked",
    "plan.threads=1",
    "baseline_tries=1",
)
K = 3


def two_kinds(sites=4, train=90, test=400, seed=0):
    """Sites where a line is right, and sites where the sign of a product is: for a tree."""
    generator, arrays = np.random.default_rng(seed), {}
    for site in range(sites):
        x = generator.normal(size=(train + test, 2)).astype(np.float32)
        score = 2 * x.sum(1) if site % 2 else 6 * np.sign(x[:, 0] * x[:, 1])
        y = (generator.random(len(x)) < 1 / (1 + np.exp(-score))).astype(np.int64)
        arrays[f"s{site}"] = {"x_train": x[:train], "y_train": y[:train], "x_test": x[train:], "y_test": y[train:]}
    return Federation.from_arrays(arrays)


OWN = ["sklearn:logistic", "sklearn:gradient-boosting"]
LOSS = {
    "baseline_tries": 1,
    "evaluation": {"compare_by": "log-loss"},
    "model": {"head": "linear"},
    "rounds": 1,
    "seeds": [0],
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    out = tmp_path_factory.mktemp("blend") / "kinds"
    made = compare(two_kinds(), [*OWN, "blend"], **LOSS, blend={"folds": K, "prior_rows": 5.0}, out=out)
    assert not made.failed
    return made


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Without a slow forest."""
    out = tmp_path_factory.mktemp("blend") / "digits"
    names = "local,fedavg,sklearn:logistic,sklearn:random-forest"
    made = perfed("blend", "digits-label-skew", *SMALL, "--methods", names, "--folds", K, "--out", out)
    assert made.code == 0, made.err
    assert "fold 1 of 3: fedavg seed 0" in made.out and "blend seed 0" in made.out
    return Path(out)


def weights_of(path):
    return json.loads((path / "blend/seed-0/blend.json").read_text())


def mean_loss(path, name):
    return json.loads((path / name.replace(":", ".") / "seed-0/summary.json").read_text())["metrics"]["log-loss"][
        "mean"
    ]


@pytest.mark.long
def test_the_blend_is_better_than_either_where_sites_want_different_models(kinds):
    """Which fails where all sites have the same weights, or weights are a choice for all."""
    found = {name: mean_loss(kinds.path, name) for name in (*OWN, "blend")}
    assert found["blend"] < 0.97 * min(found[name] for name in OWN)
    sites = weights_of(kinds.path)["sites"]
    lines = [sites[f"s{i}"]["sklearn:logistic"] for i in range(4)]
    assert min(lines[1::2]) > 0.1 + max(lines[::2])
    assert kinds.table.query("metric == 'log-loss'").method.tolist() == [*OWN, "blend"]


@pytest.mark.long
def test_with_a_strong_prior_all_sites_have_the_pooled_weights(tmp_path):
    made = compare(two_kinds(4), [*OWN, "blend"], **LOSS, blend={"folds": 2, "prior_rows": 1e9}, out=tmp_path / "out")
    found = weights_of(made.path)
    for own in found["sites"].values():
        assert list(own.values()) == pytest.approx(list(found["pooled"].values()), abs=2e-3)


@pytest.mark.long
def test_a_site_that_errs_less_alone_keeps_its_own_model_whatever_the_prior_says(tmp_path):
    """Values: a line is exact at the first site, and nothing is at the others."""
    generator, arrays = np.random.default_rng(0), {}
    for site in range(3):
        x = generator.normal(size=(80, 2)).astype(np.float32)
        y = (x.sum(1) + 3 * (site > 0) * generator.normal(size=80)).astype(np.float32)
        arrays[f"s{site}"] = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    values, names = Federation.from_arrays(arrays).standardised(), ["sklearn:ridge", "sklearn:gradient-boosting"]
    shape = {"model": {"head": "linear"}, "rounds": 1, "seeds": [0], "baseline_tries": 1}
    made = compare(values, [*names, "blend"], **shape, blend={"folds": 2, "prior_rows": 1e9}, out=tmp_path / "out")
    found = weights_of(made.path)
    assert found["keep_own"] == ["s0"] and found["sites"]["s0"] == dict(zip(names, (1, 0), strict=True))
    for site in ("s1", "s2"):
        assert list(found["sites"][site].values()) == pytest.approx(list(found["pooled"].values()), abs=2e-3)
    for (site, blend), (_, ridge) in zip(*(said_by(made.path, name) for name in ("blend", names[0])), strict=True):
        assert np.allclose(blend, ridge, atol=1e-6) == (site == "s0")
    assert "so these sites keep their best local model: s0." in (made.path / "report.html").read_text()
    notes = json.loads((made.path / "blend/seed-0/summary.json").read_text())["notes"]
    assert notes[1] == "sites that keep their best own model, which errs less on held-out rows: s0"


def said_by(path, name):
    """Of each client what a row says of its test rows."""
    kept = predictions.read_predictions(path / name.replace(":", ".") / "seed-0")[-1]
    return [(site, kept.outputs[own]) for site, _, own in kept.sites()]


def test_weights_are_learnt_from_rows_that_no_model_of_the_fold_has_seen(kinds):
    """Each fold's test rows are training rows of the whole, and the weights those of what is kept of them."""
    whole, comparison = two_kinds(), read_comparison(kinds.path)
    said: dict[str, list[np.ndarray]] = {client.id: [] for client in whole}
    seen: dict[str, list[np.ndarray]] = {client.id: [] for client in whole}
    for fold in comparison.folds.values():
        assert fold.table["data"]["inner_fold"][1] == K
        kept = [predictions.read_predictions(fold.directory(name, 0))[-1] for name in OWN]
        for (site, _, own), (_, _, other) in zip(kept[0].sites(), kept[1].sites(), strict=True):
            y = kept[0].targets[own]
            both = [
                softmax(k.outputs[o], axis=1)[np.arange(len(y)), y] for k, o in zip(kept, (own, other), strict=True)
            ]
            said[site].append(np.stack(both, 1))
            seen[site].append(y)
    for client in whole:
        assert sorted(np.concatenate(seen[client.id])) == sorted(client.train.y.tolist())
    rows = [
        Probabilities(np.concatenate(s), np.empty(len(client.train)), np.empty(0))
        for client, s in zip(whole, said.values(), strict=True)
    ]
    _, expected = learn_weights(rows, 5.0)
    found = weights_of(kinds.path)["sites"]
    for site, weights in zip(found, expected, strict=True):
        assert list(found[site].values()) == pytest.approx(weights, abs=2e-3)


def test_what_is_kept_is_the_mixture_of_what_the_candidates_say(kinds):
    found, run = weights_of(kinds.path), kinds.path / "blend/seed-0"
    kept = {name: predictions.read_predictions(run / place)[-1] for name, place in found["candidates"].items()}
    own = predictions.read_predictions(run)[-1]
    for number, (site, _, rows) in enumerate(own.sites()):
        expected = 0
        for name, file in kept.items():
            _, _, place = list(file.sites())[number]
            expected = expected + found["sites"][site][name] * softmax(file.outputs[place], axis=1)
        assert np.allclose(np.exp(own.outputs[rows]), expected, atol=1e-6)
    assert list(found["candidates"]) == OWN
    note = json.loads((run / "summary.json").read_text())["notes"][0]
    assert note.startswith("weights over all sites: ") and note.endswith("as if these had 5 rows there")


@pytest.mark.long
def test_an_interrupted_blend_goes_on_to_the_same_weights(digits, tmp_path):
    copy = Path(shutil.copytree(digits, tmp_path / "copy"))
    before = weights_of(copy)
    shutil.rmtree(copy / "blend")
    (fold,) = [place for place in (copy / "folds").iterdir() if place.name.startswith("2-of")]
    shutil.rmtree(fold / "fedavg")
    again = perfed("resume", copy)
    assert again.code == 0, again.err
    assert "fold 2 of 3: fedavg seed 0" in again.out and "fold 1 of 3" not in again.out
    assert weights_of(copy) == before
    assert "blend seed" not in perfed("resume", copy).out


@pytest.mark.long
def test_a_further_method_becomes_a_candidate(digits, tmp_path):
    copy = Path(shutil.copytree(digits, tmp_path / "copy"))
    more = perfed("compare", "--extend", copy, "--methods", "fedavg-ft")
    assert more.code == 0, more.err
    assert "fold 3 of 3: fedavg-ft seed 0" in more.out and "local seed 0" not in more.out
    assert list(weights_of(copy)["candidates"])[-1] == "fedavg-ft"


@pytest.mark.long
def test_a_blend_can_be_added_to_a_comparison(tmp_path):
    out = tmp_path / "out"
    names = "local,sklearn:logistic,sklearn:random-forest"
    first = perfed("compare", "digits-label-skew", *SMALL, "blend.folds=2", "--methods", names, "--out", out)
    assert first.code == 0, first.err
    more = perfed("compare", "--extend", out, "--methods", "blend")
    assert more.code == 0, more.err
    assert list(weights_of(out)["candidates"]) == names.split(",")


@pytest.mark.long
def test_folds_side_by_side_give_the_same(digits, tmp_path):
    names = "local,fedavg,sklearn:logistic,sklearn:random-forest"
    out = tmp_path / "jobs"
    made = perfed("blend", "digits-label-skew", *SMALL, "--methods", names, "--folds", K, "--jobs", 2, "--out", out)
    assert made.code == 0, made.err
    assert weights_of(out) == weights_of(digits)


def test_own_models_are_candidates_unless_they_are_named():
    assert with_own_models(["local", "blend"], "regression") == [
        "local", "sklearn:ridge", "sklearn:random-forest", "blend",
    ]  # fmt: skip
    assert with_own_models(["blend", "local"], "survival") == ["sklearn:cox", "blend", "local"]
    named = ["sklearn:gradient-boosting", "sklearn:logistic", "blend"]
    assert with_own_models(named, "classification") == named


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--methods", "local", "--folds", "1"), "blend.folds: "),
        (("--methods", "local", "--folds", "50"), "blend.folds = 50: no client has so many training rows"),
        (("--methods", "local,sklearn:svc"), "blend: sklearn:svc has no probabilities"),
        (("--methods", "local", "evaluation.split=train"), "blend: is judged with evaluation.split = 'test'"),
        (("--methods", "local", "evaluation.when=after"), "blend: is judged with evaluation.split = 'test'"),
        (("--methods", "local", "inner_fold=[0,3]"), "blend: makes folds itself; leave data.inner_fold out"),
        (("--methods", "local", "blend.prior_rows=-1"), "blend.prior_rows"),
        (("--methods", ""), "--methods: at least one is needed"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_one_line(words, says, tmp_path):
    refused = perfed("blend", "digits-label-skew", *SMALL, *words, "--out", tmp_path / "out")
    assert refused.code == 2
    assert says in " ".join(refused.err.split())
    assert not (tmp_path / "out").exists()


def test_a_blend_is_no_method(tmp_path):
    for words in (
        ("run", "digits-label-skew", "--method", "blend"),
        ("tune", "digits-label-skew", "--methods", "blend"),
    ):
        refused = perfed(*words, "--out", tmp_path / "out")
        assert refused.code == 2 and "'blend' is not a method" in refused.err
    table = {"rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}}
    with pytest.raises(PerfedError, match="'blend' is not a method"):
        validate({**table, "method": "blend"})


@pytest.mark.long
def test_values_and_hazards_are_mixed_too(tmp_path):
    generator, arrays = np.random.default_rng(0), {}
    for site in range(3):
        x = generator.normal(size=(80, 3)).astype(np.float32)
        y = (10 + x @ [1.0, 2.0, -1.0] + generator.normal(size=80)).astype(np.float32)
        arrays[f"s{site}"] = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    values = Federation.from_arrays(arrays).standardised()
    shape = {"model": {"head": "linear"}, "rounds": 2, "seeds": [0], "blend": {"folds": 2}, "baseline_tries": 1}
    made = compare(values, ["local", "blend"], **shape, out=tmp_path / "values")
    assert not made.failed and made.methods == ("local", "sklearn:ridge", "sklearn:random-forest", "blend")
    blend = made.run("blend", 0)
    x = values.clients[1].test.x
    site = blend.site("s1")
    expected = sum(
        weight * made.run(name, 0).site("s1").predict(x).reshape(-1) for name, weight in site.facts["weights"].items()
    )
    assert np.allclose(site.predict(x).reshape(-1), expected, atol=1e-5)
    assert onnx_file(site)[1] < 1e-3
    hazards = compare(make_survival_data(), ["local", "forest", "blend"], **shape, out=tmp_path / "hazards")
    assert not hazards.failed and hazards.methods == ("local", "forest", "sklearn:cox", "blend")
    site = hazards.run("blend", 0).site(make_survival_data().ids[0])
    assert onnx_file(site)[1] < 1e-3


# Models ---------------------------------------------------------------------------------------------------------


def table(seed, rows=60):
    generator = np.random.default_rng(seed)
    sick = generator.random(rows) < 0.5
    return pd.DataFrame(
        {
            "age": 50 + 8 * sick + generator.normal(0, 6, rows),
            "pain": np.where(generator.random(rows) < 0.3 + 0.4 * sick, "yes", "no"),
            "ill": np.where(sick, "ill", "well"),
        }
    )


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("blend")
    for number, name in enumerate(("north", "south")):
        table(number).to_csv(folder / f"{name}.csv", index=False)
    table(7, 40).to_csv(folder / "west.csv", index=False)
    table(8, 10).drop(columns="ill").to_csv(folder / "new.csv", index=False)
    (folder / "study.toml").write_text(
        'name = "study"\nrounds = 3\nbaseline_tries = 1\n[model]\nhead = "linear"\n[blend]\nfolds = 2\n'
        '[data]\nname = "tables"\nfiles = ["north.csv", "south.csv"]\ntarget = "ill"\ncolumns = "named"\n'
    )
    out = folder / "out"
    made = perfed("blend", folder / "study.toml", "--methods", "mixed,fedavg-ft", "--out", out)
    assert made.code == 0, made.err
    return Path(folder)


@pytest.mark.long
def test_a_sites_mixture_predicts_and_is_one_onnx_graph_with_a_card(tables):
    import onnxruntime

    run, file = tables / "out/blend/seed-0", tables / "north.onnx"
    told = perfed("predict", run, "--site", "north", tables / "new.csv", "--out", tables / "said.csv")
    assert told.code == 0, told.err
    said = pd.read_csv(tables / "said.csv")["probability of ill"].to_numpy()
    rows = pd.read_csv(tables / "new.csv")
    models = {name: open_run(run / place) for name, place in weights_of(tables / "out")["candidates"].items()}
    weights = weights_of(tables / "out")["sites"]["north"]
    expected = sum(weights[name] * model.site("north").predict_proba(rows)[:, 0] for name, model in models.items())
    assert np.allclose(said, expected, atol=1e-5)
    made = perfed("export", run, "--site", "north", "--out", file)
    assert made.code == 0, made.err
    session = onnxruntime.InferenceSession(file.read_bytes())
    feeds = {"age": rows[["age"]].to_numpy(np.float32), "pain": (rows[["pain"]] == "yes").to_numpy(np.float32)}
    assert np.allclose(session.run(["probabilities"], feeds)[0][:, 0], said, atol=1e-5)
    card = file.with_suffix(".md").read_text()
    assert "| mixed |" in card or "| fedavg-ft |" in card
    refused = perfed("export", run, "--site", "north", "--format", "pt2")
    assert refused.code == 2 and "allowed: --format onnx" in refused.err


@pytest.mark.long
def test_a_new_site_joins_with_weights_of_its_own(tables):
    run = tables / "out/blend/seed-0"
    made = perfed("join", run, tables / "west.csv", "--site", "west")
    assert made.code == 0, made.err
    site = load_site(run / "joined/west")
    assert sum(site.facts["weights"].values()) == pytest.approx(1, abs=1e-4)
    assert site.facts["method"] == "blend" and site.facts["joined"] == 3
    rows = pd.read_csv(tables / "new.csv")
    found = site.predict_proba(rows)
    assert np.allclose(found.sum(1), 1, atol=1e-5)
    told = perfed("predict", run, "--site", "west", tables / "new.csv", "--out", tables / "west-said.csv")
    assert told.code == 0, told.err
    assert np.allclose(pd.read_csv(tables / "west-said.csv")["probability of ill"], found[:, 0], atol=1e-6)
    export(site, tables / "west.onnx", "onnx")
    assert perfed("join", run, tables / "west.csv", "--site", "west").code == 2


@pytest.mark.long
def test_damaged_weights_are_one_line(digits, tmp_path):
    copy = Path(shutil.copytree(digits, tmp_path / "copy"))
    file = copy / "blend/seed-0/blend.json"
    for content in ("{", "{}", file.read_text().replace('"local": ', '"lokal": ', 1)):
        file.write_text(content)
        with pytest.raises(PerfedError, match=r"blend\.json"):
            open_run(copy / "blend/seed-0")


@pytest.mark.long
def test_the_report_has_the_weights_as_a_picture(digits, tmp_path):
    page, found = (digits / "report.html").read_text(), weights_of(digits)
    assert "What the blend is made of" in page and "Weights over all sites: " in page
    for site, weights in found["sites"].items():
        for name, weight in weights.items():
            assert (f"<title>{site}: {display_name(name)} {weight:.2f}</title>" in page) == (weight > 0)
    assert perfed("report", digits, "--out", tmp_path / "r.html", "--figures", tmp_path / "figures").code == 0
    drawing = (tmp_path / "figures/blend.svg").read_text()
    assert drawing.count("<rect") >= len(found["sites"]) + 1


@pytest.mark.long
def test_a_blend_sends_what_others_send_and_does_not_say_nothing(digits):
    assert list(weights_of(digits)["candidates"]) == ["local", "fedavg", "sklearn:logistic", "sklearn:random-forest"]
    assert "it sends nothing" not in " ".join(
        json.loads((digits / "comparison.json").read_text())["verdict"]["sentences"]
    )
