"""A client that comes after a run: data with the classes and domains of the federation that it joins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.from_arrays import client_of
from perfed.data.held_out import with_validation
from perfed.data.tables.newcomer import TESTED, newcomer_table
from perfed.errors import PerfedError


def newcomer(federation: Federation, name: str, given: Mapping[str, Any], seed: int = 0) -> Client:
    """A client of ``federation``'s classes, domains and, if it is of tables, columns.

    Args:
        federation: that it joins.
        name: its id.
        given: arrays as :meth:`Federation.from_arrays` takes them for one client, where ``x``, ``y`` and ``domain`` are
            short for ``x_train`` and so on. Without test data, a quarter of the samples is, by class.
        seed: of that choice.

    Raises:
        PerfedError: an id that is there, arrays that :meth:`Federation.from_arrays` refuses, labels that are no classes
            of the federation, or other columns than its clients have where these are the same.
    """
    if name in federation.ids:
        raise PerfedError(f"site '{name}' is in the run already; choose another name")
    full = {f"{key}_train" if key in ("x", "y", "domain") else key: value for key, value in given.items()}
    client = client_of(name, full, federation.classes, federation.target_scale)
    if client.split("test") is None:
        kept = client.validation
        cut = with_validation(replace(client, validation=None), TESTED, federation.num_classes is not None, seed)
        client = replace(cut, test=cut.validation, validation=kept)
    return client


def newcomer_from_frame(federation: Federation, name: str, frame: Any, source: str, seed: int = 0) -> Client:
    """A client of ``federation``, which is of tables, from a data frame with the site's columns.

    Raises:
        PerfedError: as :func:`newcomer` and :func:`perfed.data.tables.newcomer.newcomer_table`.
    """
    tables = [client.table for client in federation if client.table is not None]
    arrays, table = newcomer_table(name, frame, source, tables, federation.task, seed)
    return replace(newcomer(federation, name, arrays, seed), table=table)
