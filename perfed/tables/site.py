"""What turns a site's own table into inputs of its model."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.client import Client
from perfed.data.column import MISSING_CATEGORY, Column
from perfed.data.files import optional_package
from perfed.data.inputs import native_columns
from perfed.data.names import compose_text
from perfed.data.problems import raise_problems
from perfed.data.reading import checked, reason_of, refuse_unpacked, refuse_untrusted
from perfed.errors import PerfedError
from perfed.tables.cells import clean_frame, column_names
from perfed.tables.conversions import Conversions
from perfed.tables.kinds import read
from perfed.tables.preprocess import find_output_names, list_inputs, transform_rows
from perfed.tables.problems import (
    Frame,
    Series,
    describe_columns,
    describe_rows,
    find_similar_name,
    pandas,
    quote_names,
    refuse_complex,
)

_FACTS, _SAFE, _PICKLED = "table.json", "transformer.skops", "transformer.joblib"
_TRUSTED = ["numpy.dtype"]


@dataclass(frozen=True, eq=False, repr=False)
class TablePreprocessor:
    """A site's columns and its fitted preprocessing.

    Attributes:
        site: the name of the site.
        inputs: the columns that enter, in the order in which ``transformer`` takes them; columns that are ``absent``
            are not in the table of the site.
        transformer: the transformer fitted on the training rows of the site, with scikit-learn's method ``transform``.
        target: the column that is predicted; for survival, the column of times.
        domain: the column of domains; ``None`` if there is none.
        domains: the names of the domains 0, 1, ...
        ignored: columns that the table may have and that do not enter: dropped columns, constant columns, the group.
        ids: the ignored columns that identify rows: the group, and dropped columns that look like ids.
        constant: the ignored columns with a single value in the training rows.
        shared: the number of the first ``inputs`` that mean the same at all sites (``columns = "named"``); ``None`` if
            all inputs do, or none.
        missing: values that mean missing (:attr:`perfed.tables.options.TableOptions.codes`).
        originals: the site's spelling of each name of a column or class that differs from the composed name.
        conversions: the conversions of cells before anything else reads them.
        own: whether ``transformer`` is from the user; it gets NaN for missing categories, and dates as dates.
        domain_input: whether the domain is also an input, one-hot behind the others.
        event: for survival, the column of events; otherwise ``None``.
    """

    site: str
    inputs: tuple[Column, ...]
    transformer: Any
    target: str
    domain: str | None = None
    domains: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    own: bool = False
    domain_input: bool = False
    event: str | None = None
    ids: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    shared: int | None = None
    missing: tuple[str, ...] = ()
    originals: Mapping[str, str] = field(default_factory=dict)
    conversions: Conversions = field(default_factory=Conversions)

    def __repr__(self) -> str:
        return f"<TablePreprocessor '{self.site}': {len(self.columns)} columns, target '{self.target}'>"

    @property
    def held(self) -> tuple[bool, ...] | None:
        """A mask of the shared inputs that the site has; ``None`` without ``shared``."""
        return None if self.shared is None else tuple(not c.absent for c in list_inputs(self.inputs[: self.shared]))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the site that enter."""
        return tuple(column for column in self.inputs if not column.absent)

    @property
    def feature_names_in_(self) -> tuple[str, ...]:
        """The names of the site's input columns as the site writes them."""
        return tuple(self.original_name(column.name) for column in self.columns)

    def with_domain_input(self) -> TablePreprocessor:
        """Return the preprocessing with the domain as a further input, one-hot behind the others."""
        return replace(self, domain_input=True)

    def original_name(self, name: str) -> str:
        """Return the name of a column or a class as the site writes it."""
        return self.originals.get(name, name)

    @property
    def columns_there(self) -> frozenset[str]:
        """The names of the columns of the site that enter, or would enter if they were not constant."""
        return frozenset((*(column.name for column in self.columns), *self.constant))

    @property
    def feature_names_out_(self) -> tuple[str, ...] | None:
        """The names of the model's inputs; ``None`` if the user's own transformer does not provide them."""
        names = find_output_names(self.transformer)
        domain_names = tuple(f"domain {name}" for name in self.domains) if self.domain_input else ()
        return None if names is None else names + domain_names

    def transform(self, frame: Frame) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
        """Return the inputs ``(n, p)`` of a data frame, and its domains ``(n,)``; ``None`` without a domain column.

        Columns may be in any order. Categories that do not occur in the training rows are allowed: see :meth:`unseen`.
        The domain column is optional unless ``domain_input`` is set.

        Raises:
            PerfedError: unknown or missing columns, values that do not fit the kind of their column, or a domain
                without training rows; the message names the column and the rows.
        """
        inputs = transform_rows(self.transformer, self.read(frame), f"site '{self.site}'")
        domain = self._read_domain(frame)
        if self.domain_input and domain is not None:
            inputs = np.concatenate([inputs, np.eye(len(self.domains))[domain]], axis=1)
        return inputs, domain

    def read(self, frame: Frame) -> Frame:
        """Return the columns that enter as the transformer takes them: numbers and days as floats, categories as texts.

        Raises:
            PerfedError: the reasons of :meth:`transform`, except for domains, or there are no rows.
        """
        frame = self._check_frame(frame)
        raise_problems([] if len(frame) else [f"site '{self.site}': there are no rows"])
        columns = {column.name: read(frame[column.name], column) for column in self.columns}
        raise_problems([f"site '{self.site}': {problem}" for _, problems in columns.values() for problem in problems])
        return self.arrange({name: values.to_numpy() for name, (values, _) in columns.items()}, frame.index)

    def arrange(self, values: Mapping[str, NDArray[Any]], index: Any) -> Frame:
        """Return the input columns as the transformer takes them.

        Args:
            values: the values of the site's columns by name, as :func:`perfed.tables.kinds.read` returns them.
            index: the index of the rows.
        """
        pd = pandas()
        arranged: dict[str, Any] = {}
        for column in self.inputs:
            if column.absent:
                arranged[column.name] = pd.Series([column.filling] * len(index), index=index)
                continue
            of_column = values[column.name]
            if column.kind == "category" and not self.own:
                of_column = np.where(pd.isna(of_column), MISSING_CATEGORY, of_column)
            elif self.own and of_column.dtype == object:
                of_column = np.where(pd.isna(of_column), np.nan, of_column)
            if column.kind == "date" and self.own:
                of_column = pd.to_datetime(of_column, unit="D")
            arranged[column.name] = of_column
        return pd.DataFrame(arranged, index=index)

    def unseen(self, frame: Frame) -> dict[str, int]:
        """Return by column the number of rows whose category does not occur in the training rows, where it is not 0."""
        frame, counts = self._check_frame(frame), {}
        for column in self.columns:
            if column.kind == "category":
                values, _ = read(frame[column.name], column)
                counts[column.name] = int((values.notna() & ~values.isin(column.categories)).sum())
        return {name: count for name, count in counts.items() if count}

    def _check_frame(self, frame: Frame) -> Frame:
        """Return the frame with composed names and normalised cells; raise an error for missing or unknown columns."""
        where = f"site '{self.site}'"
        if not hasattr(frame, "columns") or not hasattr(frame, "index"):
            raise PerfedError(f"{where}: a {type(frame).__name__} was given; a pandas DataFrame is needed")
        names = [compose_text(name) for name in column_names(frame)]
        needed = [
            *(column.name for column in self.columns),
            *([self.domain] if self.domain and self.domain_input else []),
        ]
        missing = [name for name in needed if name not in names]
        unknown = [name for name in names if name not in {*needed, *self.ignored, self.target, self.event, self.domain}]
        suggestions = {name: near for name in missing if (near := find_similar_name(name, unknown)) is not None}
        problems = [f"no {describe_columns(missing)}"] if missing else []
        problems += [f"rename '{near}' to '{name}'?" for name, near in suggestions.items()]
        strangers = [name for name in unknown if name not in suggestions.values()]
        problems += (
            [f"unknown {describe_columns(strangers)}, remove {'them' if len(strangers) > 1 else 'it'}"]
            if strangers
            else []
        )
        if problems:
            raise PerfedError(f"{where}: {'; '.join(problems)}; the site's columns: {', '.join(needed)}")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PerfedError(f"{where}: several columns are called {quote_names(twice)}")
        refuse_complex(frame, where)
        return self.conversions.apply(clean_frame(native_columns(frame), self.missing))

    def _read_domain(self, frame: Frame) -> NDArray[np.int64] | None:
        named = self._check_frame(frame)
        if self.domain is None or self.domain not in named:
            return None
        texts, _ = read(named[self.domain], Column(name=self.domain, kind="category"))
        ids, problems = number_domains(texts, self.domain, self.domains)
        raise_problems([f"site '{self.site}': {problem}" for problem in problems])
        return ids

    # Files ---------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Write the preprocessing to one file, with the transformer in skops' format, which runs no code when read.

        A transformer of the user's own types is pickled with joblib.

        Raises:
            PerfedError: skops is not installed; names the extra.
        """
        skops = optional_package("skops.io", "saving a site's preprocessing", extra="tables")
        facts = {**{name: value for name, value in vars(self).items() if name not in ("inputs", "transformer")}}
        facts["inputs"] = [column.model_dump(mode="json", exclude={"sums"}) for column in self.inputs]
        facts["conversions"] = asdict(self.conversions)
        safe: bytes | None = None
        try:
            content = skops.dumps(self.transformer)
            safe = content if set(skops.get_untrusted_types(data=content)) <= set(_TRUSTED) else None
        except Exception:  # types that skops does not know: whatever their code raises
            safe = None
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(_FACTS, json.dumps(facts, indent=1))
            file.writestr(
                _PICKLED if safe is None else _SAFE, _pickle_transformer(self.transformer) if safe is None else safe
            )

    @classmethod
    def load(cls, path: Path | str, trust: bool = False) -> TablePreprocessor:
        """Return the preprocessing that :meth:`save` wrote.

        Args:
            path: the file.
            trust: whether a pickled transformer of the user is read, which can run any code.

        Raises:
            PerfedError: the file does not exist or has another format, or its pickled transformer is not trusted.
        """
        try:
            refuse_unpacked(Path(path))
            with zipfile.ZipFile(path) as file:
                facts = json.loads(file.read(_FACTS))
                facts["inputs"] = [{"letters": None, **column} for column in facts["inputs"]]
                safe = _SAFE in file.namelist()
                if not safe:
                    refuse_untrusted(Path(path), "a preprocessing that is pickled (joblib)", trust)
                transformer = _load_transformer(file.read(_SAFE if safe else _PICKLED), safe)
            return checked(cls, {**facts, "transformer": transformer}, Path(path))
        except PerfedError:
            raise
        except Exception as error:  # zipfile, zlib, skops and joblib raise each their own
            raise PerfedError(f"{path}: cannot be read as a site's table ({reason_of(error)})") from None


def table_of(client: Client) -> TablePreprocessor | None:
    """Return the preprocessing of a client whose data come from a table, otherwise ``None``."""
    return client.table if isinstance(client.table, TablePreprocessor) else None


def _load_transformer(content: bytes, safe: bool) -> Any:
    if safe:
        skops = optional_package("skops.io", "reading a site's preprocessing", extra="tables")
        return skops.loads(content, trusted=_TRUSTED)
    import joblib

    return joblib.load(io.BytesIO(content))


def _pickle_transformer(transformer: Any) -> bytes:
    import joblib

    content = io.BytesIO()
    joblib.dump(transformer, content)
    return content.getvalue()


def number_domains(texts: Series, name: str, domains: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return the position of each row's domain in ``domains``, and lines about missing and unknown domains.

    Args:
        texts: the column ``name``, read as categories.
        name: the name of the column, for messages.
        domains: the names of the domains.
    """
    place = texts.map({domain: number for number, domain in enumerate(domains)})
    bad = texts.index[place.isna()]
    if not len(bad):
        return place.to_numpy(dtype=np.int64), []
    return np.zeros(len(texts), np.int64), [
        f"column '{name}' holds no known domain {describe_rows(bad)}; allowed: {', '.join(domains)}"
    ]
