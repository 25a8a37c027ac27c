from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.data.held_out import with_validation
from perfed.errors import PerfedError


def good(n=4, dim=3):
    return {"x_train": np.arange(n * dim, dtype=np.float64).reshape(n, dim), "y_train": np.arange(n) % 2}


def test_arrays_become_clients_in_the_order_of_their_ids():
    federation = Federation.from_arrays({"b": good(), "a": good(5, 2), "c10": good(), "c2": good()}, name="toy")
    assert federation.ids == ["a", "b", "c10", "c2"] and len(federation) == 4 and federation.name == "toy"
    a = next(iter(federation))
    assert a.input_shape == (2,) and len(a.train) == 5
    assert torch.equal(a.train.x, torch.arange(10, dtype=torch.float64).view(5, 2))
    assert a.train.y.dtype == torch.int64 and a.train.y.tolist() == [0, 1, 0, 1, 0]
    assert federation.num_classes == 2


def test_a_list_of_clients_gets_numbers_as_ids():
    assert Federation.from_arrays([good(), good(), good()]).ids == ["000", "001", "002"]


def test_integer_inputs_become_floating_point_and_other_integers_labels():
    arrays = {"x_train": np.array([[1, 2]], dtype=np.uint8), "y_train": np.array([1], dtype=np.int8)}
    split = Federation.from_arrays([arrays]).clients[0].train
    assert split.x.dtype == torch.float32 and split.y.dtype == torch.int64


def test_the_classes_are_the_labels_that_occur_in_any_split_of_any_client():
    other = {**good(), "x_test": np.zeros((1, 3)), "y_test": np.array([6])}
    found = Federation.from_arrays([good(), other])
    assert (found.num_classes, found.classes, found.class_names) == (3, (0, 1, 6), ("0", "1", "6"))
    assert found.clients[1].test.y.tolist() == [2] and found.clients[0].train.y.tolist() == [0, 1, 0, 1]
    assert Federation.from_arrays([good(), other], num_classes=9).classes == tuple(range(9))


@pytest.mark.parametrize(
    ("labels", "options", "classes", "coded"),
    [
        ([1, 2, 2, 1], {}, (1, 2), [0, 1, 1, 0]),
        ([-1, 1, 1, -1], {}, (-1, 1), [0, 1, 1, 0]),
        ([1, 2, 2, 1], {"class_names": ["cat", "dog"]}, (1, 2), [0, 1, 1, 0]),
        ([1, 2, 2, 1], {"class_names": ["bird", "cat", "dog"]}, (0, 1, 2), [1, 2, 2, 1]),  # nobody has a bird
        ([1, 2, 2, 1], {"num_classes": 3}, (0, 1, 2), [1, 2, 2, 1]),
        ([1.0, 2.0, 2.0, 1.0], {"task": "classification"}, (1, 2), [0, 1, 1, 0]),
        ([0.0, 1.0, 1.0, 0.0], {"num_classes": 3}, (0, 1, 2), [0, 1, 1, 0]),
        (["no", "yes", "yes", "no"], {}, ("no", "yes"), [0, 1, 1, 0]),
        (["no", "yes", "yes", "no"], {"class_names": ["yes", "no", "never"]}, ("yes", "no", "never"), [1, 0, 0, 1]),
        ([True, False, False, True], {}, (0, 1), [1, 0, 0, 1]),
        ([1, 2, 2, 1], {"task": "regression"}, None, [1.0, 2.0, 2.0, 1.0]),
        ([0.5, 2.0, 2.0, 1.0], {}, None, [0.5, 2.0, 2.0, 1.0]),
        ([1.0, 2.0, 3.0, 4.0], {}, None, [1.0, 2.0, 3.0, 4.0]),  # each only once: values
    ],
    ids=str,
)
def test_labels_of_any_kind_are_kept_as_names_of_the_classes(labels, options, classes, coded):
    arrays = {"x_train": np.ones((4, 3)), "y_train": np.array(labels)}
    for given in (arrays, {**arrays, "x_test": np.ones((1, 3)), "y_test": arrays["y_train"][:1]}):
        found = Federation.from_arrays([given], **options)
        assert found.classes == classes and found.num_classes == (None if classes is None else len(classes))
        assert found.clients[0].train.y.tolist() == coded


def test_a_representation_has_counts_and_no_rows():
    arrays = {"x_train": np.full((4, 3), 0.125), "y_train": np.array([7, 8, 7, 8]), "domain_train": np.zeros(4, int)}
    federation = Federation.from_arrays({"a": arrays, "b": arrays}, name="toy")
    assert repr(federation) == "<Federation 'toy': 2 clients, 8 train samples, 2 classes, 1 domains>"
    assert repr(federation.clients[1]) == "<Client 'b': 4 train samples, inputs of shape (3,)>"
    assert repr(federation.clients[0].train) == "<Split: 4 samples of shape (3,)>"


def test_floating_point_targets_are_regression():
    federation = Federation.from_arrays([{"x_train": np.ones((2, 3)), "y_train": np.array([0.5, 2.0])}])
    assert federation.num_classes is None and federation.clients[0].train.y.tolist() == [0.5, 2.0]


