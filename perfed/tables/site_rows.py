"""A site's table at the site: what it must tell before it trains, and the client that an agreement makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from perfed.data.site_arrays import SiteArrays, counted
from perfed.data.target_scale import Sums
from perfed.errors import PerfedError, shorten_list
from perfed.tables.agreement import describe_differences_from_public, unify_kinds
from perfed.tables.checks import UNDECIDED, Checked, Part, checked, holders, like_persons, unreadable
from perfed.tables.kinds import learn_column
from perfed.tables.leaks import describe_copies
from perfed.tables.options import TableOptions
from perfed.tables.preprocess import column_transformer, output_names, outputs, own_transformer, set_scales
from perfed.tables.problems import Frame, Series, in_rows, merged, pandas, unknown
from perfed.tables.site import TablePreprocessor, domain_ids
from perfed.tables.splits import fold_of, held_out
from perfed.tables.targets import Labels, describe_target, read_events

Rows = Mapping[str, tuple[Frame, NDArray[Any]]]
"""Rows of a site and their targets (labels, values, or times and events), by split."""


@dataclass(frozen=True, eq=False)
class SiteTableData:
    """A table in which nothing is wrong, at its site.

    Attributes:
        main: the site's rows.
        given: rows that it is tested on, in place of a split.
        columns: what it takes those for that may enter.
        task: what its targets are for.
        options: what the columns are for.
    """

    main: Part
    given: Part | None
    columns: Sequence[Column]
    task: Task
    options: TableOptions

    @classmethod
    def of(cls, data: Checked, options: TableOptions) -> dict[str, SiteTableData]:
        """Each site's, by name."""
        given = {part.site: part for part in data.given}
        return {
            part.site: cls(part, given.get(part.site), data.columns[part.site], data.task, options)
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
        """One site's table where those of the others are not known.

        Args:
            site: its name.
            frame: its rows; the index names them in messages.
            options: what the columns are for.
            test: rows that it is tested on, in place of a split.
            sources: where ``frame`` and ``test`` are from, for messages (default: "site 'NAME'").

        Raises:
            DataProblems: everything that is wrong with rows and columns, whatever other sites hold.
        """
        tests = None if test is None else {site: test}
        own, other = ({site: name} for name in sources or (f"site '{site}'", f"site '{site}' (test)"))
        data = checked({site: frame}, options, tests=tests, sources=own, test_sources=other, alone=True)
        return cls.of(data, options)[site]

    @property
    def _parts(self) -> list[Part]:
        return [self.main] if self.given is None else [self.main, self.given]

    @cached_property
    def _labels(self) -> Labels:
        return Labels.from_tables([part.table for part in self._parts], self.options.target)

    @cached_property
    def _held(self) -> NDArray[np.bool_]:
        """A mask of the site's test rows, stratified by class unless that would disclose the numbers of rows per class.

        With groups, it only depends on each row's group, so that a group is tested on at every site or at none.
        """
        options, site = self.options, self.main.site
        if options.group is not None:
            return options.group_split.mark_test_rows(self.main.table.groups(options.group), options.seed)
        y = self._targets(numbers=self._labels.whole)[0]
        by_task = {"classification": y, "survival": y.reshape(len(y), -1)[:, -1]}
        strata = np.zeros(len(y)) if options.public else by_task.get(self.task, np.zeros(len(y)))
        if not options.folds:
            return held_out(strata, options.test_fraction, options.seed, f"test rows of {site}")
        repetition, held = divmod(options.seed, options.folds)
        return np.equal(fold_of(strata, options.folds, repetition, f"folds of {site}"), held)

    def _targets(self, *, numbers: bool) -> list[NDArray[Any]]:
        """Of each part labels, as whole ``numbers`` or texts, values, or times and events."""
        if self.task == "classification":
            return self._labels.whole_numbers if numbers else self._labels.names
        if self.options.event is None:
            return self._labels.values
        events, _ = read_events([(part.source, part.table) for part in self._parts], self.options.event)
        return [np.column_stack(pair) for pair in zip(self._labels.values, events, strict=True)]

    def rows(self, *, numbers: bool | None = None) -> Rows:
        """Rows to train on and to test on, with labels as whole ``numbers`` or texts (default: as the site has them).

        Which are tested on, the site's own labels say.
        """
        y, *tested = self._targets(numbers=self._labels.whole if numbers is None else numbers)
        train, test = self._frames
        if self.given is not None:
            return {"train": (train, y), "test": (test, tested[0])}
        return {"train": (train, y[~self._held]), "test": (test, y[self._held])}

    @cached_property
    def _frames(self) -> tuple[Frame, Frame]:
        """Rows to train on, and to test on."""
        if self.given is not None:
            return self.main.frame, self.given.frame
        return self.main.frame[~self._held], self.main.frame[self._held]

    def personal(self) -> list[str]:
        """Columns that look like names or codes of persons, a line each; those said to be categories do not."""
        options, parts = self.options, self._parts
        texts = [c.name for c in self.columns if c.kind == "category" and options.kinds.get(c.name) != "category"]
        groups = None if options.group is None else pandas().concat([part.frame[options.group] for part in parts])
        found = []
        for name in texts:
            values = pandas().concat([part.table.read_texts(name)[0] for part in parts])
            found.append(like_persons(name, values, groups))
        return merged(self.main.said(filter(None, found)))

    def describe_copies(self) -> list[str]:
        """Return a line with the number of possible test rows that equal a training row; empty if they are few."""
        given = [] if self.given is None else [self.given]
        return describe_copies([self.main], given, {self.main.site: self.columns}, self.task, self.options)

    def counts(self) -> tuple[int, dict[str, int] | None]:
        """How many rows there are to train on, and of each class that has some."""
        return counted(self.rows(numbers=False)["train"][1], self.task)

    def told(self, fewest: int = 1) -> SiteMetadata:
        """What the site tells before it trains: of categories those that at least ``fewest`` of its training rows hold,
        or of its groups of rows where it has these. What is public is told as the study says it.
        """
        domain, labels, known = self.options.domain, self._labels, self.options.public.get(self.options.target)
        of_task: dict[str, Any] = {}
        if known is not None and self.task != "survival":
            of_task = known.of_target
        elif self.task == "classification":
            numbers = (
                tuple(sorted({y for part in labels.whole_numbers for y in part.tolist()})) if labels.whole else None
            )
            of_task = {"labels": labels.kind, "numbers": numbers}
            of_task["classes"] = tuple(sorted({name for part in labels.names for name in part.tolist()}))
        elif self.task == "regression":
            of_task = {"sums": Sums.of(torch.from_numpy(np.array(self.rows()["train"][1])))}
        asked = {name for names in self.options.named.values() for name in names}
        return SiteMetadata(
            task=self.task,
            domains=None if domain is None else self._domains(domain),
            columns=None if self.options.columns == "own" else tuple(self._told(c, fewest) for c in self.columns),
            named=tuple(sorted(asked & {n for part in self._parts for n in part.frame.columns})) if asked else None,
            **of_task,
        )

    def _domains(self, name: str) -> tuple[str, ...]:
        if name in self.options.public:
            return tuple(self.options.public[name].levels)
        texts = [part.table.read_texts(name)[0] for part in self._parts]
        return tuple(sorted({text for column in texts for text in column.dropna()}))

    def _told(self, column: Column, fewest: int) -> Column:
        learned = self._learnt(column)
        constant, missing, binary = learned.constant, learned.missing > 0, learned.binary
        if (known := self.options.public.get(column.name)) is not None:
            constant = missing = binary = False
            levels, sums = learned.levels, known.sums
        else:  # a boolean is a category if it is one at another site
            levels = self._learnt(column.with_kind("category")).levels if column.kind == "boolean" else learned.levels
            levels = levels if fewest <= 1 else self._frequent(column, levels, fewest)
            sums = self._sums(column, fewest) if self.options.one_scale else None
        return Column(
            name=column.name,
            kind=column.kind,
            constant=constant,
            missing=missing,
            binary=binary,
            levels=levels,
            sums=sums if self.options.one_scale else None,
        )

    def _sums(self, column: Column, fewest: int) -> Sums | None:
        """What a common scale is made of, of numbers and dates that at least so many training rows hold."""
        if column.kind not in ("number", "date", "boolean"):
            return None
        values = self._values(column, "train").astype(np.float64)
        values = values[~np.isnan(values)]
        with np.errstate(over="ignore"):
            plain = len(values) >= max(1, fewest) and bool(np.isfinite(np.square(values).sum()))
        return Sums.of(torch.from_numpy(values)) if plain else None

    def _frequent(self, column: Column, levels: tuple[str, ...], fewest: int) -> tuple[str, ...]:
        """Those of the ``levels`` that at least so many training rows hold, or groups of these."""
        if not levels:
            return ()
        values = self._values_with_index(column.with_kind("category"), "train").fillna(MISSING_CATEGORY)
        group = self.options.group
        found = holders(values, None if group is None else self._frames[0][group])
        return tuple(level for level in levels if found.get(level, 0) >= fewest)

    def _learnt(self, column: Column) -> Column:
        """``column`` with what the training rows say, or what is public."""
        if column not in self._known:
            found = learn_column(column, self._values(column, "train"))
            if (known := self.options.public.get(column.name)) is not None:
                found = found.replace(constant=False, masked=False, levels=known.levels, scale=known.scale)
            self._known[column] = found
        return self._known[column]

    def _values(self, column: Column, split: str) -> NDArray[Any]:
        """Return a column's values in the training rows or in the test rows."""
        if self.given is not None:
            part = self.given if split == "test" else self.main
            return np.asarray(part.table.read(column)[0])
        values = self.main.table.read(column)[0].to_numpy()
        return np.asarray(values[self._split_rows[split]])

    def _values_with_index(self, column: Column, split: str) -> Series:
        """Return :meth:`_values` with the index of the rows."""
        return pandas().Series(self._values(column, split), index=self._frame_of(split).index, name=column.name)

    @cached_property
    def _split_rows(self) -> dict[str, NDArray[np.bool_]]:
        """A mask of the rows of each split."""
        return {"train": ~self._held, "test": self._held}

    def _frame_of(self, split: str) -> Frame:
        return self._frames[split == "test"]

    @cached_property
    def _known(self) -> dict[Column, Column]:
        return {}

    # By an agreement ----------------------------------------------------------------------------------------------

    def faults(self, agreement: FederationSchema) -> list[str]:
        """What keeps the site from an agreement that others made, or made while its table was another: a line each."""
        where = describe_target(self.options.target)
        if agreement.task != self.task:
            return [f"{self.main.source}: {where} is of {self.task}, and the study is of {agreement.task}"]
        if public := self.options.public:
            raise_problems(
                [f"{self.main.source}: {p}" for p in describe_differences_from_public(agreement, self.told(), public)]
            )
        found = [problem for part in self._parts for problem in part.said(self._unknown(part, agreement))]
        columns, contradicting = self.as_agreed(agreement)
        pairs = zip(self.columns, columns, strict=True)
        late = [known for own, known in pairs if own.kind in UNDECIDED or known.kind == "boolean"]
        found += [problem for part in self._parts for problem in unreadable(part, late)]
        return [*contradicting, *merged(found)]

    def _unknown(self, part: Part, agreement: FederationSchema) -> list[str]:
        """Classes, domains and columns of a part that are not of the agreement, or the other way round."""
        names, domain, where = list(part.frame.columns), self.options.domain, describe_target(self.options.target)
        found = []
        if agreement.classes is not None:
            bad = Labels.from_tables([part.table], self.options.target).find_unknown(agreement.classes)
            allowed = shorten_list([str(label) for label in agreement.classes])
            found += [f"{where} holds no known class {in_rows(bad)}; allowed: {allowed}"] if len(bad) else []
        if domain is not None:
            texts, _ = part.table.read_texts(domain)
            found += domain_ids(texts, domain, agreement.domain_names or ())[1]
        if self.options.columns == "common" and part is self.main:
            found += [unknown(c.name, names) for c in agreement.columns or () if c.name not in names]
        return found

    def as_agreed(self, agreement: FederationSchema) -> tuple[list[Column], list[str]]:
        """The site's columns as what is agreed that they hold, and which contradict it, a line each."""
        schema = {column.name: column for column in agreement.columns or ()}
        both = {self.main.site: [c for c in self.columns if c.name in schema], "": list(schema.values())}
        _, problems = unify_kinds(both, {self.main.site: self.main.source, "": "the study"})
        return [c.with_kind(schema[c.name].kind) if c.name in schema else c for c in self.columns], problems

    def client(self, agreement: FederationSchema) -> Client:
        """The site's client, its table with it.

        Raises:
            DataProblems: the table does not fit the agreement.
            PerfedError: no column is left, or a transformer of the user's own cannot be used.
        """
        raise_problems(self.faults(agreement))
        numbers = not any(isinstance(label, str) for label in agreement.classes or ())
        rows = self.rows(numbers=numbers)
        known = [self._learnt(column) for column in self.as_agreed(agreement)[0]]
        entering = self._entering(known, agreement.columns)
        shared = len(agreement.columns or ()) if self.options.columns == "named" else None
        table = self._table(known, entering, rows["train"][1], agreement.domain_names or (), shared)
        made = SiteArrays.of(self.main.site, self._arrays(table, rows), self.task)
        return self._with_groups(replace(made.client(agreement), table=table, held=table.held))

    def _with_groups(self, client: Client) -> Client:
        """Return ``client`` with the groups of its rows, by which later splits divide them."""
        if (name := self.options.group) is None:
            return client
        groups = self.main.table.groups(name)
        if self.given is None:
            parts = {"train": groups[~self._held], "test": groups[self._held]}
        else:
            parts = {"train": groups, "test": self.given.table.groups(name)}
        train = client.train.with_groups(torch.from_numpy(parts["train"]))
        test = client.split("test")
        return replace(
            client, train=train, test=None if test is None else test.with_groups(torch.from_numpy(parts["test"]))
        )

    def _entering(self, known: Sequence[Column], schema: Sequence[Column] | None = None) -> list[Column]:
        """Those of the columns ``known`` that enter, and those that do elsewhere and that it lacks.

        Where each site has its own, a transformer of the user's gets all, else those enter that are not constant.
        """
        if schema is None:
            return [column for column in known if self.options.preprocess is not None or not column.constant]
        own, named = {column.name: column for column in known}, self.options.columns == "named"
        agreed = [
            own.pop(c.name, c.replace(absent=True, silent=named)).replace(
                masked=c.masked, levels=c.levels, scale=c.scale
            )
            for c in schema
        ]
        return agreed + [column for column in own.values() if named and not column.constant]

    def _table(
        self,
        known: Sequence[Column],
        entering: Sequence[Column],
        y: NDArray[Any],
        domains: Sequence[str],
        shared: int | None = None,
    ) -> TablePreprocessor:
        """Its preprocessing of the columns ``entering``, fitted on the rows to train on, whose targets are ``y``; all
        are ``known``, and so many of the first are ``shared`` by name.
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
            _transformer(options.preprocess, entering, shared),
            options.target,
            domain=options.domain,
            domains=tuple(domains),
            ignored=tuple(name for name in columns if name not in names),
            own=options.preprocess is not None,
            event=options.event,
            ids=ids,
            constant=tuple(column.name for column in known if column.constant and column.name not in names),
            shared=shared,
            missing=options.codes,
            originals=self._find_original_names(),
            conversions=options.conversions,
        )
        frame = self._arranged(table, "train")
        table.transformer.fit(frame, y)
        if not table.own:
            set_scales(table.transformer, frame, entering, filled=bool(options.public))
        return table

    def _find_original_names(self) -> dict[str, str]:
        """Return the site's spelling of the names of columns and classes that it does not write in composed form."""
        names = {*self.main.frame.columns, *(label for part in self._labels.names for label in part.tolist())}
        return {composed: text for composed, text in self.main.table.originals.items() if composed in names}

    def _arranged(self, table: TablePreprocessor, split: str) -> Frame:
        """The rows of a split as the transformer takes them."""
        values = {column.name: self._values(column, split) for column in table.columns}
        return table.arrange(values, self._frame_of(split).index)

    def _arrays(self, table: TablePreprocessor, rows: Rows) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        for split, (frame, y) in rows.items():
            if len(frame):
                ready = self._arranged(table, split)
                arrays[f"x_{split}"] = outputs(table.transformer, ready, f"site '{table.site}'")
                arrays[f"y_{split}"] = y
                if table.domain is not None:
                    texts = self._values_with_index(Column(name=table.domain, kind="category"), split)
                    arrays[f"domain_{split}"] = domain_ids(texts, table.domain, table.domains)[0]
        names = output_names(table.transformer)
        return arrays if names is None else {**arrays, "feature_names": names}


def _transformer(preprocess: Any, entering: Sequence[Column], shared: int | None) -> Any:
    if preprocess is None:
        return column_transformer(entering, shared)
    if isinstance(preprocess, str):
        return own_transformer(preprocess)
    from sklearn.base import clone

    return clone(preprocess)
