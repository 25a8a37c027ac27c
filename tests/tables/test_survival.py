"""Times and events of tables: from columns to targets, splits by event, a Cox model, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from data_files import require_file
from lifelines.utils import concordance_index

import perfed
from perfed.errors import PerfedError
from perfed.tables.joining import new_client_from_frame


def frame(rows=60, seed=0, **columns):
    """Hazards that grow with x; a third is censored."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=rows)
    table = {
        "x": x,
        "noise": draw.normal(size=rows),
        "days": np.ceil(200 * draw.exponential(size=rows) * np.exp(-1.5 * x)) + 1,
        "died": np.where(draw.uniform(size=rows) < 0.67, "yes", "no"),
    }
    return pd.DataFrame({**table, **columns})


def federation(frames=None, **options):
    frames = frames or {name: frame(seed=seed) for seed, name in enumerate(("east", "north", "west"))}
    return perfed.Federation.from_frames(frames, target="days", event="died", **options)


def trained(data, method="fedavg", rounds=30):
    model = perfed.Model(body=perfed.linear(4), head=perfed.linear(1))
    run = perfed.Run(data, perfed.build_method(method, {"lr": 0.05, "batch_size": 100}), model, rounds=rounds)
    run.execute()
    return run


def test_targets_are_times_and_events_and_neither_is_an_input():
    frames = {"one": frame(), "two": frame(seed=1)}
    made = federation(frames, test=0.0)
    assert made.task == "survival"
    for client, table in zip(made, frames.values(), strict=True):
        expected = np.column_stack([table["days"], table["died"] == "yes"]).astype(float)
        np.testing.assert_allclose(client.train.y.numpy(), expected)
        assert client.table.feature_names_in_ == ("x", "noise")
        inputs, _ = client.table.transform(table)  # with both columns there
        np.testing.assert_allclose(inputs, client.train.x.numpy(), rtol=1e-5)
        again, _ = client.table.transform(table[["noise", "x"]])  # and without
        np.testing.assert_allclose(again, inputs)


@pytest.mark.parametrize("events", [(1, 0), (1.0, 0.0), (True, False), ("Yes", "no"), ("TRUE", "false")])
def test_events_are_written_in_several_ways(events):
    table = frame()
    expected = (table["died"] == "yes").to_numpy(float)
    table["died"] = pd.Series([events[0] if died else events[1] for died in expected])
    assert federation({"one": table}, test=0.0).clients[0].train.y[:, 1].tolist() == expected.tolist()


def test_events_are_counted_by_site():
    made = federation()
    expected = [int((frame(seed=seed)["died"] == "yes").sum()) for seed in range(3)]
    assert [site.events for site in made.facts.sites] == expected
    header, *rows = made.facts.rows()
    assert [int(row[header.index("events")]) for row in rows] == expected


def test_splits_are_by_event():
    made = federation(folds=5, seed=2)
    for client, table in zip(made, (frame(seed=seed) for seed in range(3)), strict=True):
        share = float((table["died"] == "yes").mean())
        assert float(client.test.y[:, 1].mean()) == pytest.approx(share, abs=0.08)


@pytest.mark.long
def test_a_model_orders_by_risk_and_a_site_takes_raw_columns():
    run = trained(federation())
    for client in run.federation:
        hazard = run.predict(client.id, client.test.x)[:, 0]
        expected = concordance_index(client.test.y[:, 0], -hazard, client.test.y[:, 1])
        assert run.client_metrics[client.id]["c-index"] == pytest.approx(expected) and expected > 0.65
    new = frame(seed=9)
    found = np.asarray(run.site("north").predict(new[["noise", "x"]])).ravel()
    assert concordance_index(new["days"], -found, new["died"] == "yes") > 0.7


@pytest.mark.long
def test_a_new_site_joins_with_its_times_and_events():
    run = trained(federation(), "fedrep", rounds=10)
    client = new_client_from_frame(run.federation, "south", frame(seed=7), "south.csv")
    assert client.train.y.shape[1] == 2
    site = run.join(client)
    assert 0.5 < site.facts["metrics"]["of"]["c-index"]["value"] <= 1


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"died": ["yes"] * 58 + ["perhaps", None]},
            "column 'died', the event, is missing in row 59; leave these rows",
        ),
        ({"died": ["yes"] * 59 + ["perhaps"]}, "column 'died', the event, is neither in row 59; allowed: 1 and 0, yes"),
        (
            {"days": [5.0] * 59 + [0.0]},
            "column 'days', the time, is not above 0 in row 59; drop these rows, or add",
        ),
    ],
)
def test_what_is_no_time_or_event_is_refused(change, said):
    with pytest.raises(PerfedError, match=said):
        federation({"one": frame(**change)})


def test_the_event_is_a_role_and_says_the_task():
    with pytest.raises(PerfedError, match=r"event: .*dead"):
        perfed.Federation.from_frames({"one": frame()}, target="days", event="dead")
    with pytest.raises(PerfedError, match="makes it survival, but task = 'regression'"):
        federation(task="regression")
    with pytest.raises(PerfedError, match="has two roles"):
        perfed.Federation.from_frames({"one": frame()}, target="days", event="days")


@pytest.mark.long
def test_the_breast_cancer_centres_as_tables():
    with np.load(require_file("tcga_brca.npz")) as file:
        names = [str(name) for name in file["feature_names"]]
        rows = pd.DataFrame(file["x"], columns=names).assign(days=file["time"], died=file["event"].astype(int))
        centre, train = file["center"], file["is_train"].astype(bool)
    rows = rows[rows["days"] > 0]
    centre, train = centre[rows.index], train[rows.index]
    parts = {f"centre {c}": rows[(centre == c) & train] for c in range(6)}
    tests = {f"centre {c}": rows[(centre == c) & ~train] for c in range(6)}
    data = perfed.Federation.from_frames(parts, target="days", event="died", test=tests, columns="common")
    run = trained(data, "fedavg", rounds=20)
    assert np.mean([values["c-index"] for values in run.client_metrics.values()]) > 0.6
