"""What came over a wire is checked before it is used: replies on the server, payloads at a site.

Each function returns one line of what is wrong, or ``None``. What is expected is declared by who asks; nothing is
learnt from what others have sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.codec import flatten
from perfed.errors import some
from perfed.tree import Tree


class Entry(NamedTuple):
    """What a tensor must be like.

    Attributes:
        shape: sizes of its axes, ``None`` where any will do.
        dtype: its dtype.
        finite: whether every value must be finite; a mean over nothing, say, may be NaN.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    finite: bool = True


Spec = Mapping[str, Entry]
"""Path of a tensor (names joined by "/") -> what it must be like; all of them must be there, and no other."""


def like(tree: Tree) -> dict[str, Entry]:
    """The spec of trees with the names, shapes and dtypes of ``tree``, and finite values.

    Example:
        >>> like({"head": {"bias": torch.zeros(2)}})
        {'head/bias': Entry(shape=(2,), dtype=torch.float32, finite=True)}
    """
    return {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in flatten(tree).items()}


@dataclass(frozen=True)
class Bounds:
    """How large a tree may be.

    Attributes:
        bytes: of all its tensors together.
        norm: Euclidean, of all its floating-point values together; ``None`` for any.
    """

    bytes: int
    norm: float | None = None


@dataclass(frozen=True)
class Expected:
    """What a reply must be, of the exchange that is going on.

    Attributes:
        run, sequence, program: which one.
        sites: the names that it was sent to.
        spec, bounds: of the reply's tree.
    """

    run: str
    sequence: int
    program: str
    sites: Collection[str]
    spec: Spec
    bounds: Bounds


def wrong_reply(site: str, header: Mapping[str, Any], tree: Tree, expected: Expected) -> str | None:
    """What is wrong with a reply, on the server; ``site`` is the name that the transport has authenticated.

    The header must name site, run, sequence and program of the exchange.

    Example:
        >>> bias = {"bias": torch.tensor([0.0, float("nan")])}
        >>> expected = Expected("flic-1", 20_000, "train", ["north"], like(bias), Bounds(bytes=1000))
        >>> header = {"site": "north", "run": "flic-1", "sequence": 20_000, "program": "train"}
        >>> wrong_reply("north", header, bias, expected)
        "the reply of site 'north': entry 'bias' has 1 value that is not finite"
        >>> wrong_reply("north", {**header, "sequence": 10_000}, bias, expected)
        "the reply of site 'north': sequence is 10000; 20000 is expected"
    """
    if site not in expected.sites:
        return f"a reply of site '{site}', which was not asked; asked: {some(sorted(expected.sites))}"
    fields = {"site": site, "run": expected.run, "sequence": expected.sequence, "program": expected.program}
    problem = wrong_header(header, fields) or wrong_tree(tree, expected.spec, expected.bounds)
    return problem and f"the reply of site '{site}': {problem}"


def wrong_payload(
    header: Mapping[str, Any],
    tree: Tree,
    run: str,
    programs: Collection[str],
    parameters: Mapping[str, Tensor],
    limit: int,
) -> str | None:
    """What is wrong with a payload, at a site: of another run, for no program of the method, or not as declared.

    The header must have all fields of a message: ``run``, ``sequence``, ``base``, ``keep``, ``program``, ``round``,
    ``index``, ``measure`` and ``terms``.

    Args:
        header, tree: of the message.
        run: id of the site's run.
        programs: names of what the server may ask for.
        parameters: of the site's model: a tensor of that name must have its dtype and last axes. There may be axes in
            front, of domains or of several models.
        limit: bytes of all tensors together.
    """
    problem = wrong_header(header, {"run": run}) or _wrong_request(header)
    if not problem and header["program"] not in programs:
        problem = f"program is {header['program']!r}, which the method of the study has not"
    problem = problem or _wrong_sent(flatten(tree), parameters, limit)
    return problem and f"the server's message: {problem}"


def _wrong_sent(found: Mapping[str, Tensor], parameters: Mapping[str, Tensor], limit: int) -> str | None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if size > limit:
        return f"{size} bytes of tensors; at most {limit} are taken"
    for name, tensor in found.items():
        known = parameters.get(name.rpartition("/")[2])
        axes = tensor.shape if known is None else (*tensor.shape[: max(0, tensor.ndim - known.ndim)], *known.shape)
        if problem := _wrong_tensor(tensor, Entry(tuple(axes), tensor.dtype if known is None else known.dtype)):
            return f"entry '{name}' {problem}"
    return None


def wrong_header(header: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Whether each field of ``expected`` is there with its value; others may be there too."""
    for name, value in expected.items():
        if name not in header:
            return f"{name} is missing from the header; {value!r} is expected"
        if type(header[name]) is not type(value) or header[name] != value:
            return f"{name} is {_short(header[name])}; {value!r} is expected"
    return None


def wrong_tree(tree: Tree, spec: Spec, bounds: Bounds) -> str | None:
    """Whether the tree is within bounds and has the entries of ``spec``, no more, each as it must be."""
    found = flatten(tree)
    size = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if size > bounds.bytes:
        return f"{size} bytes of tensors; at most {bounds.bytes} are expected"
    longest = max((length for tensor in found.values() for length in tensor.shape), default=0)
    if longest > bounds.bytes:  # beside an axis of length 0 it takes no bytes, and would overflow later
        return f"has an axis of {longest}; at most {bounds.bytes} are expected"
    if lacking := sorted(spec.keys() - found.keys()):
        return f"lacks {some([repr(name) for name in lacking])}"
    if strange := sorted(found.keys() - spec.keys()):
        return f"has {some([_short(name) for name in strange], 3)}, which nobody asked for"
    for name, entry in spec.items():
        if problem := _wrong_tensor(found[name], entry):
            return f"entry '{name}' {problem}"
    if bounds.norm is not None and (norm := _norm(found)) > bounds.norm:
        return f"its norm is {norm:.6g}; at most {bounds.norm:.6g} is allowed"
    return None


def _wrong_request(header: Mapping[str, Any]) -> str | None:
    """Whether every field of a message is there and of its kind."""
    for name, (fits, needed) in _FIELDS.items():
        if name not in header:
            return f"{name} is missing from the header"
        if not fits(header[name]):
            return f"{name} is {_short(header[name])}; {needed} is needed"
    if not header["base"] < header["sequence"]:
        return f"base is {header['base']}; a number below the message's own, {header['sequence']}, is needed"
    return None


def _wrong_tensor(tensor: Tensor, entry: Entry) -> str | None:
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


def _norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm of all floating-point values; infinite where squares overflow."""
    floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in floating))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: Any, most: int = 60) -> str:
    """``value`` as it would be written, cut where a sender made it long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("sequence", "base", "round"), (_is_count, "a whole number that is not negative")),
    "index": (lambda value: type(value) is int and value >= -1, "a whole number from -1 on"),
    "keep": (lambda value: isinstance(value, list) and all(map(_is_count, value)), "a list of whole numbers"),
    **dict.fromkeys(("program", "terms"), (lambda value: isinstance(value, str), "a text")),
    "measure": (lambda value: value is None or isinstance(value, str), "a text or null"),
}
