"""Who the clients are and what they hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from perfed.data.augment import CropFlip
from perfed.data.inputs import arrays_of, as_tensor, check_names, column_names, domain_ids
from perfed.data.labels import Classes, Task, coded
from perfed.data.summary import SiteFacts, kinds_of, site_table
from perfed.data.tables.schema import Mode
from perfed.data.tables.site import SiteTable
from perfed.errors import PerfedError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, repr=False)
class Split:
    """Samples of one client: inputs, targets and, where known, domain ids.

    Attributes:
        x: inputs, ``(samples, *input_shape)``, a floating-point tensor.
        y: targets, ``(samples,)`` int64 class labels or ``(samples, ...)`` floating-point values.
        domain: ``(samples,)`` int64 domain ids, or ``None`` where domains are unknown.

    Example:
        >>> split = Split(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> len(split), split.take(torch.tensor([2, 0])).y.tolist()
        (3, [1, 0])
    """

    x: Tensor
    y: Tensor
    domain: Tensor | None = None

    def __len__(self) -> int:
        return self.x.shape[0]

    def __repr__(self) -> str:
        return f"<Split: {len(self)} samples of shape {tuple(self.x.shape[1:])}>"

    def take(self, index: Tensor) -> Split:
        """The samples at ``index`` (int64, in that order)."""
        return Split(self.x[index], self.y[index], None if self.domain is None else self.domain[index])


@dataclass(frozen=True, repr=False)
class Client:
    """One client: an id, its training data, and optionally validation and test data.

    Attributes:
        id: unique within the federation; replies are aggregated in the sorted order of ids.
        train: at least one sample.
        test: may be ``None`` or empty: the client then takes part but is not evaluated.
        validation: held-out training data for choices made at the client (early stopping, tuning).
        feature_names: one name per column for tabular inputs.
        table: what turns the site's own table into inputs, where they were made so (:meth:`Federation.from_frames`).

    Example:
        >>> split = Split(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> client = Client("clinic", split, test=split)
        >>> client.input_shape, client.split("validation")
        ((3,), None)
    """

    id: str
    train: Split
    test: Split | None = None
    validation: Split | None = None
    feature_names: tuple[str, ...] | None = None
    table: SiteTable | None = None

    def __repr__(self) -> str:
        return f"<Client '{self.id}': {_sizes([self])}, inputs of shape {self.input_shape}>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the sample axis."""
        return tuple(self.train.x.shape[1:])

    def split(self, name: str) -> Split | None:
        """The split called ``name`` ("train", "validation" or "test"); ``None`` if absent or empty."""
        found: Split | None = getattr(self, name)
        return found if found is not None and len(found) > 0 else None


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients in the sorted order of their ids.

    Attributes:
        clients: at least one; checked and sorted by id on construction.
        num_classes: number of classes C; labels are 0..C-1. ``None`` for regression.
        name: what the data set is called in reports.
        class_names: C names, if known.
        notes: facts about the data worth printing, e.g. the accuracy of the Bayes rule under ``"oracle_accuracy"``.
        domain_names: of the domains 0, 1, ... (there may be more than occur); without them reports have the numbers.
        augment: random changes to the inputs of every training mini-batch, for images.
        words: where inputs are token ids, what the ids from 2 on stand for (0: padding, 1: other words).
        classes: what the data call the classes 0, 1, ..., C - 1 (default: just that): class j, and so column j of every
            prediction, is ``classes[j]``. ``None`` for regression.

    Raises:
        PerfedError: no clients, duplicate ids, a client without training data, labels outside the
            classes, domain ids that are negative, beyond ``domain_names`` or missing for some samples,
            NaN or infinite inputs, mismatched lengths or shapes; names the client.

    Example:
        >>> arrays = {"x_train": torch.eye(3), "y_train": ["ill", "well", "well"]}
        >>> federation = Federation.from_arrays({"clinic": arrays, "hospital": arrays})
        >>> federation.ids, federation.num_classes, [len(client.train) for client in federation]
        (['clinic', 'hospital'], 2, [3, 3])
    """

    clients: tuple[Client, ...]
    num_classes: int | None
    name: str = "data"
    class_names: tuple[str, ...] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    domain_names: tuple[str, ...] | None = None
    augment: CropFlip | None = None
    words: tuple[str, ...] | None = None
    classes: Classes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(sorted(self.clients, key=lambda c: c.id)))
        if not self.clients:
            raise PerfedError(f"federation '{self.name}' has no clients; at least one is needed")
        ids = [c.id for c in self.clients]
        for first, second in pairwise(ids):
            if first == second:
                raise PerfedError(f"client id '{first}' occurs twice; ids must be unique")
        for client in self.clients:
            _check_client(client, self.num_classes)
            if self.augment is not None and len(client.input_shape) != 3:
                raise PerfedError(
                    f"client '{client.id}' has inputs of shape {client.input_shape}; augmentation needs images "
                    "(channels, height, width)"
                )
        classes = self.num_classes or 0
        if self.class_names is not None and len(self.class_names) != classes:
            raise PerfedError(f"{len(self.class_names)} class names for {classes} classes; one each is needed")
        if self.num_classes is not None and self.classes is None:
            object.__setattr__(self, "classes", tuple(range(self.num_classes)))
        if len(self.classes or ()) != classes:
            raise PerfedError(f"the classes are {self.classes}, but there are {classes}; one each is needed")
        _check_domains(self)

    def __repr__(self) -> str:
        task = "regression" if self.num_classes is None else f"{self.num_classes} classes"
        domains = f", {self.num_domains} domains" if self.num_domains else ""
        return f"<Federation '{self.name}': {len(self)} clients, {_sizes(self.clients)}, {task}{domains}>"

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Mapping[str, Any] | Dataset[Any]] | Sequence[Mapping[str, Any] | Dataset[Any]],
        *,
        task: Task | None = None,
        num_classes: int | None = None,
        name: str = "data",
        class_names: Sequence[str] | None = None,
        domain_names: Sequence[str] | None = None,
    ) -> Federation:
        """Build a federation from numpy arrays, tensors, data frames or torch data sets.

        Args:
            clients: per client id (or in a list, ids then being "000", "001", ...) a mapping with
                ``x_train``, ``y_train`` and optionally ``x_validation``, ``y_validation``, ``x_test``,
                ``y_test``, ``domain_train`` (and ``_validation``, ``_test``) and ``feature_names`` (default: the
                columns of a data frame). Shapes may differ between clients. In place of the arrays of a split,
                ``train``, ``validation`` or ``test`` is a torch Dataset with a length whose samples are
                ``(inputs, target)`` or ``(inputs, target, domain id)``; it is read once, and a Dataset in place of the
                mapping is the training data.
            task: "classification" or "regression"; by default integer and text targets are class labels, floating-point
                targets are regression values.
            num_classes: number of classes, labels being 0, 1, ...; by default (or with more ``class_names`` than
                labels, which are then 0, 1, ...) the classes are the labels that occur, sorted: see ``classes``.
            name: what reports call the data.
            class_names: names of the classes.
            domain_names: names of the domains 0, 1, ...; M is the largest id + 1, with or without them.

        Raises:
            PerfedError: a missing or unknown key, columns that differ between the splits of a client, inputs that are
                no numbers, floating-point targets that look like labels without ``task``, or any fault listed for
                :class:`Federation`.

        Example:
            >>> import numpy as np
            >>> data = {"a": {"x_train": np.ones((4, 3)), "y_train": np.array([0, 1, 0, 1])}}
            >>> Federation.from_arrays(data).num_classes
            2
        """
        if not isinstance(clients, Mapping | list | tuple):
            raise PerfedError(
                f"clients must be a mapping from id to data, or a list (given: {type(clients).__name__}); "
                'one client alone is {"id": data}'
            )
        pairs = clients.items() if isinstance(clients, Mapping) else ((f"{i:03d}", c) for i, c in enumerate(clients))
        if num_classes is not None and task == "regression":
            raise PerfedError("num_classes is for classification, and task is regression; leave one of them out")
        read = [(str(key), *arrays_of(str(key), given, SPLITS)) for key, given in pairs]
        targets = [(f"client '{i}': {split}", y) for i, parts, _ in read for split, (_, y, _) in parts.items()]
        task = task if num_classes is None else "classification"
        values, classes = coded(targets, task, num_classes, class_names)
        left = iter(values)
        built = []
        for i, parts, features in read:
            splits = {split: Split(x, next(left), domain) for split, (x, _, domain) in parts.items()}
            built.append(Client(i, splits["train"], splits.get("test"), splits.get("validation"), features))
        if classes is not None and class_names is None and classes != tuple(range(len(classes))):
            class_names = tuple(map(str, classes))
        names = None if class_names is None else tuple(class_names)
        domains = None if domain_names is None else tuple(domain_names)
        size = None if classes is None else len(classes)
        return cls(tuple(built), size, name=name, class_names=names, domain_names=domains, classes=classes)

    @classmethod
    def from_frames(
        cls,
        frames: Mapping[str, Any],
        *,
        target: str,
        domain: str | None = None,
        drop: Sequence[str] = (),
        dates: Sequence[str] = (),
        categories: Sequence[str] = (),
        group: str | None = None,
        task: Task | None = None,
        test: Mapping[str, Any] | float = 0.2,
        folds: int = 0,
        columns: Mode = "own",
        preprocess: Any = None,
        seed: int = 0,
        name: str = "tables",
        sources: Mapping[str, str] | None = None,
        test_sources: Mapping[str, str] | None = None,
    ) -> Federation:
        """Build a federation from one pandas data frame per site, a row per sample, as the sites have them.

        Every site splits its rows and fits its own preprocessing on its training rows; the client's ``table`` keeps it.
        Needs the extra ``perfed[tables]``.

        Args:
            frames: per site; columns may differ.
            target, domain, drop, dates, categories, group, task, folds, columns, preprocess, seed: see
                :class:`perfed.data.tables.options.TableOptions`.
            test: the share of each site's rows to test on, or a data frame of such rows per site.
            name: what reports call the data.
            sources, test_sources: what messages call each site's frame, such as a file; rows are called by its index.

        Raises:
            PerfedError: a :class:`perfed.data.tables.problems.TableProblems` with all faults of rows and columns, one
                line each, or any fault listed for :class:`Federation`.

        Example:
            >>> import pandas as pd
            >>> north = pd.DataFrame({"age": [61, 48, 70, 55], "sick": ["no", "yes", "no", "yes"]})
            >>> Federation.from_frames({"north": north}, target="sick", test=0.5).classes
            ('no', 'yes')
        """
        from perfed.data.tables.frames import build
        from perfed.data.tables.options import TableOptions

        options = TableOptions(
            target=target,
            domain=domain,
            drop=tuple(drop),
            dates=tuple(dates),
            categories=tuple(categories),
            group=group,
            task=task,
            test_fraction=test if not isinstance(test, Mapping) else 0.0,
            folds=folds,
            columns=columns,
            preprocess=preprocess,
            seed=seed,
        )
        tests = test if isinstance(test, Mapping) else None
        built = build(frames, options, tests=tests, sources=sources, test_sources=test_sources)
        made = cls.from_arrays(built.arrays, task=built.task, name=name, domain_names=built.domains)
        clients = tuple(replace(client, table=built.tables[client.id]) for client in made)
        return replace(made, clients=clients, notes={"told": built.told, "remarks": built.remarks})

    def describe(self) -> str:
        """Sites x (rows of each split, columns shared and own, missing values, rows per class and domain), as text.

        For tables also what columns are taken for, what sites must tell each other before they train, and remarks.
        No row's content.
        """
        tables = {client.id: client.table for client in self if client.table is not None}
        shared = set.intersection(*(set(t.feature_names_in_) for t in tables.values())) if tables else set()
        facts = []
        for client in self:
            rows = {split: part for split in SPLITS if (part := client.split(split)) is not None}
            table = client.table
            facts.append(
                SiteFacts(
                    site=client.id,
                    rows={split: len(part) for split, part in rows.items()},
                    inputs=client.train.x[0].numel(),
                    shared=None if table is None else sum(name in shared for name in table.feature_names_in_),
                    own=None if table is None else sum(name not in shared for name in table.feature_names_in_),
                    missing=None if table is None else sum(column.missing for column in table.columns),
                    cells=None if table is None else len(client.train) * len(table.columns),
                    classes=_counts([part.y for part in rows.values()], self.num_classes or 0),
                    domains=_counts([p.domain for p in rows.values() if p.domain is not None], self.num_domains),
                )
            )
        classes = [str(label) for label in self.class_names or self.classes or ()]
        domains = [self.domain_name(number) for number in range(self.num_domains)]
        text = site_table(facts, classes, domains)
        if not tables:
            return text
        told = f"sites tell each other before they train: {'; '.join(self.notes['told']) or 'nothing'}"
        return "\n".join([text, "", *kinds_of(tables.values()), told, *self.notes["remarks"]])

    @property
    def num_domains(self) -> int:
        """Number of domains M: the largest domain id + 1; 0 where domains are unknown."""
        splits = [s for c in self.clients for name in SPLITS if (s := c.split(name)) is not None]
        return 1 + max((int(s.domain.max()) for s in splits if s.domain is not None), default=-1)

    def domains_in(self, split: str) -> list[int]:
        """Ids of the domains that the clients' ``split`` has samples of, ascending."""
        parts = (s for c in self.clients if (s := c.split(split)) is not None)
        return sorted({m for s in parts if s.domain is not None for m in s.domain.unique().tolist()})

    def domain_name(self, domain: int) -> str:
        """What the domain is called in reports."""
        return str(domain) if self.domain_names is None else self.domain_names[domain]

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self.clients)

    @property
    def ids(self) -> list[str]:
        """Client ids in sorted order."""
        return [c.id for c in self.clients]

    @cached_property
    def fingerprint(self) -> int:
        """A number that changes with the clients' ids, sizes, shapes or targets."""
        mark = 0
        for client in self.clients:
            for name in SPLITS:
                split = client.split(name)
                if split is not None:
                    facts = f"{client.id} {name} {tuple(split.x.shape)}".encode()
                    targets = split.y.double().cpu().numpy().tobytes()
                    mark = zlib.crc32(targets, zlib.crc32(facts, mark))
        return mark

    def to(self, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Federation:
        """The same federation on ``device``, with floating-point inputs and targets in ``dtype``."""

        def cast(split: Split | None) -> Split | None:
            if split is None:
                return None
            y = split.y.to(device, dtype) if torch.is_floating_point(split.y) else split.y.to(device)
            domain = None if split.domain is None else split.domain.to(device)
            return Split(split.x.to(device, dtype), y, domain)

        clients = tuple(
            replace(c, **{name: cast(getattr(c, name)) for name in SPLITS})  # type: ignore[arg-type]
            for c in self.clients
        )
        return replace(self, clients=clients)


def _counts(codes: Sequence[Tensor], number: int) -> list[int]:
    """How often each of 0, ..., number - 1 occurs; nothing where there are none."""
    return torch.bincount(torch.cat(list(codes)), minlength=number).tolist() if number else []


def _sizes(clients: Sequence[Client]) -> str:
    """How many samples there are of each split that occurs."""
    counts = {name: sum(len(split) for c in clients if (split := c.split(name)) is not None) for name in SPLITS}
    return f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)} samples"


