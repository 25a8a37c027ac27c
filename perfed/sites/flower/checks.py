"""What came over a wire is checked before it is used: trees of tensors, and replies on the server.

Each function that checks returns one line of what is wrong, or ``None``. What is expected is declared by who asks; of
what others have sent, :func:`find_oversized_entry` alone learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.codec import flatten
from perfed.errors import PerfedError, shorten_list
from perfed.sites.flower.message import unpack
from perfed.sites.flower.transport import Answer
from perfed.tree import Tree

REFUSED = "refused: "
"""What the error of an answer begins with where a reply came and cannot be used."""


class TensorSpec(NamedTuple):
    """What a tensor must be like.

    Attributes:
        shape: sizes of its axes, ``None`` where any will do.
        dtype: its dtype.
        finite: whether every value must be finite; a mean over nothing, say, may be NaN.
        counts: whether its values are numbers of the site's training samples.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    finite: bool = True
    counts: bool = False


def shorten_repr(value: Any, most: int = 60) -> str:
    """``value`` as Python writes it, cut where a sender made it long.

    Example:
        >>> shorten_repr("x" * 100, most=4)
        "'xxx..."
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


TreeSpec = Mapping[str, TensorSpec]
"""Path of a tensor (names joined by "/") -> what it must be like; all of them must be there, and no other."""


def make_spec(tree: Tree) -> dict[str, TensorSpec]:
    """The spec of trees with the names, shapes and dtypes of ``tree``, and finite values.

    Example:
        >>> make_spec({"head": {"bias": torch.zeros(2)}})
        {'head/bias': TensorSpec(shape=(2,), dtype=torch.float32, finite=True, counts=False)}
    """
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in flatten(tree).items()}


@dataclass(frozen=True)
class ExpectedReply:
    """What a reply must be, of the exchange that is going on.

    Attributes:
        run, sequence, program: which one.
        sites: the names that it was sent to.
        spec: of the reply's tree.
        most_bytes: that all tensors of the tree may have together.
        samples: training samples that the site has, as its facts say; ``None`` where that is not known.
    """

    run: str
    sequence: int
    program: str
    sites: Collection[str]
    spec: TreeSpec
    most_bytes: int
    samples: int | None = None


def reject_unusable(answer: Answer, wrong: Callable[[dict[str, Any], Tree], str | None]) -> Answer:
    """Return the answer, or a failure in its place where its body cannot be used.

    Args:
        answer: of a site; one without a body is a failure already.
        wrong: says of a header and a tree whose reply they are and why they cannot be used, or nothing.
    """
    if answer.body is None:
        return answer
    try:
        header, tree = unpack(answer.body)
        if "error" in header:
            problem = f"site '{answer.site}': {str(header['error'])[:500]}"
        else:
            found = wrong(header, tree)
            problem = f"{REFUSED}{found}" if found else ""
    except PerfedError as error:
        problem = f"{REFUSED}the reply of site '{answer.site}': {error}"
    return Answer(answer.site, None, problem, answer.seconds) if problem else answer


def find_reply_problem(site: str, header: Mapping[str, Any], tree: Tree, expected: ExpectedReply) -> str | None:
    """What is wrong with a reply, on the server; ``site`` is the name that the transport has authenticated.

    The header must name site, run, sequence and program of the exchange.

    Example:
        >>> bias = {"bias": torch.tensor([0.0, float("nan")])}
        >>> expected = ExpectedReply("flic-1", 20_000, "train", ["north"], make_spec(bias), 1000)
        >>> header = {"site": "north", "run": "flic-1", "sequence": 20_000, "program": "train"}
        >>> find_reply_problem("north", header, bias, expected)
        "the reply of site 'north': entry 'bias' has 1 value that is not finite"
        >>> find_reply_problem("north", {**header, "sequence": 10_000}, bias, expected)
        "the reply of site 'north': sequence is 10000; 20000 is expected"
    """
    if site not in expected.sites:
        return f"a reply of site '{site}', which was not asked; asked: {shorten_list(sorted(expected.sites))}"
    fields = {"site": site, "run": expected.run, "sequence": expected.sequence, "program": expected.program}
    problem = find_header_problem(header, fields) or find_tree_problem(tree, expected.spec, expected.most_bytes)
    problem = problem or _wrong_counts(tree, expected)
    return problem and f"the reply of site '{site}': {problem}"


def find_header_problem(header: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Whether each field of ``expected`` is there with its value; others may be there too."""
    for name, value in expected.items():
        if name not in header:
            return f"{name} is missing from the header; {value!r} is expected"
        if type(header[name]) is not type(value) or header[name] != value:
            return f"{name} is {shorten_repr(header[name])}; {value!r} is expected"
    return None


