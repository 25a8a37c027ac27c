"""A site with a table that joins a federation after a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from perfed.data.client import Client
from perfed.data.column import Column
from perfed.data.domain_input import with_domain
from perfed.data.federation import Federation
from perfed.data.groups import GroupSplit
from perfed.data.new_client import TEST_FRACTION, refuse_known_site
from perfed.errors import PerfedError
from perfed.tables.cells import clean_frame, column_names
from perfed.tables.kinds import guess
from perfed.tables.options import TableOptions
from perfed.tables.site import TablePreprocessor, table_of
from perfed.tables.site_rows import SiteTableData


def new_client_from_frame(federation: Federation, name: str, frame: Any, source: str, seed: int = 0) -> Client:
    """Return a new client for a ``federation`` of tables, from a data frame with the site's columns.

    If all sites share one schema, the new client uses it with its kinds of columns, whatever its rows look like: a
    column of the schema that the site lacks is missing in every row, and other columns do not enter, unless columns are
    shared by name: then columns that only this site has enter behind the shared ones. Otherwise the client has its own
    columns, and a column of dates, of categories, or of numbers that look like an id has the kind that it has at the
    other sites. The target, the domain and the ignored columns are those of the other sites. The preprocessing is
    fitted on the client's training rows; a quarter of the rows, stratified by class, are test rows. If rows have
    groups, the test groups are those that would be test groups at the other sites.

    Args:
        federation: the federation that the client joins.
        name: the id of the client.
        frame: the rows of the client.
        source: the origin of the rows in messages.
        seed: the seed of the split.

    Raises:
        PerfedError: the federation already has this id, :func:`perfed.tables.checks.check_tables` refuses the rows, a
            class or domain occurs at no other site, or a group of the test rows was trained on at another site.
    """
    refuse_known_site(federation, name)
    tables = [table for client in federation if (table := table_of(client)) is not None]
    named = tables[0].shared is not None
    columns = federation.columns if named else federation.columns or _find_shared_columns(tables)
    frame = frame.set_axis(column_names(frame), axis=1)
    cleaned = clean_frame(frame, tables[0].missing)
    options = _create_options(
        tables, columns, cleaned, task=None if tables[0].event is not None else federation.task, seed=seed
    )
    options = replace(options, **_copy_group_options(federation, options))
    site = SiteTableData.alone(name, frame, options, sources=(source, source))
    client = site.client(federation.schema.model_copy(update={"columns": columns}))
    table = table_of(client)
    assert table is not None
    ids = tuple(column for column in cleaned.columns if any(column in table.ids for table in tables))
    client = replace(client, table=replace(table, ids=ids))
    _refuse_trained_groups(federation, client, source)
    return with_domain(client, tables[0].domains) if tables[0].domain_input else client


def _create_options(
    tables: Sequence[TablePreprocessor], columns: tuple[Column, ...] | None, frame: Any, **settings: Any
) -> TableOptions:
    """Return the options, including ``settings``, for ``frame`` at a site that joins the sites with ``tables``."""
    first = tables[0]
    kinds_of_others = {column.name: column.kind for table in tables for column in table.columns}
    ignored = {name for table in tables for name in table.ignored} - set(kinds_of_others)
    named = first.shared is not None
    if columns is not None and not named:
        ignored |= set(frame.columns) - {c.name for c in columns} - {first.target, first.event, first.domain}
    swapped = {column.name for table in tables for column in table.columns if column.swapped}
    kinds = {
        name: kinds_of_others[name]
        for name, times in Counter(frame.columns).items()
        if name in kinds_of_others and times == 1
    }
    conversions = first.conversions.settings(tuple(frame.columns))
    numbers = [n for n, k in kinds.items() if k == "number" and (columns or guess(frame[n], n).kind == "id")]
    return TableOptions(
        target=first.target,
        event=first.event,
        domain=first.domain,
        drop=tuple(name for name in dict.fromkeys(frame.columns) if name in ignored),
        numbers=[*numbers, *conversions["numbers"]],
        thousands=conversions["thousands"],
        decimals=conversions["decimals"],
        swapped=[name for name in kinds if name in swapped],
        values=conversions["values"],
        dates=[name for name, kind in kinds.items() if kind == "date"],
        categories=[name for name, kind in kinds.items() if kind == "category"],
        missing=first.missing or None,
        test_fraction=TEST_FRACTION,
        columns="named" if named else "own" if columns is None else "union",
        preprocess=first.transformer if first.own else None,
        **settings,
    )


def _copy_group_options(federation: Federation, options: TableOptions) -> dict[str, Any]:
    """Return the options by which a site that joins splits groups as the other sites do; empty without groups."""
    if "group_split" not in federation.notes:
        return {}
    group: str
    split: GroupSplit
    group, split = federation.notes["group_split"]
    return {
        "group": group,
        "group_draw": split.draw,
        "folds": split.folds,
        "test_fraction": split.fraction or options.test_fraction,
        "seed": split.seed,
        "drop": tuple(name for name in options.drop if name != group),
    }


def _refuse_trained_groups(federation: Federation, client: Client, source: str) -> None:
    """Raise an error if test rows belong to groups that some site of the federation has trained on."""
    test = client.split("test")
    if test is None or test.group is None:
        return
    training_splits = [split for site in federation for split in (site.train, site.validation) if split is not None]
    groups = [split.group for split in training_splits if split.group is not None]
    number = len(np.intersect1d(test.group.numpy(), torch.cat(groups).numpy())) if groups else 0
    if number:
        raise PerfedError(
            f"{source}: its test rows have {number} values of the group on which other sites have trained; leave "
            "these rows out"
        )


def _find_shared_columns(tables: Sequence[TablePreprocessor]) -> tuple[Column, ...] | None:
    """The columns that enter, if they happen to be the same at all of several sites."""
    shapes = {tuple((c.name, c.kind, c.masked, c.levels) for c in table.inputs) for table in tables}
    if len(shapes) > 1 or len(tables) == 1 or tables[0].own:
        return None
    return tuple(Column(name=n, kind=k, masked=masked, levels=levels) for n, k, masked, levels in shapes.pop())
