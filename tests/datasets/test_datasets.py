from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import require_file, write_images
from pydantic import BaseModel, ConfigDict, model_validator

from perfed.data.federation import Federation
from perfed.data.files import SHIPPED, find_file, load_npz
from perfed.data.partition.shards import draw_classes, share_among_holders
from perfed.datasets import catalogue, dataset, dataset_names, describe, load
from perfed.datasets.digits import VIEWS, view_matrix
from perfed.datasets.synthetic import Gaussians
from perfed.errors import PerfedError

NO_FILES = ["toy-noisy-features", "toy-linear-map", "digits", "digits-views"]
SMALL_TOY = {"clients": 8, "train_per_class": 60, "test_per_class": 30}


def same(a: Federation, b: Federation) -> bool:
    if a.ids != b.ids:
        return False
    pairs = [
        (p, q)
        for c, d in zip(a, b, strict=True)
        for n in ("train", "validation", "test")
        for p, q in [(c.split(n), d.split(n))]
    ]
    return all((p is None and q is None) or (torch.equal(p.x, q.x) and torch.equal(p.y, q.y)) for p, q in pairs)


@pytest.fixture
def no_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("PERFED_DATA", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path


# ---- the catalogue


def test_all_data_sets_are_described():
    names = dataset_names()
    assert names == sorted(names) and {
        *NO_FILES,
        "mnist-usps",
        "femnist-digits",
        "bci-common",
        "bci-moabb",
        "cifar10",
        "femnist62",
    } <= set(names)
    for name in names:
        found = describe(name)
        task = "regression" if name in ("linear-domains", "parkinsons") else "classification"
        assert found.name == name and found.task == task and found.summary.endswith(".")
        assert [option.name for option in found.options[-3:]] == [
            "validation_fraction",
            "inner_fold",
            "domain_input",
        ]
    found = describe("mnist-usps")
    assert found.files == ("mnist.npz", "usps.npz")
    assert [(o.name, o.allowed, o.default) for o in found.options[:3]] == [
        ("clients", "integer >= 2", 100),
        ("classes_per_client", "integer >= 1", 3),
        ("shared_shards", "true or false", False),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"client": 3},
            "data.client is not an option of 'toy-linear-map'; its options: clients, classes_per_cl",
        ),
        ({"clients": "3"}, "data.clients = '3' is not allowed; it must be: integer >= 1"),
        ({"clients": 0}, "data.clients = 0 is not allowed; it must be: integer >= 1"),
        ({"clients": True}, "data.clients = True is not allowed"),
        ({"clients": 3.0}, "data.clients = 3.0 is not allowed"),
        ({"clients": None}, "data.clients = None is not allowed"),
        ({"mean_std": float("nan")}, "data.mean_std = nan is not allowed; it must be: number > 0"),
        ({"keep_low": 1.5}, "data.keep_low = 1.5 is not allowed; it must be: number > 0 and <= 1"),
        ({"covariance": "full"}, "it must be: one of 'identity', 'random-diagonal'"),
        ({"validation_fraction": 1.0}, "data.validation_fraction = 1.0 is not allowed"),
        ({"inner_fold": [5, 5]}, r"data.inner_fold = [5, 5] is not allowed; it must be: [i, k] with 0 <= i < k"),
        ({"inner_fold": [0, 1]}, r"data.inner_fold = [0, 1] is not allowed"),
        ({"inner_fold": [0]}, r"data.inner_fold = [0] is not allowed"),
        ({"keep_low": 0.9, "keep_high": 0.5}, "data.keep_low = 0.9 is above data.keep_high = 0.5"),
        ({"mapped_dims_low": 200}, "data.mapped_dims_low = 200 is above data.mapped_dims_high = 100"),
        ({"classes_per_client": 30}, "classes_per_client = 30 is more than the 20 classes"),
        (
            {"clients": 900, "train_per_class": 9},
            "use fewer clients, fewer classes per client or more",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(PerfedError) as error:
        load("toy-linear-map", options, seed=0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unknown_data_sets_are_refused_with_the_names():
    with pytest.raises(PerfedError, match="there is no data set 'mnits'; available: adult, bci-common, bci-moabb"):
        load("mnits", {}, seed=0)
    with pytest.raises(PerfedError, match="there is no data set"):
        describe("mnits")


def test_a_user_can_add_a_data_set(forgotten):
    @dataset("mine", task="regression")
    def mine(seed: int, data_dir: Path | None, *, rows: int = 20) -> Federation:
        """My own."""
        x = np.arange(rows, dtype=np.float32)
        return Federation.from_arrays([{"x_train": x[:, None], "y_train": x}])

    federation = load("mine", {"rows": 10, "validation_fraction": 0.2}, seed=0)
    assert federation.name == "mine" and describe("mine").task == "regression"
    assert len(federation.clients[0].train) == 8 and len(federation.clients[0].validation) == 2
    dataset("mine", task="classification")(mine)  # as a notebook's cell that is run again
    assert describe("mine").task == "classification"
    with pytest.raises(PerfedError, match="'mine' is registered twice, by 'test_datasets' and by 'elsewhere'"):
        mine.__module__ = "elsewhere"
        dataset("mine")(mine)

    @dataset("split", task="regression")
    def split(seed: int, data_dir: Path | None) -> Federation:
        """One client comes with validation data, which it keeps."""
        x = np.arange(10, dtype=np.float32)
        own = {"x_validation": x[:3, None], "y_validation": -x[:3]}
        return Federation.from_arrays([{"x_train": x[:, None], "y_train": x, **o} for o in ({}, own)])

    lent, own = load("split", {"validation_fraction": 0.2}, seed=0)
    assert (len(lent.train), len(lent.validation)) == (8, 2)
    assert len(own.train) == 10 and own.validation.y.tolist() == [0.0, -1.0, -2.0]

    def bare(seed: int, data_dir: Path | None, *, rows: int) -> Federation: ...

    with pytest.raises(PerfedError, match="option 'rows' needs a type and a default"):
        dataset("bare")(bare)


def test_data_sets_can_share_options_that_check_each_other(forgotten):
    class Shape(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        low: int = 1
        high: int | list[int] = 5

        @model_validator(mode="after")
        def _in_order(self) -> Shape:
            if isinstance(self.high, int) and self.low > self.high:
                raise PerfedError("data.low is above data.high")
            return self

    @dataset("shaped", shared=Shape)
    def shaped(seed: int, data_dir: Path | None, *, rows: int = 20, **shape: Any) -> Federation:
        """With shared options."""
        y = np.arange(rows) % 2
        return Federation.from_arrays([{"x_train": np.full((rows, 1), shape["low"]), "y_train": y}])

    assert load("shaped", {"rows": 4, "low": 3}, seed=0).clients[0].train.x.tolist() == [[3.0]] * 4
    described = [(o.name, o.allowed, o.default) for o in describe("shaped").options]
    assert described == [
        ("rows", "integer", 20),
        ("low", "integer", 1),
        ("high", "integer, or list of integer", 5),
        ("validation_fraction", "number >= 0 and < 1", 0.0),
        ("inner_fold", "list of integer", []),
        ("domain_input", "true or false", False),
    ]
    for options, says in (
        ({"low": 9}, "data.low is above data.high"),
        ({"low": "9"}, "data.low = '9' is not allowed; it must be: integer"),
        ({"high": ["x"]}, r"data.high = \['x'\] is not allowed; it must be: integer, or list of integer"),
        ({"width": 9}, "data.width is not an option of 'shaped'; its options: rows, low, high, validation_fraction"),
    ):
        with pytest.raises(PerfedError, match=says):
            load("shaped", options, seed=0)


def test_loading_leaves_the_number_of_threads_alone():
    before = torch.get_num_threads()
    load("digits-views", {"clients": 2}, seed=0)
    with pytest.raises(PerfedError):
        load("digits-views", {"classes_per_client": 11}, seed=0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", NO_FILES)
def test_a_data_set_is_a_function_of_its_seed(name):
    options = {"clients": 8, "validation_fraction": 0.2}
    first = load(name, options, seed=4)
    assert first.name == name and first.ids[:2] == ["000", "001"]
    assert same(first, load(name, options, seed=4))
    assert not same(first, load(name, options, seed=5))


def test_ids_sort_in_order_however_many_there_are():
    assert catalogue.make_client_ids(2) == ["000", "001"]
    many = catalogue.make_client_ids(1001)
    assert many[0] == "0000" and many == sorted(many)


# ---- validation data


def test_validation_is_carved_out_of_train_by_class():
    options = {"clients": 20, "samples_per_client": 0}
    whole = load("digits-views", options, seed=0)
    carved = load("digits-views", {**options, "validation_fraction": 0.25}, seed=0)
    for before, after in zip(whole, carved, strict=True):
        both = torch.cat([after.train.x, after.validation.x])
        order = [np.lexsort(x.numpy().T) for x in (before.train.x, both)]
        assert torch.equal(before.train.x[order[0]], both[order[1]])
        assert len(after.validation) == round(0.25 * len(before.train))
        assert torch.equal(before.test.x, after.test.x)
        for label in before.train.y.unique():
            expected = 0.25 * float((before.train.y == label).sum())
            assert abs(int((after.validation.y == label).sum()) - expected) < 2


def test_one_training_sample_of_each_class_always_stays():
    greedy = load("toy-noisy-features", {**SMALL_TOY, "validation_fraction": 0.99}, seed=0)
    for client in greedy:
        assert len(client.train) == len(client.train.y.unique())
    single = {"clients": 60, "classes_per_client": 1, "train_per_class": 3, "test_per_class": 3}
    for client in load("toy-noisy-features", {**single, "validation_fraction": 0.9}, seed=0):
        assert len(client.train) == 1 and client.validation is None


# ---- toys


def test_noisy_features_have_the_sizes_of_the_paper():
    federation = load("toy-noisy-features", {}, seed=0)
    assert len(federation) == 100 and federation.num_classes == 20
    sizes = [len(c.train) for c in federation]
    assert 20 <= min(sizes) < 60 and 380 < max(sizes) <= 402
    assert abs(sum(sizes) - 0.525 * 40_000) < 2500
    assert sum(len(c.test) for c in federation) == 20_000
    assert {c.input_shape[0] for c in federation} == set(range(6, 16))
    for client in federation:
        assert len(client.test.y.unique()) == 3
        assert set(client.train.y.tolist()) <= set(client.test.y.tolist())
        assert client.train.x.dtype == torch.float32 and client.train.y.dtype == torch.int64


@pytest.mark.long
@pytest.mark.parametrize(("name", "expected"), [("toy-noisy-features", 0.79), ("toy-linear-map", 0.65)])
def test_oracle_accuracy_is_that_of_the_paper(name, expected):
    found = [load(name, {}, seed=seed).notes["oracle_accuracy"] for seed in range(4)]
    assert abs(np.mean(found) - expected) < 0.025


def test_oracle_knows_the_covariance():
    """Coordinates of unequal variance: the rule must weigh them; one class makes it perfect."""
    gaussians = Gaussians(np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([100.0, 0.01]))
    x, y = gaussians.sample(2000, np.random.default_rng(0))
    assert gaussians.bayes_accuracy(x, y, np.array([0, 1])) > 0.99
    assert gaussians.bayes_accuracy(x[y == 1], y[y == 1], np.array([1])) == 1.0


def test_extra_columns_are_noise_and_informative_ones_are_untouched():
    options = {**SMALL_TOY, "keep_low": 1.0, "train_per_class": 2000}
    plain = load("toy-noisy-features", {**options, "noise_dims_low": 0, "noise_dims_high": 0}, seed=0)
    noisy = load("toy-noisy-features", {**options, "noise_dims_low": 4, "noise_dims_high": 4}, seed=0)
    for before, after in zip(plain, noisy, strict=True):
        assert before.input_shape == (5,) and after.input_shape == (9,)
        assert torch.equal(before.train.x, after.train.x[:, :5])
        for label in after.train.y.unique():
            extra = after.train.x[after.train.y == label][:, 5:]
            assert extra.mean().abs() < 0.15 and abs(float(extra.std()) - 1) < 0.15


def test_linear_map_is_the_clients_own_and_the_same_for_train_and_test():
    options = {**SMALL_TOY, "mapped_dims_low": 12, "mapped_dims_high": 12}
    spans = []
    for client in load("toy-linear-map", options, seed=0):
        assert client.input_shape == (12,)
        _, singular, right = torch.linalg.svd(client.train.x.double(), full_matrices=False)
        assert int((singular > 1e-4 * singular[0]).sum()) == 5  # five original coordinates
        span = right[:5]
        residual = client.test.x.double() - client.test.x.double() @ span.T @ span
        assert residual.abs().max() < 1e-4
        spans.append(span)
    assert (spans[0] @ spans[1].T @ spans[1] - spans[0]).abs().max() > 0.1
    dims = {c.input_shape[0] for c in load("toy-linear-map", {"clients": 300, "mapped_dims_high": 6}, seed=0)}
    assert dims == {3, 4, 5, 6}


def test_random_diagonal_covariance_is_expressible():
    federation = load("toy-linear-map", {"covariance": "random-diagonal", "mapped_dims_high": 50}, seed=0)
    assert max(c.input_shape[0] for c in federation) <= 50
    other = load("toy-linear-map", {"mapped_dims_high": 50}, seed=0)
    assert federation.notes["oracle_accuracy"] != other.notes["oracle_accuracy"]


# ---- digits


def test_digits_views_have_their_sizes():
    federation = load("digits-views", {}, seed=0)
    views = federation.notes["view"]
    assert sorted(views.values()) == sorted(VIEWS * 5)
    for client in federation:
        (dims,) = client.input_shape
        fixed = {"pixels": {64}, "blocks": {16}}.get(views[client.id], set(range(10, 41)))
        assert dims in fixed
        assert len(client.train) == 60 and len(client.test) > 20
        assert set(client.train.y.tolist()) == set(client.test.y.tolist())
        assert len(client.train.y.unique()) == 4


def test_views_show_the_pixels_they_say():
    image = np.arange(64.0)
    rng = np.random.default_rng(0)
    assert np.array_equal(image @ view_matrix("pixels", 0, rng), image)
    square = image.reshape(8, 8)
    means = [square[r : r + 2, c : c + 2].mean() for r in range(0, 8, 2) for c in range(0, 8, 2)]
    assert np.allclose(image @ view_matrix("blocks", 0, rng), means)
    subset = image @ view_matrix("subset", 30, rng)
    assert len(set(subset)) == 30 and set(subset) <= set(image)
    assert view_matrix("linear", 30, rng).shape == (64, 30)


def test_digits_of_clients_are_disjoint():
    from sklearn.datasets import load_digits

    options = {"clients": 12, "samples_per_client": 0, "standardise": False}
    federation = load("digits-views", options, seed=1)
    views = federation.notes["view"]
    rows = [r.numpy().tobytes() for c in federation for s in (c.train, c.test) for r in s.x if views[c.id] == "pixels"]
    known = {r.tobytes() for r in (load_digits().data / 16).astype(np.float32)}
    assert len(rows) == len(set(rows)) > 400 and set(rows) <= known
    assert sum(len(c.train) + len(c.test) for c in federation) == 1797


def test_digits_have_the_same_pixels_at_every_client():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    known = {row.tobytes(): label for row, label in zip((pixels / 16).astype(np.float32), labels, strict=True)}
    federation = load("digits", {"test_samples": 100, "overlap": "test"}, seed=2)
    trained, tested = [], set()
    for client in federation:
        counts = np.bincount(client.train.y, minlength=10)
        assert (
            sorted(counts) == [0] * 6 + [3] * 4 and (np.bincount(client.test.y, minlength=10)[counts > 0] == 25).all()
        )
        for split in (client.train, client.test):
            assert all(known[x.numpy().tobytes()] == y for x, y in zip(split.x, split.y, strict=True))
        trained += [x.numpy().tobytes() for x in client.train.x]
        tested |= {x.numpy().tobytes() for x in client.test.x}
    assert len(trained) == len(set(trained)) == 240 and not tested & set(trained)


def test_standardisation_uses_the_training_samples_only():
    surprises = 0
    for client, raw in zip(*(load("digits-views", {"standardise": s}, seed=0) for s in (True, False)), strict=True):
        given = raw.train.x.double()
        constant, scale = given.std(dim=0) < 1e-8, given.std(dim=0, correction=0)
        for found, x in ((client.train.x, given), (client.test.x, raw.test.x.double())):
            expected = torch.where(constant, 0.0, (x - given.mean(dim=0)) / scale)
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        surprises += int((raw.test.x[:, constant].double() != given[0, constant]).sum())
        assert client.test.x[:, ~constant].mean(dim=0).abs().max() > 0.05  # test has its own mean
    assert surprises > 0  # other values in columns that are constant in training, which say nothing


def write_digits(folder: Path, name: str, size: int, **change) -> None:
    rng = np.random.default_rng(size)
    arrays = {}
    for split, per_class in (("train", 30), ("test", 12)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (10 * per_class, size, size), dtype=np.uint8)
        arrays[f"y_{split}"] = np.repeat(np.arange(10), per_class).astype(np.uint8)
    np.savez(folder / name, **{**arrays, **change})


def test_mnist_usps_clients_differ_in_resolution(no_folders):
    write_digits(no_folders, "mnist.npz", 28)
    write_digits(no_folders, "usps.npz", 16)
    options = {"clients": 11, "classes_per_client": 3}
    federation = load("mnist-usps", options, seed=0, data_dir=no_folders)
    hosts = federation.notes["host"]
    assert sorted(hosts.values()) == ["mnist"] * 6 + ["usps"] * 5
    assert list(hosts.values()) != sorted(hosts.values())
    for client in federation:
        assert client.input_shape == ((1, 28, 28) if hosts[client.id] == "mnist" else (1, 16, 16))
        assert len(client.train.y.unique()) == 3
        assert set(client.train.y.tolist()) == set(client.test.y.tolist())
    assert min(float(c.train.x.min()) for c in federation) == -1
    assert max(float(c.train.x.max()) for c in federation) == 1
    assert sum(len(c.train) for c in federation) == 600  # no sample lost, none twice
    rows = [r.numpy().tobytes() for c in federation for r in c.train.x]
    assert len(rows) == len(set(rows))
    resized = load("mnist-usps", {**options, "resize": True}, seed=0, data_dir=no_folders)
    assert {c.input_shape for c in resized} == {(1, 28, 28)}
    shared = load("mnist-usps", {**options, "shared_shards": True}, seed=0, data_dir=no_folders)
    rows = [r.numpy().tobytes() for c in shared for r in c.train.x]
    assert len(set(rows)) < len(rows)


def test_authors_variant_never_uses_half_of_each_data_set(no_folders):
    write_digits(no_folders, "mnist.npz", 28)
    write_digits(no_folders, "usps.npz", 16)
    options = {"clients": 2, "classes_per_client": 10, "shared_shards": True}
    federation = load("mnist-usps", options, seed=0, data_dir=no_folders)
    assert [len(c.train) for c in federation] == [150, 150]  # of 300 each; 150 per client is not few


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((300, 28, 28), np.float32)}, "'x_train' is float32"),
        ({"x_test": np.zeros((120, 16, 16), np.uint8)}, "not uint8 (samples, 28, 28)"),
        ({"y_train": np.zeros(7, np.uint8)}, "'y_train' is uint8 (7,), not one integer per image"),
        ({"y_test": np.full(120, 10, np.uint8)}, "'y_test' must hold labels in 0..9"),
        ({"y_test": np.array([None] * 120)}, "cannot be read"),
    ],
)
def test_files_of_digits_are_checked(no_folders, change, message):
    write_digits(no_folders, "mnist.npz", 28, **change)
    with pytest.raises(PerfedError) as error:
        load("mnist-usps", {"clients": 2}, seed=0, data_dir=no_folders)
    assert message in str(error.value) and "mnist.npz" in str(error.value)


