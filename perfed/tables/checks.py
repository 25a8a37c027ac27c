"""Checks of the tables of sites before anything else uses them: names, rows, kinds, targets and personal data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.column import Column, Kind
from perfed.data.labels import Task
from perfed.data.names import LONGEST_NAME, compose_text, describe_control_character
from perfed.data.problems import raise_problems
from perfed.errors import PerfedError, shorten_list
from perfed.tables.agreement import unify_kinds
from perfed.tables.kinds import ParsedTable
from perfed.tables.marks import CODES, FEWEST, are_marked_numbers, describe_marks
from perfed.tables.missing import missing_values
from perfed.tables.options import TableOptions
from perfed.tables.problems import (
    Frame,
    Problem,
    Series,
    describe_absent_columns,
    describe_rows,
    describe_unknown_column,
    merge_lines,
    pandas,
    quote_names,
    refuse_complex,
)
from perfed.tables.targets import CONSTANT, FEW, are_constant, describe_target, read_events, read_targets

_MANY = 10  # different texts up to which a column is none of names


def count_rows_by_value(values: Series, groups: Series | None = None) -> Series:
    """Return the number of rows with each value or, if rows have ``groups`` such as patients, of these groups."""
    if groups is None:
        return values.value_counts()
    pairs = pandas().DataFrame({"value": values.to_numpy(), "group": groups.to_numpy()}).drop_duplicates()
    return pairs["value"].value_counts()


def describe_personal_values(name: str, values: Series, groups: Series | None = None) -> str:
    """Return a message if the texts of the column ``name`` may be names or codes of persons, otherwise ""."""
    counts: Any = count_rows_by_value(values, groups)
    different, rare, rows = len(counts), int((counts < FEWEST).sum()), int(counts.sum())
    if different <= _MANY or (2 * rare <= different and rows >= FEWEST * different):
        return ""
    units = "rows" if groups is None else f"values of '{groups.name}'"
    return (
        f"column '{name}' looks like names or codes of persons: {different} different texts in {rows} {units}, "
        f"{rare} of them in fewer than {FEWEST}; leave it out of the file, or name it in the study's drop, or in its "
        "categories if they are none"
    )


UNDECIDED: frozenset[Kind] = frozenset({"boolean", "empty"})
"""Kinds that another site may change if all have one schema; see :func:`perfed.tables.agreement.unify_kinds`."""

_ABOVE = "drop these rows, or add half a unit to them"


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of a site from one source: its table, or a separate table of test rows."""

    site: str
    source: str
    table: ParsedTable

    @property
    def frame(self) -> Frame:
        """The rows as a data frame."""
        return self.table.frame

    def add_source(self, problems: Iterable[str]) -> list[Problem]:
        """Return problems of these rows with their source."""
        return [(self.source, problem) for problem in problems]


@dataclass(frozen=True)
class Checked:
    """Tables that are in order.

    Attributes:
        main: the table of each site.
        test_parts: separate test rows of some sites, which replace a split.
        columns: for each site, the columns that may enter.
        targets: the targets of each site.
        task: the task of the targets.
    """

    main: Sequence[Part]
    test_parts: Sequence[Part]
    columns: Mapping[str, Sequence[Column]]
    targets: Mapping[str, NDArray[Any]]
    task: Task


