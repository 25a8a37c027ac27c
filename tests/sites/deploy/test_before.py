"""What sites tell before round 1: every field is accounted for, and other rows tell the same."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
from privacy_tables import before

from perfed import start, validate
from perfed.data.column import Column
from perfed.data.federation_schema import SiteMetadata
from perfed.errors import PerfedError
from perfed.privacy.before import DISCLOSED_BEFORE_ROUND_1, UNCOUNTED_NOTE
from perfed.sites.deploy.part import SiteRun, create_site_facts, create_site_metadata, read_table_options
from perfed.tables.agreement import agree_on_schema
from perfed.tables.options import TableOptions
from perfed.tables.site_data import read_site_data

SPAN = {"age": [0, 100], "dose": [0, 1], "born": ["1900-01-01", "2030-01-01"]}
COLUMNS = {**SPAN, "sex": ["f", "m"], "smoker": ["no", "yes"], "ward": ["a", "b", "missing"]}
TARGETS = {"classification": ["ill", "well"], "regression": [-10, 10]}
BUDGET = {"privacy": {"epsilon": 6.0, "delta": 1e-3}}


def test_every_field_that_a_site_tells_is_accounted_for():
    """A new field of a message must say here what it is."""
    for message, said in DISCLOSED_BEFORE_ROUND_1.items():
        names = getattr(message, "model_fields", None) or [field.name for field in fields(message)]
        names = SiteMetadata.column_fields if message is Column else names
        assert set(names) == set(said), message.__name__
    assert "| `Column.levels` | as the study says it" in before()


def plain(rows: int = 24) -> pd.DataFrame:
    """Rows of which nothing is missing, rare or the same everywhere."""
    draw, half = np.random.default_rng(0), np.arange(rows) % 2
    table = {"age": draw.uniform(20, 60, rows).round(1), "dose": half, "born": ["2001-02-03", "1999-01-01"] * 12}
    table |= {"sex": np.where(half, "f", "m"), "smoker": np.where(half, "yes", "no"), "ward": ["a", "b"] * 12}
    return pd.DataFrame(table)


def odd(rows: int = 24) -> pd.DataFrame:
    """As many rows of which a column is empty, one constant, one has gaps, and one holds what nobody knows."""
    table = plain(rows).assign(age=None, dose=0.5, smoker="yes")
    table.loc[:3, ["sex", "ward"]] = ["unknown", None]
    table.loc[4:9, "born"] = None
    return table


def told(path, frame: pd.DataFrame, y, **data: object) -> tuple[dict, dict, np.ndarray]:
    """What leaves a site before round 1, but for the checksum, and its inputs; another site tells the same."""
    path.mkdir()
    frame.assign(y=y).to_csv(path / "site.csv", index=False)
    given = {"name": "tables", "files": ["site"], "target": "y", "dates": ["born"], "validation_fraction": 0.2, **data}
    budget = BUDGET if "public" in data else {}
    study = validate({"method": "fedavg", "rounds": 1, "model": {"head": "linear"}, "data": given, **budget})
    options = read_table_options(study)
    own = read_site_data("site", path / "site.csv", options)
    left = create_site_metadata(own)
    schema = agree_on_schema({site: SiteMetadata.of_plain(left, site) for site in ("site", "other")}, options)
    (client,) = SiteRun("site", path / "site.csv", "run", study.to_toml(), schema, "", "", own).site_federation
    facts = create_site_facts(client, schema, b"secret")
    assert facts.pop("mark") != client.facts().mark
    return left, facts, client.train.x.numpy()


@pytest.mark.long
@pytest.mark.parametrize("columns", ["own", "common", "union", "named"])
@pytest.mark.parametrize("task", TARGETS)
def test_other_rows_tell_the_same(tmp_path, columns, task):
    """As many rows; without what the study says, they tell other things."""
    classes = ["ill", "well"] * 12, ["well"] * 23 + ["ill"]
    one, two = classes if task == "classification" else (range(24), [0.5] * 24)
    public = {"y": TARGETS[task], **COLUMNS}
    first = told(tmp_path / "first", plain(), one, columns=columns, public=public)
    second = told(tmp_path / "second", odd(), two, columns=columns, public=public)
    assert first[:2] == second[:2] and not np.array_equal(first[2], second[2])
    first = told(tmp_path / "third", plain(), one, columns=columns, task=task)
    second = told(tmp_path / "fourth", odd(), one, columns=columns, task=task)
    assert first[:2] != second[:2]


def test_ranges_become_minus_one_to_one_and_what_is_missing_stands_in_the_middle(tmp_path):
    frame, public = plain().assign(age=[None, 0.0, 100.0, 75.0] * 6), {"y": ["ill", "well"], **COLUMNS}
    frame.assign(y=["ill", "well"] * 12).to_csv(tmp_path / "site.csv", index=False)
    options = TableOptions("y", dates=["born"], public=public, test_fraction=0.0)
    own = read_site_data("site", tmp_path / "site.csv", options)
    x = own.client(agree_on_schema({"site": own.create_metadata()}, options)).train.x.numpy()
    assert x[:4, 0].tolist() == [0.0, -1.0, 1.0, 0.5] and x[:4, 1].tolist() == [-1.0, 1.0, -1.0, 1.0]
    low, born, high = map(pd.Timestamp, ("1900-01-01", "2001-02-03", "2030-01-01"))
    assert x[0, 2] == pytest.approx(2 * (born - low) / (high - low) - 1)
    assert x.shape[1] == 3 + 2 + 2 + 3 and x[0, 3:].tolist() == [0, 1, 1, 0, 1, 0, 0]


def test_arrays_tell_what_the_study_says(tmp_path):
    options, found = TableOptions("y", public={"y": ["0", "1", "2"]}), []
    for name, y in (("one", [0, 1] * 10), ("two", [2] * 20)):
        np.savez(tmp_path / f"{name}.npz", x_train=np.eye(20), y_train=np.array(y))
        own = read_site_data("site", tmp_path / f"{name}.npz", options)
        facts = create_site_facts(
            own.client(agree_on_schema({"site": own.create_metadata()}, options)),
            agree_on_schema({"site": own.create_metadata()}, options),
            b"",
        )
        found.append((create_site_metadata(own), {**facts, "mark": 0}))
    assert found[0] == found[1] and found[0][0]["numbers"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"public": {}},
            r"before round 1 sites would disclose classes or sums of 'ill', .* declare in the table \[data.public\]",
        ),
        ({"public": {}, "event": "died"}, "before round 1 sites would disclose categories of columns from their rows"),
        ({"public": {"age": [0, 100]}}, "public says nothing of column 'ill', the target, which sites would then tell"),
        ({"domain": "ward"}, "public says nothing of column 'ward', the domain, which sites would then tell"),
        ({"public": {"ill": ["no", "no"]}}, "public.ill = .'no', 'no'. is not allowed; allowed: texts that differ"),
        ({"public": {"ill": [3, 3]}}, "public.ill = .3.0, 3.0. is not allowed; allowed: texts that differ, or two num"),
        ({"dates": ["born"], "public": {"ill": ["a", "b"], "born": ["x", "y"]}}, "public.born = .* allowed: ..1990"),
        ({"scales": "site"}, "scales = 'site' is of a site's rows, and public says what columns are scaled by"),
        ({"preprocess": "own:make", "columns": "own"}, "preprocess is of a site's rows, and public says"),
        ({"task": "regression"}, "task = 'regression', but public.ill is of classification; leave one out"),
        ({"categories": ["age"]}, "public.age says a range, and the column is said to be a category"),
        ({"numbers": ["ill"]}, "public.ill says texts, and the column is said to be a number"),
    ],
)
def test_what_a_study_does_not_say_is_refused_in_one_line(tmp_path, changes, said):
    site(tmp_path)
    experiment = study(tmp_path, **changes)
    with pytest.raises(PerfedError, match=said) as error:
        experiment.in_private(2) and experiment.data.load(seed=0)
    assert "\n" not in str(error.value)


def site(path) -> None:
    for name in ("north", "south"):
        plain().assign(ill=["yes", "no"] * 12).to_csv(path / f"{name}.csv", index=False)


def study(path, **changes):
    files = [str(path / f"{name}.csv") for name in ("north", "south")]
    data = {"name": "tables", "files": files, "target": "ill", "public": {"ill": ["no", "yes"], **SPAN, "age": [0, 99]}}
    table = {"method": "fedavg", "rounds": 2, "data": {**data, "columns": "common", **changes}}
    return validate({**table, "model": {"head": "linear"}, "training": {"local_epochs": 1}, **BUDGET})


def test_a_column_that_the_study_does_not_say_is_refused_at_its_site_by_name(tmp_path):
    site(tmp_path)
    public = {"ill": ["no", "yes"], **{name: COLUMNS[name] for name in ("age", "dose", "born", "sex", "smoker")}}
    with pytest.raises(PerfedError, match=r"column 'ward' is not in data.public; say its texts or its range there"):
        start(study(tmp_path, public=public, dates=["born"]))
    with pytest.raises(PerfedError, match=r"public: no site has a column 'wards' .did you mean 'ward'"):
        start(study(tmp_path, public={**public, "wards": ["a", "b"]}, dates=["born"], drop=["ward"]))


@pytest.mark.long
def test_a_simulation_tells_and_spends_what_a_deployment_does(tmp_path):
    site(tmp_path)
    run = start(study(tmp_path, public={"ill": ["no", "yes"], **COLUMNS}, dates=["born"]))
    summary = run.execute()
    assert run.federation.notes["told"] == (
        "names of columns; of their rows nothing, but what the study says in data.public",
    )
    assert max(summary["privacy"]["spent"].values()) <= 6.0 and UNCOUNTED_NOTE not in summary["notes"]
    digits = {"name": "digits", "clients": 3}
    table = {"method": "fedavg", "rounds": 1, "data": digits, "model": {"head": "linear"}, **BUDGET}
    assert UNCOUNTED_NOTE in start(validate(table)).execute()["notes"]
