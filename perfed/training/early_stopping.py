"""How many epochs are enough: each client decides, on held-out samples of its own or by its training loss."""

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
    """Split each client's training samples into a kept and a held-out part.

    The held-out part is a quarter of each class (of all samples, for values), chosen by key; a class with one sample
    keeps it. A client's own
    validation split is not used, so that what is chosen on it has not seen it.
    """
    train = cohort.samples()
    values = train.y.is_floating_point()
    labels: IntArray = np.zeros(len(train.y), np.int64) if values else train.y.cpu().numpy()
    keys = cohort.key("hold out")
    kept, held = [], []
    for row, (start, count) in enumerate(zip(train.starts, train.counts, strict=True)):
        everything = np.arange(start, start + count)
        draw = rng.bits(keys[row], int(count)).cpu().numpy()
        chosen = _quarter_of_each_class(labels[start : start + count], draw)
        kept.append(everything[~chosen])
        held.append(everything[chosen])
    return train.select(kept), train.select(held)


def _quarter_of_each_class(labels: IntArray, draw: IntArray) -> NDArray[np.bool_]:
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        mine = np.nonzero(labels == label)[0]
        number = min(int(len(mine) * _HELD_OUT + 0.5), len(mine) - 1)
        chosen[mine[np.argsort(draw[mine], kind="stable")][:number]] = True
    return chosen


def best_epochs(train: Callable[[int], None], score: Callable[[], Tensor], limit: int) -> IntArray:
    """The number of epochs after which each client's held-out score was lowest; at most ``limit``.

    Looks after 1, 2, 3, 5, 7, 10, 15, 20, 30, ... epochs; a client stops looking when it has not improved at the last
    three looks.

    Args:
        train: ``train(epochs)`` trains all clients on their kept samples for that many more epochs.
        score: held-out score of each client, ``(n,)``; lower is better, NaN where a client holds nothing out: it
            then trains for 10 epochs.
        limit: most epochs.
    """
    looks = [epochs for epochs in _CHECKS if epochs < limit] + [limit]
    best, lowest = np.zeros(0, dtype=np.int64), np.zeros(0)
    done = 0
    for look, epochs in enumerate(looks):
        train(epochs - done)
        done = epochs
        found = score().cpu().double().nan_to_num(nan=float("inf")).numpy()
        if look == 0:
            best, lowest = np.zeros(len(found), dtype=np.int64), np.full(len(found), np.inf)
        # Each client stops looking when its own patience is over, however long others in the stack go on.
        better = (look - 1 - best < _PATIENCE) & (found < lowest)
        best, lowest = np.where(better, look, best), np.where(better, found, lowest)
        if (look - best >= _PATIENCE).all():
            break
    chosen: IntArray = np.array(looks, dtype=np.int64)[best]
    chosen[~np.isfinite(lowest)] = min(_DEFAULT, limit)
    return chosen


def until_converged(cohort: Cohort, fit: Callable[..., None], going: NDArray[np.bool_]) -> None:
    """Train clients five epochs at a time, until five more lower a client's mean training loss by less than 0.01.

    Args:
        cohort: whose losses count.
        fit: ``fit(epochs=epochs)`` trains every client for that many more epochs, ``(n,)``.
        going: ``(n,)``, the clients to train. Each has at most 100 epochs.
    """
    before = np.full(cohort.n, np.inf)
    for _ in range(_MOST // _BLOCK):
        if not going.any():
            break
        done, total = cohort.steps_done, cohort.train_loss.nan_to_num() * cohort.steps_done
        fit(epochs=_BLOCK * going.astype(np.int64))
        loss = ((cohort.train_loss * cohort.steps_done - total) / (cohort.steps_done - done)).numpy()
        going = going & (loss < before - _GAIN)  # false for those who did not train, whose loss is NaN
        before = loss
