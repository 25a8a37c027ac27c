"""Data sets whose samples are first pooled and then distributed to clients by one of the partitions.

A reader decorated with :func:`pooled_dataset` returns a :class:`~perfed.datasets.pool.Pool`; all of them have the
options :class:`perfed.datasets.options.PartitionOptions`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.data.partition import dirichlet, label_skew
from perfed.data.partition.shards import Indices, deal_samples, derive_seed
from perfed.datasets.catalogue import Builder, dataset, make_client_ids
from perfed.datasets.options import PartitionOptions
from perfed.datasets.pool import Pool, draw_label_permutations
from perfed.errors import PerfedError


@dataclass(frozen=True)
class _Parts:
    """The positions of each client's samples, and its group (all 0 without groups)."""

    train: list[Indices]
    test: list[Indices]
    group: Indices


def pooled_dataset(
    name: str, *, files: tuple[str, ...] = (), options: type[PartitionOptions] = PartitionOptions
) -> Callable[[Callable[..., Pool]], Callable[..., Pool]]:
    """Register a reader ``read(seed, data_dir, **options) -> Pool`` as the data set ``name``.

    The options of the data set are the reader's keyword-only parameters and those of :class:`PartitionOptions`, with
    the defaults of ``options``.
    """

    def register(read: Callable[..., Pool]) -> Callable[..., Pool]:
        parameters = inspect.signature(read).parameters.values()
        reader_options = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

        @functools.wraps(read)
        def build(seed: int, data_dir: Any, **values: Any) -> Federation:
            pool = read(seed, data_dir, **{key: values.pop(key) for key in reader_options})
            return partition_pool(pool, PartitionOptions.model_construct(**values), seed)

        builder: Builder = build
        dataset(name, files=files, shared=options)(builder)
        return read

    return register


def partition_pool(pool: Pool, options: PartitionOptions, seed: int) -> Federation:
    """Distribute the pool's samples to clients.

    Returns:
        A federation with ids "000", "001", ... Its notes have ``"group"`` (client id -> group) if there are groups,
        ``"label_permutation"`` and ``"rotation"`` (per group), ``"owner"`` (client id -> name; natural partition),
        ``"classes_nobody_holds"`` (natural partition) and ``"domains_nobody_holds"`` (domain-mixed).

    Raises:
        PerfedError: if there are too few samples, no client has a class, the number of groups does not divide that of
            the clients, or a value does not fit the data.
    """
    if options.partition == "natural":
        parts, notes = _partition_by_owner(pool, options.clients, options.min_samples)
    elif options.partition == "domain-mixed":
        parts, notes = _partition_by_domain(pool, options, seed)
    else:
        parts, notes = _partition_by_label(pool, options, seed)
    num_groups = int(parts.group.max()) + 1
    angles = dict(enumerate(options.rotations))
    labels = np.tile(np.arange(pool.num_classes), (num_groups, 1))
    if options.permute_labels:
        labels = draw_label_permutations(pool.num_classes, num_groups, seed=seed)
        notes["label_permutation"] = dict(enumerate(labels.tolist()))
    if angles:
        notes["rotation"] = angles

    def split(name: str, index: Indices, group: int) -> Split:
        y = labels[group][getattr(pool, f"y_{name}")[index]]
        domain = getattr(pool, f"domain_{name}")
        sample_domains = None if domain is None else torch.from_numpy(domain[index])
        return Split(pool.make_inputs(name, index, angles.get(group, 0.0)), torch.from_numpy(y), sample_domains)

    clients = tuple(
        Client(id_, split("train", train, int(group)), split("test", test, int(group)))
        for id_, train, test, group in zip(
            make_client_ids(len(parts.train)), parts.train, parts.test, parts.group, strict=True
        )
    )
    # With permuted labels a number means another class in every group, so that names would be wrong.
    class_names = None if options.permute_labels else pool.class_names
    return Federation(
        clients,
        pool.num_classes,
        class_names=class_names,
        notes=notes,
        domain_names=pool.domain_names or None,
        augment=pool.augment,
        words=pool.words,
    )


