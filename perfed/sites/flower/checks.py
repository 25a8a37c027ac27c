"""The checks of received trees of tensors and of replies, before they are used.

The functions ``find_..._problem`` return one line that describes the first problem, or ``None``. The caller declares
what is expected; only :func:`find_oversized_entry` compares a reply with the replies of other sites.
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
"""The beginning of the error of an answer whose reply arrived and cannot be used."""


class TensorSpec(NamedTuple):
    """The properties that a tensor must have.

    Attributes:
        shape: The sizes of the axes; ``None`` for an axis of any size.
        dtype: The dtype.
        finite: Whether all values must be finite; for example, the mean over an empty set may be NaN.
        counts: Whether the values are numbers of training samples of the site.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    finite: bool = True
    counts: bool = False


def shorten_repr(value: Any, most: int = 60) -> str:
    """Return the ``repr`` of a value, shortened to ``most`` characters.

    Example:
        >>> shorten_repr("x" * 100, most=4)
        "'xxx..."
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


TreeSpec = Mapping[str, TensorSpec]
"""The specification of a tree: the properties of each tensor by its path (names joined by "/"). The tree must contain
exactly these tensors."""


def make_spec(tree: Tree) -> dict[str, TensorSpec]:
    """Return the specification of trees with the names, shapes and dtypes of ``tree``, and with finite values.

    Example:
        >>> make_spec({"head": {"bias": torch.zeros(2)}})
        {'head/bias': TensorSpec(shape=(2,), dtype=torch.float32, finite=True, counts=False)}
    """
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in flatten(tree).items()}


@dataclass(frozen=True)
class ExpectedReply:
    """The properties that a reply in the current exchange must have.

    Attributes:
        run, sequence, program: The run, number and program of the exchange.
        sites: The names of the sites that were asked.
        spec: The specification of the reply's tree.
        most_bytes: The largest total size of the tensors in bytes.
        samples: The number of training samples that the site has announced; ``None`` if it is unknown.
    """

    run: str
    sequence: int
    program: str
    sites: Collection[str]
    spec: TreeSpec
    most_bytes: int
    samples: int | None = None


def reject_unusable(answer: Answer, find_problem: Callable[[dict[str, Any], Tree], str | None]) -> Answer:
    """Return the answer unchanged, or an answer with an error if its reply cannot be used.

    Args:
        answer: The answer of a site; an answer that has no reply is returned unchanged.
        find_problem: Returns a line that names the site and the problem of a header and a tree, or nothing.
    """
    if answer.body is None:
        return answer
    try:
        header, tree = unpack(answer.body)
        if "error" in header:
            problem = f"site '{answer.site}': {str(header['error'])[:500]}"
        else:
            problem = find_problem(header, tree) or ""
            problem = problem and f"{REFUSED}{problem}"
    except PerfedError as error:
        problem = f"{REFUSED}the reply of site '{answer.site}': {error}"
    return Answer(answer.site, None, problem, answer.seconds) if problem else answer


def find_reply_problem(site: str, header: Mapping[str, Any], tree: Tree, expected: ExpectedReply) -> str | None:
    """Return what is wrong with a reply that the server has received.

    Args:
        site: The name of the sender, which the transport has authenticated.
        header: The header of the reply, which must name the site and the run, sequence and program of the exchange.
        tree: The tensors of the reply.
        expected: The properties that the reply must have.

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
    problem = problem or _find_count_problem(tree, expected)
    return problem and f"the reply of site '{site}': {problem}"


