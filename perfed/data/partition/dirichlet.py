"""Partitions whose shares are Dirichlet draws, as tables of counts (see :mod:`perfed.data.partition.label_skew`)."""

from __future__ import annotations

import numpy as np

from perfed.data.partition.label_skew import Weights, apportion
from perfed.data.partition.shards import Indices, generator, subseed
from perfed.errors import PerfedError

DRAWS = 500


def dirichlet(
    class_counts: Indices, num_clients: int, concentration: float, *, min_samples: int = 10, seed: int
) -> Indices:
    """Shares of each class drawn from Dir(concentration, ..., concentration) over the clients; all samples are used.

    The draw is repeated until every client has ``min_samples`` samples, at most 500 times. As Flower Datasets'
    DirichletPartitioner with ``self_balancing=False``.

    Args:
        class_counts: ``(classes,)`` samples of each class.
        num_clients: m.
        concentration: beta; small values give clients few classes.
        min_samples: least number of samples of a client.
        seed: of the draw.

    Returns:
        ``(m, classes)`` int64; column k sums to ``class_counts[k]``.

    Raises:
        PerfedError: ``concentration`` not above 0, or no draw with enough samples for everyone.

    Source: Yurochkin et al. 2019 (ICML); Xu et al. 2023 (ICLR), appendix C.8 (beta = 1, 100 clients).
    """
    _check_concentration(concentration)
    least = max(1, min_samples)
    if least * num_clients > class_counts.sum():
        raise PerfedError(
            f"{num_clients} clients with at least {least} samples each need {least * num_clients}, but there are "
            f"{class_counts.sum()}; use fewer clients or a smaller min_samples"
        )
    rng = generator(seed, "dirichlet")
    best = 0
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(num_clients, concentration), size=len(class_counts))
        edges = np.round(np.cumsum(shares, axis=1) * class_counts[:, None])
        edges[:, -1] = class_counts
        counts = np.diff(edges, axis=1, prepend=0).T.astype(np.int64)
        smallest = int(counts.sum(axis=1).min()) if np.isfinite(shares).all() else 0
        if smallest >= least:
            return counts
        best = max(best, smallest)
    raise PerfedError(
        f"in {DRAWS} draws with concentration = {concentration} some client of {num_clients} always had "
        f"fewer than {least} samples (at best {best}); use a larger concentration, fewer clients or a smaller "
        "min_samples"
    )


def inner_dirichlet(
    class_counts: Indices, sizes: Indices, concentration: float | Weights, *, share: bool = False, seed: int
) -> Indices:
    """Each client's class distribution drawn from Dir(concentration, ...) over the classes; sizes are given.

    Clients take their samples one after the other; what a client cannot have of a class that is used up it takes from
    its other classes in proportion. Flower Datasets' InnerDirichletPartitioner. With domains as the classes and
    ``alpha p`` as the concentration it is FedDAR's mixture of domains.

    Args:
        class_counts: ``(classes,)`` samples of each class.
        sizes: ``(clients,)`` samples of each client.
        concentration: small values give clients few classes; or ``(classes,)``, 0 for classes not to be drawn.
        share: clients may share samples; otherwise every sample has one holder.
        seed: of the draw.

    Returns:
        ``(clients, classes)`` int64; row i sums to ``sizes[i]``.

    Raises:
        PerfedError: ``concentration`` not above 0 (an array: negative or all 0), or more samples asked for than there
            are.

    Source: Acar et al. 2021 (ICLR), "Federated Learning Based on Dynamic Regularization"; Zhong et al. 2023 (FedDAR),
    section 5 (domains).
    """
    parameters = np.broadcast_to(np.asarray(concentration, dtype=np.float64), class_counts.shape)
    _check_concentration(parameters.min() if np.ndim(concentration) == 0 else parameters.max())
    drawn = parameters > 0
    needed, there = int(sizes.max() if share else sizes.sum()), int(class_counts.sum())
    if needed > there:
        raise PerfedError(f"{needed} samples are asked for, but there are {there}")
    weights = np.zeros((len(sizes), len(class_counts)))
    weights[:, drawn] = generator(seed, "inner dirichlet").dirichlet(parameters[drawn], size=len(sizes))
    left = class_counts.copy()
    counts = np.zeros(weights.shape, dtype=np.int64)
    for client, size in enumerate(sizes):
        own_seed = subseed(seed, f"inner dirichlet {client}")
        counts[client] = _fill(weights[client], int(size), class_counts if share else left, own_seed)
        left -= counts[client]
    return counts


def even_labels(counts: Indices, available: Indices, *, seed: int) -> Indices:
    """How many samples of each domain and label clients take, with as many of each label at every client.

    A client's numbers of samples of its labels differ by one at most. Its domains are those of ``counts``; what a
    domain lacks of a label comes from the client's other domains in proportion, and from any where they lack it too.

    Args:
        counts: ``(clients, domains)``, for example from :func:`inner_dirichlet`.
        available: ``(domains, labels)`` samples there are.
        seed: of ties, and of the labels that have one more.

    Returns:
        ``(clients, domains, labels)`` int64; the sums of a client are those of its row in ``counts``.

    Raises:
        PerfedError: fewer samples of a label than the clients need.

    Source: Zhong et al. 2023 (FedDAR), section 5 (FairFace: a uniform distribution of labels at every client).
    """
    num_labels = available.shape[1]
    each = apportion(np.ones((len(counts), num_labels)), counts.sum(axis=1), seed=seed)
    short = np.flatnonzero(each.sum(axis=0) > available.sum(axis=0))
    if len(short):
        label = int(short[0])
        needed, there = int(each[:, label].sum()), int(available[:, label].sum())
        raise PerfedError(f"label {label} has {there} samples, but the clients need {needed} for as many of each label")
    left, taken = available.copy(), np.zeros((*counts.shape, num_labels), dtype=np.int64)
    for client, wanted in enumerate(counts):
        for label in range(num_labels):
            missing = np.maximum(0, wanted - taken[client].sum(axis=1))
            room, own_seed = np.minimum(missing, left[:, label]), subseed(seed, f"even labels {client} {label}")
            size = int(each[client, label])
            first = _fill(missing.astype(np.float64), min(size, int(room.sum())), room, own_seed)
            rest = _fill(wanted.astype(np.float64), size - int(first.sum()), left[:, label] - first, own_seed)
            taken[client, :, label] = first + rest
            left[:, label] -= first + rest
    return taken


def _fill(weights: Weights, size: int, available: Indices, seed: int) -> Indices:
    """``size`` samples in proportion to ``weights``, no more of a class than are available: a pass per class."""
    taken = np.zeros_like(available)
    while (missing := size - int(taken.sum())) > 0:
        room = available - taken
        open_classes = np.where(room > 0, np.nan_to_num(weights), 0.0)
        if open_classes.sum() <= 0:
            open_classes = room.astype(np.float64)
        taken += np.minimum(apportion(open_classes[None], np.array([missing]), seed=seed)[0], room)
    return taken


def _check_concentration(concentration: float) -> None:
    if not concentration > 0:
        raise PerfedError(f"concentration = {concentration} is not allowed; it must be above 0")
