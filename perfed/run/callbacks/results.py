"""The result files of a run, including ``federation.json``, which describes the clients' data for reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from perfed.data.client import SPLITS, Client
from perfed.data.federation import Federation
from perfed.data.summary import ColumnHolders, count_holders
from perfed.run.callback import Callback, Running


def describe_holdings(federation: Federation) -> dict[str, Any]:
    """Return a description of each client's data in numbers: rows, training rows by class and domain, inputs, columns.

    ``data`` changes with ids, sizes, shapes and targets (:attr:`Federation.fingerprint`); ``doubts`` are what makes
    results on tables doubtful, a line each. No row's content.
    """
    classes = federation.class_names or [str(label) for label in range(federation.num_classes or 0)]
    domains = [federation.domain_name(number) for number in range(federation.num_domains)]
    holders = count_holders([c.table for c in federation if c.table is not None])
    return {
        "data": f"{federation.fingerprint:08x}",
        "classes": [str(name) for name in classes],
        "domains": domains,
        "doubts": list(federation.notes.get("doubts", ())),
        "clients": {c.id: _describe_client(c, len(classes), len(domains), holders) for c in federation},
    }


def _describe_client(client: Client, classes: int, domains: int, holders: ColumnHolders) -> dict[str, Any]:
    description: dict[str, Any] = {
        "rows": {name: len(part) for name in SPLITS if (part := client.split(name)) is not None},
        "inputs": prod(client.input_shape),
    }
    if classes:
        description["classes"] = client.train.class_counts(classes)
    if domains and client.train.has_domains:
        description["domains"] = client.train.domain_counts(domains)
    if client.table is not None:
        description["columns"] = holders.counts(client.table.columns_there)  # as perfed check does
    return description


def describe_sites(federation: Federation) -> dict[str, Any] | None:
    """Return what a site's model needs besides the site's table; ``None`` if the clients do not come from tables.

    ``agreement`` (:class:`perfed.data.federation_schema.FederationSchema`) and ``facts`` of each client
    (:class:`perfed.data.facts.ClientFacts`, without the names of its inputs). No row's content.
    """
    if any(client.table is None for client in federation):
        return None
    facts = {c.id: replace(c.facts(federation.survival), feature_names=None).plain() for c in federation}
    return {"agreement": federation.schema.plain(), "facts": facts}


def write_arrays(run: Running, folders: Mapping[str, Mapping[str, Any]]) -> None:
    """Write arrays of the latest round of ``run``, given by folder and name; without a directory nothing is written."""
    if run.directory:
        for name, arrays in folders.items():
            run.directory.write_arrays(name, run.done, {key: np.asarray(value) for key, value in arrays.items()})


class Results(Callback):
    """A callback that writes the arrays and the record of each round, and at the end ``summary.json``."""

    name = "results"

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Write the arrays of the method, the outputs of models, and the record."""
        write_arrays(run, {} if run.latest is None else run.latest.arrays)
        if run.directory:
            run.directory.append_round(record)
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Write ``clients.csv``, ``federation.json``, for tables ``sites.json``, the summary, and their checksums."""
        if run.directory:
            run.directory.write_clients(*run.client_table())
            run.directory.write_holdings(describe_holdings(run.federation))
            if (content := describe_sites(run.federation)) is not None:
                run.directory.write_sites(content)
            run.directory.write_summary(summary)
            run.directory.seal()