def find_header_problem(header: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a header that must contain the fields of ``expected``, and may contain others."""
    for name, value in expected.items():
        if name not in header:
            return f"{name} is missing from the header; {value!r} is expected"
        if type(header[name]) is not type(value) or header[name] != value:
            return f"{name} is {shorten_repr(header[name])}; {value!r} is expected"
    return None


def find_tree_problem(tree: Tree, spec: TreeSpec, most: int) -> str | None:
    """Return what is wrong with a tree that must have at most ``most`` bytes and exactly the entries of ``spec``."""
    tensors = flatten(tree)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > most:
        return f"{size} bytes of tensors; at most {most} are expected"
    longest = max((length for tensor in tensors.values() for length in tensor.shape), default=0)
    if longest > most:  # with an axis of length 0 the tensor takes no bytes, and would overflow later
        return f"has an axis of {longest}; at most {most} are expected"
    if lacking := sorted(spec.keys() - tensors.keys()):
        return f"lacks {shorten_list([repr(name) for name in lacking])}"
    if strange := sorted(tensors.keys() - spec.keys()):
        return f"has {shorten_list([shorten_repr(name) for name in strange], 3)}, which is not expected"
    for name, entry in spec.items():
        if problem := _find_tensor_problem(tensors[name], entry):
            return f"entry '{name}' {problem}"
    return None


def _find_count_problem(tree: Tree, expected: ExpectedReply) -> str | None:
    """Return what is wrong with the numbers of samples in a reply, which cannot exceed the site's training samples."""
    tensors, samples = flatten(tree), expected.samples
    if samples is None:
        return None
    for name in (name for name, entry in expected.spec.items() if entry.counts):
        least, most = float(tensors[name].min()), float(tensors[name].max())
        if least < 0 or most > samples:
            odd = least if least < 0 else most
            return f"entry '{name}' is {odd:g}; the site has announced {samples} training samples"
    return None


def compute_norms(tree: Tree) -> dict[str, float]:
    """Return the Euclidean norm of the finite values of each floating-point entry; infinite if squares overflow."""
    return {
        name: math.sqrt(float(tensor[torch.isfinite(tensor)].double().square().sum()))
        for name, tensor in flatten(tree).items()
        if tensor.is_floating_point() and tensor.element_size() > 1
    }


def find_oversized_entry(
    site: str, norms: Mapping[str, Mapping[str, float]], scales: Mapping[str, float], ratio: float
) -> str | None:
    """Return a line about an entry of a site's reply whose norm is far too large; ``None`` if there is none.

    The limit is ``ratio`` times the median norm of the entry in the replies of the other sites, or ``ratio`` times the
    scale of the site if that is larger.

    Args:
        site: The name of the site.
        norms: The norms of the entries (:func:`compute_norms`) of all replies of the exchange, by site.
        scales: The scale of each site.
        ratio: The largest allowed ratio.

    Example:
        >>> norms = {"north": {"bias": 1.0}, "south": {"bias": 2.0}, "west": {"bias": 1e30}}
        >>> find_oversized_entry("west", norms, {"west": 5.0}, 1e6)
        "the reply of site 'west': the norm of entry 'bias' is 1e+30; at most 5e+06 is allowed"
        >>> find_oversized_entry("north", norms, {"north": 5.0}, 1e6)
    """
    for name, norm in norms[site].items():
        peer_norms = [entries[name] for peer, entries in norms.items() if peer != site and name in entries]
        most = ratio * max(scales[site], median_low(peer_norms) if peer_norms else 0.0)
        if norm > most:
            problem = f"the norm of entry '{name}' is {norm:.6g}; at most {most:.6g} is allowed"
            return f"the reply of site '{site}': {problem}"
    return None


def _find_tensor_problem(tensor: Tensor, entry: TensorSpec) -> str | None:
    shape = tuple(tensor.shape)
    if len(shape) != len(entry.shape) or any(e not in (None, s) for s, e in zip(shape, entry.shape, strict=True)):
        needed = ", ".join("any" if size is None else str(size) for size in entry.shape)
        return f"has shape {shape}; ({needed}) is expected"
    if tensor.dtype != entry.dtype:
        return f"is {_dtype_name(tensor.dtype)}; {_dtype_name(entry.dtype)} is expected"
    values = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    if entry.finite and (bad := int((~torch.isfinite(values)).sum())):
        return f"has {bad} values that are not finite" if bad > 1 else "has 1 value that is not finite"
    return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
