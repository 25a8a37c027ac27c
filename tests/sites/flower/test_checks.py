"""What is refused, by name, and what is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from perfed.sites.flower.checks import (
    ExpectedReply,
    TensorSpec,
    compute_norms,
    find_oversized_entry,
    find_reply_problem,
    find_tree_problem,
    make_spec,
)
from perfed.sites.flower.message import pack, unpack

HEADER = {"site": "north", "run": "flic-1", "sequence": 30_001, "program": "train"}
TREE = {
    "shared": {"weight": torch.ones(2, 3), "scale": torch.ones(4).bfloat16()},
    "num_samples": torch.tensor([5]),
    "present": torch.tensor([True, False]),
    "none": {},
}
SIZE = 2 * 3 * 4 + 4 * 2 + 8 + 2
EXPECTED = ExpectedReply("flic-1", 30_001, "train", {"north", "south"}, make_spec(TREE), SIZE)


def answer(tree=TREE, sender="north", expected=EXPECTED, **fields: object) -> str | None:
    """What is said of a reply that has gone over the wire."""
    return find_reply_problem(sender, *unpack(pack({**HEADER, **fields}, tree)), expected)


def shared(**entries: torch.Tensor) -> dict[str, object]:
    """The tree with entries of ``shared`` replaced."""
    return {**TREE, "shared": {**TREE["shared"], **entries}}


def weight(*values: float) -> torch.Tensor:
    changed = torch.ones(2, 3)
    changed.view(-1)[: len(values)] = torch.tensor(values)
    return changed


def test_a_reply_as_declared_is_accepted():
    assert answer() is None
    assert answer(shared(weight=torch.full((2, 3), -1e30))) is None
    assert answer(another="field") is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"site": "south"}, "site is 'south'; 'north' is expected"),
        ({"run": "flic-2"}, "run is 'flic-2'; 'flic-1' is expected"),
        ({"run": None}, "run is None; 'flic-1' is expected"),
        ({"sequence": 30_000}, "sequence is 30000; 30001 is expected"),
        ({"sequence": 20_001}, "sequence is 20001; 30001 is expected"),
        ({"sequence": 30_001.0}, "sequence is 30001.0; 30001 is expected"),
        ({"sequence": "30001"}, "sequence is '30001'; 30001 is expected"),
        ({"program": ["train"]}, "program is ['train']; 'train' is expected"),
        ({"program": "x" * 10**6}, f"program is '{'x' * 59}...; 'train' is expected"),
    ],
)
def test_a_reply_of_something_else_is_refused(fields, said):
    assert answer(**fields) == f"the reply of site 'north': {said}"


@pytest.mark.parametrize("name", HEADER)
def test_a_reply_that_does_not_say_what_it_is_of_is_refused(name):
    header = {field: value for field, value in HEADER.items() if field != name}
    said = find_reply_problem("north", header, TREE, EXPECTED)
    assert said == f"the reply of site 'north': {name} is missing from the header; {HEADER[name]!r} is expected"


def test_one_is_not_true():
    said = find_reply_problem("north", {**HEADER, "sequence": True}, TREE, replace(EXPECTED, sequence=1))
    assert said == "the reply of site 'north': sequence is True; 1 is expected"


def test_a_site_that_was_not_asked_is_refused_by_name():
    assert answer(sender="west", site="west") == "a reply of site 'west', which was not asked; asked: north, south"
    assert "was not asked" in answer(sender="west", site="north")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (shared(weight=torch.ones(3, 2)), "entry 'shared/weight' has shape (3, 2); (2, 3) is expected"),
        (shared(weight=torch.ones(6)), "entry 'shared/weight' has shape (6,); (2, 3) is expected"),
        (shared(weight=torch.ones(2, 3).half()), "entry 'shared/weight' is float16; float32 is expected"),
        (shared(scale=torch.ones(4).half()), "entry 'shared/scale' is float16; bfloat16 is expected"),
        ({**TREE, "present": torch.tensor([1, 0]).byte()}, "entry 'present' is uint8; bool is expected"),
        ({name: value for name, value in TREE.items() if name != "num_samples"}, "lacks 'num_samples'"),
        ({name: value for name, value in TREE.items() if name != "none"}, "lacks 'none///empty'"),
        ({}, "lacks 'none///empty', 'num_samples', 'present', 'shared/scale', 'shared/weight'"),
        ({**shared(weight=torch.ones(1)), "rows": torch.ones(1)}, "has 'rows', which is not expected"),
        (shared(weight=weight(math.nan)), "entry 'shared/weight' has 1 value that is not finite"),
        (shared(weight=weight(math.inf, 0, -math.inf)), "entry 'shared/weight' has 2 values that are not finite"),
        (
            shared(scale=torch.tensor([1, 2, math.nan, 4]).bfloat16()),
            "entry 'shared/scale' has 1 value that is not finite",
        ),
        (shared(weight=torch.ones(20, 3)), f"{SIZE + 18 * 12} bytes of tensors; at most {SIZE} are expected"),
        ({**TREE, "table": torch.ones(10 * SIZE)}, f"{SIZE * 41} bytes of tensors; at most {SIZE} are expected"),
    ],
)
def test_a_tree_that_is_not_as_declared_is_refused(tree, said):
    assert answer(tree) == f"the reply of site 'north': {said}"


def test_one_line_whatever_a_site_calls_its_entries():
    room = replace(EXPECTED, most_bytes=10_000)
    said = answer({**TREE, "a\nb" * 1000: torch.ones(1), **{str(n): torch.ones(1) for n in range(100)}}, expected=room)
    assert "\n" not in said and len(said) < 300 and "98 more" in said


def test_free_axes_take_any_size_within_the_bound():
    spec = {"rows": TensorSpec((None, 3), torch.float32)}
    for rows in (0, 1, 10):
        assert find_tree_problem({"rows": torch.ones(rows, 3)}, spec, 120) is None
    assert find_tree_problem({"rows": torch.ones(11, 3)}, spec, 120) == (
        "132 bytes of tensors; at most 120 are expected"
    )
    assert find_tree_problem({"rows": torch.ones(2, 4)}, spec, 120) == (
        "entry 'rows' has shape (2, 4); (any, 3) is expected"
    )


def test_an_axis_beside_none_is_bounded_too():
    spec = {"rows": TensorSpec((None, None), torch.complex64)}
    hostile = {"rows": torch.empty(0, 2**62, dtype=torch.complex64)}
    assert find_tree_problem(hostile, spec, 120) == f"has an axis of {2**62}; at most 120 are expected"
    assert find_tree_problem({"rows": torch.empty(0, 3, dtype=torch.complex64)}, spec, 120) is None


def test_what_may_be_missing_may_be_nan():
    spec = {"loss": TensorSpec((), torch.float32, finite=False), "n": TensorSpec((), torch.float32)}
    nan, one = torch.tensor(math.nan), torch.tensor(1.0)
    assert find_tree_problem({"loss": nan, "n": one}, spec, 8) is None
    assert find_tree_problem({"loss": one, "n": nan}, spec, 8) == "entry 'n' has 1 value that is not finite"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64, torch.int8])
def test_values_of_every_dtype_are_looked_at(dtype):
    tree = {"a": torch.ones(3).to(dtype)}
    assert find_tree_problem(tree, make_spec(tree), 100) is None
    if dtype.is_floating_point:
        bad = {"a": torch.tensor([1.0, math.nan, 1.0]).to(dtype)}
        assert find_tree_problem(bad, make_spec(tree), 100) == "entry 'a' has 1 value that is not finite"


@pytest.mark.parametrize(("numbers", "odd"), [([7.0, -1.0], "-1"), ([1.0, 13.0], "13")])
def test_numbers_of_samples_are_some_that_the_site_has(numbers, odd):
    spec = {"counts": TensorSpec((2,), torch.float64, counts=True)}
    expected = replace(EXPECTED, spec=spec, most_bytes=100, samples=12)
    tree = {"counts": torch.tensor(numbers, dtype=torch.float64)}
    said = f"the reply of site 'north': entry 'counts' is {odd}; the site has announced 12 training samples"
    assert answer(tree, expected=expected) == said
    assert answer({"counts": tree["counts"].clamp(0, 12)}, expected=expected) is None


def test_entries_are_compared_with_those_of_others_and_with_what_was_sent():
    found = {
        site: compute_norms({"bias": torch.full((4,), size)})
        for site, size in zip("abcd", (2.0, 4.0, 8.0, 2e3), strict=True)
    }
    assert found["d"] == {"bias": 4e3} and compute_norms({"n": torch.tensor([3])}) == {}
    scales = dict.fromkeys("abcd", 3.0)
    assert [find_oversized_entry(site, found, scales, 500.0) for site in "abcd"] == [None] * 4
    assert [find_oversized_entry(site, found, scales, 2.0) for site in "abc"] == [None] * 3
    said = "the reply of site 'd': the norm of entry 'bias' is 4000; at most 3992 is allowed"
    assert find_oversized_entry("d", found, scales, 499.0) == said
    assert find_oversized_entry("d", found, {**scales, "d": 10.0}, 400.0) is None
    alone = {"d": found["d"]}  # nobody else has replied
    assert (
        find_oversized_entry("d", alone, scales, 1300.0) is not None
        and find_oversized_entry("d", alone, scales, 1400.0) is None
    )


def test_a_norm_is_of_what_is_finite_and_may_overflow():
    assert compute_norms({"a": torch.tensor([3.0, math.nan, -4.0, math.inf])}) == {"a": 5.0}
    assert compute_norms({"a": torch.tensor([1e200], dtype=torch.float64)}) == {"a": math.inf}
