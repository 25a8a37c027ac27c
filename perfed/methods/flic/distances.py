"""FLIC's distances between anchors and the samples of their classes, each behind one setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from perfed.maths.divergence import sample_w2
from perfed.methods.flic.bures import bures_w2
from perfed.methods.flic.class_batches import ClassMembers
from perfed.methods.flic.empirical_ot import pot, transport
from perfed.methods.flic.fast_w2 import gaussian_w2_sets
from perfed.methods.flic.gaussians import Gaussians
from perfed.methods.flic.mmd import mmd

Measure = Literal["w2", "mmd", "ot", "mixture"]
Estimate = Literal["closed-form", "two-sample"]
Noise = Callable[[int], Tensor]
"""Standard normal numbers ``(sets, J, k)`` for J samples of each anchor."""


@dataclass(frozen=True)
class Distance:
    """How far samples are from their anchors.

    Attributes:
        between: of embedded samples ``(rows, k)``, which of them form sets, the sets' anchors and noise: ``(sets,)``.
        centres: whether its gradient in an anchor whose covariance is fixed is twice the way from the samples' centre.
        part: most samples of a client, of all classes and in the order in which they are stored, that the anchors' own
            step takes at once (``None``: all): a class's value is then the mean over parts, by its samples in each.
    """

    between: Callable[[Tensor, ClassMembers, Gaussians, Noise], Tensor]
    centres: bool = False
    part: int | None = None


def _rows(z: Tensor, members: ClassMembers) -> Tensor:
    return z[members.rows[:, : members.counts[0]]]


def _closed_form(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    if isinstance(anchors.factor, float) and not anchors.mean.requires_grad:
        return gaussian_w2_sets(z, members.sets, anchors.mean, anchors.factor)
    return bures_w2(_rows(z, members), members.counts.tolist(), anchors)


def _two_sample(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    rows = _rows(z, members)
    return sample_w2(rows, anchors.drawn(noise(rows.shape[1])), members.counts.tolist())


def _mmd(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise) -> Tensor:
    return mmd(_rows(z, members), members.counts.tolist(), anchors)


def _transport(z: Tensor, members: ClassMembers, anchors: Gaussians, noise: Noise, entropy: float) -> Tensor:
    rows = _rows(z, members)
    return transport(rows, anchors.drawn(noise(rows.shape[1])), members.counts.tolist(), entropy)


def distance_for(measure: Measure, w2: Estimate, entropy: float) -> Distance:
    """What the settings ``distance``, ``w2`` and ``ot_entropy`` say; optimal transport is to new samples in each step.

    Raises:
        PerfedError: a package that it needs is not installed; names the extra.
    """
    if measure == "ot":
        pot()
        return Distance(partial(_transport, entropy=entropy), part=128)
    if measure == "mmd":
        return Distance(_mmd, part=128)
    return Distance(_two_sample if w2 == "two-sample" else _closed_form, centres=True)
