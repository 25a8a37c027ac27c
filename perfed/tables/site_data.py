"""The data of one site, a table or arrays, read from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from perfed.data.client import Client
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.data.problems import DataProblems, raise_problems
from perfed.data.reading import read_arrays
from perfed.data.site_arrays import SiteArrays
from perfed.errors import PerfedError
from perfed.tables.files import NOTE, read_table, tables_in
from perfed.tables.options import TableOptions
from perfed.tables.site_rows import SiteTableData

_ARRAYS = ".npz"
_TEST = "test"


class SiteData(Protocol):
    """The data of a site, checked as far as this is possible without other sites."""

    def create_metadata(self, fewest: int = 1) -> SiteMetadata:
        """Return the metadata that the site sends before training; its categories are in at least ``fewest`` rows."""

    def describe_copies(self) -> list[str]:
        """Return a line with the number of rows that occur several times; an empty list if there are few."""

    def count_rows(self) -> tuple[int, dict[str, int] | None]:
        """Return the number of training rows, and of those of each class; ``None`` without classes."""

    def describe_misfits(self, agreement: FederationSchema) -> list[str]:
        """Return a line for each part of the data that does not fit the schema."""

    def client(self, agreement: FederationSchema) -> Client:
        """Return the client of the site.

        Raises:
            PerfedError: the data do not fit the schema.
        """


def read_site_data(site: str, path: Path, options: TableOptions | None = None) -> SiteData:
    """Read the data of a site from a file, or from the only file of a folder.

    Beside a table there may be another one called "test", such as test.csv, whose test rows replace a split.

    Args:
        site: the name of the site.
        path: a table (CSV, Parquet, Excel), or an ``.npz`` file with ``x_train``, ``y_train`` and so on, as
            :meth:`perfed.data.federation.Federation.from_arrays` takes them for one client.
        options: the options of a table.

    Raises:
        PerfedError: the file does not exist or is damaged, or the folder has several.
        DataProblems: the rows or columns have problems, or columns look like names or codes of persons and the study
            does not call them categories.
    """
    file, test = _find_files(path)
    if file.suffix.lower() == _ARRAYS:
        if test is not None:
            raise PerfedError(f"{test}: an {_ARRAYS} file has its rows to test on as x_test and y_test")
        arrays = SiteArrays.from_data(site, read_arrays(file))
        arrays.create_metadata()
        return arrays if options is None else replace(arrays, public=_public_metadata(options))
    if options is None:
        raise PerfedError(f"{file}: the study is of arrays; an {_ARRAYS} file is needed")
    tested = None if test is None else read_table(test)[0]
    rows = SiteTableData.alone(site, read_table(file)[0], options, tested, sources=(str(file), str(test)))
    raise_problems(rows.describe_personal_columns())
    return rows


def _public_metadata(options: TableOptions) -> SiteMetadata | None:
    """Return the metadata of arrays whose targets and domains are in the study's ``data.public``."""
    values = options.public.get(options.target)
    if values is None or options.task is None:
        return None
    roles = [name for name in (options.target, options.domain) if name is not None]
    domains = None if options.domain is None else options.public[options.domain].levels
    return SiteMetadata(task=options.task, domains=domains, named=tuple(sorted(roles)), **values.of_target)


def describe_problems(
    site: str, path: Path, options: TableOptions | None = None, agreement: FederationSchema | None = None
) -> list[str]:
    """Return a line for each problem of a site's data, and for each part that does not fit a schema.

    Args:
        site, path, options: see :func:`read_site_data`.
        agreement: the schema if it is known.
    """
    try:
        data = read_site_data(site, path, options)
        return [] if agreement is None else data.describe_misfits(agreement)
    except DataProblems as error:
        return list(error.problems)
    except PerfedError as error:
        return [str(error)]


def _find_files(path: Path) -> tuple[Path, Path | None]:
    """Return the file with the site's rows, and the file with test rows."""
    if not path.is_dir():
        return path, None
    files = sorted([*tables_in(path), *path.glob(f"[!.]*{_ARRAYS}")])
    tests = [file for file in files if file.stem.lower() == _TEST]
    mains = [file for file in files if file not in tests]
    if len(mains) > 1:
        mains = [file for file in mains if file.suffix.lower() != NOTE] or mains
    if len(mains) != 1 or len(tests) > 1:
        names = ", ".join(file.name for file in files) or "none"
        raise PerfedError(
            f"{path}: one file with the site's rows is needed, and at most one called 'test'; found: {names}"
        )
    return mains[0], next(iter(tests), None)
