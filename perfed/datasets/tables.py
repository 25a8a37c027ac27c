"""The user's data: tables from files, and folders with the arrays of each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.federation_schema import FederationSchema
from perfed.data.lazy import HOLD
from perfed.data.names import compose_text, find_name
from perfed.datasets.catalogue import NonNegative, ValidationFraction, dataset
from perfed.errors import PerfedError
from perfed.tables.files import Sites, read_sites, table_files, tables_in
from perfed.tables.frames import build_federation
from perfed.tables.options import Mode, Scales, TableOptions
from perfed.tables.site_rows import SiteTableData

CACHED_BYTES = 256 << 20
"""Size of files up to which their parsed rows stay in memory, for further seeds of the same process."""


class TableSettings(BaseModel):
    """The files of a federation of tables, and the roles of their columns.

    Attributes:
        files: files or folders, each with the rows of one site, or of any sites with ``site_column``; relative to the
            experiment's file.
        test_files: files with test rows, in place of a split.
        site_column: the column with the site of every row.
        target: the column to predict; with ``event``, a time.
        event, domain, drop, numbers, dates, categories, missing, thousands, decimals, swapped, values, group,
            group_draw, folds, columns, scales, preprocess, public: see
            :class:`perfed.tables.options.TableOptions`; "" for none.
        task: the task; "auto" to infer it from the targets.
        test_fraction: the fraction of each site's rows; not with ``folds`` or ``test_files``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    files: list[str] = []
    test_files: list[str] = []
    site_column: str = ""
    target: str = ""
    event: str = ""
    domain: str = ""
    drop: list[str] = []
    numbers: list[str] = []
    dates: list[str] = []
    categories: list[str] = []
    missing: list[str] | None = None
    thousands: list[str] = []
    decimals: list[str] = []
    swapped: list[str] = []
    values: dict[str, dict[str, str | int | float]] = {}
    group: str = ""
    group_draw: NonNegative = 0
    task: Literal["auto", "classification", "regression"] = "auto"
    test_fraction: ValidationFraction = 0.2
    folds: NonNegative = 0
    columns: Mode = "own"
    scales: Scales = "auto"
    preprocess: str = ""
    public: dict[str, list[str] | list[float]] = {}

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        for key in ("files", "target"):
            if not getattr(self, key):
                raise PerfedError(f"data.{key} is needed: 'perfed init' writes an experiment for your files")
        splits = [key for key in ("test_files", "folds", "test_fraction") if key in self.model_fields_set]
        if len([key for key in splits if getattr(self, key)]) > 1:
            raise PerfedError(f"data.{splits[0]} and data.{splits[1]} are two ways to split; leave one of them out")
        return self

    def table_options(self, seed: int) -> TableOptions:
        """Return the roles of the columns, and the split of this seed."""
        values: dict[str, Any] = {
            field.name: value for field in fields(TableOptions) if (value := getattr(self, field.name, ""))
        }
        values |= {} if self.missing is None else {"missing": self.missing}
        values |= {"test_fraction": 0.0 if self.test_files else self.test_fraction, "seed": seed}
        return TableOptions(**values | ({"task": None} if self.task == "auto" else {}))


@dataset("tables", shared=TableSettings, paths=("files", "test_files"))
def tables(seed: int, data_dir: Path | None, **values: Any) -> Federation:
    """Tables of your own: one file per site, or a column that names the site (CSV, Parquet, Excel; perfed[tables]).

    The preprocessing of each site is fitted on its training rows, as by
    :meth:`perfed.data.federation.Federation.from_frames`. ``perfed init`` writes such an experiment, and ``perfed
    check`` prints a summary of the data and their problems.
    """
    settings = TableSettings.model_construct(**values)
    read = _read_sites(settings.files, settings)
    test_tables = _read_sites(settings.test_files, settings)
    federation = build_federation(
        read.parsed,
        settings.table_options(seed),
        tests=test_tables.parsed or None,
        sources=read.sources,
        test_sources=test_tables.sources,
    )
    remarks = (*read.notes, *test_tables.notes, *federation.notes["remarks"])
    return replace(federation, notes={**federation.notes, "remarks": remarks})


def read_site_client(values: Mapping[str, Any], seed: int, site: str, agreement: FederationSchema) -> Client:
    """Return the client of one site of a federation of :func:`tables`.

    Only the files of this site are read if possible.

    Args:
        values: the values of all options of the data set.
        seed: the seed of the split.
        site: the name of the site.
        agreement: the schema on which all sites have agreed.

    Raises:
        PerfedError: if the site does not exist or its rows do not fit.
    """
    settings = TableSettings.model_construct(**values)
    read = _read_sites(_select_files(settings.files, settings.site_column, site), settings)
    tests = _read_sites(_select_files(settings.test_files, settings.site_column, site), settings)
    name, tested = (find_name(site, sites.frames) for sites in (read, tests))
    if name is None:
        raise PerfedError(f"site '{site}': its table is not among data.files any more")
    options = settings.table_options(seed)
    options = replace(options, task=None if options.event is not None else agreement.task)
    sources = read.sources[name], "" if tested is None else tests.sources[tested]
    test = None if tested is None else tests.frames[tested]
    return SiteTableData.alone(site, read.frames[name], options, test, sources).client(agreement)


def _select_files(files: list[str], site_column: str, site: str) -> list[str]:
    """Return the files that may have rows of ``site``; the others may no longer exist."""
    if site_column:
        return files
    candidates = (
        candidate for file in map(Path, files) for candidate in (tables_in(file) if file.is_dir() else [file])
    )
    return [str(file) for file in candidates if compose_text(file.stem) == compose_text(site)]


def _read_sites(files: list[str], settings: TableSettings) -> Sites:
    """Return the tables of all sites.

    Files that this process has read, and that have not changed since, are not read again.
    """
    if not files:
        return Sites({}, {}, ())
    stats = {file: file.stat() for file in table_files([Path(file) for file in files]) if file.is_file()}
    stamps = tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats.items())
    missing = tuple(settings.missing or ("",)) if settings.site_column and settings.missing is not None else None
    read = _read_uncached if sum(stat.st_size for stat in stats.values()) > CACHED_BYTES else _read_cached
    return read(tuple(files), settings.site_column, missing, stamps)


def _read_uncached(
    files: tuple[str, ...],
    site_column: str,
    missing: tuple[str, ...] | None,
    stamps: tuple[tuple[Path, int, int], ...],
) -> Sites:
    return read_sites([Path(file) for file in files], site_column or None, missing)


_read_cached = lru_cache(maxsize=2)(_read_uncached)  # the training tables and the test tables


@dataset("folder", paths=("path",))
def folder(
    seed: int,
    data_dir: Path | None,
    *,
    path: str = "",
    task: Literal["auto", "classification", "regression", "survival"] = "auto",
    num_classes: NonNegative = 0,
    hold_megabytes: NonNegative = HOLD >> 20,
) -> Federation:
    """Arrays of your own, larger than memory: a file ID.npz, or a folder ID of .npy files, per client.

    See :meth:`perfed.data.federation.Federation.from_folder`; recently used samples stay in memory, up to
    ``hold_megabytes``.
    """
    if not path:
        raise PerfedError("data.path is needed: the folder with a file ID.npz or a folder ID per client")
    return Federation.from_folder(
        path,
        task=None if task == "auto" else task,
        num_classes=num_classes or None,
        hold=hold_megabytes << 20,
    )