def check_tables(
    frames: Mapping[str, Frame | ParsedTable],
    options: TableOptions,
    *,
    tests: Mapping[str, Frame | ParsedTable] | None = None,
    sources: Mapping[str, str] | None = None,
    test_sources: Mapping[str, str] | None = None,
    single_site: bool = False,
) -> Checked:
    """Check the tables of sites; the arguments are those of :func:`perfed.tables.frames.build_federation`.

    With ``single_site``, the tables of other sites are unknown, and what depends on them is not checked: whether the
    target varies, whether some site has each column that the options name, and the kind of columns of yes and no or
    without values.

    Raises:
        DataProblems: first the problems of names and required rows, then all others.
    """
    if not isinstance(frames, Mapping) or not frames:
        raise PerfedError("frames must be a mapping from the name of a site to its data frame, with one site at least")
    for tables in (frames, tests or {}):
        counts = Counter(compose_text(str(site)) for site in tables)
        if repeated := [site for site, count in counts.items() if count > 1]:
            raise PerfedError(f"two sites are called {quote_names(repeated)}; names must differ")
    sites = {compose_text(str(site)): str(site) for site in frames}
    unknown_sites = [site for site in tests or {} if compose_text(str(site)) not in sites]
    if unknown_sites:
        raise PerfedError(
            f"test rows are given for {quote_names(unknown_sites)}, but there are the sites {', '.join(frames)} only"
        )
    main = [_create_part(str(site), frame, options, sources) for site, frame in sort_by_name(frames)]
    tested_on = [
        _create_part(str(site), frame, options, test_sources, " (test)") for site, frame in sort_by_name(tests or {})
    ]
    test_parts = [replace(part, site=sites[compose_text(part.site)]) for part in tested_on]
    parts = [*main, *test_parts]
    raise_problems(
        [problem for site in frames if (problem := describe_control_character("site", str(site))) is not None]
    )
    raise_problems(_merge_problems(_describe_structure(part) for part in parts))
    raise_problems(_merge_problems(_describe_roles(part, options) for part in parts))
    raise_problems(_merge_problems(_describe_long_texts(part, options) for part in parts))
    names = list(dict.fromkeys(name for part in parts for name in part.frame.columns))
    raise_problems([] if single_site else describe_absent_columns(options.named, names, names))
    tested = {part.site: part for part in test_parts}
    columns = {part.site: _guess_columns(part, tested.get(part.site), options) for part in main}
    values, task, problems = _check_targets(parts, options, single_site=single_site)
    questions = _ask_about_marks(main, columns)
    problems += _merge_problems(
        _describe_unusable_columns(part, columns[part.site], options, questions) for part in main
    )
    read_as: Mapping[str, Sequence[Column]] = columns
    if options.columns != "own" and not single_site:
        read_as, conflicts = unify_kinds(columns, {part.site: part.source for part in main})
        problems += conflicts
    late = UNDECIDED if options.columns != "own" and single_site else frozenset[Kind]()
    problems += _merge_problems(describe_unreadable_values(part, read_as[part.site], late) for part in parts)
    problems += _merge_problems(
        _describe_small_site(part, options, test_parts, single_site=single_site) for part in main
    )
    problems += _merge_problems(_find_trained_groups(part, options, main) for part in test_parts)
    raise_problems(problems)
    return Checked(main, test_parts, columns, dict(zip(columns, values, strict=False)), task)


def _check_targets(
    parts: Sequence[Part], options: TableOptions, *, single_site: bool = False
) -> tuple[list[NDArray[Any]], Task, list[str]]:
    """Return labels, values, or times and events ``(rows, 2)``; see :func:`perfed.tables.targets.read_targets`."""
    survival = options.event is not None
    tables = [(part.source, part.table) for part in parts]
    if options.task is None and not survival:
        marked = [
            (source, table.texts(options.target))
            for source, table in tables
            if _is_marked_target(table, options.target)
        ]
        if marked:
            question = describe_marks(options.target, [text for _, texts in marked for text in texts])
            way = "or say task = 'classification' if these are classes"
            question = question.replace(CODES, way)
            return [], "regression", merge_lines((source, question) for source, _ in marked)
    values, task, problems = read_targets(tables, options.target, "regression" if survival else options.task)
    if not single_site and not problems and are_constant(values):
        problems.append(CONSTANT.format(describe_target(options.target)))
    if options.event is None:
        return values, task, problems
    events, event_problems = read_events(tables, options.event)
    problems += event_problems
    for part, times in zip(parts, values, strict=False):
        if len(bad := part.frame.index[times <= 0]):
            problems.append(
                f"{part.source}: column '{options.target}', the time, is not above 0 {describe_rows(bad)}; {_ABOVE}"
            )
    pairs = [] if problems else [np.column_stack(pair) for pair in zip(values, events, strict=True)]
    return pairs, "survival", problems


def _is_marked_target(table: ParsedTable, name: str) -> bool:
    """Return whether a target holds numbers with marks or units that are too many to be classes."""
    texts = table.texts(name)
    return len(set(texts)) > FEW and bool(table.numbers(name).isna().any()) and are_marked_numbers(texts)


