"""The assignment of samples to clients: pure functions from labels to one index array per client.

Every function is deterministic in its seed, takes a bounded number of steps and uses a separate generator.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.errors import PerfedError

# Below FEW_SAMPLES_PER_CLIENT samples per client the program of FLIC's authors draws SHARD_DRAWS shards with
# replacement.
FEW_SAMPLES_PER_CLIENT = 100
SHARD_DRAWS = 50

Indices = NDArray[np.int64]


def _seed_sequence(seed: int, purpose: str) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed % (1 << 64), zlib.crc32(purpose.encode())])


def make_generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a numpy generator for one purpose; generators of different purposes are independent."""
    return np.random.default_rng(_seed_sequence(seed, purpose))


def derive_seed(seed: int, purpose: str) -> int:
    """Return a seed for one purpose, for functions that are called several times with the same seed."""
    return int(_seed_sequence(seed, purpose).generate_state(1, np.uint64)[0])


def draw_classes(num_classes: int, num_clients: int, classes_per_client: int, *, seed: int) -> Indices:
    """Return randomly drawn classes of every client; the same draw is used for training and test data.

    The classes of a client are distinct. How often two classes are used differs by at most one; with fewer
    places than classes some classes are not used at all.

    Returns:
        ``(num_clients, classes_per_client)`` int64 classes in 0..num_classes - 1, sorted within a client.

    Raises:
        PerfedError: if a number is below 1, or there are more classes per client than classes.

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
    rng = make_generator(seed, "draw classes")
    places = num_clients * classes_per_client
    remaining = np.full(num_classes, places // num_classes)
    remaining[rng.permutation(num_classes)[: places % num_classes]] += 1
    client_classes = np.empty((num_clients, classes_per_client), dtype=np.int64)
    for client in range(num_clients):
        # Smallest of exponentials with rate `remaining` = a draw without replacement in proportion to `remaining`.
        arrival = np.where(remaining > 0, rng.exponential(size=num_classes) / np.maximum(remaining, 1), np.inf)
        arrival[remaining == num_clients - client] = -1.0  # every remaining client must take this class
        client_classes[client] = np.sort(np.argsort(arrival)[:classes_per_client])
        remaining[client_classes[client]] -= 1
    return client_classes


def share_among_holders(
    labels: NDArray[np.integer], classes: NDArray[np.integer], *, seed: int, shared: bool = False
) -> list[Indices]:
    """Return the samples of every client, with the samples of each class split among the clients that have it.

    For the number of samples of each client, see :func:`perfed.data.partition.label_skew.divide_classes`.

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
        seed: the seed of the draw.
        shared: whether to use the authors' variant.

    Returns:
        One sorted int64 array of positions in ``labels`` per client; every client has a sample of each of its
        classes.

    Raises:
        PerfedError: if shapes are wrong, a client has a class twice, or a class has fewer samples than clients.

    Source: Rakotomamonjy et al. 2024 (TMLR), section S3.2 ("equally share those examples among clients who
    hold that class").
    """
    labels, classes = np.asarray(labels), np.asarray(classes)
    _check_classes(labels, classes)
    rng = make_generator(seed, "pathological")  # renaming this key would change all draws
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
            selected = [shards[j] for j in rng.integers(len(shards), size=SHARD_DRAWS)] if overlap else [shard]
            parts[holder].extend(selected)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def _check_classes(labels: NDArray[np.integer], classes: NDArray[np.integer]) -> None:
    if labels.ndim != 1 or len(labels) == 0:
        raise PerfedError(f"labels have shape {labels.shape}; a non-empty one-dimensional array is needed")
    if classes.ndim != 2 or classes.size == 0:
        raise PerfedError(f"classes have shape {classes.shape}; (num_clients, classes_per_client) is needed")
    ordered = np.sort(classes, axis=1)
    twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if len(twice):
        raise PerfedError(f"client {twice[0]} holds a class twice: {classes[twice[0]].tolist()}")


def select_test_samples(keys: NDArray[Any], fraction: float, *, seed: int) -> NDArray[np.bool_]:
    """Return which samples are used for testing: the part ``fraction`` of each key's samples, except at least one of
    each.

    Args:
        keys: ``(samples,)``, anything that numpy can sort: classes, names of owners.
        fraction: between 0 and 1.
        seed: the seed of the draw.

    Returns:
        ``(samples,)`` bool.
    """
    rng = make_generator(seed, "put aside for testing")
    aside = np.zeros(len(keys), dtype=np.bool_)
    for key in np.unique(keys):
        members = rng.permutation(np.flatnonzero(keys == key))
        aside[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return aside


def subsample_clients(indices: Sequence[Indices], *, low: float, high: float, seed: int) -> list[Indices]:
    """Return a random part of each client's samples, at least one, drawn without replacement.

    Args:
        indices: one array per client.
        low: smallest fraction to keep, above 0.
        high: largest fraction to keep, at most 1; a client's fraction is uniform between the two.
        seed: the seed of the draw.

    Returns:
        One int64 array per client, in the same order.

    Raises:
        PerfedError: unless 0 < low <= high <= 1, or if a client has no samples.

    Source: Rakotomamonjy et al. 2024 (TMLR), section S3.2 ("we randomly subsample examples on all clients").
    """
    if not 0 < low <= high <= 1:
        raise PerfedError(f"fractions low = {low}, high = {high} are not allowed; 0 < low <= high <= 1 is needed")
    rng = make_generator(seed, "subsample")
    subsets = []
    for client, index in enumerate(indices):
        if len(index) == 0:
            raise PerfedError(f"client {client} has no samples to keep a part of")
        size = max(1, round(float(rng.uniform(low, high)) * len(index)))
        subsets.append(index[np.sort(rng.choice(len(index), size=size, replace=False))].astype(np.int64))
    return subsets


def deal_samples(
    labels: NDArray[np.integer], counts: NDArray[np.integer], *, seed: int, share: bool = False
) -> list[Indices]:
    """Return random samples for every client, with the number of samples of each class from ``counts``.

    Args:
        labels: ``(samples,)`` class of every sample, 0..C-1.
        counts: ``(num_clients, C)`` samples of each class that each client gets, e.g. from
            :mod:`perfed.data.partition.label_skew`.
        seed: the seed of the draw.
        share: whether clients share the samples of a class that has fewer than requested in total: all are used equally
            often, up to one, and no client has a sample twice. Otherwise clients are disjoint.

    Returns:
        One sorted int64 array of positions in ``labels`` per client.

    Raises:
        PerfedError: if a class has fewer samples than requested in total, or with ``share`` by one client.

    Example:
        >>> [len(part) for part in deal_samples(np.array([0, 0, 0, 1]), np.array([[2, 0], [1, 1]]), seed=0)]
        [2, 2]
    """
    labels, counts = np.asarray(labels), np.asarray(counts)
    rng = make_generator(seed, "deal")
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
            positions = np.arange(starts[client], starts[client] + needs[client]) % len(members)
            parts[client].append(members[positions])
    empty = np.zeros(0, dtype=np.int64)
    return [np.sort(np.concatenate([empty, *part])).astype(np.int64) for part in parts]
