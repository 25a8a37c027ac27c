"""Partitions by label, as tables of the number of samples of each class of every client.

A partition is drawn once, as a table ``(clients, classes)`` for the training data. :func:`scale_counts` derives the
table of the test data from it, and :func:`~perfed.data.partition.shards.deal_samples` assigns samples for both, so that
training and test data of a client have the same class distribution. Every function is deterministic in its seed and
takes a bounded number of steps. Names follow the partitioners of Flower Datasets. Dirichlet partitions are in
:mod:`perfed.data.partition.dirichlet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfed.data.partition.shards import Indices, derive_seed, draw_classes, make_generator
from perfed.errors import PerfedError

Weights = NDArray[np.float64]
GroupOrder = Literal["contiguous", "interleaved"]

CONSECUTIVE = 3  # dominant classes of a group


def assign_groups(num_clients: int, num_groups: int, order: GroupOrder = "contiguous") -> Indices:
    """Return the group of every client, ``(num_clients,)`` int64 in 0..num_groups - 1.

    ``"contiguous"`` cuts the clients into equal blocks; ``"interleaved"`` puts client i into group i mod
    ``num_groups``, so that groups may differ in size by one.

    Raises:
        PerfedError: if the clients cannot be divided into equal contiguous groups.

    Source: Xu et al. 2023 (ICLR), "Personalized Federated Learning with Feature Alignment and Classifier
    Collaboration", section 5.1; interleaved as in its authors' program.
    """
    if order == "interleaved":
        return np.arange(num_clients) % num_groups
    if num_clients % num_groups:
        raise PerfedError(
            f"clients = {num_clients} cannot be cut into {num_groups} equal groups; use a multiple of {num_groups}, "
            "or group_order = 'interleaved' (group sizes then differ by one)"
        )
    return np.arange(num_clients) // (num_clients // num_groups)


def draw_sizes(choices: Sequence[int], num_clients: int, *, spread: float = 0.0, seed: int) -> Indices:
    """Return the number of samples of every client, ``(num_clients,)`` int64, drawn uniformly from ``choices``.

    With ``spread`` s each is multiplied by ``exp(s z)``, z ~ N(0, 1), and rounded, to at least 1: sizes are log-normal
    with the choice as median (Tziotis et al. 2023, appendix C, which does not give the parameters).
    """
    choice_index = make_generator(seed, "client sizes").integers(len(choices), size=num_clients)
    sizes: Indices = np.asarray(choices, dtype=np.int64)[choice_index]
    if spread:
        sizes = np.maximum(1, np.rint(sizes * _draw_log_normal(num_clients, spread, seed))).astype(np.int64)
    return sizes


def divide_samples(samples: int, num_clients: int, *, spread: float = 0.0, seed: int) -> Indices:
    """Return equal numbers of samples of the clients, or with ``spread`` log-normal ones of at least 1,
    ``(num_clients,)`` int64.
    """
    if not spread or samples < num_clients:
        return samples // num_clients + (np.arange(num_clients) < samples % num_clients)
    remaining = np.array([samples - num_clients])
    sizes: Indices = 1 + apportion(_draw_log_normal(num_clients, spread, seed)[None], remaining, seed=seed)[0]
    return sizes


def _draw_log_normal(num_clients: int, spread: float, seed: int) -> Weights:
    return np.exp(spread * make_generator(seed, "size spread").standard_normal(num_clients))


def apportion(weights: Weights, sizes: Indices, *, seed: int) -> Indices:
    """Return whole numbers in proportion to ``weights`` by largest remainders, with ties broken at random.

    Args:
        weights: ``(clients, classes)``, not negative, no row all zero.
        sizes: ``(clients,)`` sums of the rows of the result.
        seed: the seed of the ties.

    Returns:
        ``(clients, classes)`` int64; row i sums to ``sizes[i]`` and differs from its exact share by less than one.
    """
    quotas = weights / weights.sum(axis=1, keepdims=True) * np.asarray(sizes)[:, None]
    counts: Indices = np.floor(quotas + 1e-9).astype(np.int64)
    remainder = np.round(quotas - counts, 9)
    ties = make_generator(seed, "apportion").random(quotas.shape)
    rank = np.argsort(np.lexsort((ties, -remainder), axis=-1), axis=-1)
    counts += rank < (sizes - counts.sum(axis=1))[:, None]
    return counts


def scale_counts(counts: Indices, from_samples: Indices, to_samples: Indices, *, share: bool, seed: int) -> Indices:
    """Return the table of another split in which every client has the same fraction of each class as in ``counts``.

    Args:
        counts: ``(clients, classes)`` counts of the first split.
        from_samples: ``(classes,)`` number of samples of each class in the first split.
        to_samples: ``(classes,)`` number of samples of each class in the other split.
        share: whether clients may share samples, so that the counts of a class may exceed its samples.
        seed: the seed of the order in which clients of equal size are rounded.

    Returns:
        ``(clients, classes)`` int64, the exact quota rounded down or up; counts do not exceed the samples of a class
        (unless ``share``), and clients have at least one sample if there are enough.
    """
    quotas = counts * (to_samples / np.maximum(from_samples, 1))
    scaled = np.floor(quotas + 1e-9).astype(np.int64)
    remainder = np.where(quotas - scaled > 1e-9, quotas - scaled, 0.0)
    remaining = np.full(len(to_samples), len(counts)) if share else to_samples - scaled.sum(axis=0)
    total = np.array([round(float(quotas.sum()))])
    missing = np.maximum(1, apportion(quotas.sum(axis=1)[None], total, seed=seed)[0]) - scaled.sum(axis=1)
    ties = make_generator(seed, "scaled counts").random(quotas.shape)
    for client in np.lexsort((ties[:, 0], quotas.sum(axis=1))):  # the smallest clients choose first
        order = np.lexsort((ties[client], -remainder[client]))
        open_classes = order[(remainder[client, order] > 0) & (remaining[order] > 0)]
        increased = open_classes[: max(0, missing[client])]
        scaled[client, increased] += 1
        remaining[increased] -= 1
    return scaled


def distribute_all(counts: Indices, to_samples: Indices, *, seed: int) -> Indices:
    """Return the table of another split that uses all of its samples, those of a class in proportion to ``counts``.

    Args:
        counts: ``(clients, classes)`` counts of the first split.
        to_samples: ``(classes,)`` number of samples of each class in the other split.
        seed: the seed of the ties.

    Returns:
        ``(clients, classes)`` int64; column k sums to ``to_samples[k]``, or to 0 if no client holds class k.
    """
    table = np.zeros_like(counts)
    is_used = counts.sum(axis=0) > 0
    table[:, is_used] = apportion(counts.T[is_used].astype(np.float64), to_samples[is_used], seed=seed).T
    return table


def draw_iid_counts(class_counts: Indices, sizes: Indices, *, seed: int) -> Indices:
    """Return the counts of samples that are drawn independently of their class (Flower Datasets' IidPartitioner).

    Args:
        class_counts: ``(classes,)`` number of samples of each class.
        sizes: ``(clients,)`` number of samples of each client. If their sum exceeds the number of samples, all
            samples are used equally often, up to one.
        seed: the seed of the draw.

    Returns:
        ``(clients, classes)`` int64; row i sums to ``sizes[i]``.
    """
    labels = np.repeat(np.arange(len(class_counts)), class_counts)
    copies = -(-int(sizes.sum()) // len(labels))
    rng = make_generator(seed, "iid")
    drawn_labels = np.concatenate([rng.permutation(labels) for _ in range(copies)])[: sizes.sum()]
    clients = np.repeat(np.arange(len(sizes)), sizes)
    flat = np.bincount(clients * len(class_counts) + drawn_labels, minlength=len(sizes) * len(class_counts))
    return flat.reshape(len(sizes), len(class_counts))


def consecutive_groups(num_classes: int) -> list[list[int]]:
    """Return groups of three consecutive classes, starting at 0, 2, 4, ...; the last ones continue at class 0.

    Example:
        >>> consecutive_groups(10)
        [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    """
    length = min(CONSECUTIVE, num_classes)
    return [[(start + i) % num_classes for i in range(length)] for start in range(0, num_classes, 2)]


def dominant_weights(
    num_classes: int, group: Indices, dominant_classes: Sequence[Sequence[int]], uniform: float
) -> Weights:
    """Return class distributions in which the classes of a client's group dominate.

    Args:
        num_classes: C.
        group: ``(clients,)`` from :func:`assign_groups`.
        dominant_classes: the classes of each group.
        uniform: percentage that is uniform over all classes; the remainder is uniform over the group's classes.

    Returns:
        ``(clients, C)``; rows sum to 1.

    Raises:
        PerfedError: if ``uniform`` is outside 0..100, or a group is empty, repeats a class or has an unknown class.

    Source: Xu et al. 2023 (ICLR), section 5.1, after Karimireddy et al. 2020 (SCAFFOLD), section 7.
    """
    if not 0 <= uniform <= 100:
        raise PerfedError(f"uniform = {uniform} is not allowed; it must be a percentage, 0 to 100")
    part = np.zeros((len(dominant_classes), num_classes))
    for number, classes in enumerate(dominant_classes):
        if not classes or len(set(classes)) < len(classes) or not 0 <= min(classes) <= max(classes) < num_classes:
            raise PerfedError(
                f"dominant_classes: group {number} is {list(classes)}; it must be different classes of 0 to "
                f"{num_classes - 1}, at least one"
            )
        part[number, list(classes)] = 1 / len(classes)
    return uniform / 100 / num_classes + (1 - uniform / 100) * part[group]


def draw_client_classes(
    num_classes: int, group: Indices, classes_per_group: Sequence[int], *, clustered: bool, seed: int
) -> NDArray[np.bool_]:
    """Return which classes every client has, if the clients of group g have ``classes_per_group[g]`` of them.

    Args:
        num_classes: C.
        group: ``(clients,)`` from :func:`assign_groups`.
        classes_per_group: one number per group.
        clustered: whether the clients of a group have the same consecutive classes, where each group starts after the
            previous one, cyclically. Otherwise classes are drawn for every client, and used evenly within a group
            (see :func:`perfed.data.partition.shards.draw_classes`).
        seed: the seed of the draw.

    Returns:
        ``(clients, C)`` bool.

    Raises:
        PerfedError: if there are more classes per client than classes.

    Source: Xu et al. 2023 (ICLR), appendix C (3, 3, 5, 5 and 8 classes; where clusters start is not given there).
    """
    has_class = np.zeros((len(group), num_classes), dtype=np.bool_)
    start = 0
    for number, size in enumerate(classes_per_group):
        if size > num_classes:
            raise PerfedError(f"classes_per_client = {size} is more than the {num_classes} classes there are")
        members = np.flatnonzero(group == number)
        if clustered:
            has_class[np.ix_(members, (start + np.arange(size)) % num_classes)] = True
        elif len(members):
            classes = draw_classes(
                num_classes, len(members), size, seed=derive_seed(seed, f"classes of group {number}")
            )
            has_class[members[:, None], classes] = True
        start += size
    return has_class


def divide_classes(class_counts: Indices, has_class: NDArray[np.bool_], *, seed: int) -> Indices:
    """Return counts for which the clients of each class share all its samples equally (Flower's
    PathologicalPartitioner).

    Args:
        class_counts: ``(classes,)`` number of samples of each class.
        has_class: ``(clients, classes)`` from :func:`draw_client_classes`.
        seed: the seed of the choice of clients that get one more sample.

    Returns:
        ``(clients, classes)`` int64.

    Raises:
        PerfedError: if a class has fewer samples than clients.
    """
    holders = has_class.sum(axis=0)
    short = np.flatnonzero(class_counts < holders)
    if len(short):
        label = int(short[0])
        raise PerfedError(
            f"class {label} has {class_counts[label]} samples for the {holders[label]} clients that hold it; "
            "use fewer clients or fewer classes per client"
        )
    per_client, extra = np.divmod(class_counts, np.maximum(holders, 1))
    draw = np.where(has_class, make_generator(seed, "pathological counts").random(has_class.shape), np.inf)
    rank = np.argsort(np.argsort(draw, axis=0), axis=0)
    counts: Indices = has_class * (per_client + (rank < extra))
    return counts
