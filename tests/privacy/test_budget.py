"""Runs with a budget: what they plan and use, say and keep, and where they end; what is refused before they begin."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

import pytest
from test_rows import Noting

from perfed import resume, start, validate
from perfed.errors import PerfedError
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure, find_disclosure
from perfed.method.registry import entry, method_names
from perfed.methods.build import build_method
from perfed.privacy.accountant import compute_epsilon
from perfed.privacy.apply import make_private
from perfed.privacy.sample import SamplePrivacy
from perfed.privacy.settings import Privacy
from perfed.testing.federations import make_blobs
from perfed.testing.runs import RecordingEngine, build_network, build_server

SAMPLE = Privacy(epsilon=6.0, delta=1e-3)
CLIENT = Privacy(unit="client", epsilon=6.0, delta=1e-3)
QUICK = {"local_epochs": 2, "batch_size": 4, "lr": 0.01}


def experiment(method: str = "fedavg", **changes: Any):
    privacy = {"unit": "sample", "epsilon": 6.0, "delta": 1e-3, **changes.pop("privacy", {})}
    table = {
        "method": method,
        "rounds": 3,
        "data": {"name": "digits", "clients": 4},
        "model": {"body": {"kind": "mlp", "hidden": [8], "out": 8}, "head": "linear"},
        "training": {"local_epochs": 1},
        "privacy": {k: v for k, v in privacy.items() if v is not None},
        **changes,
    }
    return validate(table)


def allowed(unit: Privacy) -> list[str]:
    found = []
    for name in method_names():
        try:
            make_private(build_method(name, QUICK if name not in ("forest", "boost", "mixed") else {}), unit, 2, [12])
        except PerfedError as error:
            assert "\n" not in str(error) and "mechanism" in str(error), error
            continue
        found.append(name)
    return found


def test_the_methods_that_can_be_private():
    sample, client = set(allowed(SAMPLE)), set(allowed(CLIENT))
    assert {"fedavg", "fedavg-ft", "local", "ditto", "fedrep", "pfedme", "flic-hl", "fedproto", "fedprox"} <= sample
    assert {"fedavg", "fedrep", "ditto", "flic-hl", "knnper", "fedala"} <= client
    assert not (sample | client) & {"fedpac", "fedfomo", "feddar-sa", "fedem", "forest", "mixed", "hypcluster"}
    assert "knnper" not in sample and "fedamp" not in client


@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", method_names())
def test_no_more_leaves_and_no_row_is_used_more_often_than_planned(name):
    if name not in allowed(SAMPLE):
        pytest.skip("it has no mechanism")
    settings = {**QUICK, "pretrain_epochs": 2} if "flic" in name else QUICK
    plan = make_private(build_method(name, settings), Privacy(noise=1.0, delta=1e-3), 2, None)
    by = Noting(clip=1.0, noise=1.0)

    class Watched(SamplePrivacy):
        name = "sample-privacy"

        def private(self):
            return by

    own = Watched(noise=1.0, entries=plan.method.extensions[0].entries)
    method = plan.method.model_copy(update={"extensions": (own, *plan.method.extensions[1:])})
    server = build_server(method, make_blobs((12,)), model=build_network(), runner=RecordingEngine)
    server.prepare()
    for number in (1, 2):
        server.round(number)
    uses = [0] * 12
    for _, used, *_ in by.seen:
        for row in used[0]:
            uses[row] += 1
    server.evaluate("test")
    assert 0 < max(uses) <= plan.sum_releases(2).full
    exact = plan.sum_releases(2).full - max(uses)
    assert exact <= (12 if name == "apfl" else 7) + 2 * (name == "fedavg-ft") + (10 if name.endswith("-ft") else 0)
    for _, done in server.engine.record:
        entries = find_disclosure(type(plan.method)).entries
        assert set(done.content) <= {*entries, "extensions"}
        for extension in plan.method.extensions[1:]:
            sent = done.content.get("extensions", {}).get(extension.name, {})
            assert set(sent) <= set(find_disclosure(type(extension)).entries)


def test_a_run_says_what_each_client_has_spent():
    run = start(experiment(participation={"rate": 0.5}))
    summary = run.execute()
    spent, used = summary["privacy"]["spent"], run.progress.totals.taken_part
    assert summary["privacy"]["unit"] == "sample" and isfinite(summary["privacy"]["noise"])
    assert max(spent.values()) <= 6.0
    for client, rounds in used.items():
        assert (spent[client] == max(spent.values())) == (rounds == max(used.values()))
    first, last = run.history[0]["epsilon"], run.history[-1]["epsilon"]
    assert all(first[i] <= last[i] == spent[i] for i in spent)


def test_noise_without_a_budget_is_reported():
    summary = start(experiment(privacy={"epsilon": None, "noise": 2.0})).execute()
    assert "epsilon" not in summary["privacy"] and summary["rounds"] == 3
    assert len(set(summary["privacy"]["spent"].values())) == 1


def test_a_run_ends_before_its_budget_is_exceeded():
    run = start(experiment(rounds=50, privacy={"noise": 2.0, "epsilon": 4.0}))
    summary = run.execute()
    assert summary["stopped_by"] == "privacy" and 0 < summary["rounds"] < 50
    plan = run.callbacks[0].plan
    assert plan.compute_spending(summary["rounds"]) <= 4.0 < plan.compute_spending(summary["rounds"] + 1)
    assert any("privacy budget is spent" in note for note in summary["notes"])
    with pytest.raises(PerfedError, match="does not pay for one round"):
        start(experiment(privacy={"noise": 0.1, "epsilon": 1.0})).execute()


@pytest.mark.long
def test_resume_cannot_spend_twice(tmp_path):
    whole = start(experiment(rounds=4), out=tmp_path / "whole").execute()
    run = start(experiment(rounds=4), out=tmp_path / "part")

    class Enough(Exception):
        pass

    def stop(number, rounds, accuracy):
        if number == 2:
            raise Enough

    with pytest.raises(Enough):
        run.execute(stop)
    done = resume(tmp_path / "part").execute()
    assert done["privacy"] == whole["privacy"] and done["accuracy"] == whole["accuracy"]
    again = resume(tmp_path / "part", rounds=9)  # the noise stays that of 4 rounds, and so the budget is gone
    summary = again.execute()
    assert again.done == 4 and summary["stopped_by"] == "privacy"
    assert summary["privacy"]["spent"] == whole["privacy"]["spent"]


def test_client_level_counts_rounds_alone():
    run = start(experiment("fedrep", privacy={"unit": "client", "delta": 0.1}))
    summary = run.execute()
    plan = run.callbacks[0].plan
    assert plan.sum_releases(3).full == 3
    assert max(summary["privacy"]["spent"].values()) <= 6.0


def test_local_sends_nothing_that_a_client_could_be_known_by():
    plan = make_private(build_method("local", {}), CLIENT, 5, None)
    assert plan.compute_spending(5) == 0.0


@pytest.mark.long
def test_with_poisson_samples_each_client_spends_the_budget_with_the_least_noise_for_its_rows():
    poisson = SAMPLE.model_copy(update={"sampling": "poisson"})
    method = build_method("fedavg", QUICK)
    plan = make_private(method, poisson, 3, [12, 40, 12])
    alone = {rows: make_private(method, poisson, 3, [rows]) for rows in (12, 40)}
    assert plan.method.extensions[0].noises == {rows: one.noise for rows, one in alone.items()}
    assert plan.noise == alone[12].noise > alone[40].noise
    assert all(5.9 < compute_epsilon(one.noise, one.sum_releases(3), 1e-3) <= 6 for one in plan.plans)
    assert plan.compute_spending(3) == max(one.compute_spending(3) for one in alone.values())
    assert [note for note in plan.notes if "by a client's number of rows" in note] and plan.affordable_rounds == 3
    assert all(one.method.extensions[0].noises == {} and not one.notes for one in alone.values())  # one size: one noise
    given = make_private(method, poisson.model_copy(update={"noise": 1.0}), 3, [12, 40])
    assert given.method.extensions[0].noises == {} and given.compute_spending(3) > 6 and given.affordable_rounds < 3
    kept = Privacy.model_validate(plan.explicit_settings())  # a run that goes on has the noise with which it began
    assert make_private(method, kept, 9, [12, 40, 12]).method.extensions[0].noises == plan.settings.noises


@pytest.mark.long
def test_a_run_with_poisson_samples_goes_on_with_each_client_s_noise(tmp_path):
    data = {"name": "digits", "clients": 2, "partition": "dirichlet"}
    start(experiment(rounds=2, data=data, privacy={"sampling": "poisson"}), out=tmp_path).execute()
    again = resume(tmp_path, rounds=5)
    summary = again.execute()
    noises = summary["privacy"]["noises"]
    assert len(noises) > 1 and max(noises.values()) == summary["privacy"]["noise"]
    assert again.server.method.extensions[0].noises == {int(rows): z for rows, z in noises.items()}
    assert again.done == 2 and summary["stopped_by"] == "privacy" and max(summary["privacy"]["spent"].values()) <= 6


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"privacy": {"epsilon": -1.0}}, "privacy.epsilon"),
        ({"privacy": {"sampling": "some"}}, "privacy.sampling"),
        ({"privacy": {"delta": None}}, "privacy.delta"),
        ({"method": "fedpac"}, "fedpac does not declare what it sends"),
        ({"method": "knnper"}, "the clients' models contain their rows"),
        ({"method": "fedamp", "privacy": {"unit": "client"}}, "noise is on their mean"),
        ({"method": "fedproto", "privacy": {"unit": "client"}}, "'means' of extension 'prototypes'"),
        ({"training": {"class_weights": "balanced"}}, "counts all rows"),
        ({"training": {"local_steps": 10}}, "counts passes over the rows"),
        ({"participation": {"policy": "srpfl"}}, "policy = 'srpfl'"),
    ],
)
def test_bad_input_gets_one_line(changes, said):
    with pytest.raises(PerfedError) as error:
        start(experiment(**changes))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_delta_above_one_over_n_is_warned_of():
    notes = start(experiment(privacy={"delta": 0.5}, rounds=1)).execute()["notes"]
    assert any(note.startswith("warning: privacy.delta = 0.5") for note in notes)
    assert not any("warning" in note for note in start(experiment(rounds=1)).execute()["notes"])


def test_a_method_of_one_s_own_says_what_it_sends():
    class Undeclared(entry("fedavg").method):
        pass

    class Declared(Undeclared):
        disclosure = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})

    class Inherits(Declared):
        pass

    for kind in (Undeclared, Inherits):
        with pytest.raises(PerfedError, match="does not declare what it sends"):
            make_private(kind(), SAMPLE, 1, None)
    assert make_private(Declared(local_epochs=3), SAMPLE, 2, None).sum_releases(2).full == 7


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_a_client_that_joins_a_finished_run_is_counted(unit):
    """Under privacy of clients it has told nobody anything; else its own model is of its rows in each of its rounds."""
    run = start(experiment("fedper", privacy={"unit": unit}))
    run.execute()
    new, plan = replace(run.federation.clients[0], id="new"), run.callbacks[0].plan
    for rounds in (2, 5):
        told = run.join(new, rounds).facts["privacy"]
        assert told["spent"] == (plan.compute_spending(rounds) if unit == "sample" else 0.0)
        assert told["contributors"] == run.summary["privacy"]["spent"]
    assert unit == "client" or plan.compute_spending(5) > plan.compute_spending(3)  # beyond the rounds of the run


@pytest.mark.parametrize("unit", [SAMPLE, CLIENT])
def test_anchors_of_values_are_refused_before_anything_runs(unit):
    method = make_private(build_method("flic-hl", {}), unit, 2, None).method
    with pytest.raises(PerfedError, match="no mechanism for anchors in a regression"):
        build_server(method, make_blobs(regression=True), model=build_network(1))


@pytest.mark.long
def test_clients_add_the_noise_themselves_where_the_server_sees_sums_alone():
    found = []
    for more in ({}, {"secure_aggregation": {"threshold": 3}}):
        run = start(experiment("fedrep", privacy={"unit": "client"}, **more))
        summary, own = run.execute(), run.server.method.extensions[0]
        found.append((own.shares, summary["privacy"]["noise"], summary["privacy"]["spent"]))
    assert [shares for shares, *_ in found] == [0, 3]
    assert found[0][1:] == found[1][1:]
