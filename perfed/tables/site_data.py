"""A site's own data: a table or arrays, from a file; what it tells, and the client that an agreement makes of it."""

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
    """Data at a site, in which nothing is wrong as far as the site can see alone."""

    def told(self, fewest: int = 1) -> SiteMetadata:
        """What the site tells before it trains; of categories those that at least ``fewest`` of its rows hold."""

    def describe_copies(self) -> list[str]:
        """Return a line with the number of rows that are there several times; none where there are no such."""

    def counts(self) -> tuple[int, dict[str, int] | None]:
        """How many rows there are to train on, and of each class that has some; ``None`` where there are no classes."""

    def faults(self, agreement: FederationSchema) -> list[str]:
        """What keeps the site from the agreement, a line each."""

    def client(self, agreement: FederationSchema) -> Client:
        """The site's client.

        Raises:
            PerfedError: the data do not fit the agreement.
        """


def site_data(site: str, path: Path, options: TableOptions | None = None) -> SiteData:
    """What a site's file holds, or the one file of a folder.

    Beside a table there may be another one called "test", such as test.csv: the rows to test on, in place of a split.

    Args:
        site: its name.
        path: a table (CSV, Parquet, Excel), or an ``.npz`` file with ``x_train``, ``y_train`` and so on, as
            :meth:`perfed.data.federation.Federation.from_arrays` takes them for one client.
        options: what the columns of a table are for.

    Raises:
        PerfedError: no such file, several in the folder, damaged ones, columns that look like names or codes of persons
            and are not said to be categories, or everything else that is wrong with what they hold
            (:class:`perfed.data.problems.DataProblems`).
    """
    file, test = _files(path)
    if file.suffix.lower() == _ARRAYS:
        if test is not None:
            raise PerfedError(f"{test}: an {_ARRAYS} file has its rows to test on as x_test and y_test")
        arrays = SiteArrays.of(site, read_arrays(file))
        arrays.told()
        return arrays if options is None else replace(arrays, public=_public(options))
    if options is None:
        raise PerfedError(f"{file}: the study is of arrays; an {_ARRAYS} file is needed")
    tested = None if test is None else read_table(test)[0]
    rows = SiteTableData.alone(site, read_table(file)[0], options, tested, sources=(str(file), str(test)))
    raise_problems(rows.personal())
    return rows


def _public(options: TableOptions) -> SiteMetadata | None:
    """What a site with arrays tells where the study says what all may know of targets and domains."""
    known = options.public.get(options.target)
    if known is None or options.task is None:
        return None
    roles = [name for name in (options.target, options.domain) if name is not None]
    domains = None if options.domain is None else options.public[options.domain].levels
    return SiteMetadata(task=options.task, domains=domains, named=tuple(sorted(roles)), **known.of_target)


def problems(
    site: str, path: Path, options: TableOptions | None = None, agreement: FederationSchema | None = None
) -> list[str]:
    """What is wrong with a site's data and what does not fit an agreement, a line each.

    Args:
        site, path, options: as of :func:`site_data`.
        agreement: what holds at all sites, where that is known.
    """
    try:
        data = site_data(site, path, options)
        return [] if agreement is None else data.faults(agreement)
    except DataProblems as error:
        return list(error.problems)
    except PerfedError as error:
        return [str(error)]


def _files(path: Path) -> tuple[Path, Path | None]:
    """The file with the site's rows, and one with those to test on."""
    if not path.is_dir():
        return path, None
    files = sorted([*tables_in(path), *path.glob(f"[!.]*{_ARRAYS}")])
    tests = [file for file in files if file.stem.lower() == _TEST]
    mains = [file for file in files if file not in tests]
    if len(mains) > 1:
        mains = [file for file in mains if file.suffix.lower() != NOTE] or mains
    if len(mains) != 1 or len(tests) > 1:
        held = ", ".join(file.name for file in files) or "none"
        raise PerfedError(
            f"{path}: one file with the site's rows is needed, and at most one called 'test'; found: {held}"
        )
    return mains[0], next(iter(tests), None)
