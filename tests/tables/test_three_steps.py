"""A site tells, the server agrees, the site makes its client: over JSON as in one process, and no more than that."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from perfed import Federation, PerfedError
from perfed.data.federation import federation_of
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.data.problems import DataProblems
from perfed.tables.agreement import agree_on_schema
from perfed.tables.options import TableOptions
from perfed.tables.site_rows import SiteTableData

TARGETS = ("sick", "code", "value", "steps", "days", "died")


def site(seed: int, rows: int = 40, **more: object) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 10, rows).round(1),
            "smokes": rng.choice(["yes", "no"], rows),
            "flag": rng.choice([0, 1], rows),
            "mark": rng.choice([0, 1], rows),
            "pain": [*rng.choice(["mild", "severe"], rows - 1), "unheard of"],
            "visit": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 90, rows), "D"),
            "race": rng.choice(["a", "b"], rows),
            "patient": [f"P{n // 2}" for n in range(rows)],
            "sick": rng.choice(["no", "yes"], rows),
            "code": rng.choice([2, 10, 11], rows),
            "value": rng.normal(1e4, 3, rows),
            "steps": rng.permutation(rows) * 3,
            "days": rng.exponential(100, rows).round(1) + 0.1,
            "died": rng.choice([0, 1], rows),
        }
    )
    frame.loc[3, "age"] = None
    return frame.assign(**more)


def three(off: int = 0, rows: int = 40) -> dict[str, pd.DataFrame]:
    """Sites that differ in columns, and in what they take ``flag`` (empty, 0 and 1, numbers), ``mark`` (0 and 1, truth)
    and ``word`` (texts, truth) for.
    """
    half = rows // 2
    north = site(1 + off, rows, sugar=np.arange(float(rows)) ** 2, word=["x", "y"] * half).drop(columns="smokes")
    words = {"word": ["yes", "no"] * half, "mark": ["yes", "no"] * half}
    west = site(2 + off, rows, colour=["red", "blue"] * half, flag=[0, 1, 2, 3] * (rows // 4), **words)
    south = site(3 + off, rows, flag=[None] * rows, word=["n", "y"] * half)
    return {"north": north, "south": south, "west": west}


def options_of(target: str, **more: object) -> TableOptions:
    unused = [name for name in TARGETS if name != target and not (target == "days" and name == "died")]
    unused += [name for role, name in (("group", "patient"), ("domain", "race")) if more.get(role) is None]
    return TableOptions(target, drop=unused, seed=3, event="died" if target == "days" else None, **more)


def over_a_network(frames, options, tests=None) -> tuple[dict[str, SiteMetadata], Federation]:
    """Each site alone; all that passes between sites and server are texts."""
    sites = {name: SiteTableData.alone(name, frame, options, (tests or {}).get(name)) for name, frame in frames.items()}
    messages = {name: json.dumps(rows.create_metadata().plain()) for name, rows in sites.items()}
    tolds = {
        name: SiteMetadata.of_plain(json.loads(text), f"site '{name}'") for name, text in reversed(messages.items())
    }
    answer = json.dumps(agree_on_schema(tolds, options).plain())
    agreements = {name: FederationSchema.of_plain(json.loads(answer), "the server") for name in frames}
    clients = tuple(sites[name].client(agreements[name]) for name in frames)
    return tolds, federation_of(clients, agreements["north"], "tables")


def in_one_process(frames, options, tests=None) -> Federation:
    settings = {
        name: getattr(options, name) for name in ("target", "event", "domain", "drop", "group", "folds", "columns")
    }
    test = options.test_fraction if tests is None else tests
    return Federation.from_frames(frames, **settings, task=options.task, test=test, seed=options.seed)


def assert_same(one: Federation, two: Federation) -> None:
    facts = ("ids", "classes", "class_names", "num_classes", "domain_names", "target_scale", "task")
    assert all(getattr(one, name) == getattr(two, name) for name in facts)
    for a, b in zip(one, two, strict=True):
        assert a.feature_names == b.feature_names and a.table.inputs == b.table.inputs
        assert (a.table.ignored, a.table.ids, a.table.constant) == (b.table.ignored, b.table.ids, b.table.constant)
        for name in ("train", "test"):
            x, y = a.split(name), b.split(name)
            assert (x is None) == (y is None)
            if x is not None:
                assert torch.equal(x.x, y.x) and torch.equal(x.y, y.y) and x.y.dtype == y.y.dtype
                assert (x.domain is None and y.domain is None) or torch.equal(x.domain, y.domain)


@pytest.mark.parametrize("columns", ["own", pytest.param("common", marks=pytest.mark.long), "union"])
@pytest.mark.parametrize("target", ["sick", "code", "value", "steps", "days"])
@pytest.mark.parametrize("split", [{}, {"folds": 4, "domain": "race"}, {"group": "patient"}])
def test_sites_over_a_network_have_what_one_process_has(target, columns, split):
    options = options_of(target, columns=columns, **split)
    assert_same(over_a_network(three(), options)[1], in_one_process(three(), options))


@pytest.mark.long
@pytest.mark.parametrize("columns", ["own", "union"])
@pytest.mark.parametrize("target", ["sick", "value"])
def test_sites_that_bring_rows_to_be_tested_on(target, columns):
    options, tests = options_of(target, columns=columns, domain="race", test_fraction=0.0), three(50, 12)
    assert_same(over_a_network(three(), options, tests)[1], in_one_process(three(), options, tests))


def test_targets_and_their_scale_are_those_of_all_training_rows():
    _, federation = over_a_network(three(), options_of("value", group="patient"))
    values = torch.cat([federation.target_scale.up(client.train.y) for client in federation])
    assert len(values) < 120  # some rows are tested on
    given = np.concatenate([frame["value"].to_numpy() for frame in three().values()])
    places = np.abs(values.numpy()[:, None] - given[None]).argmin(1)
    train = given[places]
    np.testing.assert_allclose(values, train, rtol=1e-14)
    np.testing.assert_allclose(federation.target_scale.mean, train.mean(), rtol=1e-14)
    np.testing.assert_allclose(federation.target_scale.std, train.std(), rtol=1e-13)


# What leaves a site ----------------------------------------------------------------------------------------------


def leaves(value: object) -> list[object]:
    if isinstance(value, dict | list):
        return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in leaves(part)]
    return [value]


@pytest.mark.parametrize("columns", ["own", "common", "union", "named"])
@pytest.mark.parametrize("target", ["sick", "value", "days"])
def test_a_site_tells_what_is_listed_and_nothing_else(target, columns):
    options, frames = options_of(target, columns=columns, domain="race", group="patient"), three()
    tolds, federation = over_a_network(frames, options)
    for name, told in tolds.items():
        frame, found = frames[name], {key: value for key, value in told.plain().items() if value is not None}
        assert found.pop("task") == federation.task and found.pop("domains") == ["a", "b"]
        if target == "sick":
            assert (found.pop("labels"), found.pop("classes")) == ("texts", ["no", "yes"])
        if target == "value":
            y = federation.target_scale.up(next(c for c in federation if c.id == name).train.y).numpy()
            sums = found.pop("sums")
            assert sums["number"] == len(y) and sums["total"] == pytest.approx([y.sum()])
            assert sums["squares"] == pytest.approx([len(y) * y.var()]) and len(sums) == 3
        if columns != "own":
            held = [c for c in frame if c not in (target, *options.drop, "race", "patient", options.event)]
            assert [column["name"] for column in found["columns"]] == held
            said = found.pop("columns")
            for column in said:
                assert set(column) == {"name", "kind", "constant", "missing", "binary", "levels", "sums"}
                summed = columns == "named" and column["kind"] in ("number", "date", "boolean")
                assert (set(column["sums"]) == {"number", "total", "squares"}) if summed else column["sums"] is None
                assert not summed or 1 < column["sums"]["number"] <= frame[column["name"]].notna().sum()
                binary = {"north": ["flag", "mark"], "south": ["mark"], "west": []}
                assert column["binary"] == (column["name"] in binary[name])
                counts = frame[column["name"]].astype(str).value_counts()
                frequent = sorted(counts.index[counts > 1]) if column["kind"] in ("category", "boolean") else []
                assert column["levels"] == frequent
        assert found.pop("named") == sorted(name for name in options.drop if name in frame)
        assert not found
        secret = {*frame["age"].dropna(), *frame["value"], *frame["days"], *frame["steps"], *frame["patient"]}
        secret |= {"unheard of", *frame["visit"].astype(str)} - {0, 1}
        plain = told.plain()
        for message in (plain, *(plain["columns"] or ())):
            message.pop("sums")  # numbers of other kinds, which may happen to be the same
        assert not secret & {leaf for leaf in leaves(plain) if not isinstance(leaf, bool)}


def test_what_is_told_is_said_in_words():
    said = in_one_process(three(), options_of("sick", columns="common", domain="race")).notes["told"]
    assert said == (
        "the names of the classes",
        "the names of the domains",
        "which of these columns they have: code, days, died, patient, steps, value",
        "names and kinds of their columns, and which are constant, 0 and 1 alone or have missing values",
        "how booleans are written: smokes, word, mark",
        "the categories, without the rare ones, of columns that do not enter: colour",
        "the categories, without the rare ones, of: pain, word",
    )


# What is refused -------------------------------------------------------------------------------------------------

GOOD = {"task": "classification", "labels": "texts", "classes": ["no", "yes"]}
COLUMN = {"name": "age", "kind": "number", "constant": False, "missing": True, "binary": False, "levels": []}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({**GOOD, "rows": [1]}, "unknown key 'rows'"),
        ({"labels": "texts"}, "task: field required"),
        ({**GOOD, "task": "guess"}, "task: input should be"),
        ({**GOOD, "classes": "no"}, "classes: input should be"),
        ({**GOOD, "classes": ["yes", "no"]}, "'classes' are not sorted"),
        ({**GOOD, "classes": ["n" * 2000, "yes"]}, "classes.0: string should have at most 1000"),
        ({**GOOD, "classes": [f"{n:06}" for n in range(100_001)]}, "classes: tuple should have at most 100000"),
        ({**GOOD, "numbers": [2**70]}, "numbers.0: input should be less"),
        ({"task": "classification"}, "'labels' goes with classification"),
        ({**GOOD, "sums": {"number": 3, "total": [1.0], "squares": [1.0]}}, "'sums' goes with regression"),
        ({"task": "regression", "sums": {"number": 0, "total": [1.0], "squares": [1.0]}}, "sums.number: input"),
        ({"task": "regression", "sums": {"number": 1, "total": [float("nan")], "squares": [1.0]}}, "sums.total.0: "),
        ({"task": "regression", "sums": {"number": 1, "total": [1.0], "squares": [-1.0]}}, "sums.squares.0: input"),
        ({"task": "regression", "sums": {"number": 1, "total": [1.0, 2.0], "squares": [1.0]}}, "sums: 2 sums, but 1"),
        ({**GOOD, "columns": [{**COLUMN, "kind": "odd"}]}, "columns.0.kind: input should be"),
        ({**GOOD, "columns": [COLUMN, COLUMN]}, "two 'columns' have one name"),
        ([1, 2], "input should be an object"),
    ],
)
def test_what_a_site_tells_is_checked(values, said):
    with pytest.raises(PerfedError) as error:
        SiteMetadata.of_plain(values, "site 'north'")
    line = str(error.value)
    assert line.startswith("site 'north': ") and said in line and "\n" not in line and len(line) < 600


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"task": "classification", "classes": ["a", "a"]}, "'classes' hold one twice"),
        ({"task": "classification", "classes": ["a", 1]}, "'classes' hold one twice, or texts and numbers"),
        ({"task": "regression"}, "'scale' goes with regression"),
        ({"task": "regression", "scale": {"mean": [0.0], "std": [0.0]}}, "scale.std.0: input should be greater"),
        ({"task": "survival", "domains": 0}, "domains"),
        (
            {"task": "survival", "columns": [{"name": "age", "kind": "number", "masked": 1, "levels": []}]},
            "columns.0.masked",
        ),
    ],
)
def test_what_the_server_says_is_checked(values, said):
    with pytest.raises(PerfedError) as error:
        FederationSchema.of_plain(values, "the server")
    assert str(error.value).startswith("the server: ") and said in str(error.value)


def told_by(frames, options) -> dict[str, SiteMetadata]:
    return {name: SiteTableData.alone(name, frame, options).create_metadata() for name, frame in frames.items()}


def test_a_column_that_the_study_names_and_no_site_has_is_refused_with_the_nearest_that_is_told():
    """What one site alone has is enough; where sites tell nothing about columns, there is none to compare with."""
    lists = {"drop": ["colour", "sugr"], "dates": ["visit"], "categories": ["Word", "smokes"]}
    near = [" (did you mean 'sugar'?)", " (did you mean 'word'?)"]
    frames = {name: frame.drop(columns=["patient", *TARGETS[1:]]) for name, frame in three().items()}
    for columns, meant in (("union", near), ("own", ["", ""])):
        options = replace(options_of("sick", columns=columns), **lists)
        tolds = told_by(frames, options)
        held = {"north": ("visit",), "south": ("smokes", "visit"), "west": ("colour", "smokes", "visit")}
        assert {name: told.named for name, told in tolds.items()} == held
        with pytest.raises(DataProblems) as error:
            agree_on_schema(tolds, options)
        assert list(error.value.problems) == [
            f"drop: no site has a column 'sugr'{meant[0]}",
            f"categories: no site has a column 'Word'{meant[1]}",
        ]
    agree_on_schema(told_by(three(), options_of("sick")), options_of("sick"))


def test_sites_that_contradict_each_other_are_named():
    options = options_of("sick", columns="union")
    frames = three()
    frames["south"]["age"], frames["south"]["sick"] = ["old", "young"] * 20, [0, 1] * 20
    with pytest.raises(DataProblems) as error:
        agree_on_schema(told_by(frames, options), options)
    assert list(error.value.problems) == [
        "site 'south': column 'sick', the target, holds numbers; others' targets are texts",
        "column 'age' is a category in site 'south' and a number in site 'north', site 'west'; "
        "give it one kind (a name in numbers, categories or dates), replace its texts (values), or drop it",
    ]
    plain = options_of("sick")
    tolds = told_by(three(), plain)
    for change, line in (
        ({"columns": ()}, "site 'south': columns are told, and as others do not; all sites need the same study"),
        ({"domains": ("a",)}, "site 'south': domains are told, and as others do not; all sites need the same study"),
    ):
        with pytest.raises(PerfedError, match=line):
            agree_on_schema({**tolds, "south": tolds["south"].model_copy(update=change)}, plain)
    with pytest.raises(PerfedError, match="site 'north': no columns are told"):
        agree_on_schema(tolds, replace(plain, columns="union"))
    with pytest.raises(PerfedError, match=r"site 'north', site 'south', site 'west': .* is not of regression"):
        agree_on_schema(tolds, replace(plain, task="regression"))
    with pytest.raises(PerfedError, match="the same in all rows of all sites"):
        agree_on_schema(told_by({name: frame.assign(sick="no") for name, frame in three().items()}, plain), plain)
    with pytest.raises(PerfedError, match="no site has told anything"):
        agree_on_schema({}, plain)


@pytest.mark.long
def test_targets_that_are_labels_here_and_values_there_need_a_word():
    options = options_of("code")
    values = three()
    values["west"]["code"] = np.arange(40)
    with pytest.raises(
        PerfedError, match="is of classification in site 'north', of regression in site 'west'; say task"
    ):
        agree_on_schema(told_by(values, options), options)
    many = {name: frame.assign(code=np.arange(40) % 15 + 15 * n) for n, (name, frame) in enumerate(three().items())}
    with pytest.raises(PerfedError, match="has 45 different whole numbers, classes or values; say task"):
        agree_on_schema(told_by(many, options), options)
    for task in ("classification", "regression"):
        said = replace(options, task=task)
        assert_same(over_a_network(many, said)[1], in_one_process(many, said))


@pytest.mark.long
def test_a_table_that_does_not_fit_what_was_agreed_is_refused_by_row():
    options = options_of("sick", columns="union", domain="race")
    agreement = agree_on_schema(told_by(three(), options), options)
    changed = three()["west"]
    changed.loc[5, "sick"], changed.loc[7, "race"], changed["flag"] = (
        "perhaps",
        "c",
        [f"{n % 3} of 3" for n in range(40)],
    )
    rows = SiteTableData.alone("west", changed, options, sources=("west.csv", "test.csv"))
    lines = [
        "column 'flag' is a category in west.csv and a number in the study; give it one kind",
        "west.csv: column 'sick', the target, holds no known class in row 5; allowed: no, yes",
        "west.csv: column 'race' holds no known domain in row 7; allowed: a, b",
    ]
    assert [line.partition(" (a name")[0] for line in rows.describe_misfits(agreement)] == lines
    with pytest.raises(DataProblems) as error:
        rows.client(agreement)
    assert len(error.value.problems) == 3
    common = replace(options, columns="common")
    agreement = agree_on_schema(told_by(three(), common), common)
    lacking = SiteTableData.alone("west", three()["west"].drop(columns="age"), common)
    assert lacking.describe_misfits(agreement)[0].startswith("site 'west': no column 'age'")
    other = SiteTableData.alone("west", three()["west"], options_of("value"))
    assert other.describe_misfits(agreement) == [
        "site 'west': column 'value', the target, is of regression, and the study is of classification"
    ]
    yes_no = three()
    yes_no["north"] = yes_no["north"].assign(flag=["yes", "no"] * 20)
    options = options_of("sick", columns="common")
    rows = SiteTableData.alone("north", yes_no["north"], options)
    found = rows.describe_misfits(agree_on_schema(told_by(three(), options), options))
    assert [line.partition(" in rows")[0] for line in found] == [
        "site 'north': column 'flag' holds numbers, and something else"
    ]
