"""Validation data: what clients give up of their training samples, and what of it a method does not see."""

from __future__ import annotations

from dataclasses import replace

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
    labels = _strata(client.train, stratify)
    position = _evenly(labels, generator(seed, f"validation of {client.id}"))
    classes = np.unique(labels)
    for label in classes:
        members = np.flatnonzero(labels == label)
        position[members[position[members].argmax()]] = np.inf
    size = min(round(fraction * len(labels)), len(labels) - len(classes))
    validation, train = _cut(client.train, position, size)
    return client if validation is None else replace(client, train=train, validation=validation)


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
        position = _evenly(_strata(held, stratify), generator(seed, f"scored apart of {client.id}"))
        own, scored = _cut(held, position, len(held) // 2)
        return replace(client, validation=own, test=scored)

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


def _cut(split: Split, position: NDArray[np.float64], size: int) -> tuple[Split | None, Split]:
    """The ``size`` samples of lowest position (``None`` if that is 0), and the others."""
    order = torch.from_numpy(np.argsort(position, kind="stable"))
    first, rest = order[:size].sort().values, order[size:].sort().values
    return split.take(first) if size else None, split.take(rest)
