"""The splits of PFLlib's published tables, identical to those of its generator.

They use numpy's old generator (``RandomState``, whose draws never change), with which the tables were computed; all
other partitions use :mod:`perfed.data.partition.shards`. Training and test data are split together: each client's
samples are shuffled, and three quarters of them are for training.

Source: Zhang et al. 2025 (JMLR), "PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated Learning Library
and Benchmark", section 3.2; written from its description and checked against the indices of a replay.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from perfed.data.partition.shards import Indices
from perfed.errors import PerfedError

SEED = 1
LEAST = 40  # the smallest number of samples of a client, a quarter of which is a test mini-batch of ten

Parts = list[tuple[Indices, Indices]]


def split_pathological(labels: Indices, num_clients: int, classes_per_client: int) -> Parts:
    """Return training and test positions of clients with ``classes_per_client`` classes and an uneven share of each.

    Each class is assigned to the first ``ceil(m k / C)`` clients that still need one. The sizes of all shares except
    the last are drawn uniformly between a tenth of the even share and the even share; the last client gets the
    remainder.

    Args:
        labels: ``(samples,)`` class of every sample, 0..C-1.
        num_clients: m.
        classes_per_client: k.

    Returns:
        Positions of each client's training and of its test samples.

    Raises:
        PerfedError: if a class has too few samples for its clients, or a client has no class.

    Example:
        >>> parts = split_pathological(np.repeat([0, 1], 500), num_clients=2, classes_per_client=1)
        >>> [(len(train), len(test)) for train, test in parts]
        [(375, 125), (375, 125)]
    """
    draw = np.random.RandomState(SEED)
    num_classes = int(labels.max()) + 1
    least = int(min(LEAST, len(labels) / num_clients / 2))
    missing_classes = np.full(num_clients, classes_per_client)
    client_parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        members = np.flatnonzero(labels == label)
        holders = np.flatnonzero(missing_classes > 0)[: ceil(num_clients / num_classes * classes_per_client)]
        even = len(members) / max(1, len(holders))
        low, high = int(max(even / 10, least / num_classes)), int(even)
        if low >= high:
            who = f"{len(members)} samples for {len(holders)} clients"
            raise PerfedError(f"class {label} has {who}: too few, or nobody")
        sizes = draw.randint(low, high, len(holders) - 1)
        for holder, share in zip(holders, np.split(members, np.cumsum(sizes)), strict=True):
            client_parts[holder].append(share)
        missing_classes[holders] -= 1
    if not all(client_parts):
        raise PerfedError(f"{num_clients} clients of {classes_per_client} classes each: some would hold none")
    return _split_train_test([np.concatenate(shares) for shares in client_parts], draw)


def split_dirichlet(labels: Indices, num_clients: int, concentration: float) -> Parts:
    """Return training and test positions of clients for shares of each class drawn from Dir(concentration).

    Clients that have their m-th part of all samples get no more. The draw is repeated until every client has 40
    samples.

    Args:
        labels: ``(samples,)`` class of every sample, 0..C-1.
        num_clients: m.
        concentration: small values give clients few classes.

    Returns:
        Positions of each client's training and of its test samples.

    Raises:
        PerfedError: if none of 500 draws has so many samples.
    """
    draw = np.random.RandomState(SEED)
    least = int(min(LEAST, len(labels) / num_clients / 2))
    for _ in range(500):
        client_parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients, dtype=np.int64)
        for label in range(int(labels.max()) + 1):
            members = np.flatnonzero(labels == label)
            draw.shuffle(members)
            shares = draw.dirichlet(np.full(num_clients, concentration)) * (sizes < len(labels) / num_clients)
            edges = (np.cumsum(shares / shares.sum()) * len(members)).astype(np.int64)[:-1]
            for client, share in enumerate(np.split(members, edges)):
                client_parts[client].append(share)
                sizes[client] += len(share)
        if sizes.min() >= least:
            return _split_train_test([np.concatenate(shares) for shares in client_parts], draw)
    raise PerfedError(f"no draw gives each of {num_clients} clients {least} samples; use a larger concentration")


def _split_train_test(client_indices: list[Indices], draw: np.random.RandomState) -> Parts:
    parts = []
    for index in client_indices:
        order = draw.permutation(len(index))
        num_test = len(index) - int(0.75 * len(index))
        parts.append((index[order[num_test:]], index[order[:num_test]]))
    return parts