def sort_by_name(frames: Mapping[str, Frame | ParsedTable]) -> list[tuple[str, Frame | ParsedTable]]:
    """Return sites and their frames, sorted by name."""
    return sorted(((str(site), frame) for site, frame in frames.items()), key=lambda pair: pair[0])


def _merge_problems(problems_of_parts: Iterable[Sequence[Problem]]) -> list[str]:
    return merge_lines(problem for problems in problems_of_parts for problem in problems)


def _create_part(
    site: str, frame: Frame | ParsedTable, options: TableOptions, sources: Mapping[str, str] | None, suffix: str = ""
) -> Part:
    source = (sources or {}).get(site, f"site '{site}'{suffix}")
    if isinstance(frame, ParsedTable):
        return Part(site, source, frame.clean(options.codes).converted(options.conversions))
    if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):
        raise PerfedError(f"{source}: a {type(frame).__name__} was given; a pandas DataFrame is needed")
    refuse_complex(frame, source)
    return Part(site, source, ParsedTable(frame).clean(options.codes).converted(options.conversions))


def _guess_columns(part: Part, test_part: Part | None, options: TableOptions) -> list[Column]:
    """Return the columns that may enter, with the kinds that all rows of the site suggest, including test rows."""
    roles = {options.target, options.event, options.domain, options.group, *options.drop}
    test_rows = None if test_part is None else test_part.table
    names = [name for name in part.frame.columns if name not in roles]
    kinds = options.kinds
    columns = [part.table.guess(name, kinds.get(name), test_rows, swapped=name in options.swapped) for name in names]
    return [c.with_kind(options.kinds[c.name]) if c.name in options.public else c for c in columns]


def _describe_structure(part: Part) -> list[Problem]:
    names = list(part.frame.columns)
    repeated = [name for name, times in Counter(names).items() if times > 1]
    problems = [f"several columns are called {quote_names(repeated)}; names must differ"] if repeated else []
    problems += [] if len(part.frame) else ["there are no rows; every site needs some"]
    problems += filter(None, (describe_control_character("column", name) for name in names))
    problems += [
        f"the name of column {number} has {len(name):,} characters; allowed: {LONGEST_NAME:,}"
        for number, name in enumerate(names, start=1)
        if len(name) > LONGEST_NAME
    ]
    return part.add_source(problems)


def _describe_long_texts(part: Part, options: TableOptions) -> list[Problem]:
    """Return problems with texts that are too long for a class, a domain or a category.

    Columns of free text and ids are reported elsewhere.
    """
    roles = [name for name in (options.target, options.domain) if name is not None]
    left_out = {*roles, options.event, options.group, *options.drop}
    names = [name for name in part.frame.columns if name not in left_out and part.table.cells(name).dtype == object]
    categories = [name for name in names if part.table.guess(name, options.kinds.get(name)).kind == "category"]
    problems = []
    for name in (*roles, *categories):
        cells = part.table.cells(name)
        rows = [
            row
            for row, cell in zip(cells.index, cells, strict=True)
            if isinstance(cell, str) and len(cell) > LONGEST_NAME
        ]
        if rows:
            problems.append(
                f"column '{name}' holds texts of more than {LONGEST_NAME:,} characters {describe_rows(rows)}; "
                "shorten them, or drop the column"
            )
    return part.add_source(problems)


def _describe_roles(part: Part, options: TableOptions) -> list[Problem]:
    """Return problems with the target, the event, the domain and the group, which every row must have."""
    problems = []
    names = list(part.frame.columns)
    roles = {"target": options.target, "event": options.event, "domain": options.domain, "group": options.group}
    for role, name in roles.items():
        if name is None:
            continue
        if name not in names:
            problems.append(f"{role}: {describe_unknown_column(name, names)}")
        elif len(empty := part.frame.index[part.table.cells(name).isna()]):
            way = "leave these rows out" if role in ("target", "event") else "fill them in, or leave these rows out"
            if "" not in missing_values(options.codes, name) and (texts := part.table.missing_texts(name)):
                way += f", or put '{name}=' into missing if {' or '.join(texts)} is a value"
            problems.append(f"column '{name}', the {role}, is missing {describe_rows(empty)}; {way}")
        elif role == "domain":
            problems += part.table.read_texts(name)[1]
    return part.add_source(problems)


