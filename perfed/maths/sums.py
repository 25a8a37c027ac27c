"""Sums over clients of replies that the server does not see: fixed-point numbers, and tensors that only give sums.

If replies are masked, the server knows ``sum_i x_i`` and ``sum_i w_i x_i`` and nothing else about them. A
:class:`Hidden` represents an entry of such replies as a tensor ``(clients, ...)`` without values. It returns sums over
clients and raises an error in every operation that would need the values of single clients. So the code of a method
that combines replies also decides whether the method works with secure aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from perfed.codec import EMPTY
from perfed.errors import PerfedError
from perfed.tree import Tree, iterate_leaves, split_path

Term = tuple[str, ...]
"""Paths of the entries whose product is summed over clients, sorted: ``("num_samples", "shared/head.weight")``."""

_RANGE = 62  # bits of a sum's magnitude: one fewer than int64 has beside its sign


class SingleReplies(PerfedError):
    """An error: an operation needs the replies of single clients where only their sums are known."""

    def __init__(self, need: str) -> None:
        super().__init__(
            f"secure aggregation: the server has sums over clients alone, and this method needs {need}; allowed: "
            "methods that only average replies, such as fedavg, fedprox, fedrep or ditto"
        )


class Source(Protocol):
    """An object that knows sums over clients."""

    def sum_term(self, term: Term) -> Tensor:
        """Return ``sum_i`` of the product of the entries of ``term``, float64, without the clients' axis."""


class Hidden(Tensor):
    """An entry of replies ``(clients, ...)`` for which only sums over clients are known.

    It has methods for sums, means and products with other hidden entries, and supports those functions of PyTorch that
    are linear and need no other values, or that concern its shape and dtype. All others raise :class:`SingleReplies`.
    """

    _path: str
    _source: Source

    @staticmethod
    def from_source(path: str, shape: Sequence[int], dtype: torch.dtype, source: Source) -> Hidden:
        """Return the entry ``path`` of shape ``(clients, ...)``, whose sums ``source`` knows."""
        entry: Hidden = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Hidden)
        entry._path, entry._source = path, source
        return entry

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of functions on sums, shapes and types; raise :class:`SingleReplies` for all others."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _SHAPE_FUNCTIONS or (name == "__get__" and getattr(func, "__self__", None) in _SHAPE_ATTRIBUTES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        first = args[0] if args else None
        if (
            isinstance(first, Hidden)
            and name in _ANSWERS
            and (result := _ANSWERS[name](first, *args[1:], **options)) is not None
        ):
            return result
        entry = next((a._path for a in args if isinstance(a, Hidden)), "")
        raise SingleReplies(
            f"'{entry}' of single clients ({name.strip('_')})" if entry else "replies of single clients"
        )

    def sum_clients(self, weights: Tensor | None = None) -> Tensor:
        """Return ``sum_i w_i x_i``, float64; the axes of ``weights`` are the first axes of this entry.

        Args:
            weights: a hidden entry, or equal numbers; ``None`` for 1.

        Raises:
            SingleReplies: if weights are known and differ.
        """
        if weights is None:
            return self._source.sum_term((self._path,))
        if isinstance(weights, Hidden):
            return self._source.sum_term(make_term(self._path, weights._path))
        if not (weights == weights.flatten()[0]).all():
            raise SingleReplies(f"'{self._path}' with weights that it chooses itself")
        return weights.flatten()[0].double() * self._source.sum_term((self._path,))

    def average_clients(self, weights: Tensor | None) -> Tensor:
        """Return ``sum_i w_i x_i / sum_i w_i``, float64, with weights ``(clients,)``."""
        total = (
            weights.sum_clients()
            if isinstance(weights, Hidden)
            else torch.tensor(float(len(self)), dtype=torch.float64)
        )
        return self.sum_clients(weights if isinstance(weights, Hidden) else _drop_equal_weights(weights)) / total


def _drop_equal_weights(weights: Tensor | None) -> Tensor | None:
    """Return ``None`` if all weights are equal, otherwise the weights."""
    return None if weights is None or bool((weights == weights[0]).all()) else weights


def _cast_entry(entry: Hidden, dtype: torch.dtype) -> Hidden:
    return Hidden.from_source(entry._path, entry.shape, dtype, entry._source)


def _move_entry(entry: Hidden, *arguments: Any, **options: Any) -> Hidden | None:
    dtypes = [value for value in (*arguments, *options.values()) if isinstance(value, torch.dtype)]
    return _cast_entry(entry, dtypes[0]) if dtypes else entry


def _sum_entry(entry: Hidden, dim: Any = None, **options: Any) -> Tensor | None:
    return entry.sum_clients().to(entry.dtype) if dim in (0, (0,), [0]) and not options else None


def _average_entry(entry: Hidden, dim: Any = None, **options: Any) -> Tensor | None:
    return (entry.sum_clients() / len(entry)).to(entry.dtype) if dim in (0, (0,), [0]) and not options else None


