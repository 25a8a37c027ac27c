"""Validation data and folds, which are split off from the training samples of clients."""

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
"""The fraction of the training samples on which settings are chosen if the data have no validation samples."""


def with_validation(client: Client, fraction: float, stratify: bool, seed: int) -> Client:
    """Return the client with a fraction of its training samples as validation data.

    At least one training sample of each class remains. A client that already has validation data is not changed.
    Samples of one group stay together at all clients; the fraction and the classes are then not exact.

    Args:
        client: the client.
        fraction: the fraction of the training samples.
        stratify: whether the same fraction is drawn from each class (for survival, from samples with and without an
            event).
        seed: the seed of the draw.

    Raises:
        PerfedError: all groups of the client are drawn.
    """
    if client.split("validation") is not None:
        return client
    cut = _Cut("validation", client.id, seed, stratify, fraction)
    validation, train = _select_part(client.train, cut), _select_part(client.train, replace(cut, complement=True))
    if train is None and client.train.group is not None:
        raise _no_training_rows(client, f"a share of {fraction:g} for validation", "a smaller share")
    return client if validation is None or train is None else replace(client, train=train, validation=validation)


def fold_as_test(client: Client, fold: Sequence[int], stratify: bool, seed: int) -> Client:
    """Return the client with fold i of k of its training samples in place of its test data; ``fold`` is ``(i, k)``.

    The original test data are removed, so that choices that are based on the folds cannot depend on them. With
    ``stratify``, each class (for survival, samples with and without an event) is divided evenly among the folds. A
    class with a single sample is in no fold and remains among the training samples; every other sample is in one fold.
    Validation data are not changed. Samples of one group are in the same fold at all clients; classes are then not
    divided evenly.

    Raises:
        PerfedError: all groups of the client are in the fold.
    """
    cut = _Fold("folds", client.id, seed, stratify, fold[0], fold[1])
    test, train = _select_part(client.train, cut), _select_part(client.train, replace(cut, complement=True))
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


def split_validation(federation: Federation, seed: int) -> Federation:
    """Return the federation with half of each client's validation samples as its test data.

    A method can then use the first half, while scores are computed on the second, which is larger by one if the number
    is odd. The original test data are removed. Classes are divided evenly; samples of one group are in the same half.
    """
    stratify = federation.task != "regression"

    def halve_validation(client: Client) -> Client:
        validation = client.split("validation")
        if validation is None:
            return replace(client, test=None)
        cut = _Cut("scored apart", client.id, seed, stratify)
        first, second = _select_part(validation, cut), _select_part(validation, replace(cut, complement=True))
        return replace(client, validation=first, test=second)

    return replace(federation, clients=tuple(halve_validation(client) for client in federation))


def _get_strata(split: Split, stratify: bool) -> NDArray[np.int64]:
    """Return the class of each sample (for survival, whether it has an event), or 0 without ``stratify``."""
    labels = split.y if split.y.ndim == 1 else split.y[:, 1].long()
    return labels.cpu().numpy() if stratify else np.zeros(len(split), dtype=np.int64)


def _draw_even_positions(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return a random position in [0, 1] for each sample; those of every class are evenly spaced."""
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        position[members] = (np.arange(len(members)) + rng.uniform()) / len(members)
    return position


class _Selection(Protocol):
    """A selection of some of a client's samples."""

    @property
    def stratify(self) -> bool:
        """Whether each class is split separately."""

    def select_samples(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their classes."""

    def select_groups(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their groups."""

    def __call__(self, split: Split) -> Split:
        """Return the selected samples."""


def _take_selected(selection: _Selection, split: Split) -> Split:
    if split.group is None:
        mask = selection.select_samples(_get_strata(split, selection.stratify))
    else:
        mask = selection.select_groups(split.group.numpy())
    return split.take(torch.from_numpy(np.flatnonzero(mask)))


@dataclass(frozen=True)
class _Cut:
    """The selection of a random part of a client's samples, or of its complement.

    Attributes:
        purpose, client, seed: the key of the draw; draws of groups do not depend on the client.
        stratify: whether classes are divided evenly (for survival, samples with and without an event).
        fraction: the fraction of the samples in the part, which leaves one sample of each class out; ``None`` for half
            of them, rounded down.
        complement: whether the samples outside of the part are selected.
    """

    purpose: str
    client: str
    seed: int
    stratify: bool
    fraction: float | None = None
    complement: bool = False

    def select_samples(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their classes."""
        position = _draw_even_positions(labels, make_generator(self.seed, f"{self.purpose} of {self.client}"))
        size = len(labels) // 2
        if self.fraction is not None:
            classes = np.unique(labels)
            for label in classes:
                members = np.flatnonzero(labels == label)
                position[members[position[members].argmax()]] = np.inf
            size = min(round(self.fraction * len(labels)), len(labels) - len(classes))
        part = np.zeros(len(labels), dtype=np.bool_)
        part[np.argsort(position, kind="stable")[:size]] = True
        return ~part if self.complement else part

    def select_groups(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their groups."""
        part = draw_positions(groups, self.seed, self.purpose) < (0.5 if self.fraction is None else self.fraction)
        return ~part if self.complement else part

    def __call__(self, split: Split) -> Split:
        """Return the selected samples."""
        return _take_selected(self, split)


@dataclass(frozen=True)
class _Fold:
    """The selection of fold ``index`` of ``count`` of a client's samples, or of its complement."""

    purpose: str
    client: str
    seed: int
    stratify: bool
    index: int
    count: int
    complement: bool = False

    def select_samples(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their classes."""
        rng, folds, first = make_generator(self.seed, f"{self.purpose} of {self.client}"), np.full(len(labels), -1), 0
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            if len(members) > 1:
                folds[members] = (first + np.arange(len(members))) % self.count
                first += len(members)  # continue with the next fold, so that all folds have the same size
        part: NDArray[np.bool_] = folds == self.index
        return ~part if self.complement else part

    def select_groups(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, from their groups."""
        folds = (draw_positions(groups, self.seed, self.purpose) * self.count).astype(np.int64)
        part: NDArray[np.bool_] = folds == self.index
        return ~part if self.complement else part

    def __call__(self, split: Split) -> Split:
        """Return the selected samples."""
        return _take_selected(self, split)


def _select_part(split: Split, cut: _Selection) -> Split | None:
    """Return the samples of ``split`` that ``cut`` selects; ``None`` if there are none."""
    if split.has_domains or (split.has_values and cut.stratify) or not split.deferred:
        part = cut(split)
        return None if len(part) == 0 else split.then(cut) if split.deferred else part
    # The number of selected samples of each class depends only on the class counts, so that nothing has to be read.
    classes = np.repeat(np.arange(len(split.held_classes)), split.held_classes)
    mask = cut.select_samples(classes if cut.stratify else np.zeros(len(split), dtype=np.int64))
    if not mask.any():
        return None
    if not cut.stratify and not split.has_values:
        return split.then(cut)  # the classes of the selected samples depend on the order, so that they must be read
    class_counts = None if split.has_values else tuple(np.bincount(classes[mask]).tolist())
    return split.then(cut, lambda facts: replace(facts, samples=int(mask.sum()), classes=class_counts))
