"""Embedded samples of a run in two dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from perfed.report.arrays import Snapshot

MAX_SAMPLES = 200


@dataclass(frozen=True)
class Placed:
    """Positions ``(samples, 2)`` with their classes and clients, and anchors ``(entries, 2)`` with their classes."""

    round: int
    points: NDArray[np.float64]
    y: NDArray[np.int64]
    client: NDArray[np.str_]
    anchors: NDArray[np.float64]
    anchor_classes: NDArray[np.int64]


def placed(snapshot: Snapshot) -> Placed | None:
    """t-SNE of at most :data:`MAX_SAMPLES` samples and the anchors together; None where there are fewer than four."""
    picked = np.arange(len(snapshot.z))
    if len(picked) > MAX_SAMPLES:
        picked = np.sort(np.random.default_rng(0).choice(picked, MAX_SAMPLES, replace=False))
    anchors = np.empty((0, snapshot.z.shape[1])) if snapshot.anchors is None else snapshot.anchors
    finite = np.isfinite(anchors).all(axis=1)
    points, classes = np.concatenate([snapshot.z[picked], anchors[finite]]), snapshot.anchor_class[finite]
    if len(points) < 4:
        return None
    at = tsne(points)
    return Placed(
        snapshot.round, at[: len(picked)], snapshot.y[picked], snapshot.client[picked], at[len(picked) :], classes
    )


def tsne(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Two-dimensional positions of at least four points, the same for the same points."""
    perplexity = min(30.0, (len(points) - 1) / 3)
    init = "pca" if points.shape[1] >= 2 else "random"
    # Few points: a second thread gains nothing, and on a busy machine waiting for it costs many times the work.
    with threadpool_limits(1):
        positions = TSNE(perplexity=perplexity, init=init, min_grad_norm=1e-3, random_state=0).fit_transform(points)
    return np.asarray(positions, dtype=float)
