"""How many samples of each class every client holds: the partitions by label, as tables of counts.

A partition is drawn once, as a table ``(clients, classes)`` for the training data. :func:`scaled_counts` makes the
table of the test data from it, and :func:`~perfed.data.partition.shards.deal` hands out samples for both: training and
test data of a client have the same class distribution. Every function is deterministic in its seed and takes a bounded
number of steps. Names follow the partitioners of Flower Datasets where there is one. Dirichlet partitions are in
:mod:`perfed.data.partition.dirichlet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfed.data.partition.shards import Indices, draw_classes, generator, subseed
from perfed.errors import PerfedError

Weights = NDArray[np.float64]
GroupOrder = Literal["contiguous", "interleaved"]

CONSECUTIVE = 3  # dominant classes of a group


def assign_groups(num_clients: int, num_groups: int, order: GroupOrder = "contiguous") -> Indices:
    """The group of every client, ``(num_clients,)`` int64 in 0..num_groups - 1.

    ``"contiguous"`` cuts the clients into equal blocks; ``"interleaved"`` puts client i into group i mod
    ``num_groups``, so that groups may differ in size by one.

    Raises:
        PerfedError: contiguous groups that do not divide the clients.

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
    """The number of samples of every client, drawn uniformly from ``choices``; ``(num_clients,)`` int64.

    With ``spread`` s each is multiplied by ``exp(s z)``, z ~ N(0, 1), and rounded, to 1 at least: sizes are log-normal
    around the choice, their median (Tziotis et al. 2023, appendix C, which does not give the parameters).
    """
    drawn = generator(seed, "client sizes").integers(len(choices), size=num_clients)
    sizes: Indices = np.asarray(choices, dtype=np.int64)[drawn]
    if spread:
        sizes = np.maximum(1, np.rint(sizes * _log_normal(num_clients, spread, seed))).astype(np.int64)
    return sizes


def shared_sizes(samples: int, num_clients: int, *, spread: float = 0.0, seed: int) -> Indices:
    """All ``samples``, equally, or with ``spread`` in log-normal shares of one at least; ``(num_clients,)`` int64."""
    if not spread or samples < num_clients:
        return samples // num_clients + (np.arange(num_clients) < samples % num_clients)
    left = np.array([samples - num_clients])
    sizes: Indices = 1 + apportion(_log_normal(num_clients, spread, seed)[None], left, seed=seed)[0]
    return sizes


def _log_normal(num_clients: int, spread: float, seed: int) -> Weights:
    return np.exp(spread * generator(seed, "size spread").standard_normal(num_clients))


def apportion(weights: Weights, sizes: Indices, *, seed: int) -> Indices:
    """Whole numbers in proportion to ``weights``: largest remainders, ties broken at random.

    Args:
        weights: ``(clients, classes)``, not negative, no row all zero.
        sizes: ``(clients,)`` sums of the rows to make.
        seed: of the ties.

    Returns:
        ``(clients, classes)`` int64; row i sums to ``sizes[i]`` and differs from its exact share by less than one.
    """
    quotas = weights / weights.sum(axis=1, keepdims=True) * np.asarray(sizes)[:, None]
    counts: Indices = np.floor(quotas + 1e-9).astype(np.int64)
    remainder = np.round(quotas - counts, 9)
    ties = generator(seed, "apportion").random(quotas.shape)
    rank = np.argsort(np.lexsort((ties, -remainder), axis=-1), axis=-1)
    counts += rank < (sizes - counts.sum(axis=1))[:, None]
    return counts


def scaled_counts(counts: Indices, from_samples: Indices, to_samples: Indices, *, share: bool, seed: int) -> Indices:
    """The table of another split in which every client has the same part of each class as in the given one.

    Args:
        counts: ``(clients, classes)`` of the given split.
        from_samples: ``(classes,)`` samples of each class in the given split.
        to_samples: ``(classes,)`` samples of each class in the other split.
        share: clients may share samples, so that a class may be asked for more often than it has samples.
        seed: of the order in which clients of equal size are rounded.

    Returns:
        ``(clients, classes)`` int64, the exact quota rounded down or up; classes are not asked for more samples than
        they have (unless ``share``), and clients have at least one sample as long as there are enough.
    """
    quotas = counts * (to_samples / np.maximum(from_samples, 1))
    scaled = np.floor(quotas + 1e-9).astype(np.int64)
    remainder = np.where(quotas - scaled > 1e-9, quotas - scaled, 0.0)
    left = np.full(len(to_samples), len(counts)) if share else to_samples - scaled.sum(axis=0)
    total = np.array([round(float(quotas.sum()))])
    wanted = np.maximum(1, apportion(quotas.sum(axis=1)[None], total, seed=seed)[0]) - scaled.sum(axis=1)
    ties = generator(seed, "scaled counts").random(quotas.shape)
    for client in np.lexsort((ties[:, 0], quotas.sum(axis=1))):  # the smallest clients choose first
        order = np.lexsort((ties[client], -remainder[client]))
        open_classes = order[(remainder[client, order] > 0) & (left[order] > 0)]
        chosen = open_classes[: max(0, wanted[client])]
        scaled[client, chosen] += 1
        left[chosen] -= 1
    return scaled


