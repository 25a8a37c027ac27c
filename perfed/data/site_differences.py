"""Units and codes that differ between sites, found in what sites send before they train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perfed.data.federation_schema import SiteMetadata, ToldColumn
from perfed.data.tables.codes import describe_codes
from perfed.data.tables.units import describe_units
from perfed.data.target_scale import Sums

_ROUNDING = 1e-6


def describe_differences(
    metadata: Mapping[str, SiteMetadata], target: str | None = None, sources: Mapping[str, str] | None = None
) -> list[str]:
    """Return a line for each column or target that some sites seem to have in another unit or with other codes.

    Args:
        metadata: what each site sends.
        target: name of the column to predict.
        sources: what messages call the sites (default: their names).
    """
    called = {site: (sources or {}).get(site, site) for site in metadata}
    columns: dict[str, dict[str, ToldColumn]] = {}
    for site, of_site in metadata.items():
        for column in of_site.columns or ():
            columns.setdefault(column.name, {})[site] = column
    numbers = {name: _collect_sums(of_sites) for name, of_sites in columns.items()}
    targets = {site: of_site.sums for site, of_site in metadata.items() if of_site.sums is not None}
    if all(len(sums.total) == 1 for sums in targets.values()):
        numbers[target or "target"] = targets
    lines = list(describe_units({name: sums for name, sums in numbers.items() if len(sums) > 1}, called))
    for name, of_sites in columns.items():
        if any(column.kind == "category" for column in of_sites.values()):
            texts = {site: c.levels for site, c in of_sites.items() if c.kind in ("category", "boolean")}
            lines += describe_codes(name, texts, called)
        lines += _describe_shifted(name, of_sites, called)
    classes = {site: of_site.classes for site, of_site in metadata.items() if of_site.classes is not None}
    return lines + list(describe_codes(target or "target", classes, called))


def _collect_sums(columns: Mapping[str, ToldColumn]) -> dict[str, Sums]:
    """Return what sites send of a column of numbers; not of 0 and 1, which have no unit."""
    numbers = {site: c for site, c in columns.items() if c.kind == "number" and not c.binary}
    return {site: column.sums for site, column in numbers.items() if column.sums is not None}


def _describe_shifted(name: str, columns: Mapping[str, ToldColumn], called: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each site that writes 1 and 2 where others write 0 and 1."""
    binary = [site for site, column in columns.items() if column.binary or column.kind == "boolean"]
    for site, column in columns.items():
        if column.kind != "number" or column.binary or column.sums is None or not binary:
            continue
        rows, mean = column.sums.number, column.sums.total[0] / column.sums.number
        squares = rows * (mean - 1) * (2 - mean)  # of values that are 1 or 2
        if 1 < mean < 2 and abs(column.sums.squares[0] - squares) <= _ROUNDING * rows:
            others = called[binary[0]] if len(binary) == 1 else f"{len(binary)} other sites"
            yield (
                f"column '{name}' at {called[site]} holds 1 and 2, and 0 and 1 at {others}; if they mean the same, "
                f"recode it at {called[site]}"
            )
