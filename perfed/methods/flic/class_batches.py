"""The samples of each class in mini-batches, for FLIC's distances to anchors and its samples of anchors."""

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
    """The samples of each (client, class) pair of a mini-batch, one pair per row.

    Attributes:
        rows: ``(pairs, longest of the block)`` positions in the flattened mini-batch; padded with the pair's first
            position, because 0 times a value of another client is not 0 if that has overflowed.
        counts: ``(pairs,)`` samples of each pair, in decreasing order, all at least 1 (numpy, on the host).
        client: ``(pairs,)`` position of the active client.
        label: ``(pairs,)`` class.
        sets: the same pairs in the form that :func:`perfed.methods.flic.fast_w2.gaussian_w2_sets` needs.
    """

    rows: Tensor
    counts: IntArray
    client: Tensor
    label: Tensor
    sets: Sets


def group_by_class(labels: Tensor, valid: NDArray[np.bool_], num_classes: int, like: Tensor) -> list[ClassMembers]:
    """Group the samples of mini-batches by client and class, step by step.

    Args:
        labels: class of every sample, ``(steps, clients, width)``.
        valid: the same shape, False for padding (numpy, on the host).
        num_classes: number of classes.
        like: a tensor whose dtype and device the result has.

    Returns:
        The members of each step.
    """
    widths = valid.sum(2).max(1)
    padded_labels = _pad_labels(labels, valid, num_classes)
    steps, clients, _ = padded_labels.shape
    order = np.argsort(padded_labels, axis=2, kind="stable")
    cell = np.arange(steps * clients).reshape(steps, clients, 1) * (num_classes + 1) + padded_labels
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
    return [ClassMembers(*arrays) for arrays in pairs]


@dataclass(frozen=True)
class ClassSlots:
    """The classes of each mini-batch, one per slot: ``(steps, clients, slots)``.

    Attributes:
        label: class, ascending; 0 in unused slots.
        is_used: whether the slot is used.
    """

    label: Tensor
    is_used: Tensor


def find_class_slots(labels: Tensor, valid: NDArray[np.bool_], num_classes: int) -> ClassSlots:
    """Return the classes that occur in each mini-batch; arguments are those of :func:`group_by_class`."""
    padded_labels = _pad_labels(labels, valid, num_classes)
    steps, clients, _ = padded_labels.shape
    present = np.zeros((steps, clients, num_classes + 1), dtype=bool)
    np.put_along_axis(present, padded_labels, True, axis=2)
    number = np.cumsum(present[:, :, :num_classes], axis=2)
    step, client, label = np.nonzero(present[:, :, :num_classes])
    slot = number[step, client, label] - 1
    table = np.zeros((steps, clients, int(slot.max(initial=0)) + 1), dtype=np.int64)
    is_used = np.zeros(table.shape, dtype=bool)
    table[step, client, slot], is_used[step, client, slot] = label, True
    return ClassSlots(torch.from_numpy(table).to(labels.device), torch.from_numpy(is_used).to(labels.device))


def _pad_labels(labels: Tensor, valid: NDArray[np.bool_], num_classes: int) -> IntArray:
    """Return labels on the host, with ``num_classes`` for padding."""
    return np.where(valid, labels.cpu().numpy(), num_classes)
