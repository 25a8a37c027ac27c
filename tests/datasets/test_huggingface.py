"""Hugging Face data sets, with a stand-in for the package: only what the reader uses of it."""

from __future__ import annotations

import sys
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from perfed.data.federation import Federation
from perfed.datasets import load
from perfed.errors import PerfedError


class Table:
    """A split: columns by name, their features, a length."""

    def __init__(self, columns: dict[str, list[Any]], class_names: dict[str, list[str]] | None = None) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = {name: SimpleNamespace() for name in columns}
        for name, names in (class_names or {}).items():
            self.features[name] = SimpleNamespace(names=names)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Image:
    """What numpy and the reader see of one of Pillow's images."""

    def __init__(self, pixels: np.ndarray, mode: str = "") -> None:
        self.pixels = pixels
        self.mode = mode or ("L" if pixels.ndim == 2 else "RGB")

    def convert(self, mode: str) -> Image:
        return Image(self.pixels[..., :3] if mode == "RGB" else self.pixels.astype(np.uint8), mode)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.pixels


def images(split: str, size: int = 60) -> Table:
    """Grey images whose first pixel is their number."""
    pixels = np.zeros((size, 6, 5), dtype=np.uint8)
    pixels[:, 0, 0] = np.arange(size)
    pixels[:, 5, 4] = 255
    label = [i % 3 for i in range(size)]
    columns = {"image": list(map(Image, pixels)), "label": label, "who": [f"w{i % 4}" for i in range(size)]}
    return Table(columns, {"label": ["cat", "dog", "eel"]})


def numbers(split: str, size: int = 60) -> Table:
    return Table(
        {
            "a": [float(i) for i in range(size)],
            "v": [[i, 2 * i, 3 * i] for i in range(size)],
            "kind": [["red", "blue"][i % 2] for i in range(size)],
            "year": [1 + i % 2 for i in range(size)],
            "text": ["x"] * size,
            "gap": [None if i == 7 else i % 2 for i in range(size)],
            "odd": [[0.0] * (1 + (i == 9)) for i in range(size)],
        }
    )


@pytest.fixture(autouse=True)
def package(monkeypatch) -> dict[str, Any]:
    """The stand-in; its "calls" are the arguments of load_dataset."""
    calls: list[tuple[str, str | None, str]] = []
    found = {"calls": calls, "images": images, "numbers": numbers}

    def load_dataset(path: str, name: str | None = None, split: str = "") -> Table:
        calls.append((path, name, split))
        if path not in found or split not in ("train", "test"):
            raise FileNotFoundError(f"Couldn't find any data file\nat {path}, {split}")
        return found[path](split)

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return found


def give(**options: Any) -> Federation:
    return load("huggingface", {"clients": 2, "samples": 0, **options}, seed=0)


def numbers_of(federation: Federation, split: str) -> list[list[int]]:
    return [((getattr(c, split).x[:, 0, 0, 0] * 0.5 + 0.5) * 255).round().int().tolist() for c in federation]


def test_images_are_normalised_and_classes_have_their_names(package):
    federation = give(path="images", config="small")
    assert package["calls"] == [("images", "small", "train"), ("images", "small", "test")]
    assert federation.class_names == ("cat", "dog", "eel") and federation.num_classes == 3
    x = federation.clients[0].train.x
    assert x.shape[1:] == (1, 6, 5) and x.dtype == torch.float32
    assert x[:, 0, 5, 4].unique().item() == 1 and x[:, 0, 3, 3].unique().item() == -1
    assert sorted(chain(*numbers_of(federation, "train"))) == list(range(60))
    for part, client in zip(numbers_of(federation, "train"), federation, strict=True):
        assert [i % 3 for i in part] == client.train.y.tolist()


def test_colour_images_and_other_modes(package):
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    with_alpha = np.concatenate([pixels, pixels[..., :1]], axis=2)

    def pictures(second: Image) -> None:
        package["colour"] = lambda split: Table({"image": [Image(pixels), second] * 10, "label": [0, 1] * 10})

    pictures(Image(with_alpha, "RGBA"))
    for client in give(path="colour"):
        assert client.input_shape == (3, 4, 5)
        shown = torch.from_numpy(pixels.transpose(2, 0, 1)).float() / 255
        torch.testing.assert_close(client.train.x * 0.5 + 0.5, shown.expand_as(client.train.x))
    pictures(Image(np.zeros((4, 5), np.uint8)))
    here = "'colour', split 'train': column 'image'"
    with pytest.raises(PerfedError, match=rf"{here}, row 1 has shape \(1, 4, 5\), the rows before \(3, 4, 5"):
        give(path="colour")


