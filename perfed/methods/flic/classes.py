"""Anchors of classes or groups of classes: FLIC's alignment and calibration for classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perfed import rng
from perfed.methods.flic.class_batches import ClassMembers, find_class_slots, group_by_class
from perfed.methods.flic.covariance import Covariance
from perfed.methods.flic.distances import Distance, Noise
from perfed.methods.flic.mixture import cluster_samples, find_nearest_modes
from perfed.model.chain import EMBEDDING
from perfed.training.batches import Block, Samples
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step

_DRAW_BYTES = 16 << 20

Values = Mapping[str, Tensor]
"""The values of the anchors: ``mean``, and ``factor`` if covariances are learnt."""


@dataclass(frozen=True)
class ClassAnchors:
    """Gaussian anchors of classes, or of groups of classes (meta-classes; the paper's section 3).

    The classifier's loss on samples of a group's anchor is ``-log sum_{c in group} p_c``. The paper does not define it;
    for a group of one class it is the cross-entropy.

    Attributes:
        values: the received values, ``mean`` ``(n, entries, k)``. The modes of class (or group) c are the entries c K
            to c K + K - 1.
        group: number of each class's group ``(C,)`` int64; ``None``: every class is its own group.
        modes: number K of Gaussians of each class's anchor.
        covariance: representation of the covariances.
        samples: number J of samples of an entry in the calibration.
        distance: the distance of the alignment.
    """

    values: Values
    group: Tensor | None
    modes: int
    covariance: Covariance
    samples: int
    distance: Distance

    @property
    def entries(self) -> int:
        """The number of Gaussians."""
        return self.values["mean"].shape[1]

    def distances(self, z: Tensor, y: Tensor) -> Tensor:
        """Return ``|z - m|^2`` ``(n, m)`` of ``z`` ``(n, m, k)`` to the nearest mean of the anchor of each label."""
        entry, k = self._to_entries(self._to_group(y)), z.shape[2]
        target = self.values["mean"].gather(1, entry.flatten(1)[:, :, None].expand(-1, -1, k)).view(*entry.shape, k)
        return (z[:, :, None] - target).square().sum(3).amin(2)

    def alignment(self) -> Penalty:
        """Return a penalty: the distances between each client's mini-batch and its anchors, summed over classes."""

        def value(step: Step) -> Tensor:
            z = step.output(EMBEDDING).flatten(0, 1)
            members = self._find_members(step, z)
            values = {name: step.select_rows(tensor) for name, tensor in self.values.items()}
            anchors = self.covariance.gaussians(values, (members.client, members.label))
            distance = self.distance.between(z, members, anchors, _make_noise(step.keys, members, z))
            if self.modes > 1:
                distance = distance * self._compute_shares(members, [members], z)
            return z.new_zeros(len(step.rows)).index_add(0, members.client, distance)

        return value

    def calibration(self, step: Step) -> Tensor:
        """Return ``sum_c mean_j l(c, g[Z_cj])`` ``(clients,)`` over classes of the mini-batch, ``Z_cj ~ anchor_c``."""
        draws: _Draws = step.block.compute_once("draws", lambda: _Draws(step, self))
        z, labels, weight = draws.select_step(step)
        losses = self._losses(step.apply_after(EMBEDDING, z).flatten(0, 1), labels)
        return (losses.view(weight.shape) * weight).sum(1)

    # The anchors' own step ---------------------------------------------------------------------------------

    def find_present_entries(self, cohort: Cohort) -> Tensor:
        """Return whether a client has a sample of each entry, ``(n, entries)``."""
        if self.modes == 1:
            return self._sum_groups(cohort.class_counts[:, :, None])[:, :, 0] > 0
        place = cohort.client_of(cohort.samples()) * self.entries + self._assign_entries(cohort)
        return place.bincount(minlength=cohort.n * self.entries).view(cohort.n, -1) > 0

    def pull(self, cohort: Cohort) -> Callable[[Values, int], dict[str, Tensor]]:
        """Return a function that computes the gradient of the alignment in the anchors' values, in step ``count``.

        The embedding is the current one. Samples are processed in parts if the distance has a limit; modes and parts
        are weighted by their shares of a class's samples. Under ``[privacy]`` the gradients of a client whose embedding
        is not finite are NaN, so that its change is treated as not finite; an error would depend on the client's rows.

        Raises:
            ClientsDiverged: the embedding of a client is not finite, and there is no ``[privacy]``.
        """
        if self.distance.centres and self.covariance.kind == "fixed" and self.modes == 1:
            centres = self._compute_centres(cohort)
            return lambda values, count: {"mean": 2 * (values["mean"] - centres)}
        z, private = cohort.features(EMBEDDING).detach(), cohort.discreet and cohort.n == 1
        divergent_rows = torch.nonzero(~torch.isfinite(z.square().sum(1))).flatten()
        if len(divergent_rows) and private:
            return lambda values, count: _make_nan_gradients(values)
        if len(divergent_rows):
            raise cohort.make_divergence_error(
                int(cohort.client_of(cohort.samples())[divergent_rows[0]]), "the distance to the anchors"
            )
        parts = self._split_samples(cohort, z)
        shares = [self._compute_shares(members, [m for _, m in parts], z) for z, members in parts]

        def gradient(values: Values, count: int) -> dict[str, Tensor]:
            leaves = _make_leaves(values)
            sums = []
            for number, ((z, members), share) in enumerate(zip(parts, shares, strict=True)):
                anchors = self.covariance.gaussians(leaves, (members.client, members.label))
                noise = _make_noise(cohort.key("anchor draws", count, number), members, z)
                sums.append((share * self.distance.between(z, members, anchors, noise)).sum())
            return _compute_gradients(torch.stack(sums).sum(), leaves)

        def private_gradient(values: Values, count: int) -> dict[str, Tensor]:
            try:
                return gradient(values, count)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                return _make_nan_gradients(values)

        return private_gradient if private else gradient

    def push(self, cohort: Cohort, values: Values, count: int) -> dict[str, Tensor]:
        """Return the gradient of ``sum_c mean_j l(c, g[Z_cj])`` in the anchors' values.

        The samples Z_cj are those of step ``count``.
        """
        n, entries, k = values["mean"].shape
        keys = cohort.key("anchor step", count)
        noise = rng.normal(keys, entries * self.samples * k, values["mean"].dtype).view(n, entries, -1, k)
        leaves = _make_leaves(values)
        z = self.covariance.gaussians(leaves, ()).draw_samples(noise).flatten(1, 2)
        logits = cohort.apply_after(EMBEDDING, z, params=cohort.received, turn=count)
        labels = torch.arange(entries, device=z.device).repeat_interleave(self.samples).repeat(n)
        losses = self._losses(logits.flatten(0, 1), labels).sum()
        return _compute_gradients(losses / (self.samples * self.modes), leaves)

    def _compute_centres(self, cohort: Cohort) -> Tensor:
        """Return the mean embedding of each class's samples, ``(n, entries, k)``; zero for classes without samples."""
        means = cohort.class_means(EMBEDDING)
        if self.group is None:
            return means
        counts = cohort.class_counts[:, :, None]
        return self._sum_groups(counts * means) / self._sum_groups(counts).clamp_min(1)

    def _split_samples(self, cohort: Cohort, z: Tensor) -> list[tuple[Tensor, ClassMembers]]:
        """Return all samples in parts of as many rows of each client as the distance allows.

        Each part has its rows of the embedded samples ``z`` and their sets.
        """
        samples = cohort.samples()
        entry, longest = self._assign_entries(cohort), int(samples.counts.max())
        size = min(self.distance.part or longest, longest)
        parts = []
        for begin in range(0, longest, size):
            position = np.arange(begin, min(begin + size, longest))
            valid = position < samples.counts[:, None]
            index = torch.from_numpy(np.where(valid, samples.starts[:, None] + position, 0)).to(z.device)
            (members,) = group_by_class(entry[index][None], valid[None], self.entries, z)
            parts.append((z[index].flatten(0, 1), members))
        return parts

    # Which samples belong to which entry -------------------------------------------------------------------

    def mark_samples(self, cohort: Cohort, samples: Samples) -> Samples:
        """Return ``samples`` with the entry of each as its mark, for alignment before there is any alignment.

        With one mode there are no marks. With several modes the mark is the mode of the sample's cluster under the
        current embedding; samples without marks belong to the nearest mode in each step.
        """
        if self.modes == 1:
            return samples
        z, client, label = cohort.features(EMBEDDING, samples), cohort.client_of(samples), self._to_group(samples.y)
        entry, pair = self._to_entries(label), client * self.entries + label
        mark = entry[:, 0].clone()
        for client_label in pair.unique().tolist():
            rows = torch.nonzero(pair == client_label).flatten()
            mark[rows] += cluster_samples(self.values["mean"][client[rows[0]], entry[rows[0]]], z[rows])
        return replace(samples, mark=mark)

    def slots(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return the entries of each mini-batch's classes ``(steps, clients, slots)``, and which slots are used."""
        slots = find_class_slots(self._to_group(block.y), block.valid, self.entries // self.modes)
        return self._to_entries(slots.label).flatten(2), slots.is_used.repeat_interleave(self.modes, dim=2)

    def _find_members(self, step: Step, z: Tensor) -> ClassMembers:
        """Return the sets of samples of the step's mini-batch."""
        block, marks = step.block, step.marks
        if self.modes > 1 and marks is None:
            client = torch.arange(block.clients, device=z.device).repeat_interleave(step.width)
            entry = self._find_nearest_entry(
                step.select_rows(self.values["mean"]), client, self._to_group(step.y).flatten(), z.detach()
            )
            valid = block.valid[None, step.at, :, : step.width]
            return group_by_class(entry.view(valid.shape), valid, self.entries, z)[0]

        def group_block() -> list[ClassMembers]:
            labels = self._to_group(block.y) if marks is None else marks[block.index]
            return group_by_class(labels, block.valid, self.entries, block.weight)

        members_by_step: list[ClassMembers] = block.compute_once("classes", group_block)
        return members_by_step[step.at]

    def _assign_entries(self, cohort: Cohort) -> Tensor:
        """Return the entry of each of the cohort's samples under the current embedding, ``(total,)``."""
        samples = cohort.samples()
        label = self._to_group(samples.y)
        if self.modes == 1:
            return label
        return self._find_nearest_entry(
            self.values["mean"], cohort.client_of(samples), label, cohort.features(EMBEDDING)
        )

    def _find_nearest_entry(self, means: Tensor, client: Tensor, label: Tensor, z: Tensor) -> Tensor:
        """Return the nearest entries ``(rows,)`` of samples ``z`` ``(rows, k)`` of these clients and classes."""
        entry = self._to_entries(label)
        return entry[:, 0] + find_nearest_modes(means[client[:, None], entry], z)

    def _to_group(self, y: Tensor) -> Tensor:
        """Return the class, or group, of labels."""
        return y if self.group is None else self.group[y]

    def _to_entries(self, label: Tensor) -> Tensor:
        """Return the entries of classes ``(...)``: ``(..., K)``."""
        return label.unsqueeze(-1) * self.modes + torch.arange(self.modes, device=label.device)

    def _compute_shares(self, members: ClassMembers, everything: list[ClassMembers], like: Tensor) -> Tensor:
        """Return the share of each set in all samples of its client and class, ``(sets,)``.

        ``everything`` has the sets of all samples.
        """
        totals = like.new_zeros(like.shape[0] * self.entries)
        places = [m.client * self.entries + m.label // self.modes for m in (*everything, members)]
        counts = [torch.from_numpy(m.counts).to(like) for m in (*everything, members)]
        for place, count in zip(places[:-1], counts[:-1], strict=True):
            totals.index_add_(0, place, count)
        return counts[-1] / totals[places[-1]]

    def _sum_groups(self, values: Tensor) -> Tensor:
        """Return the sums of ``(n, C, ...)`` over the classes of each entry."""
        if self.group is None:
            return values
        return values.new_zeros(len(values), self.entries, *values.shape[2:]).index_add_(1, self.group, values)

    def _losses(self, logits: Tensor, entry: Tensor) -> Tensor:
        """Return the loss of each row of ``logits`` ``(rows, C)`` on the class (or group) of an entry ``(rows,)``."""
        label = entry // self.modes
        if self.group is None:
            return F.cross_entropy(logits, label, reduction="none")
        outside = self.group != label[:, None]
        return -logits.log_softmax(1).masked_fill(outside, -torch.inf).logsumexp(1)


def _make_leaves(values: Values) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_(True) for name, tensor in values.items()}


def _make_nan_gradients(values: Values) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in values.items()}


def _compute_gradients(total: Tensor, leaves: Values) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def _make_noise(keys: Tensor, members: ClassMembers, like: Tensor) -> Noise:
    """Return a function that draws standard normal samples of each set, ``(sets, samples, k)``."""

    def noise(samples: int) -> Tensor:
        set_keys, k = rng.key(keys[members.client], "two-sample", members.label), like.shape[-1]
        return rng.normal(set_keys, samples * k, like.dtype).view(len(members.counts), samples, k)

    return noise


class _Draws:
    """Samples of the anchors of each mini-batch's classes, drawn for as many steps at once as fit in memory."""

    def __init__(self, step: Step, anchors: ClassAnchors) -> None:
        self.anchors = anchors
        self.values = {name: step.select_rows(tensor) for name, tensor in anchors.values.items()}
        self.labels, self.is_used = anchors.slots(step.block)
        k = self.values["mean"].shape[-1]
        values_per_slot = k * anchors.samples + (k * k if anchors.covariance.kind == "full" else 0)
        per_step = self.values["mean"].element_size() * values_per_slot * self.labels[0].numel()
        self.steps_at_once = max(1, _DRAW_BYTES // per_step)
        self.first = self.stop = 0

    def select_step(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return samples, their entries (flattened) and their weights for a step.

        Samples are ``(clients, slots * J, k)``, weights ``(clients, slots * J)``.
        """
        if not self.first <= step.at < self.stop:
            self._draw_steps(step, step.at, min(step.at + self.steps_at_once, len(self.labels)))
        position = step.at - self.first
        return self.z[position], self.entry[position], self.weight[position]

    def _draw_steps(self, step: Step, first: int, stop: int) -> None:
        label, samples, mean = self.labels[first:stop], self.anchors.samples, self.values["mean"]
        keys = rng.key(step.block.keys[first:stop, :, None], "calibration", label)
        noise = rng.normal(keys, samples * mean.shape[-1], mean.dtype).view(*label.shape, samples, -1)
        client = torch.arange(label.shape[1], device=label.device)[:, None]
        self.z = self.anchors.covariance.gaussians(self.values, (client, label)).draw_samples(noise).flatten(2, 3)
        self.entry = label.repeat_interleave(samples, dim=2).flatten(1)
        is_used = self.is_used[first:stop].to(mean.dtype)
        self.weight = is_used.repeat_interleave(samples, dim=2) / (samples * self.anchors.modes)
        self.first, self.stop = first, stop