def test_femnist_clients_are_writers(no_folders):
    writers = {f"writer_{s}": np.arange(n) % 3 for s, n in (("train", 300), ("test", 120))}
    writers["writer_train"] = np.where(np.arange(300) < 4, 1, writers["writer_train"] // 2 * 2)
    x_train = np.zeros((300, 28, 28), np.uint8)
    x_train[:, 0, 0] = 255
    names = {"writer_name": np.array(["ann", "bob", "cy"])}
    write_digits(no_folders, "femnist_digits.npz", 28, x_train=x_train, **writers, **names)
    federation = load("femnist-digits", {"clients": 3}, seed=0, data_dir=no_folders)
    assert federation.notes["writer"] == {"000": "ann", "001": "bob", "002": "cy"}
    assert len(federation.clients[1].train) == 4 and federation.clients[0].input_shape == (784,)
    assert federation.clients[0].train.x[0, :2].tolist() == [0.0, 1.0]  # white paper becomes 0
    options = {"clients": 2, "min_samples": 5, "image": True, "scale": 0.1}
    chosen = load("femnist-digits", options, seed=0, data_dir=no_folders)
    assert list(chosen.notes["writer"].values()) == ["ann", "cy"]
    assert chosen.clients[0].input_shape == (1, 28, 28)
    assert chosen.clients[0].train.x.max() == pytest.approx(0.1)
    with pytest.raises(PerfedError, match=r"data.clients = 4 is more than the 3 writers"):
        load("femnist-digits", {"clients": 4}, seed=0, data_dir=no_folders)


# ---- files


def test_missing_files_are_named_with_the_folders_and_the_source(no_folders, monkeypatch):
    monkeypatch.setenv("PERFED_DATA", str(no_folders / "env"))
    with pytest.raises(PerfedError) as error:
        load("mnist-usps", {}, seed=0, data_dir=no_folders / "given")
    text = str(error.value)
    assert text.startswith("file 'mnist.npz' was not found in ") and "\n" not in text
    assert text.endswith("perfed data get mnist")
    assert [text.find(f) > 0 for f in ("given", "env", "home")] == [True] * 3
    for name in dataset_names():
        for file in describe(name).files:
            if (SHIPPED / file).is_file():
                assert find_file(file) == SHIPPED / file
                continue
            with pytest.raises(PerfedError, match=r"(perfed data get [\w-]+|no command makes it: .*docs/data\.md.*)$"):
                find_file(file)


def test_folders_are_searched_in_order(no_folders, monkeypatch):
    monkeypatch.setenv("PERFED_DATA", str(no_folders / "env"))
    folders = [no_folders / "home" / ".cache" / "perfed", no_folders / "env", no_folders / "given"]
    for folder in folders:
        folder.mkdir(parents=True)
    for folder in folders:
        (folder / "a.npz").touch()
        assert find_file("a.npz", no_folders / "given") == folder / "a.npz"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "npy", "pickle"])
