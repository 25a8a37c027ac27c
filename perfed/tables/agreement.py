"""The agreement of all sites on one schema: the kinds of columns, the columns that enter, their levels and scales."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from perfed.data.column import MISSING_CATEGORY, Column, Kind
from perfed.data.federation_schema import (
    FederationSchema,
    Metadata,
    Scale,
    SiteMetadata,
    agree_on_targets,
    are_close,
    describe_target_conflicts,
    describe_target_differences,
    merge_targets,
)
from perfed.data.labels import Classes, Task
from perfed.data.problems import raise_problems
from perfed.data.target_scale import varying_scale
from perfed.errors import PerfedError, shorten_list
from perfed.tables.options import Mode, TableOptions
from perfed.tables.problems import describe_absent_columns
from perfed.tables.public import Known
from perfed.tables.targets import CONSTANT, FEW, describe_target

_LEAST_SITES = 2  # sites that have a column of which the inputs are shared by name

Columns = Mapping[str, Sequence[Column]]
"""The columns of each site."""


def agree_on_schema(
    metadata: Metadata, options: TableOptions | None = None, sources: Mapping[str, str] | None = None
) -> FederationSchema:
    """Return the schema on which sites agree; it does not depend on the order of the sites.

    Args:
        metadata: the metadata of each site.
        options: the options of the sites' tables; ``None`` if sites have arrays.
        sources: the name of each site in messages (default: "site 'NAME'").

    Raises:
        DataProblems: sites contradict each other, or no site has a column that the study names.
        PerfedError: no site has sent metadata, or all targets have the same value.
    """
    if not metadata:
        raise PerfedError("no site has told anything; one at least is needed")
    metadata = {site: metadata[site] for site in sorted(metadata)}
    names = {site: (sources or {}).get(site, f"site '{site}'") for site in metadata}
    mode = "own" if options is None else options.columns
    domain_type = type(next(iter(metadata.values())).domains)
    if options is not None:
        domain_type = type(None) if options.domain is None else tuple
    problems = _describe_answers(metadata, names, "domains", domain_type)
    problems += _describe_answers(metadata, names, "columns", type(None) if mode == "own" else tuple)
    raise_problems([*problems, *([] if options is None else _describe_absent_columns(metadata, options))])
    if options is None:
        return agree_on_targets(metadata, names)
    target = describe_target(options.target)
    task = "survival" if options.event is not None else options.task
    columns, contradictions = unify_kinds({site: sent.columns or () for site, sent in metadata.items()}, names)
    raise_problems([*describe_target_conflicts(metadata, names, target, task), *contradictions])
    schema = merge_targets(list(metadata.values()))
    if schema.classes is not None:
        raise_problems(_describe_doubtful_classes(schema.classes, target, task_is_set=task is not None))
    if mode == "own":
        return schema
    scales = _compute_scales(metadata) if options.one_scale else {}
    return schema.model_copy(update={"columns": tuple(_select_columns(columns, mode, scales))})


def _describe_answers(metadata: Metadata, sources: Mapping[str, str], key: str, expected: type) -> list[str]:
    """Return lines on sites that send a field without need, do not send it, or send another type of it than others."""
    types = {site: type(getattr(sent, key)) for site, sent in metadata.items()}
    return [
        f"{sources[site]}: {f'no {key} are told' if kind is type(None) else f'{key} are told, and as others do not'}; "
        "all sites need the same study"
        for site, kind in types.items()
        if kind is not expected
    ]


def _describe_absent_columns(metadata: Metadata, options: TableOptions) -> list[str]:
    """Return lines on columns that the study names and no site has."""
    names = [column.name for sent in metadata.values() for column in sent.columns or ()]
    present = {name for sent in metadata.values() for name in sent.named or ()}
    return describe_absent_columns(options.named, present, list(dict.fromkeys(names)))


def _describe_doubtful_classes(classes: Classes, target: str, *, task_is_set: bool) -> list[str]:
    if len(classes) < 2:
        return [CONSTANT.format(target)]
    if not task_is_set and len(classes) > FEW and isinstance(classes[0], int):
        return [f"{target} has {len(classes)} different whole numbers, classes or values; say task in the study"]
    return []


# Columns -------------------------------------------------------------------------------------------------------


def unify_kinds(columns: Columns, sources: Mapping[str, str]) -> tuple[dict[str, list[Column]], list[str]]:
    """Return the columns with one kind for each name, and a line for each column whose kinds contradict each other.

    A column that is empty at one site has the kind of the others. Yes and no are booleans if others have only 0 and 1,
    numbers if others have more, and categories if others have these. Single letters are categories if they may mean
    something else: F at one site, and N and Y at another.

    Args:
        columns: the columns of each site.
        sources: the name of each site in messages.
    """
    by_name: dict[str, list[tuple[str, Column]]] = {}
    for site, site_columns in columns.items():
        for column in site_columns:
            if column.kind not in ("empty", "marked number"):  # the latter is refused at the site
                by_name.setdefault(column.name, []).append((sources[site], column))
    unified: dict[str, Kind] = {}
    problems = []
    for name, sourced_columns in by_name.items():
        sites: dict[Kind, list[str]] = {}
        for source, column in sourced_columns:
            sites.setdefault(column.kind, []).append(source)
        other_kinds: list[Kind] = [kind for kind in sites if kind != "boolean"]
        if len(other_kinds) > 1 or (len(sites) > 1 and other_kinds[0] == "date"):
            rarest = sorted(sites.items(), key=lambda pair: len(pair[1]))[:2]
            where = " and ".join(f"a {kind} in {shorten_list(of_kind, 3)}" for kind, of_kind in rarest)
            ways = "give it one kind (a name in numbers, categories or dates), replace its texts (values), or drop it"
            problems.append(f"column '{name}' is {where}; {ways}")
        elif not other_kinds:
            letters = [column.truth_letters for _, column in sourced_columns if column.truth_letters]
            unified[name] = "category" if _are_ambiguous(letters) else "boolean"
        elif (
            len(sites) > 1
            and other_kinds == ["number"]
            and all(c.binary for _, c in sourced_columns if c.kind == "number")
        ):
            unified[name] = "boolean"
        else:
            unified[name] = other_kinds[0]
    return {
        site: [column.with_kind(unified.get(column.name, column.kind)) for column in site_columns]
        for site, site_columns in columns.items()
    }, problems


def _are_ambiguous(letters: Sequence[tuple[str, ...]]) -> bool:
    """Return whether sites use letters of both pairs, y and n, and t and f, and some site only one letter of a pair."""
    pairs = {frozenset("yn") if set(letters_of_site) <= set("yn") else frozenset("tf") for letters_of_site in letters}
    return len(pairs) > 1 and any(len(letters_of_site) == 1 for letters_of_site in letters)


def _compute_scales(metadata: Metadata) -> dict[str, tuple[float, float] | None]:
    """Return mean and deviation over all sites of each column that varies; columns of 0 and 1 stay as they are."""
    scales: dict[str, tuple[float, float] | None] = {}
    for name, columns in _group_by_name(sent.columns or () for sent in metadata.values()).items():
        columns = [column for column in columns if column.kind != "empty"]
        sums = [column.sums for column in columns if column.sums is not None]
        scale = None if not sums or "category" in {c.kind for c in columns} else varying_scale(sums)
        flags = all(column.binary or column.kind == "boolean" for column in columns)
        scales[name] = scale if scale is None or not flags else (0.0, 1.0)
    return scales


def _select_columns(columns: Columns, mode: Mode, scales: Mapping[str, tuple[float, float] | None]) -> list[Column]:
    """Return the columns that enter at all sites, also where a site lacks them.

    A column enters if it varies at a site that has it, or between sites according to ``scales``; a category also needs
    a level that some site sends. With "common" every site must have it, with "named" two. Its levels are those of any
    site, and it is masked if it is missing anywhere or, with "union", absent.
    """
    selected = []
    for name, of_name in _group_by_name(columns.values()).items():
        everywhere = len(of_name) == len(columns)
        if (mode == "common" and not everywhere) or (mode == "named" and len(of_name) < _LEAST_SITES):
            continue
        scale, kind = scales.get(name), of_name[0].kind
        varies = scale is not None or (mode == "named" and len({column.levels for column in of_name}) > 1)
        if all(column.constant for column in of_name) and not varies:
            continue
        masked = (mode == "union" and not everywhere) or any(column.missing for column in of_name)
        levels = {level for column in of_name for level in column.levels} | ({MISSING_CATEGORY} if masked else set())
        if kind == "category" and not levels:  # no site sends one: each is in too few rows
            continue
        sorted_levels = tuple(sorted(levels)) if kind == "category" else ()
        selected.append(Column(name=name, kind=kind, masked=masked, levels=sorted_levels, scale=scale))
    return selected


def _group_by_name(columns: Iterable[Sequence[Column]]) -> dict[str, list[Column]]:
    by_name: dict[str, list[Column]] = {}
    for site_columns in columns:
        for column in site_columns:
            by_name.setdefault(column.name, []).append(column)
    return by_name


# Descriptions --------------------------------------------------------------------------------------------------


def describe_differences_from_public(
    schema: FederationSchema, metadata: SiteMetadata, public: Mapping[str, Known]
) -> list[str]:
    """Return a line for each difference between a schema and the values in the study's ``data.public``.

    With ``data.public``, classes, domains, categories and scales follow from the study only. A server that sent other
    values could learn about rows from the replies.

    Args:
        schema: the schema as the server sent it.
        metadata: the metadata that the site sends before training, which are public.
        public: the values in the study by column.
    """
    problems = describe_target_differences(schema, metadata)
    kinds = {column.name: column.kind for column in metadata.columns or ()}
    for column in schema.columns or ():
        if (values := public.get(column.name)) is None:
            problems.append(f"column '{column.name}' of the server's agreement is not in data.public")
            continue
        levels = {*values.levels, *([MISSING_CATEGORY] if column.masked and values.levels else [])}
        scale = None if values.scale is None else Scale(mean=values.scale[:1], std=values.scale[1:])
        agreed_scale = None if column.scale is None else Scale(mean=column.scale[:1], std=column.scale[1:])
        same_kind = column.kind == kinds.get(column.name, column.kind)
        if not same_kind or set(column.levels) != levels or not are_close(agreed_scale, scale):
            problems.append(f"column '{column.name}' of the server's agreement has other values than data.public")
    return problems


def describe_metadata(metadata: Metadata, schema: FederationSchema, most: int = sys.maxsize) -> list[str]:
    """Return lines on the metadata that sites sent for a schema, with at most ``most`` names each."""
    sent = [column for of_site in metadata.values() for column in of_site.columns or ()]
    columns, required = None, sorted({name for of_site in metadata.values() for name in of_site.named or ()})
    if schema.columns is not None:
        names = {kind: list(dict.fromkeys(c.name for c in sent if c.kind == kind)) for kind in ("boolean", "category")}
        entering = [column.name for column in schema.columns if column.kind == "category"]
        columns = names["boolean"], [name for name in names["category"] if name not in entering], entering
    scaled = list(dict.fromkeys(column.name for column in sent if column.sums is not None))
    return describe_fields(schema.task, schema.domains is not None, columns, required, scaled, most)


def describe_fields(
    task: Task,
    domains: bool,
    columns: tuple[Sequence[str], Sequence[str], Sequence[str]] | None,
    named: Sequence[str] = (),
    scaled: Sequence[str] = (),
    most: int = sys.maxsize,
) -> list[str]:
    """Return a line for each kind of metadata that sites send each other.

    Args:
        task: the task of the targets.
        domains: whether samples have domains.
        columns: if sites have one schema, their booleans, and their categories that do not enter and that do.
        named: the columns that the study names and that a site may lack.
        scaled: the columns whose sums sites send for a common scale.
        most: the largest number of names in a line.
    """
    of_task: dict[Task, list[str]] = {
        "classification": ["the names of the classes"],
        "regression": ["the number of their training rows, the sum of the target and of its squares"],
        "survival": [],
    }
    lines = [*of_task[task], *(["the names of the domains"] if domains else [])]
    lines += [f"which of these columns they have: {shorten_list(named, most)}"] if named else []
    if columns is None:
        return lines
    lines.append("names and kinds of their columns, and which are constant, 0 and 1 alone or have missing values")
    sums = "how many training rows hold a value, the sum of these and of their squares"
    lines += [f"{sums}: {shorten_list(scaled, most)}"] if scaled else []
    categories = "the categories, without the rare ones, of"
    descriptions = ("how booleans are written", f"{categories} columns that do not enter", categories)
    return lines + [
        f"{text}: {shorten_list(names, most)}" for text, names in zip(descriptions, columns, strict=True) if names
    ]
