"""From data frames to a federation, against the same done by hand with pandas and scikit-learn."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from data_files import require_file
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from perfed import Federation, PerfedError
from perfed.data.problems import DataProblems
from perfed.tables.splits import assign_folds, draw_test_rows


def made(rows: int = 40, seed: int = 0, **more: object) -> pd.DataFrame:
    """A site: a number with gaps, a boolean, a category with a rare value, a date, a domain, a target."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 10, rows).round(1),
            "smokes": rng.choice(["yes", "no"], rows),
            "pain": [*rng.choice(["mild", "severe"], rows - 1), "other"],
            "visit": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 90, rows), "D"),
            "race": rng.choice(["a", "b"], rows),
            "sick": rng.choice(["no", "yes"], rows),
        }
    )
    frame.loc[3, "age"] = None
    return frame.assign(**more)


def fitted_by_hand(train: pd.DataFrame, rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Inputs by name, as pandas computes them."""
    age = rows["age"].fillna(train["age"].median())
    filled = train["age"].fillna(train["age"].median())
    days, train_days = ((f["visit"] - pd.Timestamp("1970-01-01")).dt.days for f in (rows, train))
    found = {
        "number__age": (age - filled.mean()) / filled.std(ddof=0),
        "date__visit": (days - train_days.mean()) / train_days.std(ddof=0),
        "boolean__smokes": (rows["smokes"] == "yes").astype(float),
        "category__pain_mild": (rows["pain"] == "mild").astype(float),
        "category__pain_severe": (rows["pain"] == "severe").astype(float),
        "missing__age": rows["age"].isna().astype(float),
    }
    return {name: values.to_numpy() for name, values in found.items()}


@pytest.mark.long
def test_a_column_written_in_two_ways_is_said():
    other = made(seed=1).rename(columns={"age": "Age"})
    said = "site 'y': column 'Age' is another than 'age' of other sites; is it meant to be?"
    assert said in Federation.from_frames({"x": made(), "y": other}, target="sick").describe()
    both = made(seed=1).assign(Age=1.5)
    assert "another than" not in Federation.from_frames({"x": made(), "y": both}, target="sick").describe()


def test_each_site_s_preprocessing_is_what_pandas_computes_from_its_training_rows():
    frames, tests = {s: made(seed=n) for n, s in enumerate("xy")}, {"x": made(9, 7), "y": made(5, 8)}
    federation = Federation.from_frames(frames, target="sick", domain="race", test=tests)
    for client in federation:
        for split, frame in (("train", frames[client.id]), ("test", tests[client.id])):
            expected, part = fitted_by_hand(frames[client.id], frame), client.split(split)
            assert set(client.feature_names) == set(expected)
            for column, name in enumerate(client.feature_names):
                np.testing.assert_allclose(part.x[:, column], expected[name], atol=1e-12, err_msg=name)
            assert [federation.classes[label] for label in part.y] == frame["sick"].tolist()
            assert [federation.domain_names[m] for m in part.domain] == frame["race"].tolist()


def test_a_site_looks_at_its_own_rows_only():
    frames = {"x": made(seed=1), "y": made(seed=2)}
    alone = Federation.from_frames({"x": frames["x"]}, target="sick", domain="race")
    both = Federation.from_frames({**frames, "y": frames["y"].assign(age=1e6)}, target="sick", domain="race")
    assert (alone.clients[0].train.x == both.clients[0].train.x).all()


def test_test_rows_do_not_change_the_preprocessing():
    frames = {"x": made()}
    one, two = (
        Federation.from_frames(frames, target="sick", drop=["race"], test={"x": made(9, 7).assign(age=age)})
        for age in (50.0, 5000.0)
    )
    assert (one.clients[0].train.x == two.clients[0].train.x).all()


# Schemas ---------------------------------------------------------------------------------------------------------


def two_schemas() -> dict[str, pd.DataFrame]:
    north = made(seed=1, sugar=np.arange(40.0) ** 2).drop(columns="race")
    south = made(seed=2, colour=["red", "blue"] * 20).drop(columns=["race", "smokes"])
    south.loc[:10, "pain"] = "burning"
    return {"north": north, "south": south}


def test_common_keeps_what_all_sites_have_in_one_order():
    one, two = Federation.from_frames(two_schemas(), target="sick", columns="common")
    levels = ("pain_burning", "pain_mild", "pain_severe")
    assert one.feature_names == two.feature_names == (
        "number__age", "date__visit", *(f"category__{level}" for level in levels), "missing__age"
    )  # fmt: skip
    assert one.table.feature_names_in_ == ("age", "pain", "visit")


def test_union_fills_what_a_site_lacks_and_says_so_in_a_mask():
    frames = two_schemas()
    one, two = Federation.from_frames(frames, target="sick", columns="union")
    assert one.feature_names == two.feature_names
    values = {c.id: dict(zip(c.feature_names, c.train.x.T, strict=True)) for c in (one, two)}
    lacking = {
        "north": ("category__colour_red", "category__colour_blue"),
        "south": ("number__sugar", "boolean__smokes"),
    }
    for site, names in lacking.items():
        assert all((values[site][name] == 0).all() for name in names)
    for mask, site, other in (
        ("missing__sugar", "south", "north"), ("missing__smokes", "south", "north"),
        ("category__colour_missing", "north", "south"),
    ):  # fmt: skip
        assert (values[site][mask] == 1).all() and (values[other][mask] == 0).all()
    assert "sugar" not in two.table.feature_names_in_ and "sugar" in one.table.feature_names_in_
    frame = frames["south"].drop(columns="sick")
    assert two.table.transform(frame)[0].shape == (40, len(two.feature_names))


@pytest.mark.long
def test_what_sites_tell_each_other_is_listed():
    said = {
        mode: Federation.from_frames(two_schemas(), target="sick", columns=mode).describe()
        for mode in ("own", "common", "union")
    }
    assert "sites tell each other before they train: the names of the classes\n" in said["own"] + "\n"
    assert said["common"].endswith("of: pain") and said["union"].endswith("of: pain, colour")


def test_a_name_that_is_a_number_here_and_a_text_there_is_refused_where_columns_are_shared():
    frames = two_schemas()
    frames["south"]["age"] = ["old", "young"] * 20
    assert len(Federation.from_frames(frames, target="sick")) == 2
    for mode in ("common", "union"):
        with pytest.raises(
            PerfedError, match="column 'age' is a number in site 'north' and a category in site 'south'"
        ):
            Federation.from_frames(frames, target="sick", columns=mode)


def test_kinds_that_only_seem_to_differ_are_brought_together():
    frames = two_schemas()
    frames["north"]["grade"], frames["south"]["grade"] = [0, 1] * 20, [0, 1, 2, 3] * 10
    frames["north"]["sex"], frames["south"]["sex"] = ["f"] * 40, ["f", "m"] * 20
    one, two = Federation.from_frames(frames, target="sick", columns="common")
    assert one.feature_names == two.feature_names
    assert {"number__grade", "category__sex_f", "category__sex_m"} <= set(one.feature_names)


# Splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_seeds_judge_every_row_once_and_by_class():
    frame = made(43, race=range(1000, 2075, 25))
    folds = [Federation.from_frames({"x": frame}, target="sick", drop=["race"], folds=5, seed=s) for s in range(5)]
    tested = [Counter(f.clients[0].test.y.tolist()) for f in folds]
    assert sum(tested, Counter()) == Counter((frame["sick"] == "yes").astype(int))
    for label in (0, 1):
        counts = [held[label] for held in tested]
        assert max(counts) - min(counts) <= 1
    ages = sorted(age for f in folds for age in f.clients[0].table.read(frame)["age"].dropna())
    assert len(ages) == 5 * 42
    again = Federation.from_frames({"x": frame}, target="sick", drop=["race"], folds=5, seed=5)
    assert not again.clients[0].test.x.equal(folds[0].clients[0].test.x)


@pytest.mark.parametrize("seed", range(3))
def test_folds_are_level(seed):
    rng = np.random.default_rng(seed)
    strata = rng.choice(3, 101, p=[0.8, 0.15, 0.05])
    fold = assign_folds(strata, 4, seed, "folds")
    for members in (np.ones(101, bool), *(strata == label for label in range(3))):
        counts = np.bincount(fold[members], minlength=4)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_part_is_drawn_by_class(seed):
    strata = np.array([0] * 61 + [1] * 12 + [2])
    held = draw_test_rows(strata, 0.25, seed, "test")
    assert held[strata == 0].sum() in (15, 16) and held[strata == 1].sum() == 3 and not held[strata == 2].any()


def test_a_patient_s_rows_are_on_one_side():
    frame = made(60, patient=np.repeat(np.arange(20), 3), age=np.repeat(np.arange(20.0), 3))
    (client,) = Federation.from_frames({"x": frame}, target="sick", drop=["race"], group="patient", test=0.3)
    column = client.feature_names.index("number__age")
    assert not set(client.train.x[:, column].tolist()) & set(client.test.x[:, column].tolist())
    assert "patient" not in client.table.feature_names_in_


# Targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["no", "yes"] * 20, None, ("no", "yes")),
        (["3", "7"] * 20, None, (3, 7)),
        ([3.0, 7.0] * 20, None, (3, 7)),
        ([True, False] * 20, None, ("False", "True")),
        (np.arange(40), None, None),
        ([0.5, 0.25] * 20, None, None),
        ([3, 7] * 20, "regression", None),
        (np.arange(40), "classification", tuple(range(40))),
    ],
)
def test_what_targets_are_taken_for(values, task, classes):
    federation = Federation.from_frames({"x": made(sick=values)}, target="sick", drop=["race"], task=task)
    assert federation.classes == classes


def test_a_site_may_lack_classes():
    frames = {"x": made(), "y": made(sick=["no"] * 40)}
    federation = Federation.from_frames(frames, target="sick", drop=["race"])
    assert federation.classes == ("no", "yes") and set(federation.clients[1].train.y.tolist()) == {0}
    assert "site 'y': its training rows are of one class" in federation.describe()


# A transformer of the user's own ---------------------------------------------------------------------------------


def test_a_transformer_of_one_s_own_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tables.py").write_text(
        "from sklearn.compose import ColumnTransformer\n"
        "from sklearn.preprocessing import MinMaxScaler\n"
        "ranged = ColumnTransformer([('r', MinMaxScaler(), ['number'])])\n"
        "def make():\n    return ranged\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    frame = made(number=np.arange(100.0, 140.0), note=[f"a text of its own {n}" for n in range(40)])
    for name in ("mine_for_tables:ranged", "mine_for_tables:make"):
        (client,) = Federation.from_frames({"x": frame}, target="sick", preprocess=name, test={"x": frame[:3]})
        np.testing.assert_allclose(client.train.x[:, 0], np.arange(40) / 39)
        np.testing.assert_allclose(client.test.x[:, 0], np.arange(3) / 39)
        assert client.feature_names == ("r__number",)
    with pytest.raises(PerfedError, match="preprocess = 'mine_for_tables:nothing': cannot be loaded"):
        Federation.from_frames({"x": frame}, target="sick", preprocess="mine_for_tables:nothing")
    with pytest.raises(PerfedError, match="'module:NAME' of a scikit-learn transformer is"):
        Federation.from_frames({"x": frame}, target="sick", preprocess="scaler")


def test_a_transformer_of_one_s_own_gets_categories_with_gaps_and_dates_as_dates():
    frame = made(pain=["mild", None] * 19 + ["severe"] * 2)
    filled = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(sparse_output=False))
    years = FunctionTransformer(lambda f: f.apply(lambda column: column.dt.year), feature_names_out="one-to-one")
    mine = ColumnTransformer([("c", filled, ["pain"]), ("d", years, ["visit"])])
    (client,) = Federation.from_frames({"x": frame}, target="sick", preprocess=mine, test=0.0)
    expected = [(frame["pain"].fillna("mild") == "mild"), frame["pain"] == "severe", frame["visit"].dt.year]
    np.testing.assert_array_equal(client.train.x, np.stack(expected, 1).astype(float))


def test_a_transformer_object_is_copied_for_each_site():
    frames = {s: made(seed=n)[["age", "sick"]].dropna() for n, s in enumerate("xy")}
    scaler = StandardScaler()
    for client in Federation.from_frames(frames, target="sick", preprocess=scaler, test=0.0):
        np.testing.assert_allclose(client.train.x.mean(0), 0, atol=1e-12)
    assert not hasattr(scaler, "mean_")
    with pytest.raises(PerfedError, match="does not give numbers"):
        Federation.from_frames({"x": made()}, target="sick", preprocess=FunctionTransformer())


# Bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "target absent": ({}, {"target": "outcome"}, "site 'x': target: no column 'outcome'; its columns: age, smokes"),
    "target misspelt": ({}, {"target": "sik"}, "site 'x': target: no column 'sik' (did you mean 'sick'?)"),
    "many columns": (
        {f"c{n}": 1.0 for n in range(30)},
        {"target": "outcome"},
        "site 'x': target: no column 'outcome'; its columns: age, smokes, pain, visit, race, sick, c0, c1 and 28 more",
    ),
    "target constant": (
        {"sick": "no"},
        {},
        "column 'sick', the target, is the same in all rows of all sites; there is nothing to predict",
    ),
    "target missing": (
        {"sick": ["no", None, "yes", ""] * 10},
        {},
        "site 'x': column 'sick', the target, is missing in rows 1, 3, 5, 7, 9 and 15 more; leave these rows out",
    ),
    "target infinite": (
        {"sick": [1.5, np.inf] * 20},
        {},
        "site 'x': column 'sick', the target, holds infinity in rows",
    ),
    "target too large": (
        {"sick": [1.5, 1e300] * 20},
        {"task": "regression"},
        "site 'x': column 'sick', the target, holds numbers beyond 1e+145 in rows",
    ),
    "target of texts": (
        {"sick": [1.5, "high"] * 20},
        {"task": "regression"},
        "site 'x': column 'sick', the target, holds texts in rows 1, 3",
    ),
    "domain missing": (
        {"race": [None, "a"] * 20},
        {"domain": "race"},
        "site 'x': column 'race', the domain, is missing",
    ),
    "drop misspelt": ({}, {"drop": ["rac"]}, "drop: no site has a column 'rac' (did you mean 'race'?)"),
    "an id": (
        {"number": [f"K-{n}" for n in range(40)]},
        {},
        "site 'x': column 'number' looks like an id; name it in drop",
    ),
    "free text": (
        {"note": [f"comes with pain since {n}" for n in range(40)]},
        {},
        "site 'x': column 'note' looks like free text; name it in drop",
    ),
    "numbers as text": (
        {"age": ["60"] * 38 + ["60 y", "old"]},
        {},
        "site 'x': column 'age' holds numbers, and something else in rows 38, 39; write numbers alone",
    ),
    "infinity": ({"age": [np.inf, 1.0] * 20}, {}, "site 'x': column 'age' holds infinity in rows 0, 2"),
    "dates that do not parse": (
        {"visit": ["2024-01-05"] * 39 + ["2024-13-05"]},
        {},
        "site 'x': column 'visit' holds dates, and something else in row 39; write YYYY-MM-DD",
    ),
    "decimal commas": (
        {"dose": [f"{n // 9},{n % 9}" for n in range(40)]},
        {},
        "site 'x': column 'dose' holds numbers with a decimal comma; write them with a point",
    ),
    "two roles": ({}, {"domain": "sick"}, "column 'sick' has two roles"),
    "fraction": ({}, {"test": 1.5}, "test_fraction = 1.5 is not allowed"),
    "folds": ({}, {"folds": 1}, "folds = 1 is not allowed; allowed: 0, or at least 2"),
    "too many folds": ({}, {"folds": 41}, "site 'x': it has 40 rows; at least 41 are needed (folds = 41)"),
    "task": ({}, {"task": "survival"}, "task = 'survival' is not allowed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name):
    columns, settings, expected = BAD[name]
    with pytest.raises(PerfedError) as error:
        Federation.from_frames({"x": made().assign(**columns)}, **{"target": "sick", **settings})
    assert str(error.value).startswith(expected) and "\n" not in str(error.value)


def test_sites_without_rows_with_one_row_and_with_columns_of_one_name():
    good = made()
    twice = pd.concat([good, good[["age"]]], axis=1)
    for frame, expected in (
        (good[:0], "site 'y': there are no rows; every site needs some"),
        (good[:1], "site 'y': it has 1 rows; at least 2 are needed (to train on and to test on)"),
        (twice, "site 'y': several columns are called 'age'; names must differ"),
        (good.to_numpy(), "site 'y': a ndarray was given; a pandas DataFrame is needed"),
    ):
        with pytest.raises(PerfedError) as error:
            Federation.from_frames({"x": good, "y": frame}, target="sick")
        assert str(error.value) == expected
    with pytest.raises(PerfedError, match="two sites are called '1'; names must differ"):
        Federation.from_frames({1: good, "1": good}, target="sick")
    with pytest.raises(PerfedError, match="test rows are given for 'z', but there are the sites x only"):
        Federation.from_frames({"x": good}, target="sick", test={"z": good})
    with pytest.raises(PerfedError, match=r"site 'x' \(test\): no column 'age'"):
        Federation.from_frames({"x": good}, target="sick", test={"x": good.drop(columns="age")})


def test_all_problems_are_said_at_once():
    frames = {"x": made(age="old", code=range(40)), "y": made(visit=["2024-01-05"] * 39 + ["soon"])}
    with pytest.raises(DataProblems) as error:
        Federation.from_frames(frames, target="sick", columns="union")
    assert [problem.partition(";")[0] for problem in error.value.problems] == [
        "site 'x': column 'code' looks like an id",
        "column 'age' is a category in site 'x' and a number in site 'y'",
        "site 'y': column 'visit' holds dates, and something else in row 39",
    ]
    assert str(error.value).endswith("(and 2 more)")


def test_the_same_problem_of_several_sites_is_one_line():
    frames = {site: made(seed=n, code=range(40)) for n, site in enumerate("xyz")}
    with pytest.raises(DataProblems) as error:
        Federation.from_frames(frames, target="sick")
    assert [problem.partition(";")[0] for problem in error.value.problems] == [
        "site 'x' (and 2 more): column 'code' looks like an id"
    ]


def test_codes_at_one_site_and_names_at_another_are_refused():
    with pytest.raises(PerfedError, match=r"site 'y': column 'sick', the target, holds texts in rows .*are numbers"):
        Federation.from_frames({"x": made(sick=[0, 1] * 20), "y": made()}, target="sick")


# Real tables -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_four_hospitals_come_in_as_they_are():
    with np.load(require_file("heart_disease.npz")) as data:
        table = pd.DataFrame(data["x"], columns=data["feature_names"]).assign(sick=data["y"])
        frames = {
            str(h): table[data["hospital"] == i].dropna(axis=1, how="all") for i, h in enumerate(data["hospital_names"])
        }
    settings = {"target": "sick", "categories": ["cp", "thal"], "domain": "sex", "folds": 5}
    federations = [Federation.from_frames(frames, **settings, seed=seed) for seed in range(5)]
    for site, frame in frames.items():  # every row is in the training rows of four folds
        for name in ("trestbps", "thalach", "restecg"):
            columns = [c for f in federations for k in f if k.id == site for c in k.table.columns if c.name == name]
            assert sum(column.missing for column in columns) == 4 * frame[name].isna().sum()
    federation = federations[0]
    for client in federation:
        frame = frames[client.id]
        assert len(client.train) + len(client.test) == len(frame)
        varying = {name for name in frame if frame[name].nunique(dropna=False) > 1} - {"sick", "sex"}
        assert set(client.table.feature_names_in_) == varying
        x, domain = client.table.transform(frame.drop(columns="sick"))
        assert x.shape == (len(frame), *client.input_shape) and domain.tolist() == frame["sex"].astype(int).tolist()
    assert "chol" not in federation.clients[2].table.feature_names_in_  # 0 for all of Switzerland


def test_federations_of_arrays_are_described_too():
    arrays = {
        "x_train": np.ones((4, 3)),
        "y_train": np.array([0, 1, 1, 1]),
        "x_test": np.ones((2, 3)),
        "y_test": [0, 1],
    }
    assert Federation.from_arrays({"one": arrays}).describe().splitlines() == [
        "site  train  test  inputs  class 0  class 1",
        "one       4     2       3        2        4",
    ]


# What is said -----------------------------------------------------------------------------------------------------


def remarks(frames: dict[str, pd.DataFrame], **settings: object) -> tuple[str, ...]:
    return Federation.from_frames(frames, **{"target": "sick", **settings}).notes["remarks"]


@pytest.mark.long
def test_formats_of_dates_are_said_where_they_differ_or_are_not_iso():
    iso = made()
    german = iso.assign(visit=iso["visit"].dt.strftime("%d.%m.%Y"))
    assert not [line for line in remarks({"a": iso}) if "dates" in line]
    assert "column 'visit': dates are read as DD.MM.YYYY" in remarks({"a": german, "b": german})
    mixed = remarks({"a": german, "b": iso, "c": german})
    assert "column 'visit': dates are read as DD.MM.YYYY at a, c; as YYYY-MM-DD at b" in mixed


@pytest.mark.parametrize(
    ("name", "target", "hint"),
    [
        ("event", "days", "--event event"),
        ("Vital status", "days", "--event 'Vital status'"),
        ("hasDied", "days", "--event hasDied"),
        ("censored", "days", "--event takes a column that is 1 where the event was seen, which is the opposite"),
        ("eventful", "days", None),
        ("event", "sick", None),
    ],
)
def test_a_column_that_looks_like_one_of_events_is_asked_about(name, target, hint):
    frame = made().assign(days=np.arange(1.0, 41) ** 1.5, **{name: [0, 1] * 20})
    said = [line for line in remarks({"x": frame}, target=target) if "survival" in line]
    assert said == ([] if hint is None else [f"column '{name}': is this survival? {hint}"])
    if target == "days":
        assert not [line for line in remarks({"x": frame.drop(columns=name)}, target=target) if "survival" in line]
        made_survival = frame.assign(also_died=[1, 0] * 20)
        assert not [line for line in remarks({"x": made_survival}, target=target, event=name) if "surv" in line]


def test_columns_of_some_other_sites_are_neither_shared_nor_own():
    rng = np.random.default_rng(0)
    columns = {"north": ["a", "b", "c"], "south": ["a", "b"], "west": ["a", "b", "d"], "east": ["a", "e"]}
    tables = {
        site: pd.DataFrame(rng.normal(size=(12, len(names))), columns=names).assign(sick=["yes", "no"] * 6)
        for site, names in columns.items()
    }
    facts = Federation.from_frames(tables, target="sick", columns="own").facts
    found = {site.site: (site.shared, site.some, site.own) for site in facts.sites}
    for site, names in columns.items():  # counted by hand
        others = [sum(name in of for of in columns.values()) - 1 for name in names]
        assert found[site] == (others.count(3), sum(0 < n < 3 for n in others), others.count(0))
    assert "shared columns  some  own" in str(facts)


def test_shared_columns_are_those_that_all_tables_have_and_constant_ones_are_counted_apart():
    flat = made(seed=2).assign(smokes=["no"] * 40, extra=np.arange(40.0) ** 2)
    facts = Federation.from_frames({"x": made(), "y": flat}, target="sick", folds=5, seed=3).facts
    assert [(site.shared, site.own, site.constant) for site in facts.sites] == [(5, 0, 0), (5, 1, 1)]
    assert "site 'y': columns that are constant in the training rows, whose rows seed 3 draws" in " ".join(
        facts.remarks
    )
    assert "constant" in facts.rows()[0]


def test_one_name_may_be_a_text():
    frame = made().assign(**{"sample id": [f"K-{n}" for n in range(40)], "code": [1, 2] * 20})
    (client,) = Federation.from_frames({"x": frame}, target="sick", drop="sample id", categories="code")
    assert client.table.ids == ("sample id",) and client.table.ignored == ("sample id",)
    assert [column.kind for column in client.table.columns if column.name == "code"] == ["category"]
