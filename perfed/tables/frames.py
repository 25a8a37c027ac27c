"""Federations of data frames, with all sites in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfed.data.client import Client
from perfed.data.column import Column
from perfed.data.federation import Federation, federation_of
from perfed.data.labels import Task
from perfed.data.summary import NAMES
from perfed.errors import shorten_list
from perfed.tables.agreement import agree_on_schema, describe_metadata
from perfed.tables.checks import Checked, check_tables
from perfed.tables.doubts import describe_doubts
from perfed.tables.kinds import ParsedTable, describe_format
from perfed.tables.leaks import describe_copies, describe_gaps, describe_shared_groups
from perfed.tables.missing import missing_values
from perfed.tables.options import TableOptions
from perfed.tables.problems import Frame, Problem, merge_lines
from perfed.tables.public import NOTHING_OF_ROWS
from perfed.tables.site_differences import describe_differences
from perfed.tables.site_rows import SiteTableData
from perfed.tables.targets import are_numbers, event_option, looks_like_event


def build_federation(
    frames: Mapping[str, Frame | ParsedTable],
    options: TableOptions | Mapping[str, Any],
    *,
    name: str = "tables",
    tests: Mapping[str, Frame | ParsedTable] | None = None,
    sources: Mapping[str, str] | None = None,
    test_sources: Mapping[str, str] | None = None,
) -> Federation:
    """Check the tables of all sites and create their clients by the same steps as over a network.

    Each site splits its rows and fits its preprocessing on its training rows. Problems that only all tables together
    show are reported in one list, and the task is detected if the options do not set it.

    Args:
        frames: a data frame per site; its index names rows in messages.
        options: the options of the tables, or the arguments of :class:`perfed.tables.options.TableOptions`.
        name: the name of the data in reports.
        tests: separate test rows of some sites, which replace a split.
        sources, test_sources: the name of each site's rows in messages (default: "site 'NAME'").

    Returns:
        The federation of all sites. In its notes, "told" describes the metadata that sites send before training,
        "remarks" lists columns that do not enter, names with two spellings and sites with one class, and "doubts" lists
        warnings (:mod:`perfed.tables.doubts` and :mod:`perfed.tables.leaks`); with groups, "group_split" is their
        column and division, which a site that joins adopts.

    Raises:
        DataProblems: rows or columns have problems.
        PerfedError: there are no data frames, or a transformer of the user cannot be used.
    """
    options = options if isinstance(options, TableOptions) else TableOptions(**options)
    data = check_tables(frames, options, tests=tests, sources=sources, test_sources=test_sources)
    seed_note = "" if tests else f", whose rows seed {options.seed} draws"
    options = replace(options, task=None if options.event is not None else data.task)
    options = replace(options, test_fraction=0.0, folds=0) if tests else options
    sites = SiteTableData.of(data, options)
    metadata = {site: rows.create_metadata() for site, rows in sites.items()}
    agreement = agree_on_schema(metadata, options, {part.site: part.source for part in data.main})
    clients = {site: rows.client(agreement) for site, rows in sites.items()}
    columns = {site: rows.unify_columns(agreement)[0] for site, rows in sites.items()}
    remarks = merge_lines(
        [*_describe_dates_and_events(columns, data, options), *_describe_sites(columns, clients, data.task, seed_note)]
    )
    metadata_lines = [NOTHING_OF_ROWS] if options.public else describe_metadata(metadata, agreement, NAMES)
    warnings = [
        *describe_shared_groups(data, options),
        *describe_gaps(clients.values(), data.task, agreement.classes, options),
        *describe_copies(data.main, data.test_parts, columns, data.task, options),
        *describe_doubts(data, columns, options),
        *describe_differences(metadata, options.target),
    ]
    notes: dict[str, Any] = {"told": tuple(metadata_lines), "remarks": tuple(remarks), "doubts": tuple(warnings)}
    if options.group is not None:
        notes["group_split"] = (options.group, options.group_split)
    return federation_of(clients.values(), agreement, name, notes=notes)


def _describe_dates_and_events(
    columns_of_sites: Mapping[str, Sequence[Column]], data: Checked, options: TableOptions
) -> Iterator[Problem]:
    """Yield remarks on the formats of dates, on texts that may mean missing, and on columns that may hold events."""
    formats: dict[str, dict[str, list[str]]] = {}
    events: dict[str, str] = {}
    for site, columns in columns_of_sites.items():
        for column in columns:
            if column.kind == "date":
                formats.setdefault(column.name, {}).setdefault(describe_format(column.format), []).append(site)
            elif looks_like_event(column) and options.event is None and are_numbers(data.targets.values()):
                events[column.name] = event_option(column.name)
    yield from ((f"column '{name}'", f"is this survival? {option}") for name, option in events.items())
    yield from _describe_suspected_missing_texts(columns_of_sites, data, options)
    for name, sites_by_format in formats.items():
        if len(sites_by_format) > 1:
            yield (
                f"column '{name}'",
                "dates are read as " + "; as ".join(f"{f} at {shorten_list(s)}" for f, s in sites_by_format.items()),
            )
        elif (only := next(iter(sites_by_format))) != describe_format("ISO8601"):
            yield f"column '{name}'", f"dates are read as {only}"


def _describe_suspected_missing_texts(
    columns: Mapping[str, Sequence[Column]], data: Checked, options: TableOptions
) -> Iterator[Problem]:
    """Yield a line for each category column with texts such as NA: as what they are read."""
    texts: dict[str, set[str]] = {}
    for part in data.main:
        for column in columns[part.site]:
            if column.kind == "category":
                texts.setdefault(column.name, set()).update(part.table.missing_texts(column.name))
    for name, values in texts.items():
        which = " and ".join(sorted(values))
        if values and "" not in missing_values(options.codes, name):
            yield f"column '{name}'", f"{which} is read as missing; if it is a category, put '{name}=' into missing"
        elif values and "" in options.codes:
            yield f"column '{name}'", f"{which} is read as a category, and as missing without '' or [] in missing"


def _describe_sites(
    columns_of_sites: Mapping[str, Sequence[Column]], clients: Mapping[str, Client], task: Task, seed_note: str
) -> Iterator[Problem]:
    spelt: dict[str, str] = {}
    for site, columns in columns_of_sites.items():
        names = [column.name for column in columns]
        for name in names:
            first = spelt.setdefault("".join(name.casefold().split()), name)
            if first not in names:
                yield f"site '{site}'", f"column '{name}' is another than '{first}' of other sites; is it meant to be?"
    for site, client in clients.items():
        if client.table is not None and (out := client.table.constant):
            which = f"constant in the training rows{seed_note}, and not entering there"
            yield f"site '{site}'", f"columns that are {which}: {shorten_list(out, NAMES)}"
        if task == "classification" and len(client.train.y.unique()) == 1:
            yield f"site '{site}'", "its training rows are of one class"
        if client.split("test") is None:
            yield f"site '{site}'", "no rows to test on; it trains and is not evaluated"