def test_damaged_files_are_refused(no_folders, damage):
    path = no_folders / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).integers(0, 99, 5000))
    whole = path.read_bytes()
    contents = {"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"<html>not found</html>"}
    contents["flipped"] = whole[:600] + bytes(255 - b for b in whole[600:700]) + whole[700:]
    if damage in contents:
        path.write_bytes(contents[damage])
    elif damage == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        np.savez(path, x=np.array([{}], dtype=object))
    with pytest.raises(PerfedError) as error:
        load_npz("a.npz", no_folders, ["x"])
    assert "a.npz" in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_file_s_message_ends_with_the_command(no_folders):
    (no_folders / "usps.npz").write_bytes(b"<html>not found</html>")
    with pytest.raises(PerfedError, match=r"perfed data get usps --again$"):
        load_npz("usps.npz", no_folders, ["x"])


def test_missing_arrays_are_named(no_folders):
    np.savez(no_folders / "a.npz", x=np.zeros(3))
    assert load_npz("a.npz", no_folders, ["x"])["x"].shape == (3,)
    with pytest.raises(PerfedError, match=r"has no array 'y'; it holds x \(see docs/data.md\)"):
        load_npz("a.npz", no_folders, ["x", "y"])


# ---- real files


@pytest.mark.long
def test_real_mnist_usps():
    require_file("mnist.npz")
    require_file("usps.npz")
    federation = load("mnist-usps", {"clients": 100}, seed=0)
    assert sum(len(c.train) for c in federation) == 67_291
    assert sum(len(c.test) for c in federation) == 12_007
    usps = [c for c in federation if federation.notes["host"][c.id] == "usps"]
    assert len(usps) == 50 and all(c.input_shape == (1, 16, 16) for c in usps)


def test_real_usps_as_the_authors_share_it():
    """About 3644 samples a client, about half of them different ones (three classes, 100 clients)."""
    with np.load(require_file("usps.npz")) as file:
        labels = file["y_train"].astype(np.int64)
    parts = share_among_holders(labels, draw_classes(10, 100, 3, seed=0), seed=0, shared=True)
    assert abs(np.mean([len(p) for p in parts]) - 3644) < 150
    assert 1500 < np.mean([len(np.unique(p)) for p in parts]) < 1900


def test_real_femnist():
    require_file("femnist_digits.npz")
    federation = load("femnist-digits", {"clients": 105}, seed=0)
    assert sum(len(c.train) for c in federation) == 10_112
    assert sum(len(c.test) for c in federation) == 1_147
    assert all(float(c.train.x.mean()) < 0.4 for c in federation)  # mostly black
    assert len(load("femnist-digits", {"clients": 98, "min_samples": 50}, seed=0)) == 98


def test_real_bci():
    require_file("bci_flic_common.npz")
    federation = load("bci-common", {}, seed=0)
    assert len(federation) == 40 and federation.num_classes == 5
    assert federation.class_names == ("left_hand", "right_hand", "feet", "tongue", "rest")
    assert federation.ids[0] == "AlexMI-01" and federation.ids[-1] == "Zhou2016-04"
    assert sum(len(c.train) for c in federation) == 8_600 and sum(len(c.test) for c in federation) == 3_611
    for client in federation:
        expected = {1, 2} if client.id.startswith("AlexMI") else {0, 1}
        assert client.input_shape == (6,) and set(client.train.y.tolist()) == expected


@pytest.mark.parametrize("partition", ["pathological", "dirichlet"])
def test_pfllibs_fashion_pools_all_images_and_has_one_split_for_all_seeds(tmp_path, partition):
    write_images(tmp_path, "fashion_mnist.npz")
    first, second = (load("pfllib-fashion", {"partition": partition}, seed=seed, data_dir=tmp_path) for seed in (0, 1))
    assert len(first) == 20
    assert sum(len(client.train) + len(client.test) for client in first) == 360
    for client, same in zip(first, second, strict=True):
        assert torch.equal(client.train.y, same.train.y)
        assert client.train.x.unique().tolist() == [-1.0, 1.0]  # black, and the one bright pixel
    held = [len(set(client.train.y.tolist())) for client in first]
    assert (max(held) == 2) == (partition == "pathological")
