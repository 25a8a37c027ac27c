"""The table of a site that comes after a run: its own preprocessing, on columns that the model of the others takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perfed.data.labels import Task
from perfed.data.tables.checks import checked
from perfed.data.tables.kinds import Column, guess, read
from perfed.data.tables.options import TableOptions
from perfed.data.tables.preprocess import column_transformer, keep_flags
from perfed.data.tables.problems import Frame, pandas, refuse
from perfed.data.tables.schema import learnt
from perfed.data.tables.site import SiteTable, domain_ids
from perfed.data.tables.site_rows import Rows, SiteRows
from perfed.data.tables.splits import held_out

TESTED = 0.25
"""Share of a newcomer's rows that it is tested on."""


def newcomer_table(
    site: str, frame: Frame, source: str, tables: Sequence[SiteTable], task: Task, seed: int
) -> tuple[dict[str, Any], SiteTable]:
    """Arrays of one client, and its preprocessing, fitted on its own training rows.

    Where all ``tables`` have one schema, the newcomer gets it too, kinds of columns with it, whatever its own rows look
    like: columns that it lacks are missing in every row, and further ones do not enter. Else it has columns of its own,
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
    if schema is not None:
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
    own = SiteRows.of(
        checked({site: rows["train"]}, options, tests={site: rows["test"]}, sources={site: source}), options
    )[site]
    named = tuple(name for name in frame.columns if any(name in other.ids for other in tables))
    table = replace(own.own_table(first.domains), domain_input=first.domain_input, ids=named)
    if schema is not None:
        counts = {c.name for other in tables for c in other.columns if c.kind == "number" and not c.binary}
        schema = tuple(replace(c, binary=c.kind == "number" and c.name not in counts) for c in schema)
        written = {column.name: column.format for column in own.columns}  # dates are written as the newcomer does
        inputs = tuple(_own(replace(c, format=written.get(c.name, "")), rows["train"]) for c in schema)
        table = replace(table, inputs=inputs, transformer=column_transformer(inputs))
        read = table.read(rows["train"])
        table.transformer.fit(read)
        keep_flags(table.transformer, read)
    return _arrays(own.rows(), table, source), table


def _arrays(rows: Rows, table: SiteTable, source: str) -> dict[str, Any]:
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


def _schema(tables: Sequence[SiteTable]) -> tuple[Column, ...] | None:
    """The columns that enter, if they are the same at all of several sites."""
    shapes = {tuple((c.name, c.kind, c.levels, c.masked) for c in table.inputs) for table in tables}
    return tables[0].inputs if len(shapes) == 1 and len(tables) > 1 and not tables[0].own else None


def _own(column: Column, train: Frame) -> Column:
    """A column of the schema as the newcomer has it, with the levels of the schema."""
    if column.name not in train.columns:
        return replace(column, absent=True, missing=0, constant=False, categories=())
    column = replace(column, absent=False)
    found = learnt(read(train[column.name], column)[0], column)
    return replace(found, levels=column.levels, masked=column.masked)
