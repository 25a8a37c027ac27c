"""A client that comes after a run: with the classes, domains and columns of the federation that it joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.held_out import with_validation
from perfed.data.inputs import client_of
from perfed.data.labels import Task
from perfed.data.tables.checks import checked
from perfed.data.tables.kinds import Column, guess, read
from perfed.data.tables.options import TableOptions, learnt
from perfed.data.tables.preprocess import column_transformer, set_scales
from perfed.data.tables.problems import Frame, pandas, refuse
from perfed.data.tables.site import TablePreprocessor, domain_ids
from perfed.data.tables.site_rows import Rows, SiteTableData
from perfed.data.tables.splits import held_out
from perfed.errors import PerfedError

TESTED = 0.25
"""Share of a newcomer's rows that it is tested on."""


def new_client_table(
    site: str, frame: Frame, source: str, tables: Sequence[TablePreprocessor], task: Task, seed: int
) -> tuple[dict[str, Any], TablePreprocessor]:
    """Arrays of one client, and its preprocessing, fitted on its own training rows.

    Where all ``tables`` have one schema, the newcomer gets it too, kinds of columns with it, whatever its own rows look
    like: columns that it lacks are missing in every row, and further ones do not enter; where columns are shared by
    name, those that nobody shares enter behind them. Else it has columns of its own,
    of which dates, categories, and numbers that look like an id, are what they are at the others. Target, domain and
    what the others leave out are as there. A quarter of the rows is tested on, by class.

    Args:
        site, frame, source: the newcomer, its rows and where they are from, for messages.
        tables: of the sites that are there.
        task: what the targets are for.
        seed: of the split.

    Raises:
        PerfedError: as :func:`perfed.data.tables.checks.checked`; a domain that no other site has.
    """
    first, schema = tables[0], _schema(tables)
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    known = {column.name: column.kind for table in tables for column in table.columns}
    dropped = {name for table in tables for name in table.ignored} - set(known)
    if schema is not None and first.shared is None:
        entering = {column.name for column in schema} | {first.target, first.event, first.domain}
        dropped |= {name for name in frame.columns if name not in entering}
    kinds = {name: known[name] for name, times in Counter(frame.columns).items() if name in known and times == 1}
    options = TableOptions(
        target=first.target,
        event=first.event,
        domain=first.domain,
        drop=tuple(name for name in frame.columns if name in dropped),
        numbers=[n for n, k in kinds.items() if k == "number" and (schema or guess(frame[n], n).kind == "id")],
        dates=[name for name, kind in kinds.items() if kind == "date"],
        categories=[name for name, kind in kinds.items() if kind == "category"],
        task=None if first.event is not None else task,
        test_fraction=0.0,
        preprocess=first.transformer if first.own else None,
    )
    checked({site: frame}, options, sources={site: source})
    column = {"classification": first.target, "survival": first.event}.get(task)
    strata = np.zeros(len(frame)) if column is None else pandas().factorize(frame[column])[0]
    held = held_out(strata, None, TESTED, seed, f"test rows of {site}")
    rows = {"train": frame[~held], "test": frame[held]}
    own = SiteTableData.of(
        checked({site: rows["train"]}, options, tests={site: rows["test"]}, sources={site: source}), options
    )[site]
    named = tuple(name for name in frame.columns if any(name in other.ids for other in tables))
    table = replace(own.own_table(first.domains), domain_input=first.domain_input, ids=named)
    if schema is not None:
        table = _by_schema(table, schema, tables, own, rows["train"])
    return _arrays(own.rows(), table, source), table


def _by_schema(
    table: TablePreprocessor,
    schema: Sequence[Column],
    tables: Sequence[TablePreprocessor],
    own: SiteTableData,
    train: Frame,
) -> TablePreprocessor:
    """The newcomer's ``table`` with the columns of ``schema``, fitted on its rows ``train``; others as they are."""
    counts = {c.name for other in tables for c in other.columns if c.kind == "number" and not c.binary}
    agreed = tuple(replace(c, binary=c.kind == "number" and c.name not in counts) for c in schema)
    silent = tables[0].shared is not None
    written = {column.name: column.format for column in own.columns}  # dates are written as the newcomer does
    inputs = tuple(_own(replace(c, format=written.get(c.name, "")), train, silent) for c in agreed)
    if silent:
        inputs += tuple(column for column in table.inputs if column.name not in {c.name for c in schema})
        table = replace(table, shared=len(agreed))
    table = replace(table, inputs=inputs, transformer=column_transformer(inputs, table.shared))
    read = table.read(train)
    table.transformer.fit(read)
    set_scales(table.transformer, read, inputs)
    return table


def _arrays(rows: Rows, table: TablePreprocessor, source: str) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for split, (part, y) in rows.items():
        if len(part):
            arrays[f"y_{split}"] = y
            if table.domain is not None:
                ids, problems = domain_ids(part[table.domain], table.domain, table.domains)
                refuse([f"{source}: {problem}" for problem in problems])
                arrays[f"domain_{split}"] = ids
            arrays[f"x_{split}"] = table.transform(part)[0]
    names = table.feature_names_out_
    return arrays if names is None else {**arrays, "feature_names": names}


def _schema(tables: Sequence[TablePreprocessor]) -> tuple[Column, ...] | None:
    """The columns that enter, or are shared by name, if they are the same at all of several sites."""
    first = tables[0].inputs[: tables[0].shared]
    shapes = {tuple((c.name, c.kind, c.levels, c.masked) for c in table.inputs[: table.shared]) for table in tables}
    return first if len(shapes) == 1 and len(tables) > 1 and not tables[0].own else None


def _own(column: Column, train: Frame, silent: bool) -> Column:
    """A column of the schema as the newcomer has it, with the levels of the schema."""
    if column.name not in train.columns:
        return replace(column, absent=True, silent=silent, missing=0, constant=False, categories=())
    column = replace(column, absent=False, silent=False)
    found = learnt(read(train[column.name], column)[0], column)
    return replace(found, levels=column.levels, masked=column.masked)


def new_client(federation: Federation, name: str, given: Mapping[str, Any], seed: int = 0) -> Client:
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


def new_client_from_frame(federation: Federation, name: str, frame: Any, source: str, seed: int = 0) -> Client:
    """A client of ``federation``, which is of tables, from a data frame with the site's columns.

    Raises:
        PerfedError: as :func:`new_client` and :func:`perfed.data.new_client.new_client_table`.
    """
    tables = [client.table for client in federation if client.table is not None]
    arrays, table = new_client_table(name, frame, source, tables, federation.task, seed)
    return replace(new_client(federation, name, arrays, seed), table=table, held=table.held)