def _ask_about_marks(parts: Sequence[Part], columns: Mapping[str, Sequence[Column]]) -> dict[str, str]:
    """Return the question about each column of numbers with marks, by name, from the texts of all sites."""
    texts: dict[str, list[str]] = {}
    for part in parts:
        for column in columns[part.site]:
            if column.kind == "marked number":
                texts.setdefault(column.name, []).extend(part.table.texts(column.name))
    return {name: describe_marks(name, of_column) for name, of_column in texts.items()}


def _describe_unusable_columns(
    part: Part, columns: Sequence[Column], options: TableOptions, questions: Mapping[str, str]
) -> list[Problem]:
    """Return problems with columns that look like ids, free text, decimal commas or numbers with marks.

    With a transformer of the user there are none, since it handles all columns. ``questions`` are those of
    :func:`_ask_about_marks`.
    """
    if options.preprocess is not None:
        return []
    if options.public:
        unsaid = [column.name for column in columns if column.name not in options.public]
        return part.add_source(
            f"column '{name}' is not in data.public; say its texts or its range there, or drop it" for name in unsaid
        )
    ways = {
        "id": "looks like an id; name it in drop, in group if rows of one value belong together, or in categories or "
        "numbers if it is one",
        "text": "looks like free text; name it in drop, or in categories if it is one",
        "comma": "holds numbers with a decimal comma; write them with a point, or name it in decimals, in thousands if "
        "the commas separate these, or in categories",
    }
    problems = [f"column '{column.name}' {ways[column.kind]}" for column in columns if column.kind in ways]
    problems += [questions[column.name] for column in columns if column.kind == "marked number"]
    return part.add_source(problems)


def describe_unreadable_values(
    part: Part, columns: Sequence[Column], except_kinds: Set[Kind] = frozenset()
) -> list[Problem]:
    """Return problems with values of the wrong kind, unless it is among ``except_kinds``, and with absent columns."""
    names = list(part.frame.columns)
    problems = [describe_unknown_column(column.name, names) for column in columns if column.name not in names]
    for column in columns:
        if column.name in names and column.kind not in except_kinds:
            problems += part.table.read(column)[1]
    return part.add_source(problems)


def _describe_small_site(
    part: Part, options: TableOptions, test_parts: Sequence[Part], *, single_site: bool
) -> list[Problem]:
    """Return problems of splitting a site; with ``single_site`` only for its seed, and few groups are allowed."""
    if any(test.site == part.site for test in test_parts):
        return []
    groups = None if options.group is None else part.table.groups(options.group)
    units, unit_name = len(part.frame), "rows"
    if groups is not None:
        units, unit_name = len(np.unique(groups)), f"values of the group '{options.group}'"
    least = options.folds or (2 if options.test_fraction else 1)
    least = 1 if single_site and groups is not None else least
    why = f"folds = {least}" if options.folds else "to train on and to test on"
    if units < least:
        return part.add_source([f"it has {units} {unit_name}; at least {least} are needed ({why})"])
    split = options.group_split
    seeds = split.seeds if options.folds and not single_site else (options.seed,)
    if groups is None or test_parts or not any(split.mark_test_rows(groups, seed).all() for seed in seeds):
        return []
    where = f"one of the {options.folds} folds" if options.folds else "the part to test on"
    remedy = "other folds" if options.folds else "another test_fraction"
    return part.add_source(
        [
            f"all its {units} {unit_name} are in {where}, and nothing is left to train on; {remedy}, another "
            "group_draw or another group helps"
        ]
    )


def _find_trained_groups(part: Part, options: TableOptions, main: Sequence[Part]) -> list[Problem]:
    """Return problems with test rows whose groups are among the training rows of some site."""
    if options.group is None:
        return []
    groups = np.unique(part.table.groups(options.group))
    shared = {table.source: np.isin(groups, table.table.groups(options.group)) for table in main}
    count = int(np.any(list(shared.values()), axis=0).sum())
    if not count:
        return []
    tables = shorten_list([source for source, mask in shared.items() if mask.any()])
    remedy = f"leave these out of one of the two, or name '{options.group}' in drop if this is meant"
    values = f"values of the group '{options.group}' that rows to train on have too"
    return part.add_source([f"it has {count} {values} ({tables}); {remedy}"])
