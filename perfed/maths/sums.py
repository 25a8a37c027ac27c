"""Sums over clients of replies that nobody sees: fixed-point numbers, and tensors that know their sums alone.

Where replies are masked, the server has ``sum_i x_i`` and ``sum_i w_i x_i`` of them and nothing else. A
:class:`Hidden` stands for an entry of such replies, as a tensor ``(clients, ...)`` without values. What asks it for a
sum gets one; what asks for anything of single clients is refused. So how a method combines replies is all that says
whether it can do without single ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from perfed.codec import EMPTY
from perfed.errors import PerfedError
from perfed.tree import Tree, leaves, split_path

Term = tuple[str, ...]
"""Paths of the entries whose product is summed over clients, sorted: ``("num_samples", "shared/head.weight")``."""

_RANGE = 62  # bits of a sum's magnitude: one fewer than int64 has beside its sign


class SingleReplies(PerfedError):
    """Something asks for the replies of single clients where only their sums are known."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"secure aggregation: the server has sums over clients alone, and this method needs {what}; allowed: "
            "methods that only average replies, such as fedavg, fedprox, fedrep or ditto"
        )


class Source(Protocol):
    """What knows sums over clients."""

    def total(self, term: Term) -> Tensor:
        """``sum_i`` of the product of the entries of ``term``, float64, without the clients' axis."""


class Hidden(Tensor):
    """An entry of replies ``(clients, ...)`` of which only sums over clients are known.

    Sums, means and products with other hidden entries are its own methods; PyTorch's functions on it are those that
    are linear and need no other values, and its shape and dtype. All others raise :class:`SingleReplies`.
    """

    _path: str
    _source: Source

    @staticmethod
    def of(path: str, shape: Sequence[int], dtype: torch.dtype, source: Source) -> Hidden:
        """The entry called ``path`` of shape ``(clients, ...)``, whose sums ``source`` knows."""
        made: Hidden = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Hidden)
        made._path, made._source = path, source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is about sums, shapes and types; refuse all else."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _FORM or (name == "__get__" and getattr(func, "__self__", None) in _ATTRIBUTES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        first = args[0] if args else None
        if (
            isinstance(first, Hidden)
            and name in _ANSWERS
            and (found := _ANSWERS[name](first, *args[1:], **given)) is not None
        ):
            return found
        entry = next((a._path for a in args if isinstance(a, Hidden)), "")
        raise SingleReplies(
            f"'{entry}' of single clients ({name.strip('_')})" if entry else "replies of single clients"
        )

    def summed(self, weights: Tensor | None = None) -> Tensor:
        """``sum_i w_i x_i``, float64; the axes of ``weights`` are the first ones of this entry's.

        Args:
            weights: hidden too, or all the same; ``None``: 1.

        Raises:
            SingleReplies: weights that are neither.
        """
        if weights is None:
            return self._source.total((self._path,))
        if isinstance(weights, Hidden):
            return self._source.total(product(self._path, weights._path))
        if not (weights == weights.flatten()[0]).all():
            raise SingleReplies(f"'{self._path}' with weights that it chooses itself")
        return weights.flatten()[0].double() * self._source.total((self._path,))

    def mean_by(self, weights: Tensor | None) -> Tensor:
        """``sum_i w_i x_i / sum_i w_i``, float64, with weights ``(clients,)``."""
        total = weights.summed() if isinstance(weights, Hidden) else torch.tensor(float(len(self)), dtype=torch.float64)
        return self.summed(weights if isinstance(weights, Hidden) else _equal(weights)) / total


def _equal(weights: Tensor | None) -> Tensor | None:
    """Weights that are all the same weigh 1 each; others stay as they are."""
    return None if weights is None or bool((weights == weights[0]).all()) else weights


def _as(entry: Hidden, dtype: torch.dtype) -> Hidden:
    return Hidden.of(entry._path, entry.shape, dtype, entry._source)


def _to(entry: Hidden, *given: Any, **options: Any) -> Hidden | None:
    dtypes = [value for value in (*given, *options.values()) if isinstance(value, torch.dtype)]
    return _as(entry, dtypes[0]) if dtypes else entry


def _sum(entry: Hidden, dim: Any = None, **options: Any) -> Tensor | None:
    return entry.summed().to(entry.dtype) if dim in (0, (0,), [0]) and not options else None


def _mean(entry: Hidden, dim: Any = None, **options: Any) -> Tensor | None:
    return (entry.summed() / len(entry)).to(entry.dtype) if dim in (0, (0,), [0]) and not options else None


