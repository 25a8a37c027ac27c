"""The Wasserstein distance of :mod:`perfed.divergence` for training: many sets of rows of one tensor, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from perfed.divergence import CUT, inverse_root

# Microseconds that one more batched decomposition costs, however few matrices it has.
_BUCKET_COST = 400.0

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Sets:
    """Which rows of one tensor form which set, prepared for :func:`gaussian_w2_sets`; sets by decreasing size.

    Every set has slots for its rows, one behind the other. Sets of similar sizes form a bucket and have equally many
    slots, where one batched decomposition of padded matrices costs less than several without padding.

    Attributes:
        members, offsets: rows of all sets, one set behind the other, and where each set begins.
        slots: ``(slots,)`` row in each slot; any row where padded.
        owner: ``(slots,)`` set of each slot.
        place: ``(rows,)`` slot of each row; 0 for rows of no set.
        present: ``(rows, 1)`` 0 for rows of no set, else 1; ``None`` if there are none.
        mask: ``(slots, 1)`` 0 for padding, else 1; ``None`` if there is none.
        size, rest: ``(sets,)`` rows n of each set, and n - 1 (1 for n = 1).
        buckets: first set, number of sets, slots per set, first slot; and each set's rows if they are not all alike.
    """

    members: Tensor
    offsets: Tensor
    slots: Tensor
    owner: Tensor
    place: Tensor
    present: Tensor | None
    mask: Tensor | None
    size: Tensor
    rest: Tensor
    buckets: tuple[tuple[int, int, int, int, Tensor | None], ...]

    @classmethod
    def of(cls, rows: IntArray, counts: IntArray, used: NDArray[np.bool_], like: Tensor) -> Sets:
        """Prepare.

        Args:
            rows: ``(sets, longest)``; entries beyond ``counts`` are ignored.
            counts: rows of each set, at least 1, in decreasing order.
            used: any shape, one entry per row of the tensor: whether it is in a set.
            like: dtype and device.
        """
        runs = _buckets(counts)
        padded = np.repeat([size for _, _, size in runs], [number for _, number, _ in runs])
        begin = np.cumsum(padded) - padded
        owner = np.repeat(np.arange(len(counts)), padded)
        within = np.arange(len(owner)) - begin[owner]
        real = within < counts[owner]
        slots = rows[owner, within]
        place = np.zeros(used.size, dtype=np.int64)
        place[slots[real]] = np.nonzero(real)[0]

        def tensor(array: NDArray[Any], to: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(array).to(device=like.device, dtype=to)

        buckets = []
        for first, number, size in runs:
            mine = counts[first : first + number]
            buckets.append((first, number, size, int(begin[first]), None if mine[-1] == size else tensor(mine)))
        return cls(
            members=tensor(slots[real]),
            offsets=tensor(np.cumsum(counts) - counts),
            slots=tensor(slots),
            owner=tensor(owner),
            place=tensor(place),
            present=None if used.all() else tensor(used.reshape(-1, 1), like.dtype),
            mask=None if real.all() else tensor(real[:, None], like.dtype),
            size=tensor(counts, like.dtype),
            rest=tensor(np.maximum(counts - 1, 1), like.dtype),
            buckets=tuple(buckets),
        )


def _buckets(counts: IntArray) -> list[tuple[int, int, int]]:
    """Runs of sets treated together: first set, number of sets, slots per set.

    Sets of 1, 2 and 3 rows are not padded, because they need no decomposition.
    """
    sizes, numbers = (a[::-1].tolist() for a in np.unique(counts, return_counts=True))
    runs: list[tuple[int, int, int]] = []
    first, extra = 0, 0.0
    for size, number in zip(sizes, numbers, strict=True):
        extra += 0.0 if not runs else number * (_eigh_cost(runs[-1][2]) - _eigh_cost(size))
        if runs and size > 3 and extra < _BUCKET_COST:
            runs[-1] = (runs[-1][0], runs[-1][1] + number, runs[-1][2])
        else:
            runs.append((first, number, size))
            extra = 0.0
        first += number
    return runs


def _eigh_cost(size: int) -> float:
    """Microseconds per matrix, with the products around the decomposition."""
    return 0.5 + 0.06 * size * size


def gaussian_w2_sets(z: Tensor, sets: Sets, mean: Tensor, std: float = 1.0) -> Tensor:
    """:func:`gaussian_w2` between N(mean, std^2 I) and sets of rows of one tensor: the fast form for training.

    One pass computes value and gradient. No gradient flows to ``mean``, and there is no second derivative.

    Args:
        z: ``(rows, k)``.
        sets: see :meth:`Sets.of`.
        mean: ``(sets, k)``.
        std: of the Gaussian.

    Returns:
        ``(sets,)``.

    Example:
        >>> sets = Sets.of(np.array([[0, 1]]), np.array([2]), np.ones(2, dtype=bool), torch.zeros(1))
        >>> round(float(gaussian_w2_sets(torch.tensor([[0.0], [2.0]]), sets, torch.tensor([[1.0]]))), 4)
        0.1716
    """
    value: Tensor = _SetsW2.apply(z, sets, mean, std)  # type: ignore[no-untyped-call]
    return value


class _SetsW2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, sets: Sets, mean: Tensor, std: float) -> Tensor:
        centre = F.embedding_bag(sets.members, z, sets.offsets, mode="sum").div_(sets.size[:, None])
        x = z.index_select(0, sets.slots).sub_(centre.index_select(0, sets.owner))
        if sets.mask is not None:
            x.mul_(sets.mask)
        scatter = x.new_zeros(len(sets.size)).index_add_(0, sets.owner, x.square().sum(1))
        # Of rows that are all alike only rounding is left, which has no direction.
        alike = scatter <= centre.square().sum(1) * sets.size * (4 * torch.finfo(x.dtype).eps) ** 2
        scatter.masked_fill_(alike, 0)
        x.masked_fill_(alike.index_select(0, sets.owner)[:, None], 0)
        norm, polar = _polar_of_sets(x, scatter, sets)
        off = centre.sub_(mean)
        root = sets.rest.sqrt()
        value = (
            off.square().sum(1).add_(scatter / sets.rest).add_(norm / root, alpha=-2 * std).add_(std * std * z.shape[1])
        )
        # d/dx: 2 off / n + 2 x / (n - 1) - 2 std polar / sqrt(n - 1), and padded slots are never read.
        factors = torch.stack([2 / sets.rest, -2 * std / root], dim=1).index_select(0, sets.owner)
        grad = off.mul_((2 / sets.size)[:, None]).index_select(0, sets.owner)
        ctx.grad = grad.addcmul_(x, factors[:, :1]).addcmul_(polar, factors[:, 1:])
        ctx.sets = sets
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sets: Sets = ctx.sets
        slots = ctx.grad * grads[0].index_select(0, sets.owner)[:, None]
        grad: Tensor = slots.index_select(0, sets.place)
        return (grad if sets.present is None else grad.mul_(sets.present)), None, None, None


def _polar_of_sets(x: Tensor, scatter: Tensor, sets: Sets) -> tuple[Tensor, Tensor]:
    """Nuclear norm ``(sets,)`` of each set's centred rows ``x (slots, k)``, and the polar factors in the same slots."""
    norm, polar = torch.zeros_like(scatter), torch.empty_like(x)
    k = x.shape[1]
    for first, number, size, slot, counts in sets.buckets:
        part = x[slot : slot + number * size].view(number, size, k)
        out = polar[slot : slot + number * size].view(number, size, k)
        if size == 1:
            out.zero_()
        elif size == 2:
            root = scatter[first : first + number].sqrt()
            norm[first : first + number] = root
            torch.div(part, root.clamp_min(torch.finfo(x.dtype).tiny)[:, None, None], out=out)
        elif size > k:
            value, inverse = inverse_root(part.transpose(1, 2) @ part, None)
            norm[first : first + number] = value
            torch.bmm(part, inverse, out=out)
        else:
            gram = torch.bmm(part, part.transpose(1, 2))
            value, inverse = _inverse_root_3(gram) if size == 3 else inverse_root(gram, counts, centred=True)
            norm[first : first + number] = value
            torch.bmm(inverse, part, out=out)
    return norm, polar


def _inverse_root_3(gram: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`~perfed.divergence.inverse_root` for Gram matrices of three centred rows, whose rank is at most 2.

    With a, b the two singular values, t = a^2 + b^2 and d = a b: G^(1/2) = (G + d P) / (a + b) and
    G^(-1/2) = ((a + b) P - G^(1/2)) / d on the complement P of (1, 1, 1), where the centred rows are.
    """
    t = gram.diagonal(dim1=1, dim2=2).sum(1)
    d = ((t * t - gram.square().sum((1, 2))) / 2).clamp_min(0).sqrt()
    # b / a <= cut: as if of rank one
    flat = d <= CUT * t
    total = torch.where(flat, t, t + 2 * d).sqrt()
    tiny = torch.finfo(gram.dtype).tiny
    safe = total.clamp_min(tiny)
    scale = torch.where(flat, 0.0, -1 / (safe * d.clamp_min(tiny)))
    diagonal = torch.where(flat, 1 / safe, safe / d.clamp_min(tiny) - 1 / safe)
    inverse = gram * scale[:, None, None]
    inverse.diagonal(dim1=1, dim2=2).add_(diagonal[:, None])
    return total, inverse
