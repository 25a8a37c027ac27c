"""Small federations, each with an unusual property."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from perfed.data.client import SPLITS, Client, Split
from perfed.data.federation import Federation


def make_blobs(
    sizes: Sequence[int] = (12, 7, 5),
    *,
    dims: Sequence[int] = (4,),
    num_classes: int = 3,
    labels: Sequence[Sequence[int]] | None = None,
    test: int | tuple[int, ...] = 6,
    validation: int = 0,
    seed: int = 0,
    regression: bool = False,
) -> Federation:
    """Return Gaussian blobs.

    Client i has ``sizes[i]`` samples of dimension ``dims[i]`` (cyclic) and classes ``labels[i]``.

    Samples belong to one of two domains at random.
    """
    generator = np.random.default_rng(seed)
    clients: dict[str, dict[str, Any]] = {}
    for i, size in enumerate(sizes):
        dim, classes = dims[i % len(dims)], list(range(num_classes)) if labels is None else labels[i % len(labels)]
        centres = 2 * np.random.default_rng(dim).normal(size=(num_classes, dim))
        arrays: dict[str, Any] = {}
        parts = {"train": size, "validation": validation, "test": test[i] if isinstance(test, tuple) else test}
        for split, count in parts.items():
            if count == 0:
                continue
            y = generator.permutation(np.resize(classes, count)).astype(np.int64)
            x = centres[y] + generator.normal(size=(count, dim))
            arrays |= {f"x_{split}": x, f"y_{split}": x.sum(1) if regression else y}
            arrays[f"domain_{split}"] = np.random.default_rng([seed, i, len(split)]).integers(0, 2, count)
        clients[f"c{i}"] = arrays
    return Federation.from_arrays(clients, num_classes=None if regression else num_classes)


def make_awkward_domains() -> Federation:
    """Return a client with one domain, a domain with one sample at one client, and a domain that only occurs in test
    data.
    """
    one, two, three = make_blobs((6, 5, 4))

    def with_domains(client: Client, train: list[int], test: list[int]) -> Client:
        assert client.test is not None
        parts = (replace(s, domain=torch.tensor(ids)) for s, ids in ((client.train, train), (client.test, test)))
        return replace(client, train=next(parts), test=next(parts))

    clients = (
        with_domains(one, [0] * 6, [0] * 6),
        with_domains(two, [1, 0, 0, 1, 2], [0, 1, 2, 3, 0, 1]),
        with_domains(three, [0, 1, 1, 0], [0, 1, 1, 0, 0, 0]),
    )
    return Federation(clients, 3)


def make_named_columns() -> Federation:
    """Return three clients that share four columns by name: one lacks one of them, two have additional columns."""
    available_columns = ((True,) * 4, (True, False, True, True), (True,) * 4)
    clients = []
    for client, has in zip(make_blobs((8, 6, 5), dims=(4, 6, 5)), available_columns, strict=True):
        mask = torch.tensor([*has, *([True] * (client.input_shape[0] - 4))]).double()
        masked: dict[str, Any] = {
            name: replace(part, x=part.x * mask) for name in SPLITS if (part := client.split(name)) is not None
        }
        clients.append(replace(client, held=has, **masked))
    return Federation(tuple(clients), 3)


def make_survival_data() -> Federation:
    """Return times and events for a client with one sample, one without events, and one with equal times."""
    federation = make_blobs((9, 1, 4, 8), regression=True)

    def make_targets(row: int, split: Split) -> Split:
        events = (torch.arange(len(split)) % 3 > 0) & torch.tensor(row != 2)
        time = torch.ones(len(split)) if row == 3 else split.y.abs() + 0.1
        return replace(split, y=torch.stack([time, events.to(time)], 1).double())

    clients = []
    for row, client in enumerate(federation):
        assert client.test is not None
        clients.append(replace(client, train=make_targets(row, client.train), test=make_targets(row, client.test)))
    return replace(federation, clients=tuple(clients), survival=True)
