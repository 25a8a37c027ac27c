"""``federation.json``: who holds what, for a report without the data; ``sites.json``: the same for one site's model."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from perfed.data.client import SPLITS, Client
from perfed.data.federation import Federation
from perfed.data.summary import Holders, holders_of


def holdings(federation: Federation) -> dict[str, Any]:
    """Return what each client holds, in numbers: rows, training rows by class and domain, inputs, columns.

    ``data`` changes with ids, sizes, shapes and targets (:attr:`Federation.fingerprint`); ``doubts`` are what makes
    results on tables doubtful, a line each. No row's content.
    """
    classes = federation.class_names or [str(label) for label in range(federation.num_classes or 0)]
    domains = [federation.domain_name(number) for number in range(federation.num_domains)]
    holders = holders_of([c.table for c in federation if c.table is not None])
    return {
        "data": f"{federation.fingerprint:08x}",
        "classes": [str(name) for name in classes],
        "domains": domains,
        "doubts": list(federation.notes.get("doubts", ())),
        "clients": {c.id: _held(c, len(classes), len(domains), holders) for c in federation},
    }


def _held(client: Client, classes: int, domains: int, holders: Holders) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rows": {name: len(part) for name in SPLITS if (part := client.split(name)) is not None},
        "inputs": prod(client.input_shape),
    }
    if classes:
        found["classes"] = client.train.class_counts(classes)
    if domains and client.train.has_domains:
        found["domains"] = client.train.domain_counts(domains)
    if client.table is not None:
        found["columns"] = holders.counts(client.table.columns_there)  # as perfed check does
    return found


def sites(federation: Federation) -> dict[str, Any] | None:
    """Return what a site's own model needs of a federation of tables beside its own table; else ``None``.

    ``agreement`` (:class:`perfed.data.federation_schema.FederationSchema`) and ``facts`` of each client
    (:class:`perfed.data.facts.ClientFacts`, without the names of its inputs). No row's content.
    """
    if any(client.table is None for client in federation):
        return None
    facts = {c.id: replace(c.facts(federation.survival), feature_names=None).plain() for c in federation}
    return {"agreement": federation.schema.plain(), "facts": facts}
