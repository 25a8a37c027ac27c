"""A summary of a federation: a table with a row for each site, and lines on columns and metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from perfed.data.client import SPLITS, Client, Preprocessing
from perfed.errors import shorten_list

NAMES = 20
"""Largest number of column names in a text; ``perfed check --json`` lists all."""

_LINES = 30  # largest number of remarks in a text
_FEW = 8  # classes or domains that have a column each


@dataclass(frozen=True)
class SiteSummary:
    """Numbers of rows and columns of a site.

    Attributes:
        site: the id of the site.
        rows: the number of rows of each split.
        inputs: the number of values in one input of its model.
        shared, some, own: the numbers of columns of its table that all sites have, that some other sites have, and
            that no other site has; ``None`` without tables.
        constant: the number of columns that do not enter because all training rows hold one value; ``None`` without
            tables.
        missing, cells: the numbers of missing values and of cells in the training rows of the columns that enter;
            ``None`` without tables.
        events: for survival, the number of events in all splits; otherwise ``None``.
        classes, domains: the number of rows of each class and domain in all splits; empty if there are none.
    """

    site: str
    rows: dict[str, int]
    inputs: int
    shared: int | None
    some: int | None
    own: int | None
    constant: int | None
    missing: int | None
    cells: int | None
    events: int | None
    classes: list[int]
    domains: list[int]


@dataclass(frozen=True)
class FederationSummary:
    """Numbers of rows and columns of all sites, and the metadata that they send before training.

    Attributes:
        sites: the summary of each site.
        classes, domains: the names of classes and domains.
        columns: for tables, the names of columns by kind; a column whose kind differs between sites occurs repeatedly.
        told: for tables, the metadata that sites send before training.
        remarks: for tables, warnings and remarks.
    """

    sites: list[SiteSummary]
    classes: list[str]
    domains: list[str]
    columns: dict[str, list[str]]
    told: list[str]
    remarks: list[str]

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[Client],
        classes: Sequence[str],
        domains: Sequence[str],
        notes: Mapping[str, Any],
        *,
        survival: bool = False,
    ) -> FederationSummary:
        """Return the summary of clients with the ``notes`` of their federation."""
        tables = [client.table for client in clients if client.table is not None]
        holders = count_holders(tables)
        sites = [_summarise_site(c, holders, len(classes), len(domains), survival=survival) for c in clients]
        metadata, doubts, remarks = (
            list(notes.get(key, ())) if tables else [] for key in ("told", "doubts", "remarks")
        )
        return cls(sites, list(classes), list(domains), columns_by_kind(tables), metadata, [*doubts, *remarks])

    def rows(self) -> list[list[str]]:
        """Return the titles and the cells of each site as texts."""
        return _format_sites(self.sites, self.classes, self.domains)

    def sentences(self) -> list[str]:
        """Return the lines below the table of clients, shortened if there are many columns; empty without tables."""
        if not self.columns:
            return []
        metadata = f"sites tell each other before they train: {'; '.join(self.told) or 'nothing'}"
        columns = [f"{kind}: {shorten_list(names, NAMES)}" for kind, names in self.columns.items()]
        num_omitted = len(self.remarks) - _LINES
        omitted = [f"and {num_omitted} more lines of this kind; perfed check --json has all"] if num_omitted > 0 else []
        return [*columns, metadata, *self.remarks[:_LINES], *omitted]

    def __str__(self) -> str:
        header, *rows = self.rows()
        widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
        first_width, *other_widths = widths
        lines = [
            "  ".join([line[0].ljust(first_width), *map(str.rjust, line[1:], other_widths)]).rstrip()
            for line in (header, *rows)
        ]
        below = self.sentences()
        return "\n".join([*lines, "", *below] if below else lines)


@dataclass(frozen=True)
class ColumnHolders:
    """The number of tables, and the number of those that have each column."""

    tables: int
    by_column: Mapping[str, int]

    def counts(self, columns: Iterable[str]) -> dict[str, int]:
        """Return how many columns are ``shared`` by all tables, in ``some`` others, or only in their ``own`` table.

        Example:
            >>> ColumnHolders(3, {"age": 3, "ca": 2, "slope": 1}).counts(["age", "ca", "slope"])
            {'shared': 1, 'some': 1, 'own': 1}
        """
        numbers = [self.by_column[name] for name in columns]
        shared, single = numbers.count(self.tables), numbers.count(1) if self.tables > 1 else 0
        return {"shared": shared, "some": len(numbers) - shared - single, "own": single}


def count_holders(tables: Collection[Preprocessing]) -> ColumnHolders:
    """Return how many tables have each column."""
    return ColumnHolders(len(tables), Counter(name for table in tables for name in table.columns_there))


def _summarise_site(
    client: Client, holders: ColumnHolders, num_classes: int, num_domains: int, *, survival: bool = False
) -> SiteSummary:
    """Return the summary of a client; ``holders`` counts the columns of all clients' tables."""
    rows = {split: part for split in SPLITS if (part := client.split(split)) is not None}
    table = client.table
    columns = {} if table is None else holders.counts(table.columns_there)
    return SiteSummary(
        site=client.id,
        rows={split: len(part) for split, part in rows.items()},
        inputs=prod(client.input_shape),
        shared=columns.get("shared"),
        some=columns.get("some"),
        own=columns.get("own"),
        constant=None if table is None else len(table.constant),
        missing=None if table is None else sum(column.missing for column in table.columns),
        cells=None if table is None else len(client.train) * len(table.columns),
        events=sum(part.events for part in rows.values()) if survival else None,
        classes=_sum_rows([part.class_counts(num_classes) for part in rows.values()]) if num_classes else [],
        domains=_sum_rows([part.domain_counts(num_domains) for part in rows.values()]),
    )


