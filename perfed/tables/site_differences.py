"""Detection of units and codes that differ between sites, from the metadata that sites send before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perfed.data.column import Column
from perfed.data.federation_schema import SiteMetadata
from perfed.data.target_scale import Sums
from perfed.tables.codes import describe_codes
from perfed.tables.units import describe_units

_ROUNDING = 1e-6


def describe_differences(
    metadata: Mapping[str, SiteMetadata], target: str | None = None, sources: Mapping[str, str] | None = None
) -> list[str]:
    """Return a line for each column or target that some sites seem to have in another unit or with other codes.

    Args:
        metadata: the metadata of each site.
        target: the name of the column to predict.
        sources: the name of each site in messages (default: the site's name).
    """
    site_names = {site: (sources or {}).get(site, site) for site in metadata}
    columns: dict[str, dict[str, Column]] = {}
    for site, sent in metadata.items():
        for column in sent.columns or ():
            columns.setdefault(column.name, {})[site] = column
    numbers = {name: _collect_sums(site_columns) for name, site_columns in columns.items()}
    targets = {site: sent.sums for site, sent in metadata.items() if sent.sums is not None}
    if all(len(sums.total) == 1 for sums in targets.values()):
        numbers[target or "target"] = targets
    lines = list(describe_units({name: sums for name, sums in numbers.items() if len(sums) > 1}, site_names))
    for name, site_columns in columns.items():
        if any(column.kind == "category" for column in site_columns.values()):
            categories = {
                site: column for site, column in site_columns.items() if column.kind in ("category", "boolean")
            }
            texts = {site: column.levels for site, column in categories.items()}
            lines += describe_codes(name, texts, site_names)
        lines += _describe_shifted(name, site_columns, site_names)
    classes = {site: sent.classes for site, sent in metadata.items() if sent.classes is not None}
    return lines + list(describe_codes(target or "target", classes, site_names))


def _collect_sums(columns: Mapping[str, Column]) -> dict[str, Sums]:
    """Return each site's sums of a numeric column, except columns of 0 and 1, which have no unit."""
    numbers = {site: column for site, column in columns.items() if column.kind == "number" and not column.binary}
    return {site: column.sums for site, column in numbers.items() if column.sums is not None}


def _describe_shifted(name: str, columns: Mapping[str, Column], sources: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each site whose column holds 1 and 2 although it holds 0 and 1 at other sites."""
    binary = [site for site, column in columns.items() if column.binary or column.kind == "boolean"]
    for site, column in columns.items():
        if column.kind != "number" or column.binary or column.sums is None or not binary:
            continue
        rows, mean = column.sums.number, column.sums.total[0] / column.sums.number
        squares = rows * (mean - 1) * (2 - mean)  # the sum of squares if all values are 1 or 2
        if 1 < mean < 2 and abs(column.sums.squares[0] - squares) <= _ROUNDING * rows:
            elsewhere = sources[binary[0]] if len(binary) == 1 else f"{len(binary)} other sites"
            yield (
                f"column '{name}' at {sources[site]} holds 1 and 2, and 0 and 1 at {elsewhere}; if they mean the same, "
                f"recode it at {sources[site]}"
            )
