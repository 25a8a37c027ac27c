"""Partitions with Dirichlet shares, as tables of counts (see :mod:`perfed.data.partition.label_skew`)."""

from __future__ import annotations

import numpy as np

from perfed.data.partition.label_skew import Weights, apportion
from perfed.data.partition.shards import Indices, derive_seed, make_generator
from perfed.errors import PerfedError

DRAWS = 500


def draw_dirichlet_counts(
    class_counts: Indices, num_clients: int, concentration: float, *, min_samples: int = 10, seed: int
) -> Indices:
    """Return counts for shares of each class drawn from Dir(concentration, ..., concentration); all samples are used.

    The draw is repeated until every client has ``min_samples`` samples, at most 500 times. This is Flower Datasets'
    DirichletPartitioner with ``self_balancing=False``.

    Args:
        class_counts: ``(classes,)`` number of samples of each class.
        num_clients: m.
        concentration: beta; small values give clients few classes.
        min_samples: least number of samples of a client.
        seed: the seed of the draw.

    Returns:
        ``(m, classes)`` int64; column k sums to ``class_counts[k]``.

    Raises:
        PerfedError: if ``concentration`` is not above 0, or no draw gives enough samples to all clients.

    Source: Yurochkin et al. 2019 (ICML); Xu et al. 2023 (ICLR), appendix C.8 (beta = 1, 100 clients).
    """
    _check_concentration(concentration)
    least = max(1, min_samples)
    if least * num_clients > class_counts.sum():
        raise PerfedError(
            f"{num_clients} clients with at least {least} samples each need {least * num_clients}, but there are "
            f"{class_counts.sum()}; use fewer clients or a smaller min_samples"
        )
    rng = make_generator(seed, "dirichlet")
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


def draw_inner_dirichlet_counts(
    class_counts: Indices, sizes: Indices, concentration: float | Weights, *, share: bool = False, seed: int
) -> Indices:
    """Return counts for clients with ``sizes`` samples whose class distributions are drawn from Dir(concentration,
    ...).

    Clients take their samples one after the other; if a class is used up, a client takes more of its other classes in
    proportion. This is Flower Datasets' InnerDirichletPartitioner. With domains as the classes and ``alpha p`` as the
    concentration it is FedDAR's mixture of domains.

    Args:
        class_counts: ``(classes,)`` number of samples of each class.
        sizes: ``(clients,)`` number of samples of each client.
        concentration: small values give clients few classes; or ``(classes,)``, 0 to exclude a class.
        share: whether clients may share samples; otherwise every sample belongs to one client.
        seed: the seed of the draw.

    Returns:
        ``(clients, classes)`` int64; row i sums to ``sizes[i]``.

    Raises:
        PerfedError: if ``concentration`` is not above 0 (an array: negative or all 0), or more samples are requested
            than are available.

    Source: Acar et al. 2021 (ICLR), "Federated Learning Based on Dynamic Regularization"; Zhong et al. 2023 (FedDAR),
    section 5 (domains).
    """
    parameters = np.broadcast_to(np.asarray(concentration, dtype=np.float64), class_counts.shape)
    _check_concentration(parameters.min() if np.ndim(concentration) == 0 else parameters.max())
    is_used = parameters > 0
    needed, available = int(sizes.max() if share else sizes.sum()), int(class_counts.sum())
    if needed > available:
        raise PerfedError(f"{needed} samples are asked for, but there are {available}")
    weights = np.zeros((len(sizes), len(class_counts)))
    weights[:, is_used] = make_generator(seed, "inner dirichlet").dirichlet(parameters[is_used], size=len(sizes))
    remaining = class_counts.copy()
    counts = np.zeros(weights.shape, dtype=np.int64)
    for client, size in enumerate(sizes):
        client_seed = derive_seed(seed, f"inner dirichlet {client}")
        counts[client] = _fill_client(weights[client], int(size), class_counts if share else remaining, client_seed)
        remaining -= counts[client]
    return counts


def balance_labels(counts: Indices, available: Indices, *, seed: int) -> Indices:
    """Return the number of samples per client, domain and label, with equally many samples of each label at a client.

    The numbers of samples of a client's labels differ by at most one. Its domains are those of ``counts``; if a domain
    has too few samples of a label, they come from the client's other domains in proportion, or from any domain.

    Args:
        counts: ``(clients, domains)``, for example from :func:`draw_inner_dirichlet_counts`.
        available: ``(domains, labels)`` number of available samples.
        seed: the seed of ties, and of the labels that have one more.

    Returns:
        ``(clients, domains, labels)`` int64; the sums of a client are those of its row in ``counts``.

    Raises:
        PerfedError: if there are fewer samples of a label than the clients need.

    Source: Zhong et al. 2023 (FedDAR), section 5 (FairFace: a uniform distribution of labels at every client).
    """
    num_labels = available.shape[1]
    label_counts = apportion(np.ones((len(counts), num_labels)), counts.sum(axis=1), seed=seed)
    short = np.flatnonzero(label_counts.sum(axis=0) > available.sum(axis=0))
    if len(short):
        label = int(short[0])
        needed, label_samples = int(label_counts[:, label].sum()), int(available[:, label].sum())
        raise PerfedError(
            f"label {label} has {label_samples} samples, but the clients need {needed} for as many of each label"
        )
    remaining, assigned = available.copy(), np.zeros((*counts.shape, num_labels), dtype=np.int64)
    for client, client_counts in enumerate(counts):
        for label in range(num_labels):
            missing = np.maximum(0, client_counts - assigned[client].sum(axis=1))
            room = np.minimum(missing, remaining[:, label])
            label_seed = derive_seed(seed, f"even labels {client} {label}")
            size = int(label_counts[client, label])
            regular = _fill_client(missing.astype(np.float64), min(size, int(room.sum())), room, label_seed)
            extra = _fill_client(
                client_counts.astype(np.float64), size - int(regular.sum()), remaining[:, label] - regular, label_seed
            )
            assigned[client, :, label] = regular + extra
            remaining[:, label] -= regular + extra
    return assigned


def _fill_client(weights: Weights, size: int, available: Indices, seed: int) -> Indices:
    """Return counts of ``size`` samples in proportion to ``weights``, limited to the available ones, in a pass per
    class.
    """
    assigned = np.zeros_like(available)
    while (missing := size - int(assigned.sum())) > 0:
        room = available - assigned
        open_classes = np.where(room > 0, np.nan_to_num(weights), 0.0)
        if open_classes.sum() <= 0:
            open_classes = room.astype(np.float64)
        assigned += np.minimum(apportion(open_classes[None], np.array([missing]), seed=seed)[0], room)
    return assigned


def _check_concentration(concentration: float) -> None:
    if not concentration > 0:
        raise PerfedError(f"concentration = {concentration} is not allowed; it must be above 0")