def _format_sites(sites: Sequence[SiteSummary], classes: Sequence[str], domains: Sequence[str]) -> list[list[str]]:
    """Return the titles and the cells of each site as texts."""
    splits = [split for split in ("train", "validation", "test") if any(split in site.rows for site in sites)]
    tables = all(site.shared is not None for site in sites)
    some = any(site.some for site in sites)
    constant, survival = any(site.constant for site in sites), any(site.events is not None for site in sites)
    header = ["site", *splits, *(["events"] if survival else [])]
    header += ["shared columns", *(["some"] if some else []), "own"] if tables else []
    header += [*(["constant"] if constant else []), "missing"] if tables else []
    header.append("inputs")
    rows = [header + _format_titles("class", classes) + _format_titles("domain", domains)]
    for site in sites:
        row = [site.site, *(str(site.rows.get(split, 0)) for split in splits)]
        row += [str(site.events)] if survival else []
        if tables:
            row += [str(site.shared), *([str(site.some)] if some else []), str(site.own)]
            row += [str(site.constant)] if constant else []
            row += [f"{100 * (site.missing or 0) / max(site.cells or 0, 1):.0f} %"]
        rows.append([*row, str(site.inputs), *_format_counts(site.classes), *_format_counts(site.domains)])
    return rows


def columns_by_kind(tables: Iterable[Preprocessing]) -> dict[str, list[str]]:
    """Return the names of the columns that enter, by kind; a column may have several kinds."""
    names: dict[str, dict[str, None]] = {}
    for table in tables:
        for column in table.columns:
            names.setdefault(column.kind, {})[column.name] = None
    return {kind: list(names[kind]) for kind in sorted(names)}


def _format_titles(kind: str, names: Sequence[str]) -> list[str]:
    return (
        [f"{kind} {name}" for name in names] if len(names) <= _FEW else [f"{kind}es" if kind == "class" else "domains"]
    )


def _format_counts(counts: Sequence[int]) -> list[str]:
    if len(counts) <= _FEW:
        return [str(count) for count in counts]
    return [f"{sum(count > 0 for count in counts)} of {len(counts)}"]


def _sum_rows(counts: Sequence[Sequence[int]]) -> list[int]:
    """Return the sum of several rows of numbers."""
    return [sum(column) for column in zip(*counts, strict=True)]
