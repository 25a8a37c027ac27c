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
from perfed.data.partition.shards import generator

TUNING_FRACTION = 0.25
"""Part of the training samples that settings are chosen on where the data have no validation samples."""


def with_validation(client: Client, fraction: float, stratify: bool, seed: int) -> Client:
    """``client`` with the part ``fraction`` of its training samples as validation data, by class where ``stratify``,
    of survival by event.

    One training sample of each class stays. A client that comes with validation data of its own keeps them.
    """
    if client.split("validation") is not None:
        return client
    cut = _Cut(f"validation of {client.id}", seed, stratify, fraction)
    validation, train = _part(client.train, cut), _part(client.train, replace(cut, rest=True))
    return client if validation is None or train is None else replace(client, train=train, validation=validation)


def fold_as_test(client: Client, fold: Sequence[int], stratify: bool, seed: int) -> Client:
    """``client`` with fold i of k of its training samples in the place of its test data, ``fold`` being ``(i, k)``.

    Its test data are not there at all, so that whatever is chosen by these folds has not seen them. Each class is
    spread evenly over the folds (of survival each event), and a class with a single sample is in none: it stays among
    the training samples. Every other sample is in one fold. Validation data stay what they are.
    """
    cut = _Fold(f"folds of {client.id}", seed, stratify, fold[0], fold[1])
    test, train = _part(client.train, cut), _part(client.train, replace(cut, rest=True))
    assert train is not None  # of a class with several samples one is in each of several folds
    return replace(client, test=test, train=train)


def scored_apart(federation: Federation, seed: int) -> Federation:
    """Each client's validation samples in two halves, by class: for the method, and for scoring in place of test data.

    The first half stays the validation data. The second, larger by one where their number is odd, is the test data of
    the federation that is returned, which has no others.
    """
    stratify = federation.task != "regression"

    def halved(client: Client) -> Client:
        held = client.split("validation")
        if held is None:
            return replace(client, test=None)
        cut = _Cut(f"scored apart of {client.id}", seed, stratify)
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

    def __call__(self, split: Split) -> Split:
        """The samples that are meant."""


@dataclass(frozen=True)
class _Cut:
    """A random part of a client's samples, spread evenly over every class, or the rest of them.

    Attributes:
        purpose, seed: of the draw.
        stratify: whether by class, of survival by event.
        fraction: of the samples, of which one of each class stays in the rest; ``None``: half of them, rounded down.
        rest: whether the samples are meant that are not in the part.
    """

    purpose: str
    seed: int
    stratify: bool
    fraction: float | None = None
    rest: bool = False

    def chosen(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are meant, by their classes."""
        position, size = _evenly(labels, generator(self.seed, self.purpose)), len(labels) // 2
        if self.fraction is not None:
            classes = np.unique(labels)
            for label in classes:
                members = np.flatnonzero(labels == label)
                position[members[position[members].argmax()]] = np.inf
            size = min(round(self.fraction * len(labels)), len(labels) - len(classes))
        part = np.zeros(len(labels), dtype=np.bool_)
        part[np.argsort(position, kind="stable")[:size]] = True
        return ~part if self.rest else part

    def __call__(self, split: Split) -> Split:
        """The samples that are meant."""
        return split.take(torch.from_numpy(np.flatnonzero(self.chosen(_strata(split, self.stratify)))))


@dataclass(frozen=True)
class _Fold:
    """Fold ``index`` of ``count`` of a client's samples, or the rest of them."""

    purpose: str
    seed: int
    stratify: bool
    index: int
    count: int
    rest: bool = False

    def chosen(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are meant, by their classes."""
        rng, folds, first = generator(self.seed, self.purpose), np.full(len(labels), -1), 0
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            if len(members) > 1:
                folds[members] = (first + np.arange(len(members))) % self.count
                first += len(members)  # so that folds are of one size
        part: NDArray[np.bool_] = folds == self.index
        return ~part if self.rest else part

    def __call__(self, split: Split) -> Split:
        """The samples that are meant."""
        return split.take(torch.from_numpy(np.flatnonzero(self.chosen(_strata(split, self.stratify)))))


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
