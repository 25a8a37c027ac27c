"""Anchors of classes, or of groups of classes: FLIC's alignment and calibration for classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perfed import rng
from perfed.methods.flic.class_batches import ClassMembers, class_members, class_slots
from perfed.methods.flic.covariance import Covariance
from perfed.methods.flic.distances import Distance, Noise
from perfed.methods.flic.mixture import clustered, nearest
from perfed.model.chain import EMBEDDING
from perfed.training.batches import Block, Samples
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step

_DRAW_BYTES = 16 << 20

Values = Mapping[str, Tensor]
"""What there is of the anchors: ``mean``, and ``factor`` where covariances are learnt."""


@dataclass(frozen=True)
class ClassAnchors:
    """Gaussian anchors of classes, or of groups of classes (meta-classes; the paper's section 3).

    The classifier's loss on samples of a group's anchor is that of its classes together,
    ``-log sum_{c in group} p_c``: the paper does not say it, and a group of one class has its cross-entropy.

    Attributes:
        values: as the clients received them, ``mean`` ``(n, entries, k)``. Those of class (or group) c are the entries
            c K to c K + K - 1, its modes.
        group: number of each class's group ``(C,)`` int64; ``None``: every class is its own.
        modes: K, Gaussians of each class's anchor.
        covariance: how the covariances are kept.
        samples: J, of an entry in the calibration.
        distance: the alignment's.
    """

    values: Values
    group: Tensor | None
    modes: int
    covariance: Covariance
    samples: int
    distance: Distance

    @property
    def entries(self) -> int:
        """How many Gaussians there are."""
        return self.values["mean"].shape[1]

    def distances(self, z: Tensor, y: Tensor) -> Tensor:
        """``|z - m|^2`` of ``z`` ``(n, m, k)`` to the (nearest) mean of the anchor of each label: ``(n, m)``."""
        entry, k = self._modes_of(self._class_of(y)), z.shape[2]
        target = self.values["mean"].gather(1, entry.flatten(1)[:, :, None].expand(-1, -1, k)).view(*entry.shape, k)
        return (z[:, :, None] - target).square().sum(3).amin(2)

    def alignment(self) -> Penalty:
        """The distances between each client's mini-batch and its anchors, summed over classes."""

        def value(step: Step) -> Tensor:
            z = step.output(EMBEDDING).flatten(0, 1)
            members = self._members(step, z)
            values = {name: step.select_rows(tensor) for name, tensor in self.values.items()}
            anchors = self.covariance.gaussians(values, (members.client, members.label))
            distance = self.distance.between(z, members, anchors, _noise(step.keys, members, z))
            if self.modes > 1:
                distance = distance * self._shares(members, [members], z)
            return z.new_zeros(len(step.rows)).index_add(0, members.client, distance)

        return value

    def calibration(self, step: Step) -> Tensor:
        """``sum_c mean_j l(c, g[Z_cj])`` over the classes of the mini-batch, ``Z_cj ~ anchor_c``; ``(clients,)``."""
        draws: _Draws = step.block.compute_once("draws", lambda: _Draws(step, self))
        z, labels, weight = draws.at(step)
        losses = self._losses(step.apply_after(EMBEDDING, z).flatten(0, 1), labels)
        return (losses.view(weight.shape) * weight).sum(1)

    # The anchors' own step ---------------------------------------------------------------------------------

    def held(self, cohort: Cohort) -> Tensor:
        """Whether a client has a sample of each entry, ``(n, entries)``."""
        if self.modes == 1:
            return self._grouped(cohort.class_counts[:, :, None])[:, :, 0] > 0
        place = cohort.client_of(cohort.samples()) * self.entries + self._entries(cohort)
        return place.bincount(minlength=cohort.n * self.entries).view(cohort.n, -1) > 0

    def pull(self, cohort: Cohort) -> Callable[[Values, int], dict[str, Tensor]]:
        """Gradient of the alignment in the anchors' values, for the embedding as it is now, in step ``count``.

        Samples come in parts where the distance says so; modes and parts weigh by their shares of a class's samples.
        Under ``[privacy]`` the gradients of a client whose embedding is not finite are NaN, so that its change counts
        as not finite; an error would depend on the client's rows.

        Raises:
            ClientsDiverged: the embedding of a client is not finite, without ``[privacy]``.
        """
        if self.distance.centres and self.covariance.kind == "fixed" and self.modes == 1:
            centres = self._centres(cohort)
            return lambda values, count: {"mean": 2 * (values["mean"] - centres)}
        z, private = cohort.features(EMBEDDING).detach(), cohort.discreet and cohort.n == 1
        bad = torch.nonzero(~torch.isfinite(z.square().sum(1))).flatten()
        if len(bad) and private:
            return lambda values, count: _nan_gradients(values)
        if len(bad):
            raise cohort.make_divergence_error(
                int(cohort.client_of(cohort.samples())[bad[0]]), "the distance to the anchors"
            )
        parts = self._parts(cohort, z)
        shares = [self._shares(members, [m for _, m in parts], z) for z, members in parts]

        def gradient(values: Values, count: int) -> dict[str, Tensor]:
            leaves = _leaves(values)
            sums = []
            for number, ((z, members), share) in enumerate(zip(parts, shares, strict=True)):
                anchors = self.covariance.gaussians(leaves, (members.client, members.label))
                noise = _noise(cohort.key("anchor draws", count, number), members, z)
                sums.append((share * self.distance.between(z, members, anchors, noise)).sum())
            return _gradients(torch.stack(sums).sum(), leaves)

        def private_gradient(values: Values, count: int) -> dict[str, Tensor]:
            try:
                return gradient(values, count)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                return _nan_gradients(values)

        return private_gradient if private else gradient

    def push(self, cohort: Cohort, values: Values, count: int) -> dict[str, Tensor]:
        """Gradient of ``sum_c mean_j l(c, g[Z_cj])`` in the anchors' values, with the samples of step ``count``."""
        n, entries, k = values["mean"].shape
        keys = cohort.key("anchor step", count)
        noise = rng.normal(keys, entries * self.samples * k, values["mean"].dtype).view(n, entries, -1, k)
        leaves = _leaves(values)
        z = self.covariance.gaussians(leaves, ()).drawn(noise).flatten(1, 2)
        logits = cohort.apply_after(EMBEDDING, z, params=cohort.received, turn=count)
        labels = torch.arange(entries, device=z.device).repeat_interleave(self.samples).repeat(n)
        losses = self._losses(logits.flatten(0, 1), labels).sum()
        return _gradients(losses / (self.samples * self.modes), leaves)

    def _centres(self, cohort: Cohort) -> Tensor:
        """Mean embedding of each class's samples, ``(n, entries, k)``; zero where there are none."""
        means = cohort.class_means(EMBEDDING)
        if self.group is None:
            return means
        counts = cohort.class_counts[:, :, None]
        return self._grouped(counts * means) / self._grouped(counts).clamp_min(1)

    def _parts(self, cohort: Cohort, z: Tensor) -> list[tuple[Tensor, ClassMembers]]:
        """Return all samples, embedded as ``z``, in parts of so many rows of each client, each with its sets."""
        samples = cohort.samples()
        entry, longest = self._entries(cohort), int(samples.counts.max())
        size = min(self.distance.part or longest, longest)
        found = []
        for begin in range(0, longest, size):
            position = np.arange(begin, min(begin + size, longest))
            valid = position < samples.counts[:, None]
            index = torch.from_numpy(np.where(valid, samples.starts[:, None] + position, 0)).to(z.device)
            (members,) = class_members(entry[index][None], valid[None], self.entries, z)
            found.append((z[index].flatten(0, 1), members))
        return found

    # Which samples belong to which entry -------------------------------------------------------------------

    def divided(self, cohort: Cohort, samples: Samples) -> Samples:
        """``samples`` with the entry that each is to be aligned with, before there is any alignment, as mark.

        Of several modes that of its cluster, as embedded now; without marks it is the nearest in each step.
        """
        if self.modes == 1:
            return samples
        z, client, label = cohort.features(EMBEDDING, samples), cohort.client_of(samples), self._class_of(samples.y)
        entry, pair = self._modes_of(label), client * self.entries + label
        mark = entry[:, 0].clone()
        for which in pair.unique().tolist():
            rows = torch.nonzero(pair == which).flatten()
            mark[rows] += clustered(self.values["mean"][client[rows[0]], entry[rows[0]]], z[rows])
        return replace(samples, mark=mark)

    def slots(self, block: Block) -> tuple[Tensor, Tensor]:
        """Entries of the classes of each mini-batch, side by side ``(steps, clients, slots)``, and which are used."""
        found = class_slots(self._class_of(block.y), block.valid, self.entries // self.modes)
        return self._modes_of(found.label).flatten(2), found.held.repeat_interleave(self.modes, dim=2)

    def _members(self, step: Step, z: Tensor) -> ClassMembers:
        block, marks = step.block, step.marks
        if self.modes > 1 and marks is None:
            client = torch.arange(block.clients, device=z.device).repeat_interleave(step.width)
            entry = self._nearest(
                step.select_rows(self.values["mean"]), client, self._class_of(step.y).flatten(), z.detach()
            )
            valid = block.valid[None, step.at, :, : step.width]
            return class_members(entry.view(valid.shape), valid, self.entries, z)[0]

        def made() -> list[ClassMembers]:
            labels = self._class_of(block.y) if marks is None else marks[block.index]
            return class_members(labels, block.valid, self.entries, block.weight)

        found: list[ClassMembers] = block.compute_once("classes", made)
        return found[step.at]

    def _entries(self, cohort: Cohort) -> Tensor:
        """Entry of each of the cohort's samples, as embedded now, ``(total,)``."""
        samples = cohort.samples()
        label = self._class_of(samples.y)
        if self.modes == 1:
            return label
        return self._nearest(self.values["mean"], cohort.client_of(samples), label, cohort.features(EMBEDDING))

    def _nearest(self, means: Tensor, client: Tensor, label: Tensor, z: Tensor) -> Tensor:
        """Of samples ``z`` ``(rows, k)`` of these clients and classes the entries ``(rows,)``."""
        entry = self._modes_of(label)
        return entry[:, 0] + nearest(means[client[:, None], entry], z)

    def _class_of(self, y: Tensor) -> Tensor:
        """Class, or group, of labels."""
        return y if self.group is None else self.group[y]

    def _modes_of(self, label: Tensor) -> Tensor:
        """Entries of classes ``(...)``: ``(..., K)``."""
        return label.unsqueeze(-1) * self.modes + torch.arange(self.modes, device=label.device)

    def _shares(self, members: ClassMembers, everything: list[ClassMembers], like: Tensor) -> Tensor:
        """Of all samples of each set's client and class, those that are in this set: ``(sets,)``."""
        totals = like.new_zeros(like.shape[0] * self.entries)
        places = [m.client * self.entries + m.label // self.modes for m in (*everything, members)]
        counts = [torch.from_numpy(m.counts).to(like) for m in (*everything, members)]
        for place, count in zip(places[:-1], counts[:-1], strict=True):
            totals.index_add_(0, place, count)
        return counts[-1] / totals[places[-1]]

    def _grouped(self, values: Tensor) -> Tensor:
        """Sums of ``(n, C, ...)`` over the classes of each entry."""
        if self.group is None:
            return values
        return values.new_zeros(len(values), self.entries, *values.shape[2:]).index_add_(1, self.group, values)

    def _losses(self, logits: Tensor, entry: Tensor) -> Tensor:
        """Loss of each row of ``logits`` ``(rows, C)`` on the class (or group) of an entry ``(rows,)``."""
        label = entry // self.modes
        if self.group is None:
            return F.cross_entropy(logits, label, reduction="none")
        others = self.group != label[:, None]
        return -logits.log_softmax(1).masked_fill(others, -torch.inf).logsumexp(1)


def _leaves(values: Values) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_(True) for name, tensor in values.items()}


def _nan_gradients(values: Values) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in values.items()}


def _gradients(total: Tensor, leaves: Values) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def _noise(keys: Tensor, members: ClassMembers, like: Tensor) -> Noise:
    """Standard normal samples per set, from the randomness of the clients, ``(sets, samples, k)``."""

    def noise(samples: int) -> Tensor:
        own, k = rng.key(keys[members.client], "two-sample", members.label), like.shape[-1]
        return rng.normal(own, samples * k, like.dtype).view(len(members.counts), samples, k)

    return noise


class _Draws:
    """Samples of the anchors of each mini-batch's classes, made for as many steps at once as fit in memory."""

    def __init__(self, step: Step, anchors: ClassAnchors) -> None:
        self.anchors = anchors
        self.values = {name: step.select_rows(tensor) for name, tensor in anchors.values.items()}
        self.labels, self.held = anchors.slots(step.block)
        k = self.values["mean"].shape[-1]
        numbers = k * anchors.samples + (k * k if anchors.covariance.kind == "full" else 0)
        per_step = self.values["mean"].element_size() * numbers * self.labels[0].numel()
        self.room = max(1, _DRAW_BYTES // per_step)
        self.first = self.stop = 0

    def at(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Samples ``(clients, slots * J, k)``, their entries, flattened, and their weights ``(clients, slots * J)``."""
        if not self.first <= step.at < self.stop:
            self._make(step, step.at, min(step.at + self.room, len(self.labels)))
        at = step.at - self.first
        return self.z[at], self.entry[at], self.weight[at]

    def _make(self, step: Step, first: int, stop: int) -> None:
        label, samples, mean = self.labels[first:stop], self.anchors.samples, self.values["mean"]
        keys = rng.key(step.block.keys[first:stop, :, None], "calibration", label)
        noise = rng.normal(keys, samples * mean.shape[-1], mean.dtype).view(*label.shape, samples, -1)
        client = torch.arange(label.shape[1], device=label.device)[:, None]
        self.z = self.anchors.covariance.gaussians(self.values, (client, label)).drawn(noise).flatten(2, 3)
        self.entry = label.repeat_interleave(samples, dim=2).flatten(1)
        held = self.held[first:stop].to(mean.dtype)
        self.weight = held.repeat_interleave(samples, dim=2) / (samples * self.anchors.modes)
        self.first, self.stop = first, stop
