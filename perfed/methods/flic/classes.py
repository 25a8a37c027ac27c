"""Anchors of classes, or of groups of classes: FLIC's alignment and calibration for classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from perfed import rng
from perfed.maths.divergence import sample_w2
from perfed.methods.flic.class_batches import ClassMembers, class_members, class_slots
from perfed.methods.flic.fast_w2 import gaussian_w2_sets
from perfed.model.chain import EMBEDDING
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step

_DRAW_BYTES = 16 << 20


@dataclass(frozen=True)
class ClassAnchors:
    """Gaussian anchors, one for each entry: a class, or a group of classes (a meta-class; the paper's section 3).

    The classifier's loss on samples of a group's anchor is that of its classes together,
    ``-log sum_{c in group} p_c``: the paper does not say it, and a group of one class has its cross-entropy.

    Attributes:
        group: entry of each class ``(C,)`` int64; ``None``: every class has its own.
        entries: how many there are.
        scale: covariance of an anchor: this times the identity.
        samples: J, of an anchor in the calibration.
        w2: ``"closed-form"``, or ``"two-sample"`` against samples of the anchor.
    """

    group: Tensor | None
    entries: int
    scale: float
    samples: int
    w2: Literal["closed-form", "two-sample"]

    def distances(self, means: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """``|z - m|^2`` of ``z`` ``(n, m, k)`` to the mean of the entry of each label: ``(n, m)``."""
        entry = y if self.group is None else self.group[y]
        target = means.gather(1, entry[:, :, None].expand(-1, -1, z.shape[2]))
        return (z - target).square().sum(2)

    def alignment(self, means: Tensor) -> Penalty:
        """``sum_c W2^2(anchor_c, N(m_c, S_c))`` of each client's mini-batch; ``means`` is ``(n, entries, k)``."""
        std = self.scale**0.5

        def value(step: Step) -> Tensor:
            members = self._members(step)
            z = step.output(EMBEDDING).flatten(0, 1)
            target = step.of(means).flatten(0, 1).index_select(0, members.entry)
            if self.w2 == "closed-form":
                distance = gaussian_w2_sets(z, members.sets, target, std)
            else:
                rows = z[members.rows[:, : members.counts[0]]]
                noise = _noise(step, members, "two-sample", rows.shape[1], z)
                distance = sample_w2(rows, target[:, None] + std * noise, members.counts.tolist())
            return z.new_zeros(len(step.rows)).index_add(0, members.client, distance)

        return value

    def calibration(self, step: Step, means: Tensor) -> Tensor:
        """``sum_c mean_j l(c, g[Z_cj])`` over the entries of the mini-batch, ``Z_cj ~ anchor_c``; ``(clients,)``."""
        draws: _Draws = step.block.cached("draws", lambda: _Draws(step, step.of(means), self))
        z, labels, weight = draws.at(step)
        losses = self._losses(step.after(EMBEDDING, z).flatten(0, 1), labels)
        return (losses.view(weight.shape) * weight).sum(1)

    def held(self, cohort: Cohort) -> Tensor:
        """Whether a client has a sample of each entry, ``(n, entries)``."""
        return self._grouped(cohort.class_counts[:, :, None])[:, :, 0] > 0

    def centres(self, cohort: Cohort) -> Tensor:
        """Mean embedding of each entry's samples, ``(n, entries, k)``; zero where there are none."""
        means = cohort.class_means(EMBEDDING)
        if self.group is None:
            return means
        counts = cohort.class_counts[:, :, None]
        return self._grouped(counts * means) / self._grouped(counts).clamp_min(1)

    def pull(self, means: Tensor, centres: Tensor) -> Tensor:
        """Gradient of the alignment in the means: ``2 (means - centres)``."""
        return 2 * (means - centres)

    def push(self, cohort: Cohort, means: Tensor, count: int) -> Tensor:
        """Gradient of ``sum_c mean_j l(c, g[Z_cj])`` in the means, with the samples of step ``count``."""
        n, entries, k = means.shape
        keys = cohort.key("anchor step", count)
        noise = rng.normal(keys, entries * self.samples * k, means.dtype).view(n, entries, -1, k)
        v = means.detach().clone().requires_grad_(True)
        z = (v[:, :, None] + self.scale**0.5 * noise).flatten(1, 2)
        logits = cohort.after(EMBEDDING, z, params=cohort.received, turn=count)
        labels = torch.arange(entries, device=z.device).repeat_interleave(self.samples).repeat(n)
        losses = self._losses(logits.flatten(0, 1), labels).sum()
        (found,) = torch.autograd.grad(losses / self.samples, v)
        return found

    def _grouped(self, values: Tensor) -> Tensor:
        """Sums of ``(n, C, ...)`` over the classes of each entry."""
        if self.group is None:
            return values
        return values.new_zeros(len(values), self.entries, *values.shape[2:]).index_add_(1, self.group, values)

    def _losses(self, logits: Tensor, entry: Tensor) -> Tensor:
        """Loss of each row of ``logits`` ``(rows, C)`` on an entry ``(rows,)``."""
        if self.group is None:
            return F.cross_entropy(logits, entry, reduction="none")
        others = self.group != entry[:, None]
        return -logits.log_softmax(1).masked_fill(others, -torch.inf).logsumexp(1)

    def _members(self, step: Step) -> ClassMembers:
        found: list[ClassMembers] = step.block.cached(
            "classes", lambda: class_members(step.block, self.entries, self.group)
        )
        return found[step.at]


def _noise(step: Step, members: ClassMembers, purpose: str, samples: int, like: Tensor) -> Tensor:
    """Standard normal samples per (client, entry) pair of the mini-batch, ``(pairs, samples, k)``."""
    k = like.shape[-1]
    keys = rng.key(step.keys[members.client], purpose, members.label)
    return rng.normal(keys, samples * k, like.dtype).view(len(members.counts), samples, k)


class _Draws:
    """Samples of the anchors of each mini-batch's entries, made for as many steps at once as fit in memory."""

    def __init__(self, step: Step, means: Tensor, anchors: ClassAnchors) -> None:
        self.slots = class_slots(step.block, anchors.entries, anchors.group)
        self.means, self.anchors = means, anchors
        per_step = means.element_size() * means.shape[-1] * anchors.samples * self.slots.label[0].numel()
        self.room = max(1, _DRAW_BYTES // per_step)
        self.first = self.stop = 0

    def at(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Samples ``(clients, slots * J, k)``, their entries, flattened, and their weights ``(clients, slots * J)``."""
        if not self.first <= step.at < self.stop:
            self._make(step, step.at, min(step.at + self.room, len(self.slots.label)))
        at = step.at - self.first
        return self.z[at], self.labels[at], self.weight[at]

    def _make(self, step: Step, first: int, stop: int) -> None:
        label, samples, k = self.slots.label[first:stop], self.anchors.samples, self.means.shape[-1]
        keys = rng.key(step.block.keys[first:stop, :, None], "calibration", label)
        noise = rng.normal(keys, samples * k, self.means.dtype).view(*label.shape, samples, k)
        client = torch.arange(label.shape[1], device=label.device)[:, None]
        centre = self.means.flatten(0, 1)[client * self.means.shape[1] + label]
        self.z = noise.mul_(self.anchors.scale**0.5).add_(centre[:, :, :, None]).flatten(2, 3)
        self.labels = label.repeat_interleave(samples, dim=2).flatten(1)
        held = self.slots.held[first:stop].to(self.means.dtype)
        self.weight = held.repeat_interleave(samples, dim=2) / samples
        self.first, self.stop = first, stop
