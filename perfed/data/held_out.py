"""Validation data: what clients give up of their training samples, and what of it a method does not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.data.groups import draw_positions
from perfed.data.partition.shards import make_generator
from perfed.errors import PerfedError

TUNING_FRACTION = 0.25
"""Part of the training samples that settings are chosen on where the data have no validation samples."""


def with_validation(client: Client, fraction: float, stratify: bool, seed: int) -> Client:
    """``client`` with the part ``fraction`` of its training samples as validation data, by class where ``stratify``,
    of survival by event.

    One training sample of each class remains. A client that already has validation data keeps them. Samples of one
    group stay together, at all clients; the fraction and the classes are then not exact.

    Raises:
        PerfedError: all groups of the client are drawn.
    """
    if client.split("validation") is not None:
        return client
    cut = _Cut("validation", client.id, seed, stratify, fraction)
    validation, train = _part(client.train, cut), _part(client.train, replace(cut, rest=True))
    if train is None and client.train.group is not None:
        raise _no_training_rows(client, f"a share of {fraction:g} for validation", "a smaller share")
    return client if validation is None or train is None else replace(client, train=train, validation=validation)


def fold_as_test(client: Client, fold: Sequence[int], stratify: bool, seed: int) -> Client:
    """``client`` with fold i of k of its training samples in the place of its test data, ``fold`` being ``(i, k)``.

    Its test data are not there at all, so that whatever is chosen by these folds has not seen them. Each class is
    spread evenly over the folds (of survival each event), and a class with a single sample is in none: it stays among
    the training samples. Every other sample is in one fold. Validation data stay what they are. Samples of one group
    are in one fold, which is the same at all clients; classes are then not spread evenly.

    Raises:
        PerfedError: all groups of the client are in the fold.
    """
    cut = _Fold("folds", client.id, seed, stratify, fold[0], fold[1])
    test, train = _part(client.train, cut), _part(client.train, replace(cut, rest=True))
    if train is None:  # only with groups: otherwise several folds have samples
        raise _no_training_rows(
            client, f"fold {fold[0] + 1} of {fold[1]} of the training rows", "another number of folds"
        )
    return replace(client, test=test, train=train)


def _no_training_rows(client: Client, part: str, remedy: str) -> PerfedError:
    """Return the error for a client whose groups are all in one part of its training samples."""
    assert client.train.group is not None
    number = len(torch.unique(client.train.group))
    return PerfedError(
        f"client '{client.id}': all its {number} groups are in {part}, and nothing is left to train on; {remedy}, "
        "another seed or another group helps"
    )


def scored_apart(federation: Federation, seed: int) -> Federation:
    """Each client's validation samples in two halves, by class: for the method, and for scoring in place of test data.

    The first half stays the validation data. The second, larger by one where their number is odd, is the test data of
    the federation that is returned, which has no others. Samples of one group are in the same half.
    """
    stratify = federation.task != "regression"

    def halved(client: Client) -> Client:
        held = client.split("validation")
        if held is None:
            return replace(client, test=None)
        cut = _Cut("scored apart", client.id, seed, stratify)
        return replace(client, validation=_part(held, cut), test=_part(held, replace(cut, rest=True)))

    return replace(federation, clients=tuple(halved(client) for client in federation))


def _strata(split: Split, stratify: bool) -> NDArray[np.int64]:
    labels = split.y if split.y.ndim == 1 else split.y[:, 1].long()  # of survival: whether there is an event
    return labels.cpu().numpy() if stratify else np.zeros(len(split), dtype=np.int64)


def _evenly(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Positions of the samples in random order, those of every class spread evenly over [0, 1]."""
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        position[members] = (np.arange(len(members)) + rng.uniform()) / len(members)
    return position


class _Some(Protocol):
    """Some of a client's samples."""

    @property
    def stratify(self) -> bool:
        """Whether each class is split by itself."""

    def chosen(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are meant, by their classes."""

    def chosen_groups(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their groups."""

    def __call__(self, split: Split) -> Split:
        """The samples that are meant."""


def _take_chosen(selection: _Some, split: Split) -> Split:
    if split.group is None:
        mask = selection.chosen(_strata(split, selection.stratify))
    else:
        mask = selection.chosen_groups(split.group.numpy())
    return split.take(torch.from_numpy(np.flatnonzero(mask)))


@dataclass(frozen=True)
class _Cut:
    """A random part of a client's samples, spread evenly over every class, or the rest of them.

    Attributes:
        purpose, client, seed: the key of the draw; draws of groups do not depend on the client.
        stratify: whether by class, of survival by event.
        fraction: of the samples, of which one of each class stays in the rest; ``None``: half of them, rounded down.
        rest: whether the samples are meant that are not in the part.
    """

    purpose: str
    client: str
    seed: int
    stratify: bool
    fraction: float | None = None
    rest: bool = False

    def chosen(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are meant, by their classes."""
        position = _evenly(labels, make_generator(self.seed, f"{self.purpose} of {self.client}"))
        size = len(labels) // 2
        if self.fraction is not None:
            classes = np.unique(labels)
            for label in classes:
                members = np.flatnonzero(labels == label)
                position[members[position[members].argmax()]] = np.inf
            size = min(round(self.fraction * len(labels)), len(labels) - len(classes))
        part = np.zeros(len(labels), dtype=np.bool_)
        part[np.argsort(position, kind="stable")[:size]] = True
        return ~part if self.rest else part

    def chosen_groups(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their groups."""
        part = draw_positions(groups, self.seed, self.purpose) < (0.5 if self.fraction is None else self.fraction)
        return ~part if self.rest else part

    def __call__(self, split: Split) -> Split:
        """The samples that are meant."""
        return _take_chosen(self, split)


@dataclass(frozen=True)
class _Fold:
    """Fold ``index`` of ``count`` of a client's samples, or the rest of them."""

    purpose: str
    client: str
    seed: int
    stratify: bool
    index: int
    count: int
    rest: bool = False

    def chosen(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are meant, by their classes."""
        rng, folds, first = make_generator(self.seed, f"{self.purpose} of {self.client}"), np.full(len(labels), -1), 0
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            if len(members) > 1:
                folds[members] = (first + np.arange(len(members))) % self.count
                first += len(members)  # so that folds are of one size
        part: NDArray[np.bool_] = folds == self.index
        return ~part if self.rest else part

    def chosen_groups(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their groups."""
        folds = (draw_positions(groups, self.seed, self.purpose) * self.count).astype(np.int64)
        part: NDArray[np.bool_] = folds == self.index
        return ~part if self.rest else part

    def __call__(self, split: Split) -> Split:
        """The samples that are meant."""
        return _take_chosen(self, split)


def _part(split: Split, cut: _Some) -> Split | None:
    """What ``cut`` leaves of ``split``; ``None`` for nothing."""
    if split.has_domains or (split.has_values and cut.stratify) or not split.deferred:
        part = cut(split)
        return None if len(part) == 0 else split.then(cut) if split.deferred else part
    # How many of each class there will be depends on how many there are, not on their order.
    classes = np.repeat(np.arange(len(split.held_classes)), split.held_classes)
    chosen = cut.chosen(classes if cut.stratify else np.zeros(len(split), dtype=np.int64))
    if not chosen.any():
        return None
    if not cut.stratify and not split.has_values:
        return split.then(cut)  # which classes they are depends on the order
    held = None if split.has_values else tuple(np.bincount(classes[chosen]).tolist())
    return split.then(cut, lambda facts: replace(facts, samples=int(chosen.sum()), classes=held))
