"""The table of a site: the metadata that the site sends before training, and its client in a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perfed.data.client import Client
from perfed.data.column import MISSING_CATEGORY, Column
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.data.labels import Task
from perfed.data.problems import raise_problems
from perfed.data.site_arrays import SiteArrays, count_targets
from perfed.data.target_scale import Sums
from perfed.errors import PerfedError, shorten_list
from perfed.tables.agreement import describe_differences_from_public, unify_kinds
from perfed.tables.checks import (
    UNDECIDED,
    Checked,
    Part,
    check_tables,
    count_rows_by_value,
    describe_personal_values,
    describe_unreadable_values,
)
from perfed.tables.kinds import learn_column
from perfed.tables.leaks import describe_copies
from perfed.tables.options import TableOptions
from perfed.tables.preprocess import column_transformer, find_output_names, load_transformer, set_scales, transform_rows
from perfed.tables.problems import Frame, Series, describe_rows, describe_unknown_column, merge_lines, pandas
from perfed.tables.site import TablePreprocessor, number_domains
from perfed.tables.splits import assign_folds, draw_test_rows
from perfed.tables.targets import Labels, describe_target, read_events


@dataclass(frozen=True, eq=False)
class SiteTableData:
    """The checked table of a site.

    Attributes:
        main: the rows of the site.
        test: separate test rows that replace a split.
        columns: the columns that may enter.
        task: the task of the targets.
        options: the options of the tables.
    """

    main: Part
    test: Part | None
    columns: Sequence[Column]
    task: Task
    options: TableOptions

    @classmethod
    def of(cls, data: Checked, options: TableOptions) -> dict[str, SiteTableData]:
        """Return the table of each site."""
        test_parts = {part.site: part for part in data.test_parts}
        return {
            part.site: cls(part, test_parts.get(part.site), data.columns[part.site], data.task, options)
            for part in data.main
        }

    @classmethod
    def alone(
        cls,
        site: str,
        frame: Frame,
        options: TableOptions,
        test: Frame | None = None,
        sources: tuple[str, str] | None = None,
    ) -> SiteTableData:
        """Return the table of one site without those of other sites.

        Args:
            site: the name of the site.
            frame: its rows; the index names them in messages.
            options: the options of the tables.
            test: separate test rows that replace a split.
            sources: the names of ``frame`` and ``test`` in messages (default: "site 'NAME'").

        Raises:
            DataProblems: rows or columns have problems that do not depend on other sites.
        """
        tests = None if test is None else {site: test}
        main_source, test_source = ({site: name} for name in sources or (f"site '{site}'", f"site '{site}' (test)"))
        data = check_tables(
            {site: frame}, options, tests=tests, sources=main_source, test_sources=test_source, single_site=True
        )
        return cls.of(data, options)[site]

    @property
    def _parts(self) -> list[Part]:
        return [self.main] if self.test is None else [self.main, self.test]

    @cached_property
    def _labels(self) -> Labels:
        return Labels.from_tables([part.table for part in self._parts], self.options.target)

    @cached_property
    def _test_mask(self) -> NDArray[np.bool_]:
        """A mask of the site's test rows, stratified by class unless that would disclose the numbers of rows per class.

        With groups, it only depends on each row's group, so that a group is tested on at every site or at none.
        """
        options, site = self.options, self.main.site
        if options.group is not None:
            return options.group_split.mark_test_rows(self.main.table.groups(options.group), options.seed)
        y = self._read_targets(numbers=self._labels.whole)[0]
        by_task = {"classification": y, "survival": y.reshape(len(y), -1)[:, -1]}
        strata = np.zeros(len(y)) if options.public else by_task.get(self.task, np.zeros(len(y)))
        if not options.folds:
            return draw_test_rows(strata, options.test_fraction, options.seed, f"test rows of {site}")
        repetition, test_fold = divmod(options.seed, options.folds)
        return np.equal(assign_folds(strata, options.folds, repetition, f"folds of {site}"), test_fold)

    def _read_targets(self, *, numbers: bool) -> list[NDArray[Any]]:
        """Return the targets of each part: labels, as whole ``numbers`` or texts, values, or times and events."""
        if self.task == "classification":
            return self._labels.whole_numbers if numbers else self._labels.names
        if self.options.event is None:
            return self._labels.values
        events, _ = read_events([(part.source, part.table) for part in self._parts], self.options.event)
        return [np.column_stack(pair) for pair in zip(self._labels.values, events, strict=True)]

    def targets(self, *, numbers: bool | None = None) -> dict[str, NDArray[Any]]:
        """Return the targets of each split, with labels as whole ``numbers`` or texts (default: as they are)."""
        y, *test_y = self._read_targets(numbers=self._labels.whole if numbers is None else numbers)
        if self.test is not None:
            return {"train": y, "test": test_y[0]}
        return {"train": y[~self._test_mask], "test": y[self._test_mask]}

    def _select(self, split: str, read: Callable[[Part], Any]) -> Any:
        """Return what ``read`` returns for the rows of a split."""
        if self.test is not None:
            return read(self.test if split == "test" else self.main)
        return read(self.main)[self._test_mask if split == "test" else ~self._test_mask]

    def describe_personal_columns(self) -> list[str]:
        """Return a line for each column that looks like names or codes of persons and is not listed as a category."""
        options, parts = self.options, self._parts
        texts = [c.name for c in self.columns if c.kind == "category" and options.kinds.get(c.name) != "category"]
        groups = None if options.group is None else pandas().concat([part.frame[options.group] for part in parts])
        lines = []
        for name in texts:
            values = pandas().concat([part.table.read_texts(name)[0] for part in parts])
            lines.append(describe_personal_values(name, values, groups))
        return merge_lines(self.main.add_source(filter(None, lines)))

    def describe_copies(self) -> list[str]:
        """Return a line with the number of possible test rows that equal a training row; empty if they are few."""
        test_parts = [] if self.test is None else [self.test]
        return describe_copies([self.main], test_parts, {self.main.site: self.columns}, self.task, self.options)

    def count_rows(self) -> tuple[int, dict[str, int] | None]:
        """Return the number of training rows, and of those of each class."""
        return count_targets(self.targets(numbers=False)["train"], self.task)

    def create_metadata(self, fewest: int = 1) -> SiteMetadata:
        """Return the metadata that the site sends before training.

        Of a column's categories it contains those in at least ``fewest`` training rows, or groups of rows if there are
        groups. Columns in ``data.public`` are described by the study only.
        """
        domain, labels, public = self.options.domain, self._labels, self.options.public.get(self.options.target)
        of_task: dict[str, Any] = {}
        if public is not None and self.task != "survival":
            of_task = public.of_target
        elif self.task == "classification":
            numbers = (
                tuple(sorted({y for part in labels.whole_numbers for y in part.tolist()})) if labels.whole else None
            )
            of_task = {"labels": labels.kind, "numbers": numbers}
            of_task["classes"] = tuple(sorted({name for part in labels.names for name in part.tolist()}))
        elif self.task == "regression":
            of_task = {"sums": Sums.from_targets(torch.from_numpy(np.array(self.targets()["train"])))}
        optional_names = {name for names in self.options.named.values() for name in names}
        return SiteMetadata(
            task=self.task,
            domains=None if domain is None else self._read_domains(domain),
            columns=None
            if self.options.columns == "own"
            else tuple(self._disclose_column(c, fewest) for c in self.columns),
            named=tuple(sorted(optional_names & {n for part in self._parts for n in part.frame.columns}))
            if optional_names
            else None,
            **of_task,
        )

    def _read_domains(self, name: str) -> tuple[str, ...]:
        if name in self.options.public:
            return tuple(self.options.public[name].levels)
        texts = [part.table.read_texts(name)[0] for part in self._parts]
        return tuple(sorted({text for column in texts for text in column.dropna()}))

    def _disclose_column(self, column: Column, fewest: int) -> Column:
        learned, one_scale = self._learn_statistics(column), self.options.one_scale
        if (public := self.options.public.get(column.name)) is not None:
            return Column(
                name=column.name,
                kind=column.kind,
                constant=False,
                missing=False,
                binary=False,
                levels=learned.levels,
                sums=public.sums if one_scale else None,
            )
        # a boolean is a category if it is one at another site
        levels = (
            self._learn_statistics(column.with_kind("category")).levels if column.kind == "boolean" else learned.levels
        )
        return Column(
            name=column.name,
            kind=column.kind,
            constant=learned.constant,
            missing=learned.missing > 0,
            binary=learned.binary,
            levels=levels if fewest <= 1 else self._select_frequent(column, levels, fewest),
            sums=self._compute_sums(column, fewest) if one_scale else None,
        )

    def _compute_sums(self, column: Column, fewest: int) -> Sums | None:
        """Return the sums for a common scale if at least ``fewest`` training rows hold a value."""
        if column.kind not in ("number", "date", "boolean"):
            return None
        values = self._values(column, "train").astype(np.float64)
        values = values[~np.isnan(values)]
        with np.errstate(over="ignore"):
            plain = len(values) >= max(1, fewest) and bool(np.isfinite(np.square(values).sum()))
        return Sums.from_targets(torch.from_numpy(values)) if plain else None

    def _select_frequent(self, column: Column, levels: tuple[str, ...], fewest: int) -> tuple[str, ...]:
        """Return the ``levels`` in at least ``fewest`` training rows, or groups of these."""
        if not levels:
            return ()
        values = self._values_with_index(column.with_kind("category"), "train").fillna(MISSING_CATEGORY)
        group = self.options.group
        groups = None if group is None else self._select("train", lambda part: part.frame[group])
        counts = count_rows_by_value(values, groups)
        return tuple(level for level in levels if counts.get(level, 0) >= fewest)

    def _learn_statistics(self, column: Column) -> Column:
        """Return the column with the statistics of the training rows, or with its values in ``data.public``."""
        if column not in self._learned_columns:
            learned = learn_column(column, self._values(column, "train"))
            if (public := self.options.public.get(column.name)) is not None:
                learned = learned.replace(constant=False, masked=False, levels=public.levels, scale=public.scale)
            self._learned_columns[column] = learned
        return self._learned_columns[column]

    def _values(self, column: Column, split: str) -> NDArray[Any]:
        """Return the values of a column in the rows of a split."""
        return np.asarray(self._select(split, lambda part: part.table.read(column)[0].to_numpy()))

    def _values_with_index(self, column: Column, split: str) -> Series:
        """Return :meth:`_values` with the index of the rows."""
        index = self._select(split, lambda part: part.frame.index)
        return pandas().Series(self._values(column, split), index=index, name=column.name)

    @cached_property
    def _learned_columns(self) -> dict[Column, Column]:
        return {}

    # With a schema ------------------------------------------------------------------------------------------------

    def describe_misfits(self, agreement: FederationSchema) -> list[str]:
        """Return a line for each part of the table that does not fit a schema, which may be older than the table."""
        where = describe_target(self.options.target)
        if agreement.task != self.task:
            return [f"{self.main.source}: {where} is of {self.task}, and the study is of {agreement.task}"]
        if public := self.options.public:
            differences = describe_differences_from_public(agreement, self.create_metadata(), public)
            if differences:
                return [f"{self.main.source}: {line}" for line in differences]
        problems = [line for part in self._parts for line in part.add_source(self._describe_unknown(part, agreement))]
        columns, conflicts = self.unify_columns(agreement)
        pairs = zip(self.columns, columns, strict=True)
        undecided = [agreed for local, agreed in pairs if local.kind in UNDECIDED or agreed.kind == "boolean"]
        problems += [problem for part in self._parts for problem in describe_unreadable_values(part, undecided)]
        return [*conflicts, *merge_lines(problems)]

    def _describe_unknown(self, part: Part, agreement: FederationSchema) -> list[str]:
        """Return lines on classes and domains that the schema lacks, and on columns that the table lacks."""
        names, domain, where = list(part.frame.columns), self.options.domain, describe_target(self.options.target)
        problems = []
        if agreement.classes is not None:
            bad = Labels.from_tables([part.table], self.options.target).find_unknown(agreement.classes)
            allowed = shorten_list([str(label) for label in agreement.classes])
            problems += [f"{where} holds no known class {describe_rows(bad)}; allowed: {allowed}"] if len(bad) else []
        if domain is not None:
            texts, _ = part.table.read_texts(domain)
            problems += number_domains(texts, domain, agreement.domain_names or ())[1]
        if self.options.columns == "common" and part is self.main:
            problems += [describe_unknown_column(c.name, names) for c in agreement.columns or () if c.name not in names]
        return problems

    def unify_columns(self, agreement: FederationSchema) -> tuple[list[Column], list[str]]:
        """Return the columns with the kinds of the schema, and a line for each column that contradicts it."""
        schema = {column.name: column for column in agreement.columns or ()}
        compared = {self.main.site: [c for c in self.columns if c.name in schema], "": list(schema.values())}
        _, problems = unify_kinds(compared, {self.main.site: self.main.source, "": "the study"})
        return [c.with_kind(schema[c.name].kind) if c.name in schema else c for c in self.columns], problems

    def client(self, agreement: FederationSchema) -> Client:
        """Return the client of the site, with its preprocessing.

        Raises:
            DataProblems: the table does not fit the schema.
            PerfedError: no column enters, or a transformer of the user cannot be used.
        """
        raise_problems(self.describe_misfits(agreement))
        numbers = not any(isinstance(label, str) for label in agreement.classes or ())
        targets = self.targets(numbers=numbers)
        columns = [self._learn_statistics(column) for column in self.unify_columns(agreement)[0]]
        entering = self._select_entering(columns, agreement.columns)
        shared = len(agreement.columns or ()) if self.options.columns == "named" else None
        table = self._fit_preprocessing(columns, entering, targets["train"], agreement.domain_names or (), shared)
        arrays = SiteArrays.from_data(self.main.site, self._create_arrays(table, targets), self.task)
        return self._with_groups(replace(arrays.client(agreement), table=table, held=table.held))

    def _with_groups(self, client: Client) -> Client:
        """Return ``client`` with the groups of its rows, by which later splits divide them."""
        if (name := self.options.group) is None:
            return client
        splits = {split: client.split(split) for split in ("train", "test")}
        grouped = {
            split: samples.with_groups(torch.from_numpy(self._select(split, lambda part: part.table.groups(name))))
            for split, samples in splits.items()
            if samples is not None
        }
        return replace(client, train=grouped["train"], test=grouped.get("test"))

    def _select_entering(self, columns: Sequence[Column], schema: Sequence[Column] | None = None) -> list[Column]:
        """Return the columns that enter, including those of the schema that the site lacks.

        Without a schema, a transformer of the user gets all columns; otherwise constant ones do not enter.
        """
        if schema is None:
            return [column for column in columns if self.options.preprocess is not None or not column.constant]
        local, named = {column.name: column for column in columns}, self.options.columns == "named"
        shared = [
            local.pop(c.name, c.replace(absent=True, silent=named)).replace(
                masked=c.masked, levels=c.levels, scale=c.scale
            )
            for c in schema
        ]
        return shared + [column for column in local.values() if named and not column.constant]

    def _fit_preprocessing(
        self,
        candidates: Sequence[Column],
        entering: Sequence[Column],
        y: NDArray[Any],
        domains: Sequence[str],
        shared: int | None = None,
    ) -> TablePreprocessor:
        """Return the preprocessing, fitted on the training rows.

        Args:
            candidates: all columns of the site that may enter.
            entering: the columns that enter.
            y: the targets of the training rows.
            domains: the names of the domains.
            shared: the number of the first columns that are shared by name.
        """
        options, columns = self.options, self.main.frame.columns
        if not entering:
            raise PerfedError(
                f"{self.main.source}: no column is left to enter; those that there are do not vary, or are dropped"
            )
        names = {c.name for c in entering if not c.absent} | {options.target, options.event, options.domain}
        out = [name for name in (options.group, *options.drop) if name in columns and name is not None]
        ids = tuple(n for n in out if n == options.group or self.main.table.guess(n).kind == "id")
        table = TablePreprocessor(
            self.main.site,
            tuple(entering),
            _create_transformer(options.preprocess, entering, shared),
            options.target,
            domain=options.domain,
            domains=tuple(domains),
            ignored=tuple(name for name in columns if name not in names),
            own=options.preprocess is not None,
            event=options.event,
            ids=ids,
            constant=tuple(column.name for column in candidates if column.constant and column.name not in names),
            shared=shared,
            missing=options.codes,
            originals=self._find_original_names(),
            conversions=options.conversions,
        )
        frame = self._arrange_rows(table, "train")
        table.transformer.fit(frame, y)
        if not table.own:
            set_scales(table.transformer, frame, entering, filled=bool(options.public))
        return table

    def _find_original_names(self) -> dict[str, str]:
        """Return the site's spelling of the names of columns and classes that it does not write in composed form."""
        names = {*self.main.frame.columns, *(label for part in self._labels.names for label in part.tolist())}
        return {composed: text for composed, text in self.main.table.originals.items() if composed in names}

    def _arrange_rows(self, table: TablePreprocessor, split: str) -> Frame:
        """Return the rows of a split as the transformer takes them."""
        values = {column.name: self._values(column, split) for column in table.columns}
        return table.arrange(values, self._select(split, lambda part: part.frame.index))

    def _create_arrays(self, table: TablePreprocessor, targets: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        for split, y in targets.items():
            if len(y):
                ready = self._arrange_rows(table, split)
                arrays[f"x_{split}"] = transform_rows(table.transformer, ready, f"site '{table.site}'")
                arrays[f"y_{split}"] = y
                if table.domain is not None:
                    texts = self._values_with_index(Column(name=table.domain, kind="category"), split)
                    arrays[f"domain_{split}"] = number_domains(texts, table.domain, table.domains)[0]
        names = find_output_names(table.transformer)
        return arrays if names is None else {**arrays, "feature_names": names}


def _create_transformer(preprocess: Any, entering: Sequence[Column], shared: int | None) -> Any:
    if preprocess is None:
        return column_transformer(entering, shared)
    if isinstance(preprocess, str):
        return load_transformer(preprocess)
    from sklearn.base import clone

    return clone(preprocess)