def new_inputs(client: Client, x: Any, domain: Any, num_domains: int) -> tuple[Tensor, Tensor | None]:
    """Inputs and domain ids for a client's model, checked as its own data are.

    Raises:
        PerfedError: another shape or other columns, values that are not finite, domains that there are not.
    """
    where, columns = f"client '{client.id}'", column_names(x)
    if columns is not None and client.feature_names is not None:
        check_names(where, "x", columns, "its training data", client.feature_names)
    inputs = as_tensor(x, "x", client.id)
    if tuple(inputs.shape[1:]) != client.input_shape:
        raise PerfedError(f"{where} has inputs of shape {client.input_shape}, not {tuple(inputs.shape[1:])}")
    _check_finite(client, "new", inputs)
    if domain is None:
        return inputs, None
    ids = domain_ids(as_tensor(domain, "domain", client.id))
    if ids.shape != (len(inputs),):
        raise PerfedError(f"{where}: new inputs and domain ids must have the same length")
    _check_ids(where, "new", ids, num_domains)
    return inputs, ids


def _check_client(client: Client, num_classes: int | None) -> None:
    where = f"client '{client.id}'"
    if len(client.train) == 0:
        raise PerfedError(f"{where} has no training data; every client needs at least one sample")
    for name in SPLITS:
        split = client.split(name)
        if split is None:
            continue
        if split.y.shape[0] != len(split) or (split.domain is not None and split.domain.shape != (len(split),)):
            raise PerfedError(f"{where}: {name} inputs, targets and domain ids must have the same length")
        if torch.is_floating_point(split.y) != torch.is_floating_point(client.train.y):
            raise PerfedError(f"{where}: {name} targets are {split.y.dtype}, training targets {client.train.y.dtype}")
        if 0 in split.x.shape[1:]:
            raise PerfedError(f"{where}: {name} inputs have shape {tuple(split.x.shape[1:])}, so no features at all")
        if tuple(split.x.shape[1:]) != client.input_shape:
            raise PerfedError(
                f"{where}: {name} inputs have shape {tuple(split.x.shape[1:])}, training inputs {client.input_shape}"
            )
        _check_finite(client, name, split.x)
        if torch.is_floating_point(split.y) and not bool(torch.isfinite(split.y).all()):
            raise PerfedError(f"{where}: {name} targets hold NaN or infinity; targets must be finite")
        if num_classes is not None:
            if split.y.ndim != 1:
                shape = tuple(split.y.shape)
                raise PerfedError(f"{where}: {name} labels have shape {shape}; ({len(split)},) is needed")
            low, high = int(split.y.min()), int(split.y.max())
            if low < 0 or high >= num_classes:
                bad = low if low < 0 else high
                raise PerfedError(f"{where}: {name} label {bad} is outside the classes 0..{num_classes - 1}")
    if client.feature_names is not None and (len(client.feature_names),) != client.input_shape:
        raise PerfedError(
            f"{where}: {len(client.feature_names)} feature names for inputs of shape {client.input_shape}"
        )