def find_tree_problem(tree: Tree, spec: TreeSpec, most: int) -> str | None:
    """Return what is wrong with a tree that must have at most ``most`` bytes and exactly the entries of ``spec``."""
    found = flatten(tree)
    size = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if size > most:
        return f"{size} bytes of tensors; at most {most} are expected"
    longest = max((length for tensor in found.values() for length in tensor.shape), default=0)
    if longest > most:  # beside an axis of length 0 it takes no bytes, and would overflow later
        return f"has an axis of {longest}; at most {most} are expected"
    if lacking := sorted(spec.keys() - found.keys()):
        return f"lacks {shorten_list([repr(name) for name in lacking])}"
    if strange := sorted(found.keys() - spec.keys()):
        return f"has {shorten_list([shorten_repr(name) for name in strange], 3)}, which nobody asked for"
    for name, entry in spec.items():
        if problem := _wrong_tensor(found[name], entry):
            return f"entry '{name}' {problem}"
    return None


def _wrong_counts(tree: Tree, expected: ExpectedReply) -> str | None:
    """Whether numbers of samples are some that the site can have."""
    found, samples = flatten(tree), expected.samples
    if samples is None:
        return None
    for name in (name for name, entry in expected.spec.items() if entry.counts):
        least, most = float(found[name].min()), float(found[name].max())
        if least < 0 or most > samples:
            odd = least if least < 0 else most
            return f"entry '{name}' is {odd:g}; its facts say {samples} training samples"
    return None


def compute_norms(tree: Tree) -> dict[str, float]:
    """Euclidean norm of the finite floating-point values of each entry; infinite where squares overflow."""
    return {
        name: math.sqrt(float(tensor[torch.isfinite(tensor)].double().square().sum()))
        for name, tensor in flatten(tree).items()
        if tensor.is_floating_point() and tensor.element_size() > 1
    }


def find_oversized_entry(
    site: str, found: Mapping[str, Mapping[str, float]], scales: Mapping[str, float], ratio: float
) -> str | None:
    """Which entry of a site's reply is out of all proportion to the others' and to what the site was sent.

    Args:
        site: whose reply it is.
        found: :func:`compute_norms` of all replies of the exchange, by site.
        scales: of each site what its entries may always be compared with, at least.
        ratio: the largest norm of an entry in such units.

    Example:
        >>> found = {"north": {"bias": 1.0}, "south": {"bias": 2.0}, "west": {"bias": 1e30}}
        >>> find_oversized_entry("west", found, {"west": 5.0}, 1e6)
        "the reply of site 'west': the norm of entry 'bias' is 1e+30; at most 5e+06 is allowed"
        >>> find_oversized_entry("north", found, {"north": 5.0}, 1e6)
    """
    for name, norm in found[site].items():
        others = [of[name] for other, of in found.items() if other != site and name in of]
        most = ratio * max(scales[site], median_low(others) if others else 0.0)
        if norm > most:
            said = f"the norm of entry '{name}' is {norm:.6g}; at most {most:.6g} is allowed"
            return f"the reply of site '{site}': {said}"
    return None


def _wrong_tensor(tensor: Tensor, entry: TensorSpec) -> str | None:
    shape = tuple(tensor.shape)
    if len(shape) != len(entry.shape) or any(e not in (None, s) for s, e in zip(shape, entry.shape, strict=True)):
        needed = ", ".join("any" if size is None else str(size) for size in entry.shape)
        return f"has shape {shape}; ({needed}) is expected"
    if tensor.dtype != entry.dtype:
        return f"is {_name(tensor.dtype)}; {_name(entry.dtype)} is expected"
    values = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    if entry.finite and (bad := int((~torch.isfinite(values)).sum())):
        return f"has {bad} values that are not finite" if bad > 1 else "has 1 value that is not finite"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
