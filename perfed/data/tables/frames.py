"""From one data frame per site to inputs, targets and domains: checked, split, each site's preprocessing fitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.labels import Task
from perfed.data.tables.kinds import Column, cells, guess, read
from perfed.data.tables.preprocess import column_transformer, output_names, outputs, own_transformer
from perfed.data.tables.problems import Frame, in_rows, listed, refuse, unknown
from perfed.data.tables.schema import Mode, agreed, learnt, shared_columns, told
from perfed.data.tables.site import SiteTable, domain_ids
from perfed.data.tables.splits import fold_of, held_out
from perfed.data.tables.targets import targets_of
from perfed.errors import PerfedError


@dataclass(frozen=True)
class TableOptions:
    """How sites' tables become a federation.

    Attributes:
        target: the column to predict.
        domain: column that says the domain of a row; it is no input (``domain_input`` of a data set makes it one).
        drop: columns that do not enter: ids, free text.
        dates, categories: columns that are so, whatever they look like.
        group: column whose rows of one value (a patient's) are never on both sides of a split.
        task: "classification" or "regression"; by default what the targets look like.
        test_fraction: share of each site's rows that is tested on, by class.
        folds: k > 0: instead, one of k folds by class. Which, says ``seed``: seeds 0, ..., k - 1 test every row once,
            the next k do so with other folds.
        columns: "own": each site its own; "common": those that all have; "union": all, absent ones filled and masked.
        preprocess: a scikit-learn transformer in place of ours, as ``module:NAME`` or itself.
        seed: of the split.
    """

    target: str
    domain: str | None = None
    drop: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    group: str | None = None
    task: Task | None = None
    test_fraction: float = 0.2
    folds: int = 0
    columns: Mode = "own"
    preprocess: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, good in (
            ("test_fraction", self.test_fraction, 0 <= self.test_fraction < 1),
            ("folds", self.folds, self.folds == 0 or self.folds >= 2),
            ("columns", self.columns, self.columns in ("own", "common", "union")),
            ("task", self.task, self.task in (None, "classification", "regression")),
        ):
            if not good:
                allowed = {
                    "test_fraction": "from 0 to below 1",
                    "folds": "0, or at least 2",
                    "columns": "own, common, union",
                    "task": "classification, regression",
                }
                raise PerfedError(f"{name} = {value!r} is not allowed; allowed: {allowed[name]}")
        roles = [name for name in (self.target, self.domain, self.group, *self.drop) if name is not None]
        twice = [name for name in dict.fromkeys(roles) if roles.count(name) > 1]
        if twice:
            raise PerfedError(f"column {listed(twice)} has two roles among target, domain, group and drop")


@dataclass(frozen=True)
class Built:
    """What :meth:`perfed.data.federation.Federation.from_frames` is made of.

    Attributes:
        arrays: per site what :meth:`perfed.data.federation.Federation.from_arrays` takes.
        tables: per site.
        task: of the targets.
        domains: names of the domains 0, 1, ...; ``None`` without a domain column.
        told: what sites must tell each other before they train.
        remarks: what is worth knowing and no fault: columns that do not enter, sites with one class.
    """

    arrays: dict[str, dict[str, Any]]
    tables: dict[str, SiteTable]
    task: Task
    domains: tuple[str, ...] | None
    told: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass
class _Part:
    """Rows of a site, all of one source: its table, or the table that it is tested on."""

    site: str
    source: str
    frame: Frame

    def said(self, problem: str) -> str:
        return f"{self.source}: {problem}"


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
    if not isinstance(frames, Mapping) or not frames:
        raise PerfedError("frames must be a mapping from the name of a site to its data frame, with one site at least")
    twice = [site for site, count in Counter(map(str, frames)).items() if count > 1]
    if twice:
        raise PerfedError(f"two sites are called {listed(twice)}; names must differ")
    strange = [site for site in tests or {} if site not in frames]
    if strange:
        raise PerfedError(
            f"test rows are given for {listed(strange)}, but there are the sites {', '.join(frames)} only"
        )
    main = [_part(str(site), frame, sources) for site, frame in sorted(frames.items())]
    given = [_part(str(site), frame, test_sources, " (test)") for site, frame in sorted((tests or {}).items())]
    parts = [*main, *given]
    _refuse(_structure(part) for part in parts)
    _refuse(_roles(part, options) for part in parts)
    _refuse([_dropped(parts, options)])
    columns = {part.site: _columns(part, options) for part in main}
    values, task, problems = targets_of(
        [(p.source, p.frame[options.target]) for p in parts], options.target, options.task
    )
    domains = _domains(parts, options)
    problems += [line for part in main for line in _unfit(part, columns[part.site], options)]
    by_site = {part.site: part.source for part in main}
    if options.columns != "own":
        columns, found = agreed(columns, by_site)
        problems += found
    problems += [line for part in parts for line in _unreadable(part, columns[part.site], options)]
    problems += [line for part in main for line in _too_small(part, options, given)]
    refuse(problems)
    targets = dict(zip(((part.site, part in given) for part in parts), values, strict=True))
    return _fitted(main, given, columns, targets, task, domains, options)


def _refuse(found: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> None:
    refuse([line for lines in found for line in lines])


def _part(site: str, frame: Frame, sources: Mapping[str, str] | None, what: str = "") -> _Part:
    source = (sources or {}).get(site, f"site '{site}'{what}")
    if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):
        raise PerfedError(f"{source}: a {type(frame).__name__} was given; a pandas DataFrame is needed")
    return _Part(site, source, frame.set_axis([str(name) for name in frame.columns], axis=1))


# Checks --------------------------------------------------------------------------------------------------------


def _structure(part: _Part) -> list[str]:
    names = list(part.frame.columns)
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    found = [f"several columns are called {listed(twice)}; names must differ"] if twice else []
    found += [] if len(part.frame) else ["there are no rows; every site needs some"]
    return [part.said(line) for line in found]


def _roles(part: _Part, options: TableOptions) -> list[str]:
    """Target, domain and group must be there, in every row."""
    found = []
    names = list(part.frame.columns)
    roles = {"target": options.target, "domain": options.domain, "group": options.group}
    for role, name in roles.items():
        if name is None:
            continue
        if name not in names:
            found.append(f"{role}: {unknown(name, names)}")
        elif len(empty := part.frame.index[cells(part.frame[name]).isna()]):
            way = "leave these rows out" if role == "target" else "fill them in, or leave these rows out"
            found.append(f"column '{name}', the {role}, is missing {in_rows(empty)}; {way}")
    return [part.said(line) for line in found]


def _dropped(parts: Sequence[_Part], options: TableOptions) -> list[str]:
    """What is named in drop, dates and categories must be a column of some site."""
    names = list(dict.fromkeys(name for part in parts for name in part.frame.columns))
    said = {"drop": options.drop, "dates": options.dates, "categories": options.categories}
    return [
        f"{key}: no site has a column: {unknown(name, names)}"
        for key, of in said.items()
        for name in of
        if name not in names
    ]


def _unfit(part: _Part, columns: Sequence[Column], options: TableOptions) -> list[str]:
    """Columns that look like ids or free text; a transformer of the user's own gets what there is."""
    if options.preprocess is not None:
        return []
    ways = {
        "id": "looks like an id; name it in drop, or in categories if it is one",
        "text": "looks like free text; name it in drop, or in categories if it is one",
    }
    return [part.said(f"column '{column.name}' {ways[column.kind]}") for column in columns if column.kind in ways]


def _unreadable(part: _Part, columns: Sequence[Column], options: TableOptions) -> list[str]:
    """Values that are not of their column's kind, by row; columns that rows to be tested on lack."""
    names = list(part.frame.columns)
    found = [unknown(column.name, names) for column in columns if column.name not in names]
    for column in columns:
        if column.name in names:
            found += read(part.frame[column.name], column)[1]
    return [part.said(line) for line in found]


def _too_small(part: _Part, options: TableOptions, given: Sequence[_Part]) -> list[str]:
    if any(test.site == part.site for test in given):
        return []
    units, what = len(part.frame), "rows"
    if options.group is not None:
        units, what = part.frame[options.group].nunique(), f"values of the group '{options.group}'"
    least = options.folds or (2 if options.test_fraction else 1)
    why = f"folds = {least}" if options.folds else "to train on and to test on"
    return [part.said(f"it has {units} {what}; at least {least} are needed ({why})")] if units < least else []


# Making --------------------------------------------------------------------------------------------------------


def _columns(part: _Part, options: TableOptions) -> list[Column]:
    """Kinds of the columns that may enter, from all rows of the site."""
    roles = {options.target, options.domain, options.group, *options.drop}
    return [
        guess(part.frame[name], name, as_date=name in options.dates, as_category=name in options.categories)
        for name in part.frame.columns
        if name not in roles
    ]


def _domains(parts: Sequence[_Part], options: TableOptions) -> tuple[str, ...] | None:
    if options.domain is None:
        return None
    texts = [read(part.frame[options.domain], Column(options.domain, "category"))[0] for part in parts]
    return tuple(sorted({name for column in texts for name in column.dropna()}))


def _test_rows(part: _Part, y: NDArray[Any], task: Task, options: TableOptions) -> NDArray[np.bool_]:
    """Which of the site's rows it is tested on."""
    strata = y if task == "classification" else np.zeros(len(y))
    groups = None if options.group is None else part.frame[options.group].astype(str).to_numpy()
    if not options.folds:
        return held_out(strata, groups, options.test_fraction, options.seed, f"test rows of {part.site}")
    repetition, held = divmod(options.seed, options.folds)
    return np.equal(fold_of(strata, groups, options.folds, repetition, f"folds of {part.site}"), held)


def _fitted(
    main: Sequence[_Part],
    given: Sequence[_Part],
    columns: Mapping[str, Sequence[Column]],
    targets: Mapping[tuple[str, bool], NDArray[Any]],
    task: Task,
    domains: tuple[str, ...] | None,
    options: TableOptions,
) -> Built:
    tests = {part.site: part for part in given}
    rows: dict[str, dict[str, tuple[Frame, NDArray[Any]]]] = {}
    for part in main:
        y = targets[part.site, False]
        if part.site in tests:
            rows[part.site] = {"train": (part.frame, y), "test": (tests[part.site].frame, targets[part.site, True])}
        else:
            held = np.zeros(len(y), bool) if given else _test_rows(part, y, task, options)
            rows[part.site] = {"train": (part.frame[~held], y[~held]), "test": (part.frame[held], y[held])}
    known = {site: [learnt(rows[site]["train"][0], column) for column in held] for site, held in columns.items()}
    entering = (
        known if options.preprocess is not None and options.columns == "own" else shared_columns(known, options.columns)
    )
    tables: dict[str, SiteTable] = {}
    arrays: dict[str, dict[str, Any]] = {}
    for part in main:
        table = _table(part, entering[part.site], rows[part.site]["train"], domains, options)
        tables[part.site] = table
        arrays[part.site] = _arrays(table, rows[part.site], domains)
    lines = told(options.columns, entering, task == "classification", domains is not None)
    remarks = _remarks(rows, tables, known, task)
    return Built(arrays, tables, task, domains, tuple(lines), tuple(remarks))


def _table(
    part: _Part,
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
    names = {column.name for column in entering if not column.absent} | {options.target, options.domain}
    ignored = tuple(name for name in part.frame.columns if name not in names)
    table = SiteTable(
        part.site, tuple(entering), transformer, options.target, options.domain, domains or (), ignored, own
    )
    frame, y = train
    transformer.fit(table.read(frame), y)
    return table


def _arrays(
    table: SiteTable, rows: Mapping[str, tuple[Frame, NDArray[Any]]], domains: tuple[str, ...] | None
) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for split, (frame, y) in rows.items():
        if len(frame):
            arrays[f"x_{split}"] = outputs(table.transformer, table.read(frame), f"site '{table.site}'")
            arrays[f"y_{split}"] = y
            if domains is not None and table.domain is not None:
                arrays[f"domain_{split}"] = domain_ids(frame[table.domain], table.domain, domains)[0]
    names = output_names(table.transformer)
    return arrays if names is None else {**arrays, "feature_names": names}


def _remarks(
    rows: Mapping[str, Mapping[str, tuple[Frame, NDArray[Any]]]],
    tables: Mapping[str, SiteTable],
    known: Mapping[str, Sequence[Column]],
    task: Task,
) -> Iterator[str]:
    for site, table in tables.items():
        out = [c.name for c in known[site] if c.constant and c.name not in table.feature_names_in_]
        if out:
            yield f"site '{site}': columns that do not vary, and do not enter: {', '.join(out)}"
        y = rows[site]["train"][1]
        if task == "classification" and len(set(y.tolist())) == 1:
            yield f"site '{site}': its training rows are of one class"
        if not len(rows[site]["test"][0]):
            yield f"site '{site}': no rows to test on; it trains and is not evaluated"
