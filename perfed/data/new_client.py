"""Clients that join a run later, with the classes, domains and columns of its federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.held_out import with_validation
from perfed.data.names import find_name
from perfed.data.site_arrays import SiteArrays
from perfed.errors import PerfedError

TEST_FRACTION = 0.25
"""The fraction of a new client's rows that become test data."""


def new_client(federation: Federation, name: str, data: Mapping[str, Any], seed: int = 0) -> Client:
    """Return a new client with the classes and domains of ``federation``.

    Args:
        federation: the federation that the client joins.
        name: the id of the client.
        data: arrays as :meth:`Federation.from_arrays` accepts them for one client; ``x``, ``y`` and ``domain`` stand
            for ``x_train``, ``y_train`` and ``domain_train``. Without test data, a quarter of the samples of each
            class becomes test data.
        seed: the seed of this choice.

    Raises:
        PerfedError: the id occurs in the federation, the arrays are not valid (:meth:`Federation.from_arrays`), or
            labels or domains are unknown in the federation.
    """
    refuse_known_site(federation, name)
    full = {f"{key}_train" if key in ("x", "y", "domain") else key: value for key, value in data.items()}
    client = SiteArrays.from_data(name, full, federation.task).client(federation.schema)
    if client.split("test") is None:
        validation = client.validation
        cut = with_validation(replace(client, validation=None), TEST_FRACTION, federation.num_classes is not None, seed)
        client = replace(cut, test=cut.validation, validation=validation)
    return client


def refuse_known_site(federation: Federation, name: str) -> None:
    """Raise :class:`PerfedError` if the federation has a client of this name."""
    if find_name(name, federation.ids) is not None:
        raise PerfedError(f"site '{name}' is in the run already; choose another name")
