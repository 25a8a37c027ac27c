"""What users give as data: arrays, data frames and torch data sets; one line for what cannot be used."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from engines import make, network
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.run.run import Run

X, Y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 0, 1])


class Frame:
    """What perfed asks of a data frame: ``columns`` and ``to_numpy``."""

    def __init__(self, **columns: Any) -> None:
        self.columns = list(columns)
        self._values = list(columns.values())

    def to_numpy(self) -> np.ndarray:
        kinds = {np.asarray(values).dtype.kind for values in self._values}
        mixed = [list(values) for values in self._values]
        return np.stack(self._values, 1) if len(kinds) == 1 else np.array(mixed, object).T


class Rows(Dataset):
    """A map-style data set that, as most, does not say where it ends."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return tuple(column[i % len(self)] for column in self.columns)


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(3), 1


class Endless(Dataset):
    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return torch.ones(3), 1


class Photograph:
    """No array."""


def one(given: Any, **options: Any) -> Federation:
    return Federation.from_arrays({"a": given}, **options)


def arrays(**changes: Any) -> dict[str, Any]:
    return {"x_train": X, "y_train": Y, **changes}


# Data frames and torch data sets -----------------------------------------------------------------------------


def test_a_data_frame_gives_columns_their_names():
    frame = Frame(age=[30, 40, 50, 60], smoker=[True, False, True, False], bmi=[20.5, 21.0, 22.0, 23.0])
    client = one(arrays(x_train=frame)).clients[0]
    assert client.feature_names == ("age", "smoker", "bmi")
    assert client.train.x.tolist() == [[30, 1, 20.5], [40, 0, 21], [50, 1, 22], [60, 0, 23]]


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Rows(X, Y),
        Rows(list(torch.from_numpy(X)), list(torch.from_numpy(Y))),
        Subset(Rows(np.flip(X, 0), Y[::-1]), [3, 2, 1, 0]),
        ConcatDataset([Rows(X[:1], Y[:1]), Rows(X[1:], Y[1:])]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_a_map_style_data_set_is_read_by_its_length(data):
    plain = one(arrays(x_test=X, y_test=Y)).clients[0]
    for given in ({"train": data, "test": data}, {"train": data, "x_test": X, "y_test": Y}, data):
        client = one(given, num_classes=None).clients[0]
        for split in ("train", "test") if given is not data else ("train",):
            found, expected = client.split(split), plain.split(split)
            assert torch.equal(found.x, expected.x) and torch.equal(found.y, expected.y)


def test_samples_of_a_data_set_may_have_a_domain_and_be_images_and_labels_texts():
    assert one(Rows(X, ["no", "yes", "no", "yes"])).classes == ("no", "yes")
    client = one(Rows(np.ones((4, 1, 5, 5), np.float32), Y, [2, 0, 1, 2])).clients[0]
    assert client.input_shape == (1, 5, 5) and client.train.domain.tolist() == [2, 0, 1, 2]
    assert client.train.x.dtype == torch.float32
    assert one({"train": Rows(X, Y), "test": Rows([], [])}).clients[0].split("test") is None


class Missing:
    """As pandas' ``NA``."""


Missing.__name__ = "NAType"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((X, Y), "client 'a' is a tuple; a mapping is needed, such as {'x_train': ..."),
        (X, "client 'a' is a ndarray; a mapping is needed"),
        (
            Stream(),
            "client 'a': train is an iterable data set; a torch Dataset with a length is needed there, or arrays",
        ),
        ({"train": Stream()}, "client 'a': train is an iterable data set"),
        (Endless(), "client 'a': train is a Endless; a torch Dataset with a length is needed"),
        (
            {"train": X},
            "client 'a': train is a ndarray; a torch Dataset with a length is needed there, or arrays as x_tr",
        ),
        (arrays(x_train=Rows(X, Y)), "client 'a': x_train is a torch Dataset; give it, inputs and targets, as 'train'"),
        (arrays(train=Rows(X, Y)), "client 'a': both 'train' and 'x_train' are given"),
        (Rows(X), "client 'a': train: sample 0 is a tuple; (inputs, target) is needed"),
        (TensorDataset(torch.ones(3)), "client 'a': train: its samples have 1 entries; (inputs, target) or"),
        (
            Rows([Photograph()] * 3, Y),
            "the inputs of sample 0 are a Photograph; a tensor or array is needed (torchvision",
        ),
        (Rows([X[0], X[0, :2]], Y), "the inputs of sample 1 have shape (2,), those of sample 0 (3,)"),
        (Rows([], []), "client 'a' has no training data"),
        (arrays(x_train=scipy.sparse.eye(4)), "client 'a': x_train is a sparse matrix; give x_train.toarray()"),
        (arrays(x_train=scipy.sparse.csr_array(X)), "client 'a': x_train is a sparse matrix"),
        (arrays(x_train=torch.eye(4).to_sparse()), "client 'a': x_train is a sparse tensor; give x_train.to_dense()"),
        (arrays(x_train=X + 1j), "x_train holds complex numbers, in column 0, row 0"),
        (
            arrays(x_train=Frame(age=[1, 2, 3, 4], site=["n", "s", "n", "s"])),
            "client 'a': x_train holds texts, not numbers, in column 1 ('site'), row 0: n; code categories",
        ),
        (
            arrays(x_train=Frame(day=np.array(["2020-01-31"] * 4, "datetime64[D]"))),
            "x_train holds dates, not numbers, in column 0 ('day'), row 0: 2020-01-31; ",
        ),
        (
            arrays(x_train=Frame(age=[1, 2, 3, 4], born=[datetime.date(2020, 1, 31)] * 4)),
            "x_train holds dates, not numbers, in column 1 ('born'), row 0: 2020-01-31",
        ),
        (
            arrays(x_train=Frame(id=["p-17", "p-18", "p-19", "p-20"], age=[1, 2, 3, 4])),
            "x_train holds texts, not numbers, in column 0 ('id'), row 0: p-17; ",
        ),
        (
            arrays(x_train=Frame(age=[1, 2, Missing(), 4], b=[1.5, 1, 1, 1])),
            "x_train holds missing values, not numbers, in column 0 ('age'), row 2",
        ),
        (
            arrays(x_train=Frame(age=[1.0, 2, np.nan, 4])),
            "train inputs hold NaN or infinity in column 0 ('age'), row 2; features must be finite",
        ),
        (
            arrays(x_train=Frame(p=Y, q=Y), x_test=Frame(q=Y, p=Y), y_test=Y),
            "x_test has 'q' in column 0, x_train 'p'; the same columns in one order are needed",
        ),
        (arrays(x_train=Frame(p=Y), x_test=Frame(q=Y), y_test=Y), "x_test has 'q' in column 0, x_train 'p'"),
        (arrays(x_train=Frame(p=Y), feature_names=["q"]), "x_train has 'p' in column 0, feature_names 'q'"),
        (arrays(y_train=np.array([1.0, 2, 1, 2])), "but only the whole numbers 1, 2 occur: labels"),
        (arrays(y_train=np.array([1.0, np.nan, 1, 2])), "client 'a': train targets hold NaN or infinity"),
        (
            arrays(y_train=np.array([0, 1, 1, 0]), y_test=Y * 0.5, x_test=X),
            "train targets are integers and client 'a': test",
        ),
        (
            arrays(y_train=np.array(["x", "y", "x", "y"]), y_test=Y, x_test=X),
            "client 'a': train targets are texts; those",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(given, says):
    with pytest.raises(PerfedError) as error:
        one(given)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"task": "regresion"}, "task = 'regresion' is not allowed; allowed: classification, regression"),
        ({"task": "regression", "num_classes": 2}, "num_classes is for classification, and task is regression"),
        ({"class_names": ["m", "n"], "texts": True}, "client 'a': train label 'x' is not among the classes m, n"),
        (
            {"num_classes": 3, "texts": True},
            "the labels are x, y, and num_classes is 3; name all with class_names",
        ),
        (
            {"task": "regression", "texts": True},
            "client 'a': train targets are texts; numbers are needed for regression",
        ),
    ],
    ids=str,
)
def test_targets_that_do_not_fit_what_is_said_of_them(options, says):
    y = np.array(list("xyxy")) if options.pop("texts", False) else Y
    with pytest.raises(PerfedError) as error:
        one(arrays(y_train=y), **options)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("clients", [TensorDataset(torch.ones(4, 3)), Stream(), Endless(), X, "data", None, iter([])])