_ANSWERS: dict[str, Callable[..., Tensor | None]] = {
    "double": lambda entry: _as(entry, torch.float64),
    "float": lambda entry: _as(entry, torch.float32),
    "to": _to,
    "sum": _sum,
    "mean": _mean,
    "ones_like": lambda entry, **options: torch.ones(entry.shape, **{"dtype": entry.dtype, **options}),
}
_FORM = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.__len__}
_FORM |= {Tensor.element_size}
_ATTRIBUTES = [vars(torch._C.TensorBase).get(name) for name in ("shape", "dtype", "ndim", "device", "requires_grad")]


def product(*paths: str) -> Term:
    """The term that is the product of these entries.

    Example:
        >>> product("shared/w", "num_samples")
        ('num_samples', 'shared/w')
    """
    return tuple(sorted(paths))


def hidden(spec: Mapping[str, tuple[Sequence[int], torch.dtype]], source: Source) -> dict[str, Any]:
    """Hidden entries as nested dictionaries.

    Args:
        spec: shapes ``(clients, ...)`` and dtypes by path, as :func:`perfed.codec.flatten` names entries.
        source: knows their sums.
    """
    tree: dict[str, Any] = {}
    for path, (shape, dtype) in spec.items():
        *parts, name = split_path(path.removesuffix(f"/{EMPTY}"))
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[name] = {} if path.endswith(EMPTY) else Hidden.of(path, shape, dtype, source)
    return tree


class FixedPoint:
    """Numbers as multiples of ``2^-bits`` in int64: their sums are exact, whatever the order, modulo ``2^64``.

    Args:
        bits: binary digits behind the point.
        parts: how many numbers are added at most.

    Example:
        >>> numbers = FixedPoint(bits=24, parts=3)
        >>> whole = numbers.encoded(torch.tensor([0.1, -2.5], dtype=torch.float64), "w")
        >>> numbers.decoded(whole).sub(torch.tensor([0.1, -2.5], dtype=torch.float64)).abs().max().item() <= 2**-25
        True
    """

    def __init__(self, bits: int, parts: int) -> None:
        self.bits, self.parts = bits, parts

    @property
    def largest(self) -> float:
        """Of the magnitude of one number, so that a sum of ``parts`` of them stays within int64."""
        return float(2.0 ** (_RANGE - self.bits) / self.parts)

    def encoded(self, x: Tensor, what: str) -> Tensor:
        """``x`` (float64) rounded to the nearest multiple, int64.

        Raises:
            PerfedError: a value that is not finite, or too large; names ``what``.
        """
        worst = float(x.abs().amax()) if x.numel() else 0.0
        if not worst <= self.largest:  # nor NaN
            raise PerfedError(
                f"secure aggregation: '{what}' holds {worst:.6g}; at most {self.largest:.6g} fits into a sum of "
                f"{self.parts} (fewer secure_aggregation.bits allow more)"
            )
        return (x * 2.0**self.bits).round().long()

    def decoded(self, x: Tensor) -> Tensor:
        """The numbers that ``x`` (int64) stands for, float64."""
        return x.double() / 2.0**self.bits


class CountedSums:
    """Sums of replies that are here, by the same fixed-point numbers as those of replies that are masked.

    Args:
        content: the replies, stacked: nested dictionaries of tensors ``(clients, ...)``.
        numbers: how values are rounded.

    Attributes:
        asked: the terms whose sums were asked for, in order.
    """

    def __init__(self, content: Tree, numbers: FixedPoint) -> None:
        self._entries = dict(leaves(content))
        self._numbers = numbers
        self.asked: dict[Term, None] = {}

    def total(self, term: Term) -> Tensor:
        """``sum_i`` of the products, float64."""
        self.asked[term] = None
        return self._numbers.decoded(self.encoded(term).sum(0))

    def encoded(self, term: Term) -> Tensor:
        """The products of each client ``(clients, ...)``, int64."""
        return self._numbers.encoded(multiplied([self._entries[path] for path in term]), " x ".join(term))


class KnownSums:
    """Sums that are known, by term."""

    def __init__(self, totals: Mapping[Term, Tensor]) -> None:
        self._totals = totals

    def total(self, term: Term) -> Tensor:
        """``sum_i`` of the products, float64.

        Raises:
            PerfedError: nobody has summed that.
        """
        if term not in self._totals:
            raise PerfedError(f"secure aggregation: sites were not asked for the sum of {' x '.join(term)}")
        return self._totals[term]


def multiplied(factors: Sequence[Tensor]) -> Tensor:
    """The product of tensors that have their first axes in common, float64."""
    widest = max(factor.ndim for factor in factors)
    result = torch.ones((), dtype=torch.float64)
    for factor in factors:
        result = result * factor.double().reshape(*factor.shape, *([1] * (widest - factor.ndim)))
    return result
