from __future__ import annotations

import pickle

import pytest
import torch
from engines import leaves
from safetensors.torch import save

from perfed.codec import decode, encode, flatten
from perfed.errors import PerfedError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def same(a, b):
    first, second = dict(leaves(a)), dict(leaves(b))
    assert first.keys() == second.keys()
    for path, tensor in first.items():
        assert tensor.dtype == second[path].dtype and tensor.shape == second[path].shape, path
        assert torch.equal(tensor, second[path]), path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,), (2, 0, 3)])
def test_every_dtype_and_shape_comes_back(dtype, shape):
    tensor = (torch.arange(6)[: max(1, torch.Size(shape).numel())] % 2).to(dtype)
    tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
    same(decode(encode({"x": tensor})), {"x": tensor})


def test_nan_infinity_and_signed_zero_keep_their_bits():
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    back = decode(encode({"x": tensor}))["x"]
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))


def test_nested_and_empty_dictionaries_come_back():
    tree = {"a": {"b": {"weight.0": torch.ones(2), "e": {}}, "c": torch.zeros(())}, "empty": {}, "x": torch.ones(1)}
    back = decode(encode(tree))
    same(back, tree)
    assert back["empty"] == {} and back["a"]["b"]["e"] == {}
    assert decode(encode({})) == {}


def test_views_come_back_as_what_they_show():
    base = torch.arange(12.0).view(3, 4)
    tree = {
        "transposed": base.t(),
        "expanded": torch.tensor([[5.0]]).expand(2, 3),
        "strided": base[:, ::2],
        "row": base[1],
        "same storage": base,
        "needs grad": base.clone().requires_grad_(True),
    }
    back = decode(encode(tree))
    same(back, {name: t.detach().contiguous() for name, t in tree.items()})
    back["row"].zero_()
    assert float(back["same storage"][1].sum()) > 0  # no shared memory after the journey
    assert float(base[1].sum()) > 0


def test_the_same_tree_gives_the_same_bytes_whatever_its_order():
    one = {"b": torch.ones(2), "a": {"y": torch.zeros(3), "x": torch.ones(1, dtype=torch.int64)}}
    other = {"a": {"x": torch.ones(1, dtype=torch.int64), "y": torch.zeros(3)}, "b": torch.ones(2)}
    assert encode(one) == encode(one) == encode(other)
    assert encode({**one, "b": torch.zeros(2)}) != encode(one)


def test_truncated_and_foreign_bytes_are_refused():
    data = encode({"a": torch.arange(5.0), "b": {"c": torch.ones(2)}})
    for length in (0, 1, 7, 8, 9, 20, len(data) // 2, len(data) - 1):
        with pytest.raises(PerfedError, match="not a tree of tensors"):
            decode(data[:length])
    for foreign in (data + b"x", b"hello", b"\xff" * 64, pickle.dumps({"a": 1})):
        with pytest.raises(PerfedError, match="not a tree of tensors"):
            decode(foreign)


def test_a_name_that_is_both_a_tensor_and_a_dictionary_is_refused():
    with pytest.raises(PerfedError, match="not a tree of tensors"):
        decode(save({"a": torch.ones(1), "a/b": torch.ones(1)}))


@pytest.mark.parametrize("name", ["a/b", "/", "//", "a//empty", "/empty", "~1", "%2F", "a/__metadata__"])
def test_names_with_a_slash_come_back(name):
    """Sites may have one in their names."""
    tree = {name: torch.ones(1), "a": {name: torch.zeros(2), "b": {name: {}}}, "e": {name: {name: torch.ones(3)}}}
    same(decode(encode(tree)), tree)
    assert decode(encode(tree))["a"]["b"] == {name: {}}
    assert dict(leaves(tree)).keys() < flatten(tree).keys()


@pytest.mark.parametrize("name", ["", "\x1f", "a\x1fb", "__metadata__"])
def test_names_that_could_not_be_read_back_are_refused(name):
    for tree in ({name: torch.ones(1)}, {"inner": {name: torch.ones(1)}}, {name: {}}):
        if name == "__metadata__" and name not in tree:
            continue  # reserved on the outermost level only
        with pytest.raises(PerfedError, match="cannot name a tensor"):
            encode(tree)


@pytest.mark.parametrize("value", [None, 0, 3, 1.5, [], [torch.ones(1)], "text"])
def test_only_tensors_and_dictionaries_are_encoded(value):
    with pytest.raises(PerfedError, match="'a'"):
        encode({"a": value})


def test_reading_never_runs_code(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    data = encode({"a": torch.ones(2, dtype=torch.bfloat16), "b": {}})
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    same(decode(data), {"a": torch.ones(2, dtype=torch.bfloat16), "b": {}})
    assert b"cposix" not in data and data[8:9] == b"{"  # a length, then a JSON header
