"""The samples of each class in mini-batches, for FLIC's distances to the anchors and samples of the anchors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perfed.methods.flic.fast_w2 import Sets
from perfed.training.batches import Block, IntArray


@dataclass(frozen=True)
class ClassMembers:
    """The samples of each (client, class) pair of a mini-batch, gathered to the front.

    Attributes:
        rows: ``(pairs, longest of the block)`` positions in the flattened mini-batch; padded with the pair's own
            first one: 0 times what another client has is no 0 where that has overflowed.
        counts: ``(pairs,)`` samples of each pair, in decreasing order, all at least 1 (numpy, on the host).
        client: ``(pairs,)`` position of the active client.
        label: ``(pairs,)`` class.
        entry: ``(pairs,)`` place of the pair in a flattened table ``clients * classes``.
        sets: the same pairs as :func:`perfed.methods.flic.fast_w2.gaussian_w2_sets` wants them.
    """

    rows: Tensor
    counts: IntArray
    client: Tensor
    label: Tensor
    entry: Tensor
    sets: Sets


def class_members(block: Block, num_classes: int, group: Tensor | None = None) -> list[ClassMembers]:
    """Group each mini-batch of ``block``, step by step, by client and class; ``block.y`` holds class labels.

    With ``group``, the group of each label, a group counts as a class: there are ``num_classes`` of them.
    """
    labels = _labels(block, num_classes, group)
    steps, clients, _ = labels.shape
    order = np.argsort(labels, axis=2, kind="stable")
    cell = np.arange(steps * clients).reshape(steps, clients, 1) * (num_classes + 1) + labels
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
    widths = np.array(block.widths())
    rows = client[:, None] * widths[step][:, None] + order[step[:, None], client[:, None], slot]
    number = np.bincount(step, minlength=steps)

    def per_step(array: IntArray) -> tuple[Tensor, ...]:
        return torch.from_numpy(array).to(block.x.device).split_with_sizes(number.tolist())

    entry = client * num_classes + label
    pairs = zip(
        per_step(rows),
        np.split(size, np.cumsum(number)[:-1]),
        *(per_step(array) for array in (client, label, entry)),
        Sets.of(step, rows, size, clients * widths, block.weight),
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


def class_slots(block: Block, num_classes: int, group: Tensor | None = None) -> ClassSlots:
    """The classes that occur in each mini-batch of ``block``; arguments as for :func:`class_members`."""
    labels = _labels(block, num_classes, group)
    steps, clients, _ = labels.shape
    present = np.zeros((steps, clients, num_classes + 1), dtype=bool)
    np.put_along_axis(present, labels, True, axis=2)
    number = np.cumsum(present[:, :, :num_classes], axis=2)
    step, client, label = np.nonzero(present[:, :, :num_classes])
    slot = number[step, client, label] - 1
    table = np.zeros((steps, clients, int(slot.max(initial=0)) + 1), dtype=np.int64)
    held = np.zeros(table.shape, dtype=bool)
    table[step, client, slot], held[step, client, slot] = label, True
    return ClassSlots(torch.from_numpy(table).to(block.x.device), torch.from_numpy(held).to(block.x.device))


def _labels(block: Block, num_classes: int, group: Tensor | None) -> IntArray:
    """Class, or group, of every sample ``(steps, clients, width)``; ``num_classes`` for padding."""
    labels = block.y if group is None else group[block.y]
    return np.where(block.valid, labels.cpu().numpy(), num_classes)
