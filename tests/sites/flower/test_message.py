"""Messages as bytes: what was packed comes back, and nothing else is taken for a message."""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import suppress

import pytest
import torch
from faults import damages
from safetensors.torch import save

from perfed.errors import PerfedError
from perfed.sites.flower.message import frame, pack, unframe, unpack

HEADER = {"run": "flic-1", "sequence": 30_001, "keep": [10_000, 20_000], "measure": None, "rate": 0.1, "é": "\ud800"}
TREE = {
    "shared": {"head.weight": torch.tensor([[1.5, -0.0], [float("nan"), 1e-30]]).bfloat16(), "none": {}},
    "count": torch.tensor(3),
    "rows": torch.zeros(0, 4, dtype=torch.float64),
}


def test_header_and_tensors_of_any_dtype_come_back():
    header, tree = unpack(pack(HEADER, TREE))
    assert header == HEADER
    weight = tree["shared"]["head.weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.view(torch.int16), TREE["shared"]["head.weight"].view(torch.int16))
    assert tree["shared"]["none"] == {} and tree["count"] == 3 and tree["count"].shape == ()
    assert tree["rows"].shape == (0, 4) and tree["rows"].dtype == torch.float64
    assert unpack(pack({}, {})) == ({}, {})


def test_the_layout_is_as_documented():
    data = pack({"b": 1, "a": [True, None]}, {"x": torch.tensor([1.0])})
    text, body = b'{"a":[true,null],"b":1}', save({"x": torch.tensor([1.0])})
    rest = len(text).to_bytes(8, "big") + len(body).to_bytes(8, "big") + text + body
    assert data == b"perfed\x00\x01" + hashlib.sha256(rest).digest() + rest


def test_the_same_content_gives_the_same_bytes_whatever_its_order():
    turned = {name: TREE[name] for name in reversed(TREE)}
    assert pack(dict(reversed(HEADER.items())), turned) == pack(HEADER, TREE)
    assert pack({**HEADER, "rate": 0.2}, TREE) != pack(HEADER, TREE) != pack(HEADER, {**TREE, "count": torch.tensor(4)})


def test_every_damage_is_refused_in_one_line():
    for bad in damages(pack(HEADER, TREE)):
        with pytest.raises(PerfedError) as refused:
            unpack(bad)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"", "truncated: 0 bytes"),
        (b"perfed", "truncated: 6 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(99), "not a message or file of this version"),
        (pack(HEADER, TREE).replace(b"perfed\x00\x01", b"perfed\x00\x02"), "of this version of perfed"),
        (pack(HEADER, TREE)[:-1], "truncated: .* bytes, where .* were written"),
        (pack(HEADER, TREE) + b"x", "oversized: .* bytes, where .* were written"),
    ],
)
def test_what_is_wrong_is_said(bad, said):
    with pytest.raises(PerfedError, match=said):
        unpack(bad)


def honest(text: bytes, body: bytes, length: int | None = None) -> bytes:
    """A frame of any content whose checksum is right: one that somebody has made by hand."""
    lengths = (len(text) if length is None else length).to_bytes(8, "big") + len(body).to_bytes(8, "big")
    return b"perfed\x00\x01" + hashlib.sha256(lengths + text + body).digest() + lengths + text + body


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b'{"a":\xff}', b"[" * 100_000, b'{"a":' * 50_000])
def test_headers_made_by_hand_are_refused(text):
    assert unframe(honest(b"{}", b"")) == ({}, b"")
    with pytest.raises(PerfedError, match="header"):
        unframe(honest(text, b""))


def test_lengths_made_by_hand_ask_for_no_memory():
    with pytest.raises(PerfedError, match="a header of 9223372036854775807 bytes is too long"):
        unframe(honest(b"{}", b"", length=2**63 - 1))
    with pytest.raises(PerfedError, match="truncated"):
        unframe(honest(b"{}", b"", length=2**20))


@pytest.mark.parametrize("name", ["a/" * 70 + "b", "a/" * 5000 + "b", "a//b", "/a", "//empty"])
def test_names_that_no_tree_has_are_refused(name):
    with pytest.raises(PerfedError, match="not a tree of tensors"):
        unpack(honest(b"{}", save({name: torch.zeros(1)})))


def test_a_marker_of_emptiness_carries_nothing():
    with pytest.raises(PerfedError, match="not a tree of tensors"):
        unpack(honest(b"{}", save({"a///empty": torch.zeros(1000)})))


@pytest.mark.parametrize("shape", [[0, 2**62, 3], [0, 2**62, 2**31, 3], [-1, 0], [0, 1.5]])
def test_sizes_that_no_tensor_has_are_refused(shape):
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    body = len(text).to_bytes(8, "little") + text
    with pytest.raises(PerfedError, match="not a tree of tensors: ") as refused:
        unpack(honest(b"{}", body))
    assert "\n" not in str(refused.value)


def test_a_body_made_by_hand_gives_a_tree_or_one_line():
    draw, whole = random.Random(0), save({"a": torch.ones(3), "b/c": torch.zeros(2, 2).bfloat16()})
    length = 8 + int.from_bytes(whole[:8], "little")  # of what describes the tensors
    for _ in range(3000):
        bad = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(length)] = draw.choice(b'0123456789"{}[],:/BFIU' + bytes([draw.randrange(256)]))
        with suppress(PerfedError):
            _, tree = unpack(honest(b"{}", bytes(bad)))
            pack({}, tree)


@pytest.mark.parametrize("header", [{"a": torch.ones(1)}, {"a": {1, 2}}, {"a": b"x"}, {1: 2, "a": 3}])
def test_only_json_is_a_header(header):
    with pytest.raises(PerfedError, match="a header must contain JSON values only"):
        pack(header, {})


def test_a_header_that_nobody_would_read_is_not_made():
    assert unframe(frame({"a": "x" * 2**20}))[0] == {"a": "x" * 2**20}
    with pytest.raises(PerfedError, match="too long; at most 16777216"):
        pack({"a": "x" * 2**24}, {})


def test_parts_are_joined():
    assert frame({}, b"ab", b"", b"c") == frame({}, b"abc")
    assert json.loads(json.dumps(unframe(frame({"x": [1.5]}, b"ab", b"c"))[0])) == {"x": [1.5]}
