"""Who holds which samples: pure functions from labels to one index array per client.

Every function is deterministic in its seed, takes a bounded number of steps and uses a generator of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.errors import PerfedError

# The program of FLIC's authors shares shards below so many samples per client, and then draws this often.
FEW_SAMPLES_PER_CLIENT = 100
SHARD_DRAWS = 50

Indices = NDArray[np.int64]


def _sequence(seed: int, purpose: str) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed % (1 << 64), zlib.crc32(purpose.encode())])


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A numpy generator for one purpose: different purposes of the same seed are independent."""
    return np.random.default_rng(_sequence(seed, purpose))


def subseed(seed: int, purpose: str) -> int:
    """A seed for one purpose, where a function that takes a seed is called several times."""
    return int(_sequence(seed, purpose).generate_state(1, np.uint64)[0])


def draw_classes(num_classes: int, num_clients: int, classes_per_client: int, *, seed: int) -> Indices:
    """Draw the classes of every client; use the same draw for training and test data.

    The classes of a client are distinct. How often two classes are used differs by at most one; with fewer
    places than classes some classes are not used at all.

    Returns:
        ``(num_clients, classes_per_client)`` int64 classes in 0..num_classes - 1, sorted within a client.

    Raises:
        PerfedError: a number below 1, or more classes per client than classes.

    Source: Rakotomamonjy et al. 2024 (TMLR), "Personalised Federated Learning on Heterogeneous Feature
    Spaces", section S3.2. The authors' program may give a client the same class twice; here it never happens.

    Example:
        >>> draw_classes(4, 2, 2, seed=0).shape
        (2, 2)
    """
    numbers = {
        "num_classes": num_classes,
        "num_clients": num_clients,
        "classes_per_client": classes_per_client,
    }
    for name, number in numbers.items():
        if number < 1:
            raise PerfedError(f"{name} = {number} is not allowed; it must be at least 1")
    if classes_per_client > num_classes:
        raise PerfedError(f"classes_per_client = {classes_per_client} is more than the {num_classes} classes there are")
    rng = generator(seed, "draw classes")
    places = num_clients * classes_per_client
    left = np.full(num_classes, places // num_classes)
    left[rng.permutation(num_classes)[: places % num_classes]] += 1
    drawn = np.empty((num_clients, classes_per_client), dtype=np.int64)
    for client in range(num_clients):
        # Smallest of exponentials with rate `left` = a draw without replacement in proportion to `left`.
        arrival = np.where(left > 0, rng.exponential(size=num_classes) / np.maximum(left, 1), np.inf)
        arrival[left == num_clients - client] = -1.0  # every remaining client must take this class
        drawn[client] = np.sort(np.argsort(arrival)[:classes_per_client])
        left[drawn[client]] -= 1
    return drawn


def share_among_holders(
    labels: NDArray[np.integer], classes: NDArray[np.integer], *, seed: int, shared: bool = False
) -> list[Indices]:
    """Split the samples of every class among the clients that hold it: who gets which.

    For how many each gets, of all samples, see :func:`perfed.data.partition.label_skew.pathological`.

    The samples of a class are shuffled and cut into as many shards as clients hold it, sizes differing by at
    most one. By default each of these clients gets one shard, so that no sample is used twice. Samples of a
    class that no client holds are left out.

    ``shared=True`` follows the authors' program: if there are fewer than 100 samples per client
    (``len(labels) // num_clients``), each client draws 50 shards with replacement for each of its classes and
    keeps all of them, so clients overlap and an index may occur several times in one client. With 100 or more
    it is the same as the default.

    Args:
        labels: ``(samples,)`` class of every sample.
        classes: ``(num_clients, classes_per_client)`` from :func:`draw_classes`.
        seed: the draw is a function of it and of the arguments.
        shared: the authors' variant.

    Returns:
        One sorted int64 array of positions in ``labels`` per client; every client has a sample of each of its
        classes.

    Raises:
        PerfedError: wrong shapes, a class twice in one client, a class with fewer samples than holders.

    Source: Rakotomamonjy et al. 2024 (TMLR), section S3.2 ("equally share those examples among clients who
    hold that class").
    """
    labels, classes = np.asarray(labels), np.asarray(classes)
    _check_draw(labels, classes)
    rng = generator(seed, "pathological")  # the key of its draws, which stays
    overlap = shared and len(labels) // len(classes) < FEW_SAMPLES_PER_CLIENT
    parts: list[list[Indices]] = [[] for _ in classes]
    for label in np.unique(classes):
        members = rng.permutation(np.flatnonzero(labels == label))
        holders = rng.permutation(np.flatnonzero((classes == label).any(axis=1)))
        if len(members) < len(holders):
            raise PerfedError(
                f"class {label} has {len(members)} samples for the {len(holders)} clients that hold it; "
                "use fewer clients, fewer classes per client or more samples"
            )
        shards = np.array_split(members, len(holders))
        for holder, shard in zip(holders, shards, strict=True):
            drawn = [shards[j] for j in rng.integers(len(shards), size=SHARD_DRAWS)] if overlap else [shard]
            parts[holder].extend(drawn)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def _check_draw(labels: NDArray[np.integer], classes: NDArray[np.integer]) -> None:
    if labels.ndim != 1 or len(labels) == 0:
        raise PerfedError(f"labels have shape {labels.shape}; a non-empty one-dimensional array is needed")
    if classes.ndim != 2 or classes.size == 0:
        raise PerfedError(f"classes have shape {classes.shape}; (num_clients, classes_per_client) is needed")
    ordered = np.sort(classes, axis=1)
    twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if len(twice):
        raise PerfedError(f"client {twice[0]} holds a class twice: {classes[twice[0]].tolist()}")


def put_aside(keys: NDArray[Any], fraction: float, *, seed: int) -> NDArray[np.bool_]:
    """Which samples are put aside for testing: of each key's samples the part ``fraction``; one of each always stays.

    Args:
        keys: ``(samples,)``, anything that numpy can sort: classes, names of owners.
        fraction: between 0 and 1.
        seed: of the draw.

    Returns:
        ``(samples,)`` bool.
    """
    rng = generator(seed, "put aside for testing")
    aside = np.zeros(len(keys), dtype=np.bool_)
    for key in np.unique(keys):
        members = rng.permutation(np.flatnonzero(keys == key))
        aside[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return aside


def subsample(indices: Sequence[Indices], *, low: float, high: float, seed: int) -> list[Indices]:
    """Every client keeps a random part of its samples, at least one, drawn without replacement.

    Args:
        indices: one array per client.
        low: smallest fraction to keep, above 0.
        high: largest fraction to keep, at most 1; a client's fraction is uniform between the two.
        seed: the draw is a function of it and of the arguments.

    Returns:
        One int64 array per client, in the order of the given one.

    Raises:
        PerfedError: not 0 < low <= high <= 1, or a client without samples.

    Source: Rakotomamonjy et al. 2024 (TMLR), section S3.2 ("we randomly subsample examples on all clients").
    """
    if not 0 < low <= high <= 1:
        raise PerfedError(f"fractions low = {low}, high = {high} are not allowed; 0 < low <= high <= 1 is needed")
    rng = generator(seed, "subsample")
    kept = []
    for client, index in enumerate(indices):
        if len(index) == 0:
            raise PerfedError(f"client {client} has no samples to keep a part of")
        size = max(1, round(float(rng.uniform(low, high)) * len(index)))
        kept.append(index[np.sort(rng.choice(len(index), size=size, replace=False))].astype(np.int64))
    return kept


def deal(labels: NDArray[np.integer], counts: NDArray[np.integer], *, seed: int, share: bool = False) -> list[Indices]:
    """Give every client the asked number of samples of each class, drawn at random.

    Args:
        labels: ``(samples,)`` class of every sample, 0..C-1.
        counts: ``(num_clients, C)`` samples of each class that each client gets, e.g. from
            :mod:`perfed.data.partition.label_skew`.
        seed: the draw is a function of it and of the arguments.
        share: if a class has fewer samples than asked for in all, clients share them: all are used equally often, up
            to one, and no client holds a sample twice. Otherwise clients are disjoint.

    Returns:
        One sorted int64 array of positions in ``labels`` per client.

    Raises:
        PerfedError: a class with fewer samples than asked for in all, or with ``share`` by one client.

    Example:
        >>> [len(part) for part in deal(np.array([0, 0, 0, 1]), np.array([[2, 0], [1, 1]]), seed=0)]
        [2, 2]
    """
    labels, counts = np.asarray(labels), np.asarray(counts)
    rng = generator(seed, "deal")
    parts: list[list[Indices]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        members = rng.permutation(np.flatnonzero(labels == label))
        needs = counts[:, label]
        most = int(needs.max()) if share else int(needs.sum())
        if most > len(members):
            who = f"client {int(needs.argmax())} needs {most}" if share else f"the clients need {most} in all"
            raise PerfedError(f"class {label} has {len(members)} samples, but {who}")
        starts = np.cumsum(needs) - needs
        for client in np.flatnonzero(needs):
            own = np.arange(starts[client], starts[client] + needs[client]) % len(members)
            parts[client].append(members[own])
    empty = np.zeros(0, dtype=np.int64)
    return [np.sort(np.concatenate([empty, *part])).astype(np.int64) for part in parts]