def shared_out(counts: Indices, to_samples: Indices, *, seed: int) -> Indices:
    """The table of another split that uses all of its samples, those of a class in proportion to the given table.

    Args:
        counts: ``(clients, classes)`` of the given split.
        to_samples: ``(classes,)`` samples of each class in the other split.
        seed: of the ties.

    Returns:
        ``(clients, classes)`` int64; column k sums to ``to_samples[k]``, or to 0 if no client holds class k.
    """
    table = np.zeros_like(counts)
    held = counts.sum(axis=0) > 0
    table[:, held] = apportion(counts.T[held].astype(np.float64), to_samples[held], seed=seed).T
    return table


def iid(class_counts: Indices, sizes: Indices, *, seed: int) -> Indices:
    """Samples drawn at random whatever their class (Flower Datasets' IidPartitioner).

    Args:
        class_counts: ``(classes,)`` samples of each class.
        sizes: ``(clients,)`` samples of each client. More than there are in all: all samples are used equally
            often, up to one.
        seed: of the draw.

    Returns:
        ``(clients, classes)`` int64; row i sums to ``sizes[i]``.
    """
    labels = np.repeat(np.arange(len(class_counts)), class_counts)
    copies = -(-int(sizes.sum()) // len(labels))
    rng = generator(seed, "iid")
    drawn = np.concatenate([rng.permutation(labels) for _ in range(copies)])[: sizes.sum()]
    clients = np.repeat(np.arange(len(sizes)), sizes)
    flat = np.bincount(clients * len(class_counts) + drawn, minlength=len(sizes) * len(class_counts))
    return flat.reshape(len(sizes), len(class_counts))


def consecutive_groups(num_classes: int) -> list[list[int]]:
    """Groups of three consecutive classes, starting at 0, 2, 4, ...; the last ones go on at class 0.

    Example:
        >>> consecutive_groups(10)
        [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    """
    length = min(CONSECUTIVE, num_classes)
    return [[(start + i) % num_classes for i in range(length)] for start in range(0, num_classes, 2)]


def dominant_weights(
    num_classes: int, group: Indices, dominant_classes: Sequence[Sequence[int]], uniform: float
) -> Weights:
    """Class distributions in which the classes of a client's group dominate.

    Args:
        num_classes: C.
        group: ``(clients,)`` from :func:`assign_groups`.
        dominant_classes: the classes of each group.
        uniform: percentage that is uniform over all classes; the rest is uniform over the group's.

    Returns:
        ``(clients, C)``; rows sum to 1.

    Raises:
        PerfedError: ``uniform`` outside 0..100; a group that is empty, repeats a class or names one there is not.

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


def draw_held_classes(
    num_classes: int, group: Indices, classes_per_group: Sequence[int], *, clustered: bool, seed: int
) -> NDArray[np.bool_]:
    """Which classes every client holds, if the clients of group g hold ``classes_per_group[g]`` of them.

    Args:
        num_classes: C.
        group: ``(clients,)`` from :func:`assign_groups`.
        classes_per_group: one number per group.
        clustered: the clients of a group hold the same consecutive classes, each group starting where the one before
            ended, after the last class at 0 again. Otherwise every client draws its own, and within a group the
            classes are used evenly (see :func:`perfed.data.partition.shards.draw_classes`).
        seed: of the draw.

    Returns:
        ``(clients, C)`` bool.

    Raises:
        PerfedError: more classes per client than classes.

    Source: Xu et al. 2023 (ICLR), appendix C (3, 3, 5, 5 and 8 classes; where clusters start is not given there).
    """
    held = np.zeros((len(group), num_classes), dtype=np.bool_)
    start = 0
    for number, size in enumerate(classes_per_group):
        if size > num_classes:
            raise PerfedError(f"classes_per_client = {size} is more than the {num_classes} classes there are")
        members = np.flatnonzero(group == number)
        if clustered:
            held[np.ix_(members, (start + np.arange(size)) % num_classes)] = True
        elif len(members):
            own = draw_classes(num_classes, len(members), size, seed=subseed(seed, f"classes of group {number}"))
            held[members[:, None], own] = True
        start += size
    return held


def pathological(class_counts: Indices, held: NDArray[np.bool_], *, seed: int) -> Indices:
    """All samples of a class, shared equally by the clients that hold it (Flower's PathologicalPartitioner).

    Args:
        class_counts: ``(classes,)`` samples of each class.
        held: ``(clients, classes)`` from :func:`draw_held_classes`.
        seed: of who gets one sample more where a class cannot be shared equally.

    Returns:
        ``(clients, classes)`` int64.

    Raises:
        PerfedError: a class with fewer samples than holders.
    """
    holders = held.sum(axis=0)
    short = np.flatnonzero(class_counts < holders)
    if len(short):
        label = int(short[0])
        raise PerfedError(
            f"class {label} has {class_counts[label]} samples for the {holders[label]} clients that hold it; "
            "use fewer clients or fewer classes per client"
        )
    each, more = np.divmod(class_counts, np.maximum(holders, 1))
    draw = np.where(held, generator(seed, "pathological counts").random(held.shape), np.inf)
    rank = np.argsort(np.argsort(draw, axis=0), axis=0)
    counts: Indices = held * (each + (rank < more))
    return counts