def test_domains_and_feature_names_are_kept():
    arrays = {**good(), "domain_train": np.array([1, 0, 1, 0]), "feature_names": ["age", "bmi", "sex"]}
    client = Federation.from_arrays([arrays]).clients[0]
    assert client.train.domain.tolist() == [1, 0, 1, 0] and client.feature_names == ("age", "bmi", "sex")
    part = client.train.take(torch.tensor([2, 0]))
    assert part.domain.tolist() == [1, 1] and torch.equal(part.x, client.train.x[[2, 0]]) and len(part) == 2


def test_a_client_without_test_data_takes_part():
    empty = {**good(), "x_test": np.zeros((0, 3)), "y_test": np.zeros(0, dtype=np.int64)}
    federation = Federation.from_arrays({"none": good(), "empty": empty})
    assert all(client.split("test") is None and client.split("validation") is None for client in federation)
    assert all(client.split("train") is client.train for client in federation)


def test_clients_may_differ_in_shape():
    image = {"x_train": np.zeros((2, 1, 5, 5)), "y_train": np.array([0, 1])}
    assert [c.input_shape for c in Federation.from_arrays([good(), good(4, 7), image])] == [(3,), (7,), (1, 5, 5)]


def test_casting_changes_floating_point_values_only():
    federation = Federation.from_arrays([{**good(), "x_test": np.ones((1, 3)), "y_test": np.array([0])}])
    cast = federation.to(dtype=torch.float32).clients[0]
    assert cast.train.x.dtype == cast.test.x.dtype == torch.float32 and cast.train.y.dtype == torch.int64
    values = Federation.from_arrays([{"x_train": np.ones((1, 2)), "y_train": np.ones(1)}]).to(dtype=torch.float32)
    assert values.clients[0].train.y.dtype == torch.float32


def bad_inputs():
    nan = np.ones((4, 3))
    nan[2, 1] = np.nan
    infinite = np.ones((4, 1, 2, 2))
    infinite[1, 0, 1, 0] = -np.inf
    return [
        ({"x_train": nan}, r"client 'x': train inputs hold NaN or infinity in column 1, row 2"),
        ({"x_train": nan, "feature_names": ["a", "bmi", "c"]}, r"client 'x': .* column 1 \('bmi'\), row 2"),
        ({"x_train": infinite}, r"client 'x': train inputs .* column 0,1,0, row 1"),
        ({"x_test": nan, "y_test": np.zeros(4, int)}, r"client 'x': test inputs hold NaN"),
        ({"y_train": np.array([0, 1, 0, 5])}, r"client 'x': train label 5 is outside the classes 0..1"),
        ({"y_train": np.array([0, -1, 0, 1])}, r"client 'x': train label -1 is outside the classes 0..1"),
        ({"x_test": np.ones((1, 3)), "y_test": np.array([2])}, r"client 'x': test label 2 is outside"),
        ({"y_train": np.array([0, 1])}, r"client 'x': train .* same length"),
        ({"domain_train": np.array([0, 1])}, r"client 'x': train .* same length"),
        ({"x_test": np.ones((2, 4)), "y_test": np.array([0, 1])}, r"client 'x': test inputs have shape \(4,\)"),
        ({"x_train": np.ones((0, 3)), "y_train": np.zeros(0, int)}, r"client 'x' has no training data"),
        ({"x_train": None, "y_train": None}, r"client 'x' has no training data"),
        ({"y_train": None}, r"client 'x': 'y_train' is missing"),
        ({"y_test": np.array([1])}, r"client 'x': 'x_test' is missing"),
        ({"x": np.ones((4, 3))}, r"client 'x': unknown key 'x'; allowed: .*x_train"),
        ({"feature_names": ["a"]}, r"client 'x': 1 feature names for inputs of shape \(3,\)"),
        (
            {"x_train": np.array([["a", "b", "c"]] * 4)},
            r"^client 'x': x_train holds texts, not numbers, in column 0, row 0: a",
        ),
        ({"x_train": [[1.0, 2.0], [3.0]]}, r"client 'x': x_train cannot become a tensor"),
    ]


@pytest.mark.parametrize(("change", "message"), bad_inputs())
def test_bad_input_is_refused_in_one_line_that_names_the_client(change, message):
    with pytest.raises(PerfedError, match=message) as error:
        Federation.from_arrays({"fine": good(), "x": {**good(), **change}}, num_classes=2)
    assert "\n" not in str(error.value)


def test_targets_must_be_finite_and_of_one_kind():
    values = {"x_train": np.ones((2, 3)), "y_train": np.array([1.0, np.inf])}
    with pytest.raises(PerfedError, match="client 'x': train targets hold NaN or infinity"):
        Federation.from_arrays({"x": values})
    with pytest.raises(PerfedError, match="client 'a': train targets are integers and client 'b': train targets float"):
        Federation.from_arrays({"a": good(), "b": {**values, "y_train": np.ones(2)}})


