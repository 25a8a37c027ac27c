"""A blend between sites: three stations with other columns each, asked by the server's own program."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
from command_line import perfed
from stations import COLUMNS, TABLE, Stations, answer_all, write_tables

from perfed.codec import flatten
from perfed.errors import PerfedError
from perfed.experiment.config import read as read_study
from perfed.experiment.config import validate
from perfed.experiment.factory import open_run
from perfed.sites.deploy.candidates import build_blending, list_candidate_runs, list_entries
from perfed.sites.deploy.mixing import CANDIDATE_FILE
from perfed.sites.deploy.own_model import load_site_model
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.preview import Preview
from perfed.sites.deploy.study import make_deployed_study
from perfed.sites.flower.hash_chain import LOG, read_log
from perfed.sites.flower.message import unpack
from perfed.sites.flower.wire import hash_payload

FOLDS = 2
CANDIDATES = ["flic-hl", "local", "sklearn:logistic", "sklearn:gradient-boosting"]
SUMS = ["blend/rows", "blend/value", "blend/gradient", "blend/hessian"]


def table(path, target="ill", candidates=CANDIDATES, data=None, **changes):
    files = [str(path / f"{site}.csv") for site in COLUMNS]
    blend = {"folds": FOLDS, "candidates": candidates}
    given = {"name": "tables", "files": files, "target": target, **(data or {})}
    small = {"rounds": 1, "baseline_tries": 1, "evaluation": {"every": 1}, "data": given, "blend": blend}
    return {**TABLE, **small, **changes}


def study(path, **changes):
    return make_deployed_study(validate(table(path, **changes)), list(COLUMNS)).to_toml()


def deployed(path, text, **kwargs):
    with closing(Stations(path, study=text, **{"note": print, **kwargs})) as stations:
        answer_all(path, text, stations)
    return stations


def own(path, site):
    return load_site_model(path / f"at-{site}", site, path / f"{site}.csv")


def simulated(path, **changes):
    """The row ``blend`` of a comparison on the same tables."""
    file, made = path / "study.toml", table(path, **changes)
    file.write_text(tomli_w.dumps(made))
    methods = ",".join(made["blend"]["candidates"])
    done = perfed("blend", file, "--methods", methods, "--folds", FOLDS, "--out", path / "simulated")
    assert done.code == 0, done.err
    return path / "simulated/blend" / f"seed-{made.get('seed', 0)}"


def same_as_simulated(path, target="ill", **changes):
    """Weights, pooled and of each site, what the mixtures say of all rows, and their metrics."""
    place = simulated(path, target=target, **changes)
    content, models = json.loads((place / "blend.json").read_text()), open_run(place)
    summaries = [json.loads((at / "summary.json").read_text()) for at in (place, path / "run/blend/seed-0")]
    for name, value in summaries[1]["metrics"].items():
        assert value["mean"] == pytest.approx(summaries[0]["metrics"].get(name, value)["mean"], abs=1e-5), name
    for site in COLUMNS:
        made, frame = own(path, site), pd.read_csv(path / f"{site}.csv").drop(columns=target)
        wanted = {name: weight for name, weight in content["sites"][site].items() if weight > 0}
        assert made.facts["weights"] == pytest.approx(wanted, abs=2e-5)
        expected = models.site(site)
        said = (model.outputs(*model.prepare_inputs(frame, None)) for model in (made, expected))
        np.testing.assert_allclose(*said, atol=2e-5)
    return content


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    path = tmp_path_factory.mktemp("blend")
    write_tables(path)
    return path, deployed(path, study(path))


def of_weights(stations, site):
    """Header and tree of what the site has sent to the run of the weights."""
    replies = [unpack(reply) for reply in stations.left[site]]
    run = replies[-1][0]["run"]
    return [(header, tree) for header, tree in replies if header["run"] == run and header["kind"] == "done"]


@pytest.mark.long
def test_weights_and_mixtures_are_those_of_a_simulation(ran):
    path, _ = ran
    content = same_as_simulated(path)
    assert len({json.dumps(weights) for weights in content["sites"].values()}) == len(COLUMNS)
    assert max(content["pooled"].values()) < 0.999


@pytest.mark.long
def test_what_the_candidates_say_of_a_row_does_not_leave(ran):
    """Sums alone do, of a size that has nothing to do with the number of rows; each is declared, and in the log."""
    path, stations = ran
    declared = {"loss", *(f"reply/{name}" for name in list_entries(read_study(study(path), "the study")))}
    for site in COLUMNS:
        held = dict(np.load(next((path / f"at-{site}/runs").glob(f"*/{CANDIDATE_FILE}"))))
        assert len(held["x_train"]) == pd.read_csv(path / f"{site}.csv").shape[0] - len(held["x_test"]) > 20
        said = {float(value) for value in held["x_train"][:, :-1].ravel()}
        sent = of_weights(stations, site)
        assert sum(header["program"] == "blend_sums" for header, _ in sent) >= 3
        for header, tree in sent:
            found = flatten(tree)
            names = {f"reply/{name}" for name in SUMS} if header["program"] == "blend_sums" else {"reply///empty"}
            assert found.keys() == names | {"loss"}
            assert sum(value.numel() for value in found.values()) <= 1 + 1 + 1 + 4 + 16
            assert not said & {float(value) for entry in found.values() for value in entry.flatten()}
        lines = [line for line in read_log(path / f"at-{site}" / LOG) if "note" not in line and "arrived" not in line]
        entries = {entry["name"] for line in lines for entry in line["entries"]} - {"reply///empty"}
        assert {f"reply/{name}" for name in SUMS} <= entries <= declared


def test_the_server_has_no_weights_of_a_site(ran):
    path, _ = ran
    assert not list((path / "run").rglob("predictions")) and not list((path / "run").rglob("blend.json"))
    assert (path / "run/report.html").exists() and (path / "run/folds/1-of-2/flic-hl/seed-0/summary.json").exists()


@pytest.mark.long
def test_the_mixture_is_exported_with_a_card(ran):
    path, _ = ran
    at = path / "at-south"
    (at / "site.json").write_text(json.dumps({"name": "south", "data": str(path / "south.csv")}))
    done = perfed("site", "export", "--dir", at)
    assert done.code == 0, done.err
    assert "blend" in (at / "south.md").read_text() and (at / "south.onnx").stat().st_size > 0
    assert own(path, "south").predict(pd.read_csv(path / "south.csv")).shape == (40,)


@pytest.mark.long
def test_what_would_leave_is_previewed_and_consent_is_to_all_of_it(ran):
    path, _ = ran
    text = study(path)
    shown = Preview.of("south", path / "south.csv", text)
    names = [entry["name"] for entry in shown.entries]
    assert {f"reply/{name}" for name in SUMS} < set(names) and len(set(names)) == len(names)
    other = study(path, candidates=CANDIDATES[1:])
    assert Preview.of("south", path / "south.csv", other).digest != shown.digest
    file = path / "deployed.toml"
    file.write_text(text)
    done = perfed("site", "preview", "--data", path / "south.csv", "--study", file, "--name", "south")
    assert "(blend of flic-hl, local, sklearn:logistic, sklearn:gradient-boosting, 1 rounds)" in done.out
    assert "reply/blend/hessian: 4x4 float64" in done.out


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({"methods": ("flic-hl", "local")}, "methods"),
        ({"methods": ("local", "blend")}, "methods"),
        ({"entries": ("loss", "shared/*", "num_samples", "extensions/*", "anchors/*", "*samples*")}, "entries"),
    ],
)
def test_a_policy_that_forbids_it_is_told_in_one_line(policy, key, tables):
    text, said = study(tables), []
    with pytest.raises(PerfedError, match=rf"the policy of this site does not allow .*\({key}\)"):
        deployed(tables, text, policy=Policy.model_validate(policy), note=said.append)
    assert not list(tables.glob(f"at-*/runs/*/{CANDIDATE_FILE}"))


@pytest.mark.long
def test_a_site_takes_part_in_the_runs_of_its_study_and_in_no_other(tables):
    text = study(tables)
    with closing(Stations(tables, study=text)) as stations:
        for other in (study(tables, seed=1), study(tables, candidates=CANDIDATES[1:]), study(tables, rounds=2)):
            with pytest.raises(PerfedError, match="the server's study is not the one that this site was given"):
                answer_all(tables, other, stations)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"candidates": ["local"]}, "at least two different methods are needed (given: local)"),
        ({"candidates": ["local", "Local"]}, "at least two different methods"),
        ({"candidates": ["local", "blend"]}, "'blend' cannot be trained within single sites"),
        ({"candidates": ["local", "pooled:logistic"]}, "'pooled:logistic' cannot be trained within single sites"),
        ({"candidates": ["local", "sklearn:sklearn.svm.SVC"]}, "in a deployment, scikit-learn models have names"),
        ({"candidates": ["local", "fedrep-tsne"]}, "fedrep-tsne cannot be deployed"),
        ({"candidates": ["local", "fedpak"]}, "unknown method 'fedpak'"),
        ({"data": {"inner_fold": [0, 2]}}, "leave out data.inner_fold"),
        ({"evaluation": {"when": "after"}}, "when = 'before'"),
        ({"blend": {"candidates": CANDIDATES, "prior_rows": "cv"}}, "blend.prior_rows = 'cv' is for simulations"),
    ],
)
def test_what_cannot_be_mixed_between_sites_is_refused_where_it_is_deployed(changes, said, tables):
    with pytest.raises(PerfedError) as refused:
        study(tables, **changes)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_deployment_is_written_with_its_candidates(tables):
    file = tables / "study.toml"
    given = table(tables)
    del given["blend"]
    file.write_text(tomli_w.dumps(given))
    out = tables / "deployment"
    done = perfed("deploy", file, "--blend", "flic-hl,sklearn:logistic", "--sites", ",".join(COLUMNS), "--out", out)
    assert done.code == 0, done.err
    made = read_study((out / "app/perfed_app/study.toml").read_text(), "it")
    assert made.blend.candidates == ("flic-hl", "sklearn:logistic") and made.blend.folds == 5
    assert [run.title for run in list_candidate_runs(made)] == ["flic-hl", *(f"flic-hl, fold {i}" for i in range(1, 6))]
    weights = build_blending(made, "classification")
    assert weights.own == (1, 2)
    page = (out / "sites/north/README.md").read_text()
    assert "* `blend/hessian`" in page and "`blend of flic-hl, sklearn:logistic`" in page
    assert "modules of its own" not in page


@pytest.mark.long
@pytest.mark.parametrize("exchanges", [20, -4, -2])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(exchanges, ran, tables):
    """Between two runs of candidates, or between two sets of weights."""
    path, before = ran
    text, stations = study(tables), Stations(tables)
    stations.stop_after = exchanges % len(before.left["north"])
    with closing(stations), pytest.raises(KeyboardInterrupt):
        answer_all(tables, text, stations)
    deployed(tables, text)
    for site in COLUMNS:
        assert own(tables, site).facts["weights"] == own(path, site).facts["weights"]


@pytest.mark.long
def test_columns_that_sites_share_by_name(tables):
    """``mixed`` and ``forest`` on named columns, as in a simulation."""
    changes = {"candidates": ["mixed", "forest", "sklearn:logistic", "sklearn:gradient-boosting"]}
    changes |= {"data": {"columns": "named"}, "model": {"head": "linear"}, "methods": {"forest": {"trees": 5}}}
    deployed(tables, study(tables, **changes))
    same_as_simulated(tables, **changes)


@pytest.mark.long
@pytest.mark.parametrize("target", ["score", "time"])
def test_values_and_times(target, tables):
    generator, data = np.random.default_rng(1), {}
    for site in COLUMNS:
        frame = pd.read_csv(tables / f"{site}.csv")
        ill = (frame.pop("ill") == "ill").to_numpy()
        frame["score"] = 5 + 3 * ill + generator.normal(size=len(frame))
        if target == "time":
            frame["time"] = frame.pop("score").abs() + 0.1
            frame["event"] = np.where(generator.random(len(frame)) < 0.7, 1, 0)
            data = {"event": "event"}
        frame.to_csv(tables / f"{site}.csv", index=False)
    own_models = ["sklearn:cox"] if target == "time" else ["sklearn:ridge", "sklearn:gradient-boosting"]
    changes = {"target": target, "candidates": ["local", "hetfedrep", *own_models], "data": data}
    changes |= {"method": "local"}
    deployed(tables, study(tables, **changes))
    same_as_simulated(tables, **changes)


@pytest.mark.long
def test_a_site_that_is_better_alone_keeps_its_own_model(tables):
    """As in a simulation, though the prior says otherwise: a line is exact in the north."""
    generator = np.random.default_rng(1)
    for site in COLUMNS:
        frame = pd.read_csv(tables / f"{site}.csv").drop(columns="ill")
        noise = 0 if site == "north" else 3 * generator.normal(size=len(frame))
        frame["score"] = frame.select_dtypes("number").sum(axis=1) + noise
        frame.to_csv(tables / f"{site}.csv", index=False)
    candidates = ["local", "sklearn:ridge", "sklearn:gradient-boosting"]
    blend = {"folds": FOLDS, "candidates": candidates, "prior_rows": 1e6}
    changes = {"target": "score", "method": "local", "blend": blend}
    deployed(tables, study(tables, **changes))
    content = same_as_simulated(tables, **changes)
    assert content["keep_own"] == ["north"]
    assert own(tables, "north").facts["weights"] == {"sklearn:ridge": 1.0}


@pytest.mark.long
def test_under_masks_the_server_gets_sums_over_all_sites_alone(ran, tables):
    path, _ = ran
    stations = deployed(tables, study(tables, secure_aggregation={}))
    for site in COLUMNS:
        sums = [tree for header, tree in of_weights(stations, site) if header["program"] == "blend_sums"]
        assert sums and all("masked" in flatten(tree) and "reply" not in tree for tree in sums)
        assert own(tables, site).facts["weights"] == pytest.approx(own(path, site).facts["weights"], abs=1e-3)
    assert Path(tables / "run/blend/seed-0/summary.json").exists()


@pytest.mark.long
def test_under_masks_a_payload_is_one_and_the_same_in_all_runs_of_a_blend(tables):
    """Sums of other sites could otherwise be opened in the run of each candidate: both begin with the same payload."""
    changes = {"candidates": ["fedavg", "fedprox"], "data": {"columns": "union"}, "model": {"head": "linear"}}
    text = study(tables, secure_aggregation={}, methods={}, **changes)
    stations, payloads = Stations(tables, study=text), {site: set[str]() for site in COLUMNS}
    ask = stations.exchange

    def exchange(messages, deadline, least=0):
        for site, message in messages.items():
            header, tree = unpack(message)
            if "secure" in header:
                payloads[site].add(hash_payload(header, tree))
        return ask(messages, deadline, least)

    stations.exchange = exchange
    with closing(stations):
        answer_all(tables, text, stations)
    for site, hashes in payloads.items():
        assert hashes and len([*(tables / f"at-{site}/runs/.sums").glob("payload-*")]) == len(hashes)