def test_clients_are_a_mapping_or_a_list(clients):
    with pytest.raises(PerfedError, match=r"clients must be a mapping from id to data, or a list \(given: \w+\)"):
        Federation.from_arrays(clients)


# Predictions -------------------------------------------------------------------------------------------------


def framed(order: str = "pqr") -> Frame:
    return Frame(**{name: X[:, "pqr".index(name)] for name in order})


def ran(method: str = "fedavg", x: Any = X, y: Any = Y) -> Run:
    given = arrays(x_train=x, y_train=y, x_test=x, y_test=y, feature_names=list("pqr"))
    given |= {"domain_train": Y, "domain_test": Y}
    return Run(Federation.from_arrays({"a": given, "b": given}), make(method), network(2), rounds=1)


def test_predictions_are_for_the_labels_as_they_were_given():
    run = ran(x=framed(), y=Y + 1)
    run.execute()
    assert run.federation.classes == (1, 2)
    assert torch.equal(run.predict("a", framed()), run.predict("a", X)) and run.predict("a", X).shape == (4, 2)
    assert torch.equal(run.predict("a", X.tolist()), run.predict("a", X))


@pytest.mark.parametrize(
    ("x", "domain", "says"),
    [
        (
            X * np.where(X == 7, np.nan, 1),
            Y,
            "client 'a': new inputs hold NaN or infinity in column 1 ('q'), row 2; feat",
        ),
        (X, Y - 1, "client 'a': new domain id -1 is not allowed; ids are from 0 to 1"),
        (X, Y + 16, "client 'a': new domain id 17 is not allowed; ids are from 0 to 1"),
        (X, Y * 0.5, "client 'a': new domain ids must be integers, not torch.float64"),
        (X, Y[:2], "client 'a': new inputs and domain ids must have the same length"),
        (framed("prq"), Y, "client 'a': x has 'r' in column 1, its training data 'q'; the same columns in one order"),
        (framed("pq"), Y, "client 'a': x has 2 columns, its training data 3"),
        (X[:, :2], Y, "client 'a' has inputs of shape (3,), not (2,)"),
        (scipy.sparse.csr_array(X), Y, "client 'a': x is a sparse matrix; give x.toarray()"),
        (np.array([["a", "b", "c"]]), None, "client 'a': x holds texts, not numbers, in column 0, row 0: a"),
    ],
)
def test_new_inputs_are_checked_as_training_data_are(x, domain, says):
    with pytest.raises(PerfedError) as error:
        ran("fedavg-multi-head").predict("a", x, domain)
    assert says in str(error.value) and "\n" not in str(error.value)


