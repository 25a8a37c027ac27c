"""A client that comes after a run: with the classes, domains and columns of the federation that it joins."""

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
"""Share of a new client's rows that it is tested on."""


def new_client(federation: Federation, name: str, given: Mapping[str, Any], seed: int = 0) -> Client:
    """Make a client by the schema of ``federation``: of its classes and domains.

    Args:
        federation: that it joins.
        name: its id.
        given: arrays as :meth:`Federation.from_arrays` takes them for one client, where ``x``, ``y`` and ``domain`` are
            short for ``x_train`` and so on. Without test data, a quarter of the samples is, by class.
        seed: of that choice.

    Raises:
        PerfedError: an id that is there, arrays that :meth:`Federation.from_arrays` refuses, or labels or domains that
            are none of the federation.
    """
    refuse_known_site(federation, name)
    full = {f"{key}_train" if key in ("x", "y", "domain") else key: value for key, value in given.items()}
    client = SiteArrays.of(name, full, federation.task).client(federation.schema)
    if client.split("test") is None:
        kept = client.validation
        cut = with_validation(replace(client, validation=None), TEST_FRACTION, federation.num_classes is not None, seed)
        client = replace(cut, test=cut.validation, validation=kept)
    return client


def refuse_known_site(federation: Federation, name: str) -> None:
    """Raise :class:`PerfedError` if the federation has a client of this name."""
    if find_name(name, federation.ids) is not None:
        raise PerfedError(f"site '{name}' is in the run already; choose another name")
