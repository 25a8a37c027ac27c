"""From one data frame per site to inputs, targets and domains: checked, split, each site's preprocessing fitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.labels import Task
from perfed.data.tables.checks import Checked, Part, checked
from perfed.data.tables.kinds import Column, date_shown, guess
from perfed.data.tables.options import TableOptions
from perfed.data.tables.preprocess import column_transformer, output_names, outputs, own_transformer
from perfed.data.tables.problems import Frame, Problem, merged
from perfed.data.tables.schema import learnt, shared_columns, told
from perfed.data.tables.site import SiteTable, domain_ids
from perfed.data.tables.splits import fold_of, held_out
from perfed.data.tables.targets import event_option, looks_like_event, numeric
from perfed.errors import PerfedError, some

_Rows = dict[str, tuple[Frame, NDArray[Any]]]
"""Rows of a site and their targets, by split."""


@dataclass(frozen=True)
class Built:
    """What :meth:`perfed.data.federation.Federation.from_frames` is made of.

    Attributes:
        arrays: per site what :meth:`perfed.data.federation.Federation.from_arrays` takes.
        tables: per site.
        task: of the targets.
        domains: names of the domains 0, 1, ...; ``None`` without a domain column.
        told: what sites must tell each other before they train.
        remarks: what is worth knowing and no fault: columns that do not enter, names written in two ways, sites
            with one class.
    """

    arrays: dict[str, dict[str, Any]]
    tables: dict[str, SiteTable]
    task: Task
    domains: tuple[str, ...] | None
    told: tuple[str, ...]
    remarks: tuple[str, ...]


def build(
    frames: Mapping[str, Frame],
    options: TableOptions,
    *,
    tests: Mapping[str, Frame] | None = None,
    sources: Mapping[str, str] | None = None,
    test_sources: Mapping[str, str] | None = None,
) -> Built:
    """Check the tables of all sites, split them and fit each site's preprocessing on its own training rows.

    Args:
        frames: a data frame per site; its index names rows in messages.
        options: what the columns are for.
        tests: the rows that each site is tested on, in place of a split; sites may be left out.
        sources, test_sources: where each site's rows come from, for messages (default: "site 'NAME'").

    Raises:
        TableProblems: everything that is wrong with rows and columns.
        PerfedError: no data frames, or a transformer of the user's own that cannot be used.
    """
    data = checked(frames, options, tests=tests, sources=sources, test_sources=test_sources)
    tested = {part.site: (part.frame, data.test_targets[part.site]) for part in data.given}
    rows = {part.site: _split(part, data, tested, options) for part in data.main}
    known = {site: [learnt(rows[site]["train"][0], column) for column in held] for site, held in data.columns.items()}
    as_it_is = options.preprocess is not None and options.columns == "own"
    entering = known if as_it_is else shared_columns(known, options.columns)
    tables = {
        part.site: _table(part, known[part.site], entering[part.site], rows[part.site]["train"], data.domains, options)
        for part in data.main
    }
    arrays = {site: _arrays(table, rows[site], data.domains) for site, table in tables.items()}
    lines = told(options.columns, entering, data.task, data.domains is not None)
    drawn = "" if tests else f", whose rows seed {options.seed} draws"
    remarks = merged([*_hints(known, data, options), *_remarks(rows, tables, known, data.task, drawn)])
    return Built(arrays, tables, data.task, data.domains, tuple(lines), tuple(remarks))


def _split(part: Part, data: Checked, tested: Mapping[str, tuple[Frame, NDArray[Any]]], options: TableOptions) -> _Rows:
    """The site's rows to train on and to test on."""
    y = data.targets[part.site]
    if part.site in tested:
        return {"train": (part.frame, y), "test": tested[part.site]}
    held = np.zeros(len(y), bool) if tested else _test_rows(part, y, data.task, options)
    return {"train": (part.frame[~held], y[~held]), "test": (part.frame[held], y[held])}


def _test_rows(part: Part, y: NDArray[Any], task: Task, options: TableOptions) -> NDArray[np.bool_]:
    """Which of the site's rows it is tested on."""
    strata = {"classification": y, "survival": y.reshape(len(y), -1)[:, -1]}.get(task, np.zeros(len(y)))
    groups = None if options.group is None else part.frame[options.group].astype(str).to_numpy()
    if not options.folds:
        return held_out(strata, groups, options.test_fraction, options.seed, f"test rows of {part.site}")
    repetition, held = divmod(options.seed, options.folds)
    return np.equal(fold_of(strata, groups, options.folds, repetition, f"folds of {part.site}"), held)


