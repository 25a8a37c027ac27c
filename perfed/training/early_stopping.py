"""The number of epochs that suffices for each client, from held-out samples or from its training loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from perfed import rng
from perfed.training.batches import IntArray, Samples
from perfed.training.cohort import Cohort

_CHECKS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100)
_HELD_OUT = 0.25
_PATIENCE = 3
_DEFAULT = 10
_BLOCK, _MOST, _GAIN = 5, 100, 0.01


def hold_out(cohort: Cohort) -> tuple[Samples, Samples]:
    """Split each client's training samples into a remaining and a held-out part.

    The held-out part is a quarter of each class (of all samples, for regression), selected by key; a class with one
    sample is not split. A client's validation split is not used, so that it remains unseen by choices made with this
    part.

    Returns:
        The remaining and the held-out samples.
    """
    train = cohort.samples()
    values = train.y.is_floating_point()
    labels: IntArray = np.zeros(len(train.y), np.int64) if values else train.y.cpu().numpy()
    keys = cohort.key("hold out")
    remaining, held_out = [], []
    for row, (start, count) in enumerate(zip(train.starts, train.counts, strict=True)):
        positions = np.arange(start, start + count)
        draw = rng.random_bits(keys[row], int(count)).cpu().numpy()
        is_held_out = _select_quarter_of_classes(labels[start : start + count], draw)
        remaining.append(positions[~is_held_out])
        held_out.append(positions[is_held_out])
    return train.select(remaining), train.select(held_out)


def _select_quarter_of_classes(labels: IntArray, draw: IntArray) -> NDArray[np.bool_]:
    selected = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.nonzero(labels == label)[0]
        number = min(int(len(members) * _HELD_OUT + 0.5), len(members) - 1)
        selected[members[np.argsort(draw[members], kind="stable")][:number]] = True
    return selected


def choose_epochs(train: Callable[[int], None], score: Callable[[], Tensor], limit: int) -> IntArray:
    """Return the number of epochs after which each client's held-out score was lowest; at most ``limit``.

    Scores are computed after 1, 2, 3, 5, 7, 10, 15, 20, 30, ... epochs; a client stops when its last three scores did
    not improve.

    Args:
        train: ``train(epochs)`` trains all clients on their remaining samples for that many more epochs.
        score: returns the held-out score of each client, ``(n,)``; lower is better, NaN for a client without held-out
            samples, which then trains for 10 epochs.
        limit: the largest number of epochs.
    """
    checks = [epochs for epochs in _CHECKS if epochs < limit] + [limit]
    best, lowest = np.zeros(0, dtype=np.int64), np.zeros(0)
    trained_epochs = 0
    for check, epochs in enumerate(checks):
        train(epochs - trained_epochs)
        trained_epochs = epochs
        scores = score().cpu().double().nan_to_num(nan=float("inf")).numpy()
        if check == 0:
            best, lowest = np.zeros(len(scores), dtype=np.int64), np.full(len(scores), np.inf)
        # Each client stops by its own patience, independently of the other clients in the stack.
        better = (check - 1 - best < _PATIENCE) & (scores < lowest)
        best, lowest = np.where(better, check, best), np.where(better, scores, lowest)
        if (check - best >= _PATIENCE).all():
            break
    epochs_by_client: IntArray = np.array(checks, dtype=np.int64)[best]
    epochs_by_client[~np.isfinite(lowest)] = min(_DEFAULT, limit)
    return epochs_by_client


def train_until_converged(cohort: Cohort, fit: Callable[..., None], active: NDArray[np.bool_]) -> None:
    """Train clients five epochs at a time, until five more reduce a client's mean training loss by less than 0.01.

    Args:
        cohort: the cohort whose training losses are used.
        fit: ``fit(epochs=epochs)`` trains every client for that many more epochs, ``(n,)``.
        active: ``(n,)``, whether to train each client, for at most 100 epochs.
    """
    previous_loss = np.full(cohort.n, np.inf)
    for _ in range(_MOST // _BLOCK):
        if not active.any():
            break
        steps_before, loss_sum = cohort.steps_done, cohort.train_loss.nan_to_num() * cohort.steps_done
        fit(epochs=_BLOCK * active.astype(np.int64))
        loss = ((cohort.train_loss * cohort.steps_done - loss_sum) / (cohort.steps_done - steps_before)).numpy()
        active = active & (loss < previous_loss - _GAIN)  # false for clients that did not train, whose loss is NaN
        previous_loss = loss