def _check_finite(client: Client, name: str, x: Tensor) -> None:
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        first = torch.nonzero(~finite)[0].tolist()
        column = ",".join(str(i) for i in first[1:])
        if client.feature_names is not None:
            column += f" ('{client.feature_names[first[1]]}')"
        raise PerfedError(
            f"client '{client.id}': {name} inputs hold NaN or infinity in column {column}, row {first[0]}; "
            "features must be finite"
        )


def _check_domains(federation: Federation) -> None:
    splits = [(c, name, s) for c in federation.clients for name in SPLITS if (s := c.split(name)) is not None]
    known = [(c, name, s.domain) for c, name, s in splits if s.domain is not None]
    if known and len(known) < len(splits):
        client, name = next((c, name) for c, name, s in splits if s.domain is None)
        other, given = known[0][:2]
        raise PerfedError(
            f"client '{client.id}': {name} samples without domain ids, while client '{other.id}' has them for its "
            f"{given} samples; all samples of all clients need one, or none"
        )
    samples = sum(len(split) for _, _, split in splits)
    for client, name, domain in known:
        _check_ids(f"client '{client.id}'", name, domain, None if (n := federation.domain_names) is None else len(n))
        if federation.domain_names is None and int(domain.max()) >= samples:
            problem = "ids count the domains from 0, and there are fewer samples than that"
            raise PerfedError(f"client '{client.id}': {name} domain id {int(domain.max())} is not allowed: {problem}")


def _check_ids(where: str, name: str, domain: Tensor, domains: int | None) -> None:
    """Domain ids are integers from 0 on, below ``domains`` if that is known."""
    if domain.dtype != torch.int64:
        raise PerfedError(f"{where}: {name} domain ids must be integers, not {domain.dtype}")
    low, high = int(domain.min()), int(domain.max())
    if low < 0 or (domains is not None and high >= domains):
        allowed = "at least 0" if domains is None else f"from 0 to {domains - 1}, as there are {domains} domain names"
        raise PerfedError(f"{where}: {name} domain id {low if low < 0 else high} is not allowed; ids are {allowed}")
