"""``federation.json``: who holds what, so that a report can show it without the data."""

from __future__ import annotations

from math import prod
from typing import Any

from perfed.data.client import SPLITS, Client
from perfed.data.federation import Federation


def holdings(federation: Federation) -> dict[str, Any]:
    """What each client holds, in numbers: rows, training rows of each class and domain, inputs, columns of its table.

    ``data`` changes with ids, sizes, shapes and targets (:attr:`Federation.fingerprint`). No row's content.
    """
    classes = federation.class_names or [str(label) for label in range(federation.num_classes or 0)]
    domains = [federation.domain_name(number) for number in range(federation.num_domains)]
    tables = [c.table.columns_there for c in federation if c.table is not None]
    shared = frozenset.intersection(*tables) if tables else frozenset()
    return {
        "data": f"{federation.fingerprint:08x}",
        "classes": [str(name) for name in classes],
        "domains": domains,
        "clients": {c.id: _held(c, len(classes), len(domains), shared) for c in federation},
    }


def _held(client: Client, classes: int, domains: int, shared: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rows": {name: len(part) for name in SPLITS if (part := client.split(name)) is not None},
        "inputs": prod(client.input_shape),
    }
    if classes:
        found["classes"] = client.train.class_counts(classes)
    if domains and client.train.has_domains:
        found["domains"] = client.train.domain_counts(domains)
    if client.table is not None:
        there = client.table.columns_there  # as perfed check counts them
        found["columns"] = {"shared": len(there & shared), "own": len(there - shared)}
    return found