def _partition_by_owner(pool: Pool, num_clients: int, min_samples: int) -> tuple[_Parts, dict[str, Any]]:
    if pool.owner_train is None or pool.owner_test is None:
        raise PerfedError("data.partition = 'natural' needs to know whose the samples are, which these data do not say")
    num_train = np.bincount(pool.owner_train, minlength=len(pool.owners))
    owners = np.flatnonzero(num_train >= max(1, min_samples))
    if len(owners) == 0:
        most = int(num_train.max())
        raise PerfedError(f"data.min_samples = {min_samples}: nobody has so many training samples; at most {most}")
    if num_clients > len(owners):
        raise PerfedError(
            f"data.clients = {num_clients} is more than the {len(owners)} there are in the natural partition"
            + (f" with at least {min_samples} training samples" if min_samples > 1 else "")
        )
    owners = owners[: num_clients or None]
    train, test = (
        [np.flatnonzero(column == owner) for owner in owners] for column in (pool.owner_train, pool.owner_test)
    )
    names = {id_: pool.owners[owner] for id_, owner in zip(make_client_ids(len(owners)), owners, strict=True)}
    notes: dict[str, Any] = {"owner": names}
    has_samples = np.bincount(pool.y_train[np.concatenate(train)], minlength=pool.num_classes) > 0
    if not has_samples.all():
        notes["classes_nobody_holds"] = np.flatnonzero(~has_samples).tolist()
    return _Parts(train, test, np.zeros(len(owners), dtype=np.int64)), notes


def _partition_by_domain(pool: Pool, options: PartitionOptions, seed: int) -> tuple[_Parts, dict[str, Any]]:
    """Return the parts for mixtures of domains from Dir(alpha p) (Zhong et al. 2023, section 5).

    Clients share no sample.
    """
    if pool.domain_train is None or pool.domain_test is None:
        raise PerfedError("data.partition = 'domain-mixed' needs the samples' domains, which these data do not say")
    domain = {"train": pool.domain_train, "test": pool.domain_test}
    available = {s: np.bincount(column, minlength=len(pool.domain_names)) for s, column in domain.items()}
    prior = available["train"] if options.prior == "shares" else available["train"] > 0
    sizes = _choose_sizes(options, int(available["train"].sum()), False, seed)
    concentration = options.alpha * prior / prior.sum()
    counts = {"train": dirichlet.draw_inner_dirichlet_counts(available["train"], sizes, concentration, seed=seed)}
    cells, table = domain["train"], counts["train"]
    if options.uniform_labels:
        cells = cells * pool.num_classes + pool.y_train
        samples_by_cell = np.bincount(cells, minlength=len(pool.domain_names) * pool.num_classes)
        table = dirichlet.balance_labels(counts["train"], samples_by_cell.reshape(-1, pool.num_classes), seed=seed)
        counts["train"], table = table.sum(axis=2), table.reshape(len(table), -1)
    if options.test_samples:
        test_sizes = np.full(options.clients, options.test_samples)
        counts["test"] = label_skew.apportion(counts["train"].astype(np.float64), test_sizes, seed=seed)
    else:
        counts["test"] = label_skew.distribute_all(counts["train"], available["test"], seed=seed)
    needed = counts["test"].sum(axis=0)
    short = np.flatnonzero(needed > available["test"])
    if len(short):
        m = int(short[0])
        raise PerfedError(
            f"data: domain '{pool.domain_names[m]}' has {available['test'][m]} test samples, but the clients need "
            f"{needed[m]}; use a smaller data.test_samples, or 0 to share out all there are"
        )
    train = deal_samples(cells, table, seed=derive_seed(seed, "deal train"))
    test = deal_samples(domain["test"], counts["test"], seed=derive_seed(seed, "deal test"))
    unheld = [pool.domain_names[m] for m in np.flatnonzero(counts["train"].sum(axis=0) == 0)]
    notes = {"domains_nobody_holds": unheld} if unheld else {}
    return _Parts(train, test, np.zeros(options.clients, dtype=np.int64)), notes


def _partition_by_label(pool: Pool, options: PartitionOptions, seed: int) -> tuple[_Parts, dict[str, Any]]:
    available = {s: np.bincount(getattr(pool, f"y_{s}"), minlength=pool.num_classes) for s in ("train", "test")}
    num_groups = _count_groups(pool, options)
    share = {"train": options.overlap == "all", "test": options.overlap != "none"}
    try:
        group = label_skew.assign_groups(options.clients, num_groups, options.group_order)
        train = _draw_train_counts(pool, options, group, available["train"], share["train"], seed)
    except PerfedError as error:
        raise PerfedError(f"data: partition '{options.partition}': {error}") from None
    unheld = np.flatnonzero((train.sum(axis=0) == 0) & (available["train"] > 0))
    if len(unheld):
        raise PerfedError(
            f"data: partition '{options.partition}': class {unheld[0]} is held by no client; use more clients, more "
            "classes or samples per client, or another seed"
        )
    if options.test_samples:
        sizes = np.full(options.clients, options.test_samples)
        test = label_skew.apportion(train.astype(np.float64), sizes, seed=seed)
    else:
        test = label_skew.scale_counts(train, available["train"], available["test"], share=share["test"], seed=seed)
    dealt = []
    advice = {"train": "fewer clients or a smaller data.samples", "test": "a smaller data.test_samples"}
    sharing = {
        "train": ", or data.overlap = 'all' (clients then share samples)",
        "test": ", or data.overlap = 'test' (clients then share test samples)",
    }
    for split, counts in (("train", train), ("test", test)):
        y = getattr(pool, f"y_{split}")
        try:
            dealt.append(deal_samples(y, counts, seed=derive_seed(seed, f"deal {split}"), share=share[split]))
        except PerfedError as error:
            way = advice[split] + ("" if share[split] else sharing[split])
            raise PerfedError(f"data: not enough {split} samples: {error}; use {way}") from None
    ids = make_client_ids(options.clients)
    notes = {"group": dict(zip(ids, group.tolist(), strict=True))} if num_groups > 1 else {}
    return _Parts(dealt[0], dealt[1], group), notes