# Columns of clients that share a first stage -----------------------------------------------------------------


@pytest.mark.parametrize("names", [("q", "p", "r"), ("p", "q", "s")], ids=str)
def test_a_shared_first_stage_needs_the_same_columns_at_all_clients(names):
    clients = {"a": arrays(feature_names=["p", "q", "r"]), "b": arrays(), "c": arrays(feature_names=names)}
    federation = Federation.from_arrays({i: {**c, "x_test": X, "y_test": Y} for i, c in clients.items()})
    says = r"shares 'embedding', so that columns must mean the same at all clients: client 'c' has .*, client 'a' '\w'"
    with pytest.raises(PerfedError, match=says):
        Run(federation, make("fedavg"), network(2), rounds=1)
    for name in ("local", "hetfedrep", "flic-hl"):  # each client's first stage is its own
        Run(federation, make(name), network(2), rounds=1)


# Types of numbers ------------------------------------------------------------------------------------------------


def metric_of(x: Any, y: Any) -> float:
    """Train on arrays, predict them with the site's own model, and return the loss."""
    federation = Federation.from_arrays({"a": {"x_train": x, "y_train": y, "x_test": x, "y_test": y}}, num_classes=2)
    run = Run(federation, make("fedavg"), network(2), rounds=1)
    summary = run.execute()
    np.testing.assert_allclose(run.site("a").predict_proba(x), run.predict("a", x).softmax(1), atol=1e-6)
    return summary["metrics"]["loss"]["mean"]


def frame_of(array: np.ndarray) -> Any:
    return pd.DataFrame({name: array[:, at] for at, name in enumerate("abc")})


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.astype(">f4"),
        lambda x: x.astype(">f8"),
        lambda x: x.astype(">i4"),
        lambda x: x.astype(">u8"),
        lambda x: x.astype(np.longdouble),
        lambda x: np.ma.array(x),
        lambda x: torch.tensor(x).bfloat16(),
        lambda x: torch.tensor(x).to(torch.float8_e5m2),
        lambda x: frame_of(x.astype(">f8")),
        lambda x: frame_of(x.astype(">f8")).assign(b=x[:, 1].astype(">i2")),
    ],
)
def test_other_byte_orders_and_types_of_numbers_are_the_same_numbers(convert):
    """The numbers 0 to 7 are the same in all of them."""
    x = np.random.default_rng(0).integers(0, 8, (12, 3)).astype(np.float64)
    y = np.arange(12) % 2
    assert metric_of(convert(x), y.astype(">i8")) == metric_of(x, y)


@pytest.mark.parametrize("folder", [False, True])
def test_files_of_another_byte_order_are_the_same_numbers(folder, tmp_path):
    for order in "<>":
        for name in "ab":
            arrays = {"x_train": X.astype(f"{order}f4"), "y_train": Y.astype(f"{order}i8")}
            place = tmp_path / order / name
            place.parent.mkdir(exist_ok=True)
            if not folder:
                np.savez(place.with_suffix(".npz"), **arrays)
                continue
            place.mkdir()
            for key, array in arrays.items():
                np.save(place / f"{key}.npy", array)
    little, big = (Federation.from_folder(tmp_path / order).clients[0].train for order in "<>")
    assert torch.equal(little.x, big.x) and torch.equal(little.y, big.y) and big.x.dtype == torch.float32