_ANSWERS: dict[str, Callable[..., Tensor | None]] = {
    "double": lambda entry: _cast_entry(entry, torch.float64),
    "float": lambda entry: _cast_entry(entry, torch.float32),
    "to": _move_entry,
    "sum": _sum_entry,
    "mean": _average_entry,
    "ones_like": lambda entry, **options: torch.ones(entry.shape, **{"dtype": entry.dtype, **options}),
}
_SHAPE_FUNCTIONS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.__len__,
}
_SHAPE_FUNCTIONS |= {Tensor.element_size}
_SHAPE_ATTRIBUTES = [
    vars(torch._C.TensorBase).get(name) for name in ("shape", "dtype", "ndim", "device", "requires_grad")
]


def make_term(*paths: str) -> Term:
    """Return the term that is the product of these entries.

    Example:
        >>> make_term("shared/w", "num_samples")
        ('num_samples', 'shared/w')
    """
    return tuple(sorted(paths))


def make_hidden_entries(spec: Mapping[str, tuple[Sequence[int], torch.dtype]], source: Source) -> dict[str, Any]:
    """Return hidden entries as nested dictionaries.

    Args:
        spec: shapes ``(clients, ...)`` and dtypes by path, as :func:`perfed.codec.flatten` names entries.
        source: the object that knows their sums.
    """
    tree: dict[str, Any] = {}
    for path, (shape, dtype) in spec.items():
        *parts, name = split_path(path.removesuffix(f"/{EMPTY}"))
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[name] = {} if path.endswith(EMPTY) else Hidden.from_source(path, shape, dtype, source)
    return tree


class FixedPoint:
    """A code of numbers as int64 multiples of ``2^-bits``, whose sums modulo ``2^64`` are exact in any order.

    Args:
        bits: the number of binary digits after the point.
        parts: the greatest number of numbers that are added.

    Example:
        >>> numbers = FixedPoint(bits=24, parts=3)
        >>> code = numbers.encode(torch.tensor([0.1, -2.5], dtype=torch.float64), "w")
        >>> numbers.decode(code).sub(torch.tensor([0.1, -2.5], dtype=torch.float64)).abs().max().item() <= 2**-25
        True
    """

    def __init__(self, bits: int, parts: int) -> None:
        self.bits, self.parts = bits, parts

    @property
    def largest_value(self) -> float:
        """Return the largest magnitude of a number for which a sum of ``parts`` numbers fits into int64."""
        return float(2.0 ** (_RANGE - self.bits) / self.parts)

    def encode(self, x: Tensor, entry: str) -> Tensor:
        """Return ``x`` (float64) rounded to the nearest multiple, as int64.

        Raises:
            PerfedError: if a value is not finite, or too large; the message names the entry.
        """
        largest = float(x.abs().amax()) if x.numel() else 0.0
        if not largest <= self.largest_value:  # also refuses NaN
            raise PerfedError(
                f"secure aggregation: '{entry}' holds {largest:.6g}; at most {self.largest_value:.6g} fits into a sum "
                f"of {self.parts} (fewer secure_aggregation.bits allow more)"
            )
        return (x * 2.0**self.bits).round().long()

    def decode(self, x: Tensor) -> Tensor:
        """Return the numbers that ``x`` (int64) encodes, as float64."""
        return x.double() / 2.0**self.bits


class CountedSums:
    """The sums of replies whose values are known, in the same fixed-point numbers as those of masked replies.

    Args:
        content: the stacked replies: nested dictionaries of tensors ``(clients, ...)``.
        numbers: the fixed-point code.

    Attributes:
        requested_terms: the terms whose sums were requested, in order.
    """

    def __init__(self, content: Tree, numbers: FixedPoint) -> None:
        self._entries = dict(iterate_leaves(content))
        self._numbers = numbers
        self.requested_terms: dict[Term, None] = {}

    def sum_term(self, term: Term) -> Tensor:
        """Return the sum over clients of the products of the entries of ``term``, float64."""
        self.requested_terms[term] = None
        return self._numbers.decode(self.encode(term).sum(0))

    def encode(self, term: Term) -> Tensor:
        """Return the products of each client ``(clients, ...)``, int64."""
        return self._numbers.encode(multiply_factors([self._entries[path] for path in term]), " x ".join(term))


class KnownSums:
    """Sums over clients that are already known, by term."""

    def __init__(self, totals: Mapping[Term, Tensor]) -> None:
        self._totals = totals

    def sum_term(self, term: Term) -> Tensor:
        """Return the known sum over clients of the products of the entries of ``term``, float64.

        Raises:
            PerfedError: if this sum is not known.
        """
        if term not in self._totals:
            raise PerfedError(f"secure aggregation: sites were not asked for the sum of {' x '.join(term)}")
        return self._totals[term]


def multiply_factors(factors: Sequence[Tensor]) -> Tensor:
    """Return the product of tensors that have their first axes in common, float64."""
    widest = max(factor.ndim for factor in factors)
    result = torch.ones((), dtype=torch.float64)
    for factor in factors:
        result = result * factor.double().reshape(*factor.shape, *([1] * (widest - factor.ndim)))
    return result