def _table(
    part: Part,
    known: Sequence[Column],
    entering: Sequence[Column],
    train: tuple[Frame, NDArray[Any]],
    domains: tuple[str, ...] | None,
    options: TableOptions,
) -> SiteTable:
    if not entering:
        raise PerfedError(
            f"{part.source}: no column is left to enter; those that there are do not vary, or are dropped"
        )
    own = options.preprocess is not None
    if not own:
        transformer = column_transformer(entering)
    elif isinstance(options.preprocess, str):
        transformer = own_transformer(options.preprocess)
    else:
        from sklearn.base import clone

        transformer = clone(options.preprocess)
    names = {column.name for column in entering if not column.absent} | {options.target, options.event, options.domain}
    ignored = tuple(name for name in part.frame.columns if name not in names)
    out = [name for name in (options.group, *options.drop) if name in part.frame.columns and name is not None]
    ids = tuple(n for n in out if n == options.group or guess(part.frame[n], n).kind == "id")
    table = SiteTable(
        part.site,
        tuple(entering),
        transformer,
        options.target,
        domain=options.domain,
        domains=domains or (),
        ignored=ignored,
        own=own,
        event=options.event,
        ids=ids,
        constant=tuple(column.name for column in known if column.constant and column.name not in names),
    )
    frame, y = train
    transformer.fit(table.read(frame), y)
    return table


def _arrays(table: SiteTable, rows: _Rows, domains: tuple[str, ...] | None) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for split, (frame, y) in rows.items():
        if len(frame):
            arrays[f"x_{split}"] = outputs(table.transformer, table.read(frame), f"site '{table.site}'")
            arrays[f"y_{split}"] = y
            if domains is not None and table.domain is not None:
                arrays[f"domain_{split}"] = domain_ids(frame[table.domain], table.domain, domains)[0]
    names = output_names(table.transformer)
    return arrays if names is None else {**arrays, "feature_names": names}


def _hints(known: Mapping[str, Sequence[Column]], data: Checked, options: TableOptions) -> Iterator[Problem]:
    """What was guessed of dates, and a column that may be one of events."""
    formats: dict[str, dict[str, list[str]]] = {}
    events: dict[str, str] = {}
    for site, columns in known.items():
        for column in columns:
            if column.kind == "date":
                formats.setdefault(column.name, {}).setdefault(date_shown(column.format), []).append(site)
            elif looks_like_event(column) and options.event is None and numeric(data.targets.values()):
                events[column.name] = event_option(column.name)
    yield from ((f"column '{name}'", f"is this survival? {option}") for name, option in events.items())
    for name, found in formats.items():
        if len(found) > 1:
            yield f"column '{name}'", "dates are read as " + "; as ".join(f"{f} at {some(s)}" for f, s in found.items())
        elif (only := next(iter(found))) != date_shown("ISO8601"):
            yield f"column '{name}'", f"dates are read as {only}"


def _remarks(
    rows: Mapping[str, _Rows],
    tables: Mapping[str, SiteTable],
    known: Mapping[str, Sequence[Column]],
    task: Task,
    drawn: str,
) -> Iterator[Problem]:
    spelt: dict[str, str] = {}
    for site, columns in known.items():
        names = [column.name for column in columns]
        for name in names:
            first = spelt.setdefault("".join(name.casefold().split()), name)
            if first not in names:
                yield f"site '{site}'", f"column '{name}' is another than '{first}' of other sites; is it meant to be?"
    for site, table in tables.items():
        if out := table.constant:
            which = f"constant in the training rows{drawn}, and not entering there"
            yield f"site '{site}'", f"columns that are {which}: {', '.join(out)}"
        y = rows[site]["train"][1]
        if task == "classification" and len(set(y.tolist())) == 1:
            yield f"site '{site}'", "its training rows are of one class"
        if not len(rows[site]["test"][0]):
            yield f"site '{site}'", "no rows to test on; it trains and is not evaluated"
