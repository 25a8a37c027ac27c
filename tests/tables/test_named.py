"""Named columns: what several sites have comes first and means the same, on one scale; the rest is a site's own."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from perfed import Federation, Model, PerfedError, Run, linear
from perfed.tables.agreement import agree_on_schema
from perfed.tables.joining import new_client_from_frame
from perfed.tables.options import TableOptions
from perfed.tables.site_rows import SiteTableData


def site(seed, rows=40, **more):
    generator = np.random.default_rng(seed)
    frame = {
        "age": generator.normal(50 + 10 * seed, 5, rows).round(1),
        "colour": generator.choice(["red", "blue"] if seed else ["red", "green"], rows),
        "smokes": generator.choice(["yes", "no"], rows),
        "flag": generator.integers(0, 2, rows),
        "height": np.full(rows, 150.0 + 10 * seed),
        "sick": generator.choice(["no", "yes"], rows),
    }
    return pd.DataFrame({**frame, **{name: make(generator, rows) for name, make in more.items()}})


def frames():
    number = lambda generator, rows: generator.exponential(3, rows)  # noqa: E731
    one, two = site(0, sugar=number, only_one=number), site(1, sugar=number, only_two=number)
    three = site(2, only_three=lambda generator, rows: generator.choice(["a", "b"], rows)).drop(columns="smokes")
    two.loc[:9, "sugar"] = np.nan
    return {"one": one, "two": two, "three": three}


def federation(**more):
    return Federation.from_frames(frames(), target="sick", columns="named", **more)


@pytest.mark.long
def test_columns_of_several_sites_come_first_and_others_are_the_sites_own():
    one, three, two = federation()
    shared = len(one.held)
    assert one.feature_names[:shared] == two.feature_names[:shared] == three.feature_names[:shared]
    names = one.feature_names[:shared]
    assert names == (
        "number__age", "number__flag", "number__height", "number__sugar", "boolean__smokes",
        "category__colour_blue", "category__colour_green", "category__colour_red", "missing__sugar",
    )  # fmt: skip
    assert [client.feature_names[shared:] for client in (one, two, three)] == [
        ("own_number__only_one",),
        ("own_number__only_two",),
        ("own_category__only_three_a", "own_category__only_three_b"),
    ]  # fmt: skip
    lacking = [name for name, has in zip(names, three.held, strict=True) if not has]
    assert lacking == ["number__sugar", "boolean__smokes", "missing__sugar"] and all(one.held) and all(two.held)
    for split in (three.train, three.test):
        assert (split.x[:, [names.index(name) for name in lacking]] == 0).all()


def test_a_shared_column_has_one_scale_and_keeps_what_differs_between_sites():
    clients = federation(test=0.0).clients
    given = frames()
    for name in ("age", "height", "sugar"):
        values = pd.concat([frame[name] for frame in given.values() if name in frame])
        for client in clients:
            own = given[client.id].get(name)
            if own is not None:
                x = client.train.x[:, client.feature_names.index(f"number__{name}")].numpy()
                expected = (own.fillna(own.median()) - values.mean()) / values.std(ddof=0)
                assert x == pytest.approx(expected.to_numpy(), abs=1e-5)
    assert {float(c.train.x[0, c.feature_names.index("number__height")]) for c in clients} != {0.0}
    flags = clients[0].train.x[:, clients[0].feature_names.index("number__flag")]
    assert set(flags.tolist()) == {0.0, 1.0}


def test_a_site_may_scale_by_its_own_values():
    for client in federation(scales="site", test=0.0):
        x = client.train.x[:, client.feature_names.index("number__age")]
        assert abs(x.mean()) < 1e-6 and x.std(correction=0) == pytest.approx(1, abs=1e-5)
        assert "number__height" not in client.feature_names  # it varies at no site


def test_a_column_that_a_site_lacks_is_0_on_the_scale_of_the_others():
    _, three, _ = Federation.from_frames(frames(), target="sick", columns="union", scales="all")
    at = {name: place for place, name in enumerate(three.feature_names)}
    assert (three.train.x[:, at["number__sugar"]] == 0).all() and (three.train.x[:, at["missing__sugar"]] == 1).all()


@pytest.mark.long
def test_what_sites_agree_on_names_no_column_of_one_site_alone():
    options, fewest = TableOptions("sick", columns="named"), 5
    sites = {name: SiteTableData.alone(name, frame, options) for name, frame in frames().items()}
    told = {name: rows.create_metadata(fewest) for name, rows in sites.items()}
    agreement = agree_on_schema(told, options)
    assert "only_" not in json.dumps(agreement.plain()) and "height" in json.dumps(agreement.plain())
    for name, client in zip(sites, (sites[name].client(agreement) for name in sites), strict=True):
        assert client.held == next(c for c in federation() if c.id == name).held


def test_a_sum_of_fewer_values_than_a_site_tells_stays_there():
    frame = site(0).assign(rare=[1234.5, *[np.nan] * 39])
    rows = SiteTableData.alone("one", frame, TableOptions("sick", columns="named", test_fraction=0.0))
    assert {c.name: c.sums is None for c in rows.create_metadata(5).columns}["rare"]
    assert "1234.5" not in json.dumps(rows.create_metadata(5).plain())
    assert not {c.name: c.sums is None for c in rows.create_metadata(5).columns}["age"]


@pytest.mark.long
def test_it_is_said_what_sites_tell():
    assert "the sum of these and of their squares: age, smokes, flag, height, sugar" in federation().describe()


@pytest.mark.long
def test_a_newcomer_gets_the_shared_columns_and_keeps_its_own():
    before = federation()
    late = site(3, sugar=lambda g, n: g.exponential(3, n), mine=lambda g, n: g.normal(size=n)).drop(columns="age")
    client = new_client_from_frame(before, "late", late, "late.csv")
    shared = len(before.clients[0].held)
    assert client.feature_names[:shared] == before.clients[0].feature_names[:shared]
    assert client.feature_names[shared:] == ("own_number__mine",)
    assert client.held == tuple(name != "number__age" for name in client.feature_names[:shared])
    assert torch.equal(client.train.x[:, 0], torch.zeros(len(client.train)))
    assert client.table.transform(late.drop(columns="sick"))[0].shape == (40, shared + 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["mixed", "fedavg-ft", "local"])
def test_models_of_named_columns_learn_and_predict(method):
    run = Run(federation(), method, Model(head=linear(2)), rounds=3)
    run.execute()
    given = frames()["three"].drop(columns="sick")
    said = run.site("three").predict_proba(given) if hasattr(run, "site") else run.predict("three", given)
    assert np.isfinite(np.asarray(said)).all()


def test_a_transformer_of_ones_own_has_no_names_and_is_refused():
    from sklearn.preprocessing import StandardScaler

    with pytest.raises(PerfedError, match="preprocess"):
        federation(preprocess=StandardScaler())
