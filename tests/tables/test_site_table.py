"""A site's table: any order of columns, what is refused, categories never seen, files, ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, TransformerMixin
from test_frames import made

from perfed import Federation, PerfedError
from perfed.data.domain_input import with_domain_input
from perfed.tables.site import TablePreprocessor


def table(**settings: Any) -> TablePreprocessor:
    (client,) = Federation.from_frames({"north": made()}, **{"target": "sick", "domain": "race", **settings})
    return client.table


def test_columns_may_stand_in_any_order_and_the_target_may_be_there():
    site, rows = table(), made(7, 9)
    x, domain = site.transform(rows)
    again, domain_again = site.transform(rows[rows.columns[::-1]].drop(columns="sick"))
    np.testing.assert_array_equal(x, again)
    assert domain.tolist() == domain_again.tolist() == (rows["race"] == "b").astype(int).tolist()
    without, none = site.transform(rows.drop(columns="race"))
    np.testing.assert_array_equal(x, without)
    assert none is None
    assert site.feature_names_in_ == ("age", "smokes", "pain", "visit")
    assert len(site.feature_names_out_) == x.shape[1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda f: f.drop(columns="age"),
            "site 'north': no column 'age'; the site's columns: age, smokes, pain, visit",
        ),
        (
            lambda f: f.drop(columns=["age", "pain", "visit"]),
            "site 'north': no columns 'age', 'pain', 'visit'; the site's columns: age, smokes, pain, visit",
        ),
        (
            lambda f: f.rename(columns={"age": "Age"}).assign(weight=70.0, visits=2),
            "site 'north': no column 'age'; rename 'Age' to 'age'?; unknown columns 'weight', 'visits', remove them",
        ),
        (
            lambda f: f.assign(weight=70.0),
            "site 'north': unknown column 'weight', remove it; the site's columns: age, smokes, pain, visit",
        ),
        (lambda f: pd.concat([f, f[["age"]]], axis=1), "site 'north': several columns are called 'age'"),
        (lambda f: f.assign(age="sixty"), "site 'north': column 'age' holds numbers, and something else in rows 0, 1"),
        (
            lambda f: f.assign(race="c"),
            "site 'north': column 'race' holds no known domain in rows 0, 1, 2, 3; allowed: a, b",
        ),
        (lambda f: f.to_numpy(), "site 'north': a ndarray was given"),
    ],
)
def test_other_columns_and_values_are_refused_by_name(change, expected):
    with pytest.raises(PerfedError) as error:
        table().transform(change(made(4, 9)))
    assert str(error.value).startswith(expected) and "\n" not in str(error.value)


def test_columns_that_do_not_enter_may_be_there():
    frame = made().assign(patient=[f"K-{n}" for n in range(40)], ward="one")
    (client,) = Federation.from_frames({"north": frame}, target="sick", domain="race", drop=["patient"])
    assert client.table.ignored == ("patient", "ward")
    np.testing.assert_array_equal(
        client.table.transform(frame)[0], client.table.transform(frame.drop(columns=["patient", "ward"]))[0]
    )


def test_categories_that_training_never_saw_are_allowed_and_counted():
    site = table(test={"north": made(5, 3)})
    rows = made(5, 9).assign(pain=["mild", "burning", "burning", None, "dull"])
    x = site.transform(rows)[0]
    of_pain = [at for at, name in enumerate(site.feature_names_out_) if name.startswith("category__pain")]
    assert x[:, of_pain].sum(1).tolist() == [1, 0, 0, 0, 0]
    assert site.unseen(rows) == {"pain": 3} and site.unseen(made(5, 3)) == {}


def test_a_domain_input_is_made_for_new_rows_too():
    federation = with_domain_input(Federation.from_frames({"north": made()}, target="sick", domain="race", test=0.0))
    (client,) = federation
    x, domain = client.table.transform(made())
    np.testing.assert_array_equal(x, client.train.x)
    assert client.table.feature_names_out_ == client.feature_names
    np.testing.assert_array_equal(x[:, -2:], np.eye(2)[domain])
    with pytest.raises(PerfedError, match="site 'north': no column 'race'"):
        client.table.transform(made().drop(columns="race"))


class Shifted(TransformerMixin, BaseEstimator):
    """A transformer that skops does not know."""

    def fit(self, x: Any, y: Any = None) -> Shifted:
        self.mean_ = x["age"].mean()
        return self

    def transform(self, x: Any) -> Any:
        return x[["age"]].fillna(self.mean_).to_numpy() - self.mean_


@pytest.mark.long
@pytest.mark.parametrize("columns", ["own", "union", "mine"])
def test_a_saved_table_does_the_same(tmp_path, columns):
    settings = {"preprocess": Shifted()} if columns == "mine" else {"columns": columns}
    frames = {"north": made(), "south": made(seed=1).assign(sugar=np.arange(40.0) ** 2)}
    one = Federation.from_frames(frames, target="sick", domain="race", **settings).clients[0].table
    one.save(tmp_path / "north.table")
    two = TablePreprocessor.load(tmp_path / "north.table", trust=columns == "mine")
    for a, b in zip(one.transform(made(9, 9)), two.transform(made(9, 9)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {k: v for k, v in vars(one).items() if k != "transformer"} == {
        k: v for k, v in vars(two).items() if k != "transformer"
    }


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "x.table").write_bytes(b"nothing")
    for name in ("x.table", "y.table"):
        with pytest.raises(PerfedError, match="cannot be read as a site's table"):
            TablePreprocessor.load(tmp_path / name)


@pytest.mark.long
@pytest.mark.parametrize("columns", ["own", "union"])
def test_the_preprocessing_converts_to_onnx_masks_included(columns):
    """With ``add_indicator`` skl2onnx drops the masks and says nothing."""
    skl2onnx, onnxruntime = pytest.importorskip("skl2onnx"), pytest.importorskip("onnxruntime")
    types = skl2onnx.common.data_types
    frames = {"north": made(), "south": made(seed=1).assign(sugar=np.arange(40.0) ** 2)}
    site = Federation.from_frames(frames, target="sick", drop=["race"], columns=columns, test=0.0).clients[0].table
    rows = made(9, 9).assign(pain=["dull", "mild", "mild", None, "severe", "mild", "mild", "mild", "mild"])
    ready = site.read(rows.drop(columns="race"))
    texts = {column.name for column in site.inputs if column.kind == "category"}
    kinds = {name: types.StringTensorType if name in texts else types.FloatTensorType for name in ready}
    graph = skl2onnx.to_onnx(site.transformer, initial_types=[(name, kind([None, 1])) for name, kind in kinds.items()])
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    feed = {name: ready[[name]].to_numpy(object if name in texts else np.float32) for name in ready}
    (found,) = session.run(None, feed)
    np.testing.assert_allclose(found, site.transform(rows.drop(columns="race"))[0], atol=1e-4)
    assert found[3, site.feature_names_out_.index("missing__age")] == 1
