"""Arrays that a run kept of some rounds: embedded samples, weights of combined heads, and losses of local epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from perfed.data.reading import read_arrays, reason_of
from perfed.errors import PerfedError


@dataclass(frozen=True)
class Snapshot:
    """Embedded samples of one round.

    Attributes:
        round: the number of the round.
        z: the embedded samples ``(samples, k)``, all finite.
        y: the classes of the samples ``(samples,)``.
        client: the client ids of the samples ``(samples,)``.
        anchors: the anchors ``(entries, k)``; ``None`` if the method has none.
        anchor_class: the class of each anchor, ``(entries,)``.
    """

    round: int
    z: NDArray[np.float64]
    y: NDArray[np.int64]
    client: NDArray[np.str_]
    anchors: NDArray[np.float64] | None
    anchor_class: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class Combination:
    """The weights ``(m, m)`` with which a round combined the heads of the clients; row i belongs to ``clients[i]``."""

    round: int
    weights: NDArray[np.float64]
    clients: tuple[str, ...]


def load_snapshot(file: Path) -> Snapshot:
    """Read ``round-<number>.npz``; samples that are not finite are left out.

    Raises:
        PerfedError: an unreadable file, or arrays whose shapes or types do not belong together.
    """
    arrays = read_arrays(
        file, ("z", "y", "client"), ("anchors", "anchor_class"), fault="not a snapshot of embedded samples"
    )
    try:
        z, y, client = arrays["z"].astype(float), arrays["y"], arrays["client"].astype(str)
        anchors = arrays["anchors"].astype(float) if "anchors" in arrays else None
        entries = np.arange(0 if anchors is None else len(anchors))
        classes = arrays["anchor_class"].astype(np.int64) if "anchor_class" in arrays else entries
        number = int(file.stem.removeprefix("round-"))
    except (TypeError, ValueError) as error:
        raise PerfedError(f"{file}: not a snapshot of embedded samples: {reason_of(error)}") from error
    if z.ndim != 2 or y.shape != z.shape[:1] or client.shape != y.shape:
        shapes = f"z {z.shape}, y {y.shape}, client {client.shape}"
        raise PerfedError(f"{file}: needs z (samples, k), y (samples,), client (samples,), got {shapes}")
    if anchors is not None and (anchors.ndim != 2 or anchors.shape[1] != z.shape[1]):
        raise PerfedError(f"{file}: needs anchors (entries, {z.shape[1]}), got {anchors.shape}")
    if classes.shape != entries.shape:
        raise PerfedError(f"{file}: needs anchor_class {entries.shape}, got {classes.shape}")
    if not np.issubdtype(y.dtype, np.integer):
        raise PerfedError(f"{file}: y must hold integer classes, got {y.dtype}")
    keep = np.isfinite(z).all(axis=1)
    return Snapshot(number, z[keep], y[keep].astype(np.int64), client[keep], anchors, classes)


def load_combination(file: Path) -> Combination:
    """Read ``round-<number>.npz`` with the weights of a round.

    Raises:
        PerfedError: an unreadable file, or arrays whose shapes do not belong together.
    """
    arrays = read_arrays(file, ("weights", "clients"), fault="not the combination weights of a round")
    try:
        weights, clients = arrays["weights"].astype(float), tuple(arrays["clients"].astype(str).ravel().tolist())
        number = int(file.stem.removeprefix("round-"))
    except (TypeError, ValueError) as error:
        raise PerfedError(f"{file}: not the combination weights of a round: {reason_of(error)}") from error
    if weights.shape != (len(clients), len(clients)):
        raise PerfedError(f"{file}: needs weights (clients, clients), got {weights.shape} for {len(clients)} clients")
    return Combination(number, weights, clients)


def load_losses(files: Sequence[Path]) -> dict[str, list[tuple[int, list[float]]]]:
    """Return, by client, pairs of a round and its losses of local epochs, from files ``round-<number>.npz``.

    Raises:
        PerfedError: an unreadable file, or arrays whose shapes do not belong together.
    """
    losses: dict[str, list[tuple[int, list[float]]]] = {}
    for file in files:
        arrays = read_arrays(file, ("client", "loss"), fault="not the losses of local epochs")
        try:
            client, loss = arrays["client"].astype(str), arrays["loss"].astype(float)
            number = int(file.stem.removeprefix("round-"))
        except (TypeError, ValueError) as error:
            raise PerfedError(f"{file}: not the losses of local epochs: {reason_of(error)}") from error
        if client.ndim != 1 or client.shape != loss.shape:
            raise PerfedError(f"{file}: needs client and loss (epochs,), got {client.shape} and {loss.shape}")
        for name in dict.fromkeys(client.tolist()):
            losses.setdefault(name, []).append((number, loss[client == name].tolist()))
    return losses


MAX_SAMPLES = 200


@dataclass(frozen=True)
class PlacedSamples:
    """The positions of samples ``(samples, 2)`` and anchors ``(entries, 2)`` in the plane, and their classes."""

    round: int
    points: NDArray[np.float64]
    y: NDArray[np.int64]
    client: NDArray[np.str_]
    anchors: NDArray[np.float64]
    anchor_classes: NDArray[np.int64]


def place_samples(snapshot: Snapshot) -> PlacedSamples | None:
    """Return the t-SNE of at most :data:`MAX_SAMPLES` samples and the anchors; ``None`` for fewer than four points."""
    picked = np.arange(len(snapshot.z))
    if len(picked) > MAX_SAMPLES:
        picked = np.sort(np.random.default_rng(0).choice(picked, MAX_SAMPLES, replace=False))
    anchors = np.empty((0, snapshot.z.shape[1])) if snapshot.anchors is None else snapshot.anchors
    finite = np.isfinite(anchors).all(axis=1)
    points, classes = np.concatenate([snapshot.z[picked], anchors[finite]]), snapshot.anchor_class[finite]
    if len(points) < 4:
        return None
    positions = compute_tsne(points)
    samples, anchors = positions[: len(picked)], positions[len(picked) :]
    return PlacedSamples(snapshot.round, samples, snapshot.y[picked], snapshot.client[picked], anchors, classes)


def compute_tsne(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return two-dimensional positions of at least four points; the result is deterministic."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    init = "pca" if points.shape[1] >= 2 else "random"
    # Few points: a second thread gains nothing, and on a busy machine waiting for it costs many times the work.
    with threadpool_limits(1):
        positions = TSNE(perplexity=perplexity, init=init, min_grad_norm=1e-3, random_state=0).fit_transform(points)
    return np.asarray(positions, dtype=float)