def _count_groups(pool: Pool, options: PartitionOptions) -> int:
    """Return the number of groups of clients, after checking that all options with one value per group agree."""
    if options.partition == "dominant":
        number = len(_dominant_classes(pool, options))
    elif options.partition == "pathological":
        classes_per_client = options.classes_per_client
        number = len(classes_per_client) if isinstance(classes_per_client, list) else max(1, len(options.rotations))
    else:
        number = options.groups if options.groups > 1 else max(1, len(options.rotations))
    if options.rotations and len(options.rotations) != number:
        raise PerfedError(
            f"data.rotations holds {len(options.rotations)} angles for {number} groups; one each is needed"
        )
    if options.permute_labels and number == 1:
        way = "a list in data.classes_per_client" if options.partition == "pathological" else "data.groups"
        raise PerfedError(f"data.permute_labels has no effect on a single group of clients; make groups with {way}")
    return number


def _dominant_classes(pool: Pool, options: PartitionOptions) -> list[list[int]]:
    dominant = options.dominant_classes or [list(classes) for classes in pool.dominant_classes]
    return dominant or label_skew.consecutive_groups(pool.num_classes)


def _draw_train_counts(
    pool: Pool, options: PartitionOptions, group: Indices, available: Indices, share: bool, seed: int
) -> Indices:
    """Return the table of counts of the training data."""
    if options.partition == "dirichlet":
        least = options.min_samples
        return dirichlet.draw_dirichlet_counts(
            available, options.clients, options.concentration, min_samples=least, seed=seed
        )
    sizes = _choose_sizes(options, int(available.sum()), share, seed)
    if options.partition == "iid":
        return label_skew.draw_iid_counts(available, sizes, seed=seed)
    if options.partition == "inner-dirichlet":
        return dirichlet.draw_inner_dirichlet_counts(available, sizes, options.concentration, share=share, seed=seed)
    if options.partition == "dominant":
        dominant = _dominant_classes(pool, options)
        weights = label_skew.dominant_weights(pool.num_classes, group, dominant, options.uniform)
        return label_skew.apportion(weights, sizes, seed=seed)
    classes_per_client = options.classes_per_client
    per_group = (
        classes_per_client if isinstance(classes_per_client, list) else [classes_per_client] * (int(group.max()) + 1)
    )
    clustered = options.class_assignment == "clustered"
    client_classes = label_skew.draw_client_classes(pool.num_classes, group, per_group, clustered=clustered, seed=seed)
    if options.samples == 0:
        return label_skew.divide_classes(available, client_classes, seed=seed)
    return label_skew.apportion(client_classes.astype(np.float64), sizes, seed=seed)


def _choose_sizes(options: PartitionOptions, available: int, share: bool, seed: int) -> Indices:
    """Return the number of training samples of every client; raise :class:`PerfedError` if there are too few."""
    spread = options.size_spread
    if options.samples == 0:
        return label_skew.divide_samples(available, options.clients, spread=spread, seed=seed)
    choices = options.samples if isinstance(options.samples, list) else [options.samples]
    sizes = label_skew.draw_sizes(choices, options.clients, spread=spread, seed=seed)
    needed = int(sizes.max() if share else sizes.sum())
    if needed > available:
        who = "a client asks" if share else f"{options.clients} clients ask"
        can_share = not share and options.partition != "domain-mixed"
        way = ", or data.overlap = 'all' (clients then share samples)" if can_share else ""
        raise PerfedError(
            f"{who} for {needed} training samples, but there are {available}; use fewer clients or a smaller "
            f"data.samples{way}"
        )
    return sizes
