"""The samples of each class in mini-batches, for FLIC's distances to the anchors and samples of the anchors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.methods.flic.fast_w2 import Sets
from perfed.training.batches import IntArray


@dataclass(frozen=True)
class ClassMembers:
    """The samples of each (client, class) pair of a mini-batch, gathered to the front.

    Attributes:
        rows: ``(pairs, longest of the block)`` positions in the flattened mini-batch; padded with the pair's own
            first one: 0 times what another client has is no 0 where that has overflowed.
        counts: ``(pairs,)`` samples of each pair, in decreasing order, all at least 1 (numpy, on the host).
        client: ``(pairs,)`` position of the active client.
        label: ``(pairs,)`` class.
        sets: the same pairs as :func:`perfed.methods.flic.fast_w2.gaussian_w2_sets` wants them.
    """

    rows: Tensor
    counts: IntArray
    client: Tensor
    label: Tensor
    sets: Sets


def class_members(labels: Tensor, valid: NDArray[np.bool_], num_classes: int, like: Tensor) -> list[ClassMembers]:
    """Group mini-batches by client and class, step by step.

    Args:
        labels: class of every sample, ``(steps, clients, width)``.
        valid: the same shape, False for padding (numpy, on the host).
        num_classes: how many there are.
        like: dtype and device.
    """
    widths = valid.sum(2).max(1)
    found = _padded(labels, valid, num_classes)
    steps, clients, _ = found.shape
    order = np.argsort(found, axis=2, kind="stable")
    cell = np.arange(steps * clients).reshape(steps, clients, 1) * (num_classes + 1) + found
    counts = np.bincount(cell.ravel(), minlength=steps * clients * (num_classes + 1))
    counts = counts.reshape(steps, clients, num_classes + 1)
    starts = np.cumsum(counts, axis=2) - counts
    step, client, label = np.nonzero(counts[:, :, :num_classes])
    size = counts[step, client, label]
    ranked = np.argsort(step * labels.shape[2] - size, kind="stable")  # larger first within a step
    step, client, label, size = step[ranked], client[ranked], label[ranked], size[ranked]
    position = np.arange(int(size.max(initial=1)))
    inside = position < size[:, None]
    slot = np.where(inside, starts[step, client, label][:, None] + position, starts[step, client, label][:, None])
    rows = client[:, None] * widths[step][:, None] + order[step[:, None], client[:, None], slot]
    number = np.bincount(step, minlength=steps)

    def per_step(array: IntArray) -> tuple[Tensor, ...]:
        return torch.from_numpy(array).to(like.device).split_with_sizes(number.tolist())

    pairs = zip(
        per_step(rows),
        np.split(size, np.cumsum(number)[:-1]),
        *(per_step(array) for array in (client, label)),
        Sets.of(step, rows, size, clients * widths, like),
        strict=True,
    )
    return [ClassMembers(*of_step) for of_step in pairs]


@dataclass(frozen=True)
class ClassSlots:
    """The classes of each mini-batch, side by side: ``(steps, clients, slots)``.

    Attributes:
        label: class, ascending; 0 in unused slots.
        held: whether the slot is used.
    """

    label: Tensor
    held: Tensor


def class_slots(labels: Tensor, valid: NDArray[np.bool_], num_classes: int) -> ClassSlots:
    """The classes that occur in each mini-batch; arguments as for :func:`class_members`."""
    found = _padded(labels, valid, num_classes)
    steps, clients, _ = found.shape
    present = np.zeros((steps, clients, num_classes + 1), dtype=bool)
    np.put_along_axis(present, found, True, axis=2)
    number = np.cumsum(present[:, :, :num_classes], axis=2)
    step, client, label = np.nonzero(present[:, :, :num_classes])
    slot = number[step, client, label] - 1
    table = np.zeros((steps, clients, int(slot.max(initial=0)) + 1), dtype=np.int64)
    held = np.zeros(table.shape, dtype=bool)
    table[step, client, slot], held[step, client, slot] = label, True
    return ClassSlots(torch.from_numpy(table).to(labels.device), torch.from_numpy(held).to(labels.device))


def _padded(labels: Tensor, valid: NDArray[np.bool_], num_classes: int) -> IntArray:
    """Labels on the host; ``num_classes`` for padding."""
    return np.where(valid, labels.cpu().numpy(), num_classes)
