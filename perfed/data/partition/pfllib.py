"""The splits of PFLlib's published tables: who holds which samples, the same as its generator gives.

They come from numpy's old generator (``RandomState``, whose draws numpy keeps as they are), because that is what the
tables were made with; every other partition has generators of its own (:mod:`perfed.data.partition.shards`).
Training and test data are cut together: each client's own part is shuffled, and three quarters of it are for training.

Source: Zhang et al. 2025 (JMLR), "PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated Learning Library
and Benchmark", section 3.2; written from its description and checked against the indices of a replay.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from perfed.data.partition.shards import Indices
from perfed.errors import PerfedError

SEED = 1
LEAST = 40  # samples that every client gets: a test mini-batch of ten is a quarter of them

Parts = list[tuple[Indices, Indices]]


def pathological(labels: Indices, num_clients: int, classes_per_client: int) -> Parts:
    """Every client holds ``classes_per_client`` classes, and an uneven share of each.

    Class by class, the first clients that still lack one hold it, ``ceil(m k / C)`` of them. All but the last draw
    the size of their share uniformly from a tenth of the even one up to the even one; the last gets what is left.

    Args:
        labels: ``(samples,)`` class of every sample, 0..C-1.
        num_clients: m.
        classes_per_client: k.

    Returns:
        Positions of each client's training and of its test samples.

    Raises:
        PerfedError: a class with too few samples for those who hold it, or clients without a class.

    Example:
        >>> parts = pathological(np.repeat([0, 1], 500), num_clients=2, classes_per_client=1)
        >>> [(len(train), len(test)) for train, test in parts]
        [(375, 125), (375, 125)]
    """
    draw = np.random.RandomState(SEED)
    num_classes = int(labels.max()) + 1
    least = int(min(LEAST, len(labels) / num_clients / 2))
    lacking = np.full(num_clients, classes_per_client)
    own: list[list[Indices]] = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        members = np.flatnonzero(labels == label)
        holders = np.flatnonzero(lacking > 0)[: ceil(num_clients / num_classes * classes_per_client)]
        even = len(members) / max(1, len(holders))
        low, high = int(max(even / 10, least / num_classes)), int(even)
        if low >= high:
            who = f"{len(members)} samples for {len(holders)} clients"
            raise PerfedError(f"class {label} has {who}: too few, or nobody")
        sizes = draw.randint(low, high, len(holders) - 1)
        for holder, share in zip(holders, np.split(members, np.cumsum(sizes)), strict=True):
            own[holder].append(share)
        lacking[holders] -= 1
    if not all(own):
        raise PerfedError(f"{num_clients} clients of {classes_per_client} classes each: some would hold none")
    return _three_quarters([np.concatenate(shares) for shares in own], draw)


def dirichlet(labels: Indices, num_clients: int, concentration: float) -> Parts:
    """Shares of each class drawn from Dir(concentration), none for clients that have their m-th part of all samples.

    The draw is repeated until every client has 40 samples.

    Args:
        labels: ``(samples,)`` class of every sample, 0..C-1.
        num_clients: m.
        concentration: small values give clients few classes.

    Returns:
        Positions of each client's training and of its test samples.

    Raises:
        PerfedError: no such draw among 500.
    """
    draw = np.random.RandomState(SEED)
    least = int(min(LEAST, len(labels) / num_clients / 2))
    for _ in range(500):
        own: list[list[Indices]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients, dtype=np.int64)
        for label in range(int(labels.max()) + 1):
            members = np.flatnonzero(labels == label)
            draw.shuffle(members)
            shares = draw.dirichlet(np.full(num_clients, concentration)) * (sizes < len(labels) / num_clients)
            edges = (np.cumsum(shares / shares.sum()) * len(members)).astype(np.int64)[:-1]
            for client, share in enumerate(np.split(members, edges)):
                own[client].append(share)
                sizes[client] += len(share)
        if sizes.min() >= least:
            return _three_quarters([np.concatenate(shares) for shares in own], draw)
    raise PerfedError(f"no draw gives each of {num_clients} clients {least} samples; use a larger concentration")


def _three_quarters(own: list[Indices], draw: np.random.RandomState) -> Parts:
    parts = []
    for index in own:
        order = draw.permutation(len(index))
        num_test = len(index) - int(0.75 * len(index))
        parts.append((index[order[num_test:]], index[order[:num_test]]))
    return parts