def test_a_federation_needs_clients_with_different_ids():
    with pytest.raises(PerfedError, match="'data' has no clients"):
        Federation.from_arrays({})
    split = Split(torch.ones(2, 1), torch.tensor([0, 1]))
    with pytest.raises(PerfedError, match="client id '1' occurs twice"):
        Federation.from_arrays({1: good(), "1": good(5)})
    with pytest.raises(PerfedError, match="client id 'a' occurs twice"):
        Federation((Client("a", split), Client("b", split), Client("a", split)), 2)


def test_directly_built_clients_are_checked_too():
    with pytest.raises(PerfedError, match="client 'a' has no training data"):
        Federation((Client("a", Split(torch.ones(0, 1), torch.zeros(0).long())),), 2)


# Domains -----------------------------------------------------------------------------------------------------


def mixed(train=(0, 1, 0, 1), test=(1, 0)):
    arrays = {**good(), "x_test": np.ones((2, 3)), "y_test": np.array([0, 1])}
    ids = {"domain_train": train, "domain_test": test}
    return {**arrays, **{key: np.array(value) for key, value in ids.items() if value is not None}}


def test_domains_are_counted_over_all_samples_of_all_clients():
    assert Federation.from_arrays({"a": mixed(), "b": mixed(test=(3, 0))}).num_domains == 4
    assert Federation.from_arrays({"a": mixed(None, None)}).num_domains == 0
    empty = {**mixed(test=None), "x_test": np.zeros((0, 3)), "y_test": np.zeros(0, int)}
    assert Federation.from_arrays({"a": mixed(), "b": empty}).num_domains == 2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (mixed(test=None), r"client 'x': test samples without domain ids, while client 'fine' has them for its train"),
        (mixed(train=None), r"client 'x': train samples without domain ids, while client 'fine' has"),
        (mixed(None, None), r"client 'x': train samples without .*all samples of all clients need one, or none"),
        (mixed(test=(0, -1)), r"client 'x': test domain id -1 is not allowed; ids are at least 0"),
        (mixed(train=(0.0, 1.0, 0.5, 0.0)), r"client 'x': train domain ids must be integers, not torch.float64"),
        (mixed(train=(0, 1)), r"client 'x': train inputs, targets and domain ids must have the same length"),
    ],
)
def test_bad_domain_ids_are_refused_in_one_line_that_names_client_and_split(arrays, message):
    with pytest.raises(PerfedError, match=message) as error:
        Federation.from_arrays({"fine": mixed(), "x": arrays}, num_classes=2)
    assert "\n" not in str(error.value)


def test_domain_ids_must_have_a_name_where_there_are_names():
    federation = Federation.from_arrays({"a": mixed(), "b": mixed(test=(2, 0))})
    assert replace(federation, domain_names=("x", "y", "z")).num_domains == 3
    message = "client 'b': test domain id 2 is not allowed; ids are from 0 to 1, as there are 2 domains"
    with pytest.raises(PerfedError, match=message):
        replace(federation, domain_names=("x", "y"))


# Survival ---------------------------------------------------------------------------------------------------------


def of_survival(y, **more) -> Federation:
    return Federation.from_arrays({"a": {"x_train": np.ones((len(y), 2)), "y_train": y}}, task="survival", **more)


def test_survival_has_times_and_events():
    federation = of_survival(np.array([[3, 1], [5, 0]]))  # days and flags: integers
    assert (federation.task, federation.num_classes, federation.num_outputs) == ("survival", None, 1)
    assert federation.clients[0].train.y.dtype == torch.float64
    assert federation.to(dtype=torch.float32).task == "survival"
    regression = Federation.from_arrays({"a": {"x_train": np.ones((3, 2)), "y_train": np.random.rand(3, 2)}})
    assert (regression.task, regression.num_outputs) == ("regression", 2)


@pytest.mark.parametrize(
    ("y", "more", "message"),
    [
        ([1.5, 2.5], {}, r"client 'a': train targets have shape \(2,\), torch.float64; survival needs floating-point"),
        ([[1.0, 1.0], [0.0, 1.0]], {}, "hold the time 0 in row 1; times must be above 0"),
        ([[1.0, 2.0], [1.0, 1.0]], {}, r"hold the event 2 in row 0; allowed: 0 \(censored\), 1"),
        ([[1.0, np.nan]], {}, "hold NaN or infinity"),
        ([["1", "yes"]], {}, "targets are texts; numbers are needed for survival"),
        ([[1.0, 1.0]], {"num_classes": 2}, "num_classes is for classification, and task is survival"),
    ],
)
def test_targets_that_are_no_times_and_events(y, more, message):
    with pytest.raises(PerfedError, match=message) as error:
        of_survival(np.array(y), **more)
    assert "\n" not in str(error.value)


def test_validation_data_of_survival_are_drawn_by_event():
    y = np.stack([np.arange(1.0, 41.0), np.arange(40) % 10 == 0], 1)
    client = with_validation(of_survival(y).clients[0], 0.5, True, 0)
    assert [int(part.y[:, 1].sum()) for part in (client.train, client.validation)] == [2, 2]
