"""Metrics that leave real sites with noise: what is sent and counted, masks, what is refused, and the verdict."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from stations import COLUMNS, PUBLIC, Stations, answer_all, secrets_of, study, submit, wiped

from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.report import load_runs, verdict
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.preview import Preview
from perfed.sites.deploy.spending import LedgerLine, compute_ledger_epsilon, read_ledger
from perfed.sites.deploy.study import make_deployed_study
from perfed.sites.flower.message import unpack
from perfed.sites.flower.site import METRICS

QUICK = {
    "model": {"embedding": {"kind": "linear", "out": 4}, "head": "linear"},
    "rounds": 3,
    "training": {"lr": 0.1, "local_epochs": 1, "batch_size": 16, "optimizer": "sgd"},
    "evaluation": {"every": 2, "metrics": ["log-loss"]},
}
MASKED = {"secure_aggregation": {"threshold": 2}}


def quick(path: Path, unit: str = "sample", method: str = "fedavg", epsilon: float = 6.0, **changes: object) -> str:
    privacy = {"unit": unit, "epsilon": epsilon, "delta": 1e-3, "metrics": "noisy"}
    own = {method: {"placement": {"embedding": "personal"}}}
    return study(path, **{**QUICK, "method": method, "methods": own, "privacy": privacy, **changes})


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def told(stations: Stations, site: str) -> dict[int, dict]:
    headers = [unpack(reply)[0] for reply in stations.left[site]]
    return {h["round"]: h["metrics"] for h in headers if h["kind"] == "done" and h["metrics"] is not None}


def kept(path: Path, site: str) -> dict[int, dict]:
    (file,) = (path / f"at-{site}/runs").glob(f"*/{METRICS}")
    lines = map(json.loads, file.read_text().splitlines())
    return {line["round"]: line["metrics"] for line in lines if line["index"] < 0}


@pytest.mark.long
def test_a_site_tells_its_metrics_with_noise_and_each_evaluated_round_counts(tables):
    text = quick(tables)
    found = told(submit(tables, text, Stations(tables, text)), "north")
    exact = kept(tables, "north")
    assert found.keys() == exact.keys() == {2, 3}
    assert all(values.keys() == {"accuracy", "log-loss"} for values in found.values())
    assert {"accuracy", "log-loss", "auc", "loss"} <= exact[3].keys()
    assert all(found[n]["accuracy"] != exact[n]["accuracy"] for n in found)
    (line,) = read_ledger(tables / "at-north")
    assert line.metrics == {"2": 2, "3": 2} and 0 < line.metrics_noise < line.noise * 2
    said = summary(tables / "run")
    sd = said["privacy"]["noisy_metrics"]["sd"]["accuracy"]
    assert sd["north"] == pytest.approx(line.metrics_noise / 8)  # of 40 rows 8 are tested on
    assert said["privacy"]["spent"]["north"] == pytest.approx(compute_ledger_epsilon([line], "sample", 1e-3), rel=5e-3)
    means = [json.loads(reading)["metrics"]["accuracy"]["mean"] for reading in _evaluated(tables / "run")]
    assert len(means) == 2 and said["metrics"]["accuracy"]["mean"] == means[-1]
    shown = Preview.of("north", tables / "north.csv", text)
    assert list(shown.metrics) == ["accuracy", "log-loss"]


def _evaluated(run: Path) -> list[str]:
    return [line for line in (run / "rounds.jsonl").read_text().splitlines() if '"metrics"' in line]


def test_what_a_row_has_spent_is_the_larger_and_over_runs_the_larger_ones_add_up():
    one = LedgerLine("a", "x", "s", "sample", 1e-3, 2.0, 0, {"1": 8}, {"1": 1}, 1.0)  # 2 of training, 1 of the test
    other = LedgerLine("b", "y", "s", "sample", 1e-3, 2.0, 0, {"1": 2}, {"1": 3}, 1.0)  # 0.5 and 3
    assert (one.squared_mu, other.squared_mu) == (2.0, 3.0)
    assert compute_ledger_epsilon([one, other], "sample", 1e-3) == compute_ledger_epsilon(
        [LedgerLine("", "", "", "sample", 1e-3, 1.0, 5)], "sample", 1e-3
    )
    both = LedgerLine("c", "z", "s", "client", 1e-3, 1.0, 0, {"1": 2}, {"1": 3}, 1.0)
    assert both.squared_mu == 5.0


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, MASKED], ids=["plain", "masked"])
def test_a_run_that_was_interrupted_tells_the_same_and_counts_once(more, tables):
    text = quick(tables, **more)
    submit(tables, text, Stations(tables, text))
    first = summary(tables / "run")["metrics"]["accuracy"]["mean"]
    secrets = secrets_of(tables)
    for stop in (3, 5, 8, 12):
        wiped(tables, secrets)
        stations = Stations(tables, text)
        stations.stop_after = stop
        with closing(stations), suppress(KeyboardInterrupt):
            answer_all(tables, text, stations)
        submit(tables, text, Stations(tables, text))
        if not more:  # a sum that was cut under masks is void, and training goes on otherwise
            assert summary(tables / "run")["metrics"]["accuracy"]["mean"] == first
        (line,) = read_ledger(tables / "at-north")
        assert line.metrics == {"2": 2, "3": 2}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("unit", ["sample", "client"])
def test_under_masks_the_mean_alone_is_known(unit, tables):
    text = quick(tables, unit, **MASKED)
    sent = submit(tables, text, Stations(tables, text))
    assert not any(told(sent, site) for site in COLUMNS)
    said = summary(tables / "run")
    noise = said["privacy"]["noisy_metrics"]
    assert noise["sd"]["accuracy"].keys() == {"all sites"}
    each = noise["noise"] / 8 if unit == "sample" else noise["noise"] / 2**0.5  # two sites' shares make it whole
    assert noise["sd"]["accuracy"]["all sites"] == pytest.approx(each * 3**0.5 / 3)
    exact = np.mean([kept(tables, site)[3]["accuracy"] for site in COLUMNS])
    found = said["metrics"]["accuracy"]["mean"]
    assert found != exact and abs(found - exact) < 5 * noise["sd"]["accuracy"]["all sites"]
    clients = (tables / "run/clients.csv").read_text().splitlines()
    assert all(f"{site},32,8,,,,," in clients[1 + place] for place, site in enumerate(COLUMNS))


@pytest.mark.long
def test_with_hardly_any_noise_the_mean_under_masks_is_that_of_the_sites(tables):
    text = quick(tables, epsilon=1e6, **MASKED)
    submit(tables, text, Stations(tables, text))
    exact = np.mean([kept(tables, site)[3]["accuracy"] for site in COLUMNS])
    assert summary(tables / "run")["metrics"]["accuracy"]["mean"] == pytest.approx(exact, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, MASKED], ids=["plain", "masked"])
def test_runs_of_several_methods_end_with_a_verdict(more, tables):
    """Each method is a deployment of its own; the ledger of a site adds them up."""
    for method in ("local", "fedavg", "fedavg-ft"):
        text = quick(tables, method=method, **more)
        with closing(Stations(tables, text)) as stations:
            answer_all(tables, text, stations, method)
    found = verdict(load_runs([tables / method for method in ("local", "fedavg", "fedavg-ft")]))
    assert found is not None and found.reference == "local" and len(found.methods) == 2
    assert all(of.gain.low is not None and of.gain.low < of.gain.mean < of.gain.high for of in found.methods)
    said = str(found)
    assert "Metrics left the clients with noise" in said and "Privacy of each row" in said
    assert ("Only the mean over all clients is known" in said) == bool(more) == (not found.sites)
    assert len(read_ledger(tables / "at-north")) == 3


@pytest.mark.long
def test_a_policy_s_metrics_refuse_it_in_one_line(tables):
    text = quick(tables)
    for names in ((), ("accuracy",)):
        stations = Stations(tables, text, Policy(metrics=names))
        with pytest.raises(PerfedError, match=r"its administrator sees more \(metrics\)") as error:
            submit(tables, text, stations)
        assert "\n" not in str(error.value)
    submit(tables, text, Stations(tables, text, Policy(metrics=("accuracy", "log-loss"), epsilon=6.1)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluation": {"metrics": ["auc"]}}, "'auc' has no mechanism under privacy.metrics = 'noisy'"),
        ({"evaluation": {"when": "after"}}, "evaluation.when = 'after': with privacy.metrics = 'noisy'"),
        ({"evaluation": {"split": "train"}}, "evaluation.split = 'train': with privacy.metrics = 'noisy'"),
        ({"evaluation": {"weights": "samples"}, **MASKED}, "under masks each site has the same weight; allowed: unif"),
        ({"evaluation": {"targets": [0.5]}}, "evaluation.targets: under .privacy. losses and metrics stay"),
        ({"data": {"event": "dead"}}, "no metric of survival is a mean over rows"),
    ],
)
def test_what_cannot_leave_with_noise_is_refused_in_one_line(changes, said):
    data = {"name": "tables", "files": ["a.csv", "b.csv"], "target": "ill", "public": PUBLIC, **changes.pop("data", {})}
    privacy = {"privacy": {"epsilon": 6.0, "delta": 1e-3, "metrics": "noisy"}}
    table = {"method": "fedavg", "rounds": 2, "data": data, "model": {"head": "linear"}, **privacy, **changes}
    with pytest.raises(PerfedError, match=said) as error:
        make_deployed_study(validate(table), ["a", "b"])
    assert "\n" not in str(error.value)
