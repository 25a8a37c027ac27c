"""A federation in a table of text: what each site holds, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfed.data.tables.site import SiteTable

_FEW = 8  # classes or domains that have a column each


@dataclass(frozen=True)
class SiteFacts:
    """What a site holds, in numbers.

    Attributes:
        site: its id.
        rows: per split.
        inputs: numbers in one input of its model.
        shared, own: columns of its table that enter and that all sites have, or only some; ``None`` without tables.
        missing, cells: of the training rows, over these columns; ``None`` without tables.
        classes, domains: rows of each, over all splits; empty where there are none.
    """

    site: str
    rows: dict[str, int]
    inputs: int
    shared: int | None
    own: int | None
    missing: int | None
    cells: int | None
    classes: list[int]
    domains: list[int]


def site_table(facts: Sequence[SiteFacts], classes: Sequence[str], domains: Sequence[str]) -> str:
    """The facts as lines of text, a site each."""
    splits = [split for split in ("train", "validation", "test") if any(split in site.rows for site in facts)]
    tables = all(site.shared is not None for site in facts)
    header = ["site", *splits, *(["shared columns", "own", "missing"] if tables else []), "inputs"]
    header += _titles("class", classes) + _titles("domain", domains)
    rows = []
    for site in facts:
        row = [site.site, *(str(site.rows.get(split, 0)) for split in splits)]
        if tables:
            row += [str(site.shared), str(site.own), f"{100 * (site.missing or 0) / max(site.cells or 0, 1):.0f} %"]
        rows.append([*row, str(site.inputs), *_cells(site.classes), *_cells(site.domains)])
    widths = [max(len(line[at]) for line in (header, *rows)) for at in range(len(header))]
    first, *others = widths
    lines = ("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in (header, *rows))
    return "\n".join(lines)


def kinds_of(tables: Iterable[SiteTable]) -> list[str]:
    """What the columns that enter are taken for, a line per kind; one that differs between sites is in several."""
    names: dict[str, dict[str, None]] = {}
    for table in tables:
        for column in table.columns:
            names.setdefault(column.kind, {})[column.name] = None
    return [f"{kind}: {', '.join(names[kind])}" for kind in sorted(names)]


def _titles(what: str, names: Sequence[str]) -> list[str]:
    return (
        [f"{what} {name}" for name in names] if len(names) <= _FEW else [f"{what}es" if what == "class" else "domains"]
    )


def _cells(counts: Sequence[int]) -> list[str]:
    if len(counts) <= _FEW:
        return [str(count) for count in counts]
    return [f"{sum(count > 0 for count in counts)} of {len(counts)}"]
