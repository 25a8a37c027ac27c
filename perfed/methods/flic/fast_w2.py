"""The Wasserstein distance between Gaussians in training: many sets of rows in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.maths.divergence import refuse_second_derivative, singular_value_cutoff

# Cost of a further bucket in microseconds, even for few sets.
_BUCKET_COST = 1000.0

IntArray = NDArray[np.int64]
Array = NDArray[Any]


@dataclass(frozen=True)
class Bucket:
    """A bucket of sets of similar sizes, padded to the same number of slots and processed in one pass.

    Attributes:
        rows: ``(sets * slots,)`` row in each slot; any row for padding.
        weight: ``(sets * slots,)`` 1 / n for a set of n rows, 0 for padding.
        offsets: ``(sets,)`` first slot of each set.
        spread: ``(sets, slots, 1)`` 1 / sqrt(n - 1), 0 for padding and for a set of one row.
        pull: ``(sets, 1)`` 2 / n.
        scale: ``(sets, 1)`` 2 / sqrt(n - 1), 0 for a set of one row.
        inside: ``(sets, slots)`` 1 for the 2nd to the nth slot, 0 for the first and for padding.
        padding: ``(sets, slots)`` 1 for padding, 0 otherwise; ``None`` if there is no padding.
    """

    rows: Tensor
    weight: Tensor
    offsets: Tensor
    spread: Tensor
    pull: Tensor
    scale: Tensor
    inside: Tensor
    padding: Tensor | None


@dataclass(frozen=True)
class Sets:
    """The sets of rows of one tensor, by decreasing size, prepared for :func:`gaussian_w2_sets`.

    Attributes:
        buckets: buckets of consecutive sets.
        numbers: number of sets in each bucket.
        place: ``(rows,)`` slot of each row, counted over the slots of all buckets; 0 for rows of no set.
        owner: ``(rows,)`` set of each row; 0 for rows of no set.
        present: ``(rows,)`` 0 for rows of no set, 1 otherwise; ``None`` if every row is in a set.
    """

    buckets: tuple[Bucket, ...]
    numbers: list[int]
    place: Tensor
    owner: Tensor
    present: Tensor | None

    @classmethod
    def of(cls, step: IntArray, rows: IntArray, counts: IntArray, numbers: IntArray, like: Tensor) -> list[Sets]:
        """Return the prepared sets of several tensors, one tensor for each mini-batch step.

        Args:
            step: ``(sets,)`` number of the set's tensor, not decreasing.
            rows: ``(sets, longest)``; entries beyond ``counts`` are ignored.
            counts: rows of each set, at least 1, in decreasing order within a step.
            numbers: ``(steps,)`` rows of each tensor.
            like: a tensor whose dtype and device the result has.
        """
        bounds = np.searchsorted(step, np.arange(len(numbers) + 1))
        runs = [_plan_buckets(counts[first:stop]) for first, stop in pairwise(bounds)]
        shapes = np.array([shape for shapes_of_step in runs for shape in shapes_of_step], dtype=np.int64).reshape(-1, 2)
        padded = np.repeat(shapes[:, 1], shapes[:, 0])
        begin = np.cumsum(padded) - padded
        owner = np.repeat(np.arange(len(counts)), padded)
        within = np.arange(len(owner)) - begin[owner]
        slots = rows[owner, within]
        buckets = _make_buckets(shapes, slots, counts, owner, within, like)
        # The position of each row among the slots and sets of its own step.
        real = within < counts[owner]
        where = ((np.cumsum(numbers) - numbers)[step[owner]] + slots)[real]
        place, set_of_row, present = (np.zeros(int(numbers.sum()), dtype=np.int64) for _ in range(3))
        place[where] = (np.arange(len(owner)) - np.append(begin, len(owner))[bounds][step[owner]])[real]
        set_of_row[where] = (owner - bounds[step[owner]])[real]
        present[where] = 1
        cuts = np.cumsum([0, *(len(shapes_of_step) for shapes_of_step in runs)]).tolist()
        return [
            cls(
                tuple(buckets[first:stop]),
                shapes[first:stop, 0].tolist(),
                places,
                owners,
                None if complete else presence,
            )
            for (first, stop), complete, presence, places, owners in zip(
                pairwise(cuts),
                np.add.reduceat(present, np.cumsum(numbers) - numbers) == numbers,
                _split(present, numbers, like),
                _split(place, numbers, like, torch.int64),
                _split(set_of_row, numbers, like, torch.int64),
                strict=True,
            )
        ]


def _make_buckets(
    shapes: IntArray, slots: IntArray, counts: IntArray, owner: IntArray, within: IntArray, like: Tensor
) -> list[Bucket]:
    """Return the buckets of all steps.

    ``shapes`` has the sets and the slots per set of each bucket; the other arrays are those of :meth:`Sets.of`.
    """
    real = within < counts[owner]
    spread = np.where(counts > 1, 1 / np.sqrt(np.maximum(counts - 1, 1)), 0.0)
    lengths = shapes.prod(1)
    pieces = zip(
        _split(slots, lengths, like, torch.int64),
        _split(real / counts[owner], lengths, like),
        _split(real * spread[owner], lengths, like),
        _split(2 / counts, shapes[:, 0], like),
        _split(2 * spread, shapes[:, 0], like),
        _split(real & (within > 0), lengths, like),
        _split(~real, lengths, like),
        strict=True,
    )
    full = np.logical_and.reduceat(real, np.cumsum(lengths) - lengths).tolist()
    return [
        Bucket(
            rows=rows,
            weight=weight,
            offsets=torch.arange(0, sets * size, size, device=like.device),
            spread=spreads.view(sets, size, 1),
            pull=pull.unsqueeze(1),
            scale=scale.unsqueeze(1),
            inside=inside.view(sets, size),
            padding=None if complete else padding.view(sets, size),
        )
        for (sets, size), complete, (rows, weight, spreads, pull, scale, inside, padding) in zip(
            shapes.tolist(), full, pieces, strict=True
        )
    ]


def _split(array: Array, lengths: IntArray, like: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    return torch.from_numpy(array).to(device=like.device, dtype=dtype or like.dtype).split_with_sizes(lengths.tolist())


def _plan_buckets(counts: IntArray) -> list[tuple[int, int]]:
    """Return buckets of consecutive sets: number of sets, and slots per set, of each."""
    sizes, numbers = (a[::-1].tolist() for a in np.unique(counts, return_counts=True))
    runs: list[tuple[int, int]] = []
    extra = 0.0
    for size, number in zip(sizes, numbers, strict=True):
        extra += number * (_estimate_cost(runs[-1][1]) - _estimate_cost(size)) if runs else 0.0
        if runs and extra < _BUCKET_COST:
            runs[-1] = (runs[-1][0] + number, runs[-1][1])
        else:
            runs.append((number, size))
            extra = 0.0
    return runs


def _estimate_cost(size: int) -> float:
    """Return the estimated microseconds per matrix, including the products around the decomposition."""
    return 0.5 + 0.06 * size * size


def gaussian_w2_sets(z: Tensor, sets: Sets, mean: Tensor, std: float = 1.0) -> Tensor:
    """Return the squared 2-Wasserstein distance between N(mean, std^2 I) and the Gaussian fitted to each set of rows.

    ``|m - mean|^2 + tr S - 2 std tr S^(1/2) + k std^2`` with m the mean of the set and S its unbiased covariance (zero
    for one row). One pass computes value and gradient, finite for singular S. No gradient flows to ``mean``, and there
    is no second derivative. Source: Rakotomamonjy et al. 2024, eq. 3.

    Args:
        z: ``(rows, k)``.
        sets: the sets, from :meth:`Sets.of`.
        mean: ``(sets, k)``.
        std: standard deviation of the Gaussian.

    Returns:
        ``(sets,)``.

    Example:
        >>> step, count = np.array([0]), np.array([2])  # a set of two rows: mean 1, variance 2
        >>> (sets,) = Sets.of(step, np.array([[0, 1]]), count, count, torch.zeros(1))  # (sqrt(2) - 1)^2:
        >>> round(float(gaussian_w2_sets(torch.tensor([[0.0], [2.0]]), sets, torch.tensor([[1.0]]))), 4)
        0.1716
    """
    value: Tensor = _SetsW2.apply(z, sets, mean, std)  # type: ignore[no-untyped-call]
    return value


class _SetsW2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, sets: Sets, mean: Tensor, std: float) -> Tensor:
        results = [
            _compute_w2(z, b, m, std) for b, m in zip(sets.buckets, mean.split_with_sizes(sets.numbers), strict=True)
        ]
        value, grad = results[0] if len(results) == 1 else (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.grad, ctx.sets = grad.index_select(0, sets.place), sets
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        upstream = grads[0].index_select(0, ctx.sets.owner)
        if ctx.sets.present is not None:
            upstream.mul_(ctx.sets.present)
        return ctx.grad * upstream.unsqueeze(1), None, None, None


def _compute_w2(z: Tensor, bucket: Bucket, mean: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """Return the distances of one bucket ``(sets,)``, and their gradients in the row in each slot ``(.., k)``.

    With X the centred rows over sqrt(n - 1) and S = X^T X, the distance is |centre - mean|^2 + tr S - 2 std tr S^(1/2)
    + k std^2. The gradient without the part of the centre is X - std X S^(-1/2) times 2 / sqrt(n - 1).
    """
    sets, slots = bucket.inside.shape
    k, eps = z.shape[1], torch.finfo(z.dtype).eps
    centre = torch.embedding_bag(z, bucket.rows, bucket.offsets, False, 0, False, bucket.weight)[0]
    x = z.index_select(0, bucket.rows).view(sets, slots, k)
    x.sub_(centre.unsqueeze(1)).mul_(bucket.spread)
    turned = x.transpose(1, 2).contiguous()  # faster than a product that reads a transposed matrix
    small = slots <= k
    gram = torch.bmm(x, turned) if small else torch.bmm(turned, x)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    trace = diagonal.sum(1, keepdim=True)
    # If all rows are equal, only rounding errors remain, whose decomposition may not converge.
    noise = centre.square().sum(1, keepdim=True).mul_(((4 + slots / 8) * eps) ** 2)
    gram.masked_fill_((trace <= noise).unsqueeze(2), 0)
    if small and bucket.padding is not None:
        # A value above all eigenvalues decouples the padding.
        diagonal.addcmul_(bucket.padding, trace.add_(torch.finfo(z.dtype).tiny), value=2)
    values, vectors = torch.linalg.eigh(gram)
    if small:
        values.mul_(bucket.inside)
    top = values.amax(1, keepdim=True)
    # These are zero up to rounding, which the square root would amplify.
    values.masked_fill_(values <= top * (4 * eps), 0)
    inverse = values.rsqrt().masked_fill_(values <= top * singular_value_cutoff(z.dtype) ** 2, 0)
    factor = torch.addcmul(bucket.scale, bucket.scale, inverse, value=-std)
    matrix = torch.bmm(vectors * factor.unsqueeze(1), vectors.transpose(1, 2))
    difference = centre.sub_(mean)
    # tr S - 2 std tr S^(1/2) + k std^2 is the sum of (root - std)^2 over all k roots, most of them zero.
    value = (
        values.sqrt_()
        .sub_(std)
        .square_()
        .sum(1)
        .add_(difference.square().sum(1))
        .add_(std * std * (k - values.shape[1]))
    )
    pull = difference.mul_(bucket.pull).unsqueeze(1)
    grad = torch.baddbmm(pull, matrix, x) if small else torch.baddbmm(pull, x, matrix)
    return value, grad.view(-1, k)
