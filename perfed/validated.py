"""How many epochs are enough: each client decides on held-out samples of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from perfed import rng
from perfed.batches import IntArray, Samples
from perfed.cohort import Cohort

_CHECKS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100)
_HELD_OUT = 0.25
_PATIENCE = 3
_DEFAULT = 10


def hold_out(cohort: Cohort) -> tuple[Samples, Samples]:
    """Split each client's training samples into a kept and a held-out part.

    The held-out part is the client's own validation split where it has one, else a quarter of each class's training
    samples, chosen by key. A class with one sample keeps it.
    """
    samples = cohort.samples()
    keys = cohort.key("hold out")
    held = np.zeros(len(samples.y), dtype=bool)
    if any(client.validation is None for client in cohort.clients):
        labels = samples.y.cpu().numpy()
        for client, (start, count) in enumerate(zip(samples.starts, samples.counts, strict=True)):
            draw = rng.bits(keys[client], int(count)).cpu().numpy()
            for label in np.unique(labels[start : start + count]):
                mine = np.nonzero(labels[start : start + count] == label)[0]
                chosen = mine[np.argsort(draw[mine], kind="stable")][: int(len(mine) * _HELD_OUT + 0.5)]
                held[start + chosen[: len(mine) - 1]] = True
        return _select(samples, ~held), _select(samples, held)
    return samples, cohort.samples("validation")


def _select(samples: Samples, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Samples:
    counts = np.array([chosen[a : a + n].sum() for a, n in zip(samples.starts, samples.counts, strict=True)])
    index = torch.from_numpy(np.nonzero(chosen)[0]).to(samples.x.device)
    return Samples(samples.x[index], samples.y[index], counts)


def best_epochs(
    train: Callable[[int], None], score: Callable[[], Tensor], limit: int, patience: int = _PATIENCE
) -> IntArray:
    """The number of epochs after which each client's held-out score was lowest; at most ``limit``.

    Looks after 1, 2, 3, 5, 7, 10, 15, 20, 30, ... epochs, and stops early when no client has improved at the last
    ``patience`` looks.

    Args:
        train: ``train(epochs)`` trains all clients on their kept samples for that many more epochs.
        score: held-out score of each client, ``(n,)``; lower is better, NaN where a client holds nothing out: it
            then trains for 10 epochs.
        limit: most epochs.
        patience: looks without improvement.
    """
    looks = [epochs for epochs in _CHECKS if epochs < limit] + [limit]
    scores: list[Tensor] = []
    done = 0
    for look in looks:
        train(look - done)
        done = look
        scores.append(score().cpu())
        if len(scores) > patience:
            best = torch.stack(scores).nan_to_num(nan=float("inf")).argmin(0)
            if bool((best < len(scores) - patience).all()):
                break
    table = torch.stack(scores)
    known = torch.isfinite(table).all(0)
    best = table.nan_to_num(nan=float("inf")).argmin(0)
    epochs: IntArray = np.array(looks, dtype=np.int64)[best.numpy()]
    # The number for clients that hold nothing out must not depend on who else is in the stack.
    epochs[~known.numpy()] = min(_DEFAULT, limit)
    return epochs