def test_columns_of_numbers_stand_side_by_side():
    federation = give(path="numbers", inputs=["a", "v"], label="kind", partition="pathological", classes_per_client=1)
    assert federation.class_names == ("blue", "red")  # text: in the order of the alphabet
    for client in federation:
        assert client.input_shape == (4,)
        assert torch.equal(client.train.x[:, 1:], client.train.x[:, :1] * torch.tensor([1, 2, 3]))
        assert ((client.train.x[:, 0] % 2 == 0) == (client.train.y == 1)).all()
    assert give(path="numbers", inputs="v", label="year").class_names == ("0", "1", "2")
    assert give(path="numbers", inputs="a", label="year").clients[0].input_shape == (1,)


def test_a_column_of_clients_makes_the_natural_partition():
    federation = load("huggingface", {"path": "images", "client": "who", "partition": "natural"}, seed=0)
    assert list(federation.notes["owner"].values()) == ["w0", "w1", "w2", "w3"]
    assert numbers_of(federation, "train")[1] == list(range(1, 60, 4))
    assert len(federation.clients[1].test) == 15


def test_accents_of_both_forms_are_one_client_and_one_class(package):
    def towns(split: str) -> Table:
        both = ["K\u00f6ln", "Ko\u0308ln", "Bonn", "Bonn"]
        return Table({"a": [float(i) for i in range(40)], "town": both * 10, "kind": both[::-1] * 10})

    package["towns"] = towns
    options = {"path": "towns", "inputs": "a", "label": "kind", "client": "town", "partition": "natural"}
    federation = load("huggingface", options, seed=0)
    assert list(federation.notes["owner"].values()) == ["Bonn", "K\u00f6ln"]
    assert federation.class_names == ("Bonn", "K\u00f6ln")


def test_without_a_test_split_a_part_is_put_aside(package):
    by_class = give(path="images", test_split="", test_fraction=0.25)
    assert package["calls"] == [("images", None, "train")]
    train, test = (list(chain(*numbers_of(by_class, split))) for split in ("train", "test"))
    assert sorted(train + test) == list(range(60)) and len(test) == 15
    assert np.bincount(np.array(test) % 3).tolist() == [5, 5, 5]
    options = {"path": "images", "test_split": "", "client": "who", "partition": "natural"}
    for client in load("huggingface", options, seed=0):
        assert (len(client.train), len(client.test)) == (12, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "data.path is missing: the data set's name on the Hugging Face hub"),
        (
            {"path": "nowhere"},
            "'nowhere', split 'train' cannot be loaded: Couldn't find any data file at nowhere, train",
        ),
        ({"path": "images", "test_split": "tests"}, "split 'tests' cannot be loaded"),
        (
            {"path": "images", "inputs": "img"},
            "data.inputs = 'img': 'images' has no such column; it has image, label, who",
        ),
        ({"path": "images", "label": "y"}, "data.label = 'y': 'images' has no such column"),
        ({"path": "images", "client": "id"}, "data.client = 'id': 'images' has no such column"),
        ({"path": "images", "inputs": []}, "data.inputs = [] is not allowed"),
        ({"path": "numbers", "inputs": "text", "label": "kind"}, "column 'text', row 0: neither an image nor numbers"),
        ({"path": "numbers", "inputs": "odd", "label": "kind"}, "column 'odd', row 9"),
        ({"path": "numbers", "inputs": "v", "label": "gap"}, "column 'gap', row 7: None is not one of the 2 classes"),
        ({"path": "numbers", "inputs": "v", "label": "a"}, "column 'a' holds no classes: integers or text are"),
        ({"path": "numbers", "inputs": "v", "label": "kind", "rotations": [0, 90]}, "rotations need images"),
        ({"path": "images", "partition": "natural"}, "needs to know whose the samples are"),
        ({"path": "images", "uniform": 3}, "data.uniform is not an option of partition 'iid'"),
        (
            {"path": "images", "columns": "x"},
            "data.columns is not an option of 'huggingface'; its options: path, config",
        ),
    ],
)
def test_bad_input_is_one_line(options, says):
    if options.get("partition") == "natural":
        options = {**options, "clients": 2}
        with pytest.raises(PerfedError, match=says):
            load("huggingface", options, seed=0)
        return
    with pytest.raises(PerfedError) as error:
        give(**options)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_empty_split(package):
    package["images"] = lambda split: images(split, 0)
    with pytest.raises(PerfedError, match="data set 'images', split 'train' has no rows"):
        give(path="images")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PerfedError) as error:
        give(path="images")
    assert "data set 'huggingface' needs the package 'datasets', which is not installed" in str(error.value)
    assert "[datasets]" in str(error.value)