@pytest.mark.parametrize("order", [">i4", ">f8"])
def test_columns_of_a_frame_may_have_another_byte_order(order):
    """Numbers, codes, targets and groups."""
    columns = {
        "age": np.arange(40) % 7,
        "code": np.arange(40) % 3,
        "sick": np.arange(40) % 2,
        "person": np.arange(40) // 2,
    }
    options = {"target": "sick", "categories": ["code"], "group": "person", "missing": ["age=6"]}
    frame = pd.DataFrame({name: values.astype(order) for name, values in columns.items()})
    expected = Federation.from_frames({"a": pd.DataFrame(columns)}, **options).clients[0]
    found = Federation.from_frames({"a": frame}, **options).clients[0]
    assert torch.equal(found.train.x, expected.train.x) and torch.equal(found.train.y, expected.train.y)
    native, other = (table[["age", "code"]] for table in (pd.DataFrame(columns), pd.DataFrame(frame.to_dict("list"))))
    np.testing.assert_array_equal(found.table.transform(other)[0], expected.table.transform(native)[0])
    big = pd.DataFrame({name: columns[name].astype(order) for name in ("age", "code")})
    np.testing.assert_array_equal(found.table.transform(big)[0], expected.table.transform(native)[0])


MASKED = np.ma.array(X, mask=X == 7)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (MASKED, r"x_train holds missing values \(masked\), in column 1, row 2; fill them in"),
        (list(MASKED), r"x_train holds missing values \(masked\), in column 1, row 2; fill them in"),
        (X + 1j, "x_train holds complex numbers, in column 0, row 0; give real and imaginary parts as columns"),
        (torch.tensor(X + 1j), "x_train holds complex numbers; give real and imaginary parts as columns"),
        (frame_of(X).assign(b=1j), r"x_train holds complex numbers, in column 0 \('a'\), row 0; give real and"),
    ],
)
def test_masked_and_complex_arrays_are_refused(x, says):
    with pytest.raises(PerfedError, match=f"client 'a': {says}"):
        Federation.from_arrays({"a": {"x_train": x, "y_train": Y}})


@pytest.mark.parametrize("y", [np.ma.array(Y, mask=Y == 0), np.ma.array(Y.astype(str), mask=Y == 0)])
def test_masked_targets_are_refused(y):
    with pytest.raises(PerfedError, match=r"client 'a': y_train holds missing values \(masked\), in row 0"):
        Federation.from_arrays({"a": {"x_train": X, "y_train": y}})


@pytest.mark.parametrize(
    ("x", "says"), [(MASKED, r"holds missing values \(masked\), in row 1"), (X + 1j, "holds complex numbers, in row 0")]
)
def test_masked_and_complex_samples_of_a_data_set_are_refused(x, says):
    sample = 2 if x is MASKED else 0
    with pytest.raises(PerfedError, match=f"client 'a': train sample {sample} {says}"):
        Federation.from_arrays({"a": {"train": Rows(x, Y)}})


@pytest.mark.parametrize("values", [np.arange(40) + 1j, pd.Series([1.0, 2.0 + 1j] * 20, dtype=object)])
def test_complex_columns_of_a_frame_are_refused(values):
    frame = pd.DataFrame({"age": np.arange(40) % 7, "signal": values, "sick": np.arange(40) % 2})
    with pytest.raises(PerfedError, match=r"site 'a': column 'signal' holds complex numbers in rows .*; give real and"):
        Federation.from_frames({"a": frame}, target="sick")
    plain = Federation.from_frames({"a": frame.assign(signal=np.arange(40) % 5)}, target="sick").clients[0]
    with pytest.raises(PerfedError, match="site 'a': column 'signal' holds complex numbers"):
        plain.table.transform(frame)


def test_masked_cells_are_missing_where_a_model_of_a_table_predicts():
    ages = np.ma.array(np.arange(40.0) % 7, mask=np.arange(40) % 5 == 0)
    frame = pd.DataFrame({"age": ages, "dose": np.arange(40) % 3, "sick": np.arange(40) % 2})
    run = Run(Federation.from_frames({"a": frame}, target="sick"), make("local"), network(2), rounds=1)
    run.execute()
    rows = np.ma.stack([ages, np.ma.array(np.arange(40) % 3)], axis=1)
    site = run.site("a")
    np.testing.assert_array_equal(site.predict_proba(rows), site.predict_proba(frame.drop(columns="sick")))
