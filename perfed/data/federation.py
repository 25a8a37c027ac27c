"""Who the clients are and what they hold."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.utils.data import Dataset

from perfed.data.augment import CropFlip
from perfed.data.checks import check_client, check_domains
from perfed.data.client import SPLITS, Client, sizes_of
from perfed.data.column import Column
from perfed.data.facts import ClientFacts
from perfed.data.federation_schema import FederationSchema, Scale
from perfed.data.folder import ClientFolder
from perfed.data.inputs import arrays_of
from perfed.data.labels import Classes, Task, task_of
from perfed.data.lazy import HOLD, lazy_clients, refuse_read
from perfed.data.names import compose_text, refuse_control_characters
from perfed.data.site_arrays import (
    Arrays,
    FromArrays,
    Labels,
    ScannedArrays,
    SiteArrays,
    create_schema,
    create_schema_from_facts,
    list_targets,
    read_arrays_by,
    refuse_unknown_arguments,
    scan_arrays,
)
from perfed.data.summary import FederationSummary
from perfed.data.target_scale import TargetScale
from perfed.errors import PerfedError
from perfed.plugins import TABLES


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients in the sorted order of their ids.

    Attributes:
        clients: at least one; checked and sorted by id on construction.
        num_classes: number of classes C; labels are 0..C-1. ``None`` for regression and survival.
        name: what the data set is called in reports.
        class_names: C names, if known.
        notes: facts about the data worth printing, e.g. the accuracy of the Bayes rule under ``"oracle_accuracy"``.
        domain_names: of the domains 0, 1, ... (there may be more than occur); without them reports have the numbers.
        augment: random changes to the inputs of every training mini-batch, for images.
        words: where inputs are token ids, what the ids from 2 on stand for (0: padding, 1: other words).
        classes: what the data call the classes 0, 1, ..., C - 1 (default: just that): class j, and so column j of every
            prediction, is ``classes[j]``. ``None`` for regression and survival.
        survival: targets are ``(samples, 2)``: a time above 0, and 1 for an event at that time, 0 where nothing is
            known beyond it (censored). The model's one output is the logarithm of the hazard.
        target_scale: what the targets of a regression were standardised by (:meth:`standardised`). Metrics and
            predictions are in the unit of the data.
        columns: where sites with tables have one schema, its columns.
        scaled_inputs: whether a data set of arrays has standardised its inputs, with categories as 0 and 1.

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
    survival: bool = False
    target_scale: TargetScale | None = None
    columns: tuple[Column, ...] | None = None
    scaled_inputs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(sorted(self.clients, key=lambda c: c.id)))
        refuse_unusable(self.name, self.ids)
        for role, names in (("client", self.ids), ("class", self.class_names), ("domain", self.domain_names)):
            refuse_control_characters(role, names or ())
        for client in self.clients:
            check_client(client, self.num_classes, self.survival)
            if self.augment is not None and len(client.input_shape) != 3:
                raise PerfedError(
                    f"client '{client.id}' has inputs of shape {client.input_shape}; augmentation needs images "
                    "(channels, height, width)"
                )
        if self.survival and self.num_classes is not None:
            raise PerfedError(f"num_classes is {self.num_classes}, and survival has none; leave one of them out")
        classes = self.num_classes or 0
        if self.class_names is not None and len(self.class_names) != classes:
            raise PerfedError(f"{len(self.class_names)} class names for {classes} classes; one each is needed")
        if self.num_classes is not None and self.classes is None:
            object.__setattr__(self, "classes", tuple(range(self.num_classes)))
        if len(self.classes or ()) != classes:
            raise PerfedError(f"the classes are {self.classes}, but there are {classes}; one each is needed")
        check_domains(self.clients, self.domain_names)

    def __repr__(self) -> str:
        task = self.task if self.num_classes is None else f"{self.num_classes} classes"
        domains = f", {self.num_domains} domains" if self.num_domains else ""
        return f"<Federation '{self.name}': {len(self)} clients, {sizes_of(self.clients)}, {task}{domains}>"

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Mapping[str, Any] | Dataset[Any]] | Sequence[Mapping[str, Any] | Dataset[Any]],
        *,
        name: str = "data",
        **labels: Unpack[Labels],
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
            task: "classification", "regression" or "survival"; by default integer and text targets are class labels,
                floating-point targets are regression values. Survival's are ``(samples, 2)``, see ``survival``.
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
        refuse_unknown_arguments(labels)
        if not isinstance(clients, Mapping | list | tuple):
            raise PerfedError(
                f"clients must be a mapping from id to data, or a list (given: {type(clients).__name__}); "
                'one client alone is {"id": data}'
            )
        pairs = clients.items() if isinstance(clients, Mapping) else ((f"{i:03d}", c) for i, c in enumerate(clients))
        task = labels.get("task")
        if labels.get("num_classes") is not None:
            if task in ("regression", "survival"):
                raise PerfedError(f"num_classes is for classification, and task is {task}; leave one of them out")
            task = "classification"
        read = [(str(key), arrays_of(str(key), data, SPLITS)) for key, data in pairs]
        refuse_unusable(name, [site for site, _ in read])
        targets = [target for site, arrays in read for target in list_targets(site, arrays.parts)]
        task = task_of(targets, task)
        sites = [
            SiteArrays(site, arrays.parts, arrays.names, task, standardised=False, originals=arrays.originals)
            for site, arrays in read
        ]
        schema = create_schema([site.scanned for site in sites], labels)
        return federation_of((site.client(schema) for site in sites), schema, name, labels.get("class_names"))

    @classmethod
    def from_datasets(
        cls, clients: Mapping[str, tuple[Dataset[Any], Dataset[Any]]], *, name: str = "data", **labels: Unpack[Labels]
    ) -> Federation:
        """Build a federation from torch data sets, to train on and to test on.

        Args:
            clients: per client id two map-style data sets whose samples are ``(inputs, target)`` or ``(inputs, target,
                domain id)``; each is read once.
            name: what reports call the data.
            labels: ``task``, ``num_classes``, ``class_names`` and ``domain_names`` of :meth:`from_arrays`.

        Raises:
            PerfedError: no pair of data sets, or as :meth:`from_arrays`.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> samples = TensorDataset(torch.eye(3), torch.tensor([0, 1, 1]))
            >>> Federation.from_datasets({"clinic": (samples, samples)})
            <Federation 'data': 1 clients, 3 train, 3 test samples, 2 classes>
        """
        for client, pair in clients.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise PerfedError(f"client '{client}' is a {type(pair).__name__}; (train, test) is needed")
        pairs = {client: {"train": train, "test": test} for client, (train, test) in clients.items()}
        return cls.from_arrays(pairs, name=name, **labels)

    @property
    def task(self) -> Task:
        """Classification where there are classes, else survival or regression."""
        if self.survival:
            return "survival"
        return "regression" if self.num_classes is None else "classification"

    @property
    def num_outputs(self) -> int:
        """What a model says of a sample: C logits, as many values as there are targets, or one log hazard."""
        target = self.clients[0].train.target_shape
        return self.num_classes or (target[0] if target and not self.survival else 1)

    @classmethod
    def from_source(
        cls,
        read: Arrays | None,
        clients: Iterable[str | ClientFacts],
        *,
        name: str = "data",
        hold: int = HOLD,
        **labels: Unpack[Labels],
    ) -> Federation:
        """Build a federation whose samples are read when they are used, such as one that is larger than memory.

        Args:
            read: from a client's id to what :meth:`from_arrays` takes for one client; the arrays may be memory-mapped.
                Equal calls give equal arrays. Other processes call it too, where it can be pickled. ``None``: samples
                stay at their sites, as a server sees them, and to read any is an error.
            clients: their ids, or what is known of them (:meth:`perfed.data.client.Client.facts`). Of ids each client
                is read once, one after the other, and only facts are kept; with facts nothing is read, and labels are
                0, 1, ... below ``num_classes``.
            task, num_classes, name, class_names, domain_names: as for :meth:`from_arrays`; floating-point targets need
                ``task``.
            hold: bytes of samples that are kept in memory, those used last.

        Raises:
            PerfedError: as :meth:`from_arrays`, or facts of some clients only. Samples are checked when they are read.

        Example:
            >>> def read(client):
            ...     return {"x_train": torch.eye(3) * int(client), "y_train": torch.tensor([0, 1, 1])}
            >>> Federation.from_source(read, ["1", "2"])
            <Federation 'data': 2 clients, 6 train samples, 2 classes>
        """
        refuse_unknown_arguments(labels)
        given = list(clients)
        known = [facts for facts in given if isinstance(facts, ClientFacts)]
        if (known and len(known) < len(given)) or (read is None and not known):
            raise PerfedError("clients: give the facts of all clients, or only ids")
        if not known and read is not None:
            ids = [str(client) for client in given]
            return _lazy(read, read, ids, name, hold, labels)
        schema = create_schema_from_facts(known, labels)
        samples = refuse_read if read is None else FromArrays(read, schema.classes)
        return federation_of(lazy_clients(samples, known, schema, hold), schema, name, labels.get("class_names"))

    @classmethod
    def from_folder(
        cls,
        path: Path | str,
        *,
        name: str = "data",
        hold: int = HOLD,
        **labels: Unpack[Labels],
    ) -> Federation:
        """Build a federation whose samples are in the files of a folder and read when they are used.

        Args:
            path: of the folder. A file ``ID.npz`` is one client, with the keys of :meth:`from_arrays`; so is a folder
                ``ID`` of files ``x_train.npy`` and so on. At first only targets, domain ids and the shapes of inputs
                are read.
            task, num_classes, name, class_names, domain_names, hold: as for :meth:`from_source`.

        Raises:
            PerfedError: no such folder, no client in it, a file that cannot be read, or as :meth:`from_source`.
        """
        refuse_unknown_arguments(labels)
        folder = ClientFolder.of(Path(path))
        return _lazy(folder, folder.heads, list(folder.places), name, hold, labels)

    @classmethod
    def from_frames(
        cls,
        frames: Mapping[str, Any],
        *,
        target: str,
        test: Mapping[str, Any] | float = 0.2,
        name: str = "tables",
        sources: Mapping[str, str] | None = None,
        test_sources: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Federation:
        """Build a federation from one pandas data frame per site, a row per sample, as the sites have them.

        Every site splits its rows and fits its own preprocessing on its training rows; the client's ``table`` keeps it.
        Needs the extra ``perfed[tables]``.

        Args:
            frames: per site; columns may differ.
            target: the column to predict; of survival the time.
            test: the share of each site's rows to test on, or a data frame of such rows per site.
            name: what reports call the data.
            sources, test_sources: what messages call each site's frame, such as a file; rows are called by its index.
            options: what other columns are for: ``event``, ``domain``, ``drop``, ``numbers``, ``dates``,
                ``categories``, ``missing``, ``group``, ``task``, ``folds``, ``columns``, ``preprocess``, ``seed``; see
                :class:`perfed.tables.options.TableOptions`.

        Raises:
            PerfedError: a :class:`perfed.data.problems.DataProblems` with all faults of rows and columns, one
                line each, or any fault listed for :class:`Federation`.

        Example:
            >>> import pandas as pd
            >>> north = pd.DataFrame({"age": [61, 48, 70, 55], "sick": ["no", "yes", "no", "yes"]})
            >>> Federation.from_frames({"north": north}, target="sick", test=0.5).classes
            ('no', 'yes')
        """
        options |= {"target": target, "test_fraction": 0.0 if isinstance(test, Mapping) else test}
        tests = test if isinstance(test, Mapping) else None
        tables = importlib.import_module(TABLES)
        federation: Federation = tables.build_federation(
            frames, options, name=name, tests=tests, sources=sources, test_sources=test_sources
        )
        return federation

    @cached_property
    def schema(self) -> FederationSchema:
        """What all clients agree on, by which a new site makes its client too."""
        return FederationSchema(
            task=self.task,
            classes=self.classes,
            domains=self.domain_names or self.num_domains or None,
            scale=None if self.target_scale is None else Scale(**vars(self.target_scale)),
            columns=self.columns,
        )

    def standardised(self) -> Federation:
        """The same with targets of mean 0 and variance 1 over all clients' training samples (of a regression).

        Clients tell their number of samples, and of each target the sum and the sum of squares.

        Raises:
            PerfedError: no regression, or a target that is the same for all samples.
        """
        if self.task != "regression":
            raise PerfedError(f"targets of {self.task} are not standardised; only values are")
        scale = TargetScale.of([client.train.y for client in self])

        return replace(self, clients=tuple(client.with_targets(scale.down) for client in self), target_scale=scale)

    def describe(self) -> str:
        """Sites x (rows of each split, columns shared and own, missing values, rows per class and domain), as text.

        For tables also what columns are taken for, what sites must tell each other before they train, and remarks.
        No row's content.
        """
        return str(self.facts)

    @property
    def facts(self) -> FederationSummary:
        """What :meth:`describe` says, as plain values."""
        classes = [str(label) for label in self.class_names or self.classes or ()]
        domains = [self.domain_name(number) for number in range(self.num_domains)]
        return FederationSummary.from_clients(self.clients, classes, domains, self.notes, survival=self.survival)

    @property
    def named_inputs(self) -> int | None:
        """How many inputs, the first of each client, are of columns that are shared by name; ``None`` without names."""
        held = self.clients[0].held
        return None if held is None else len(held)

    @cached_property
    def num_domains(self) -> int:
        """Number of domains M: the largest domain id + 1; 0 where domains are unknown."""
        splits = [s for c in self.clients for name in SPLITS if (s := c.split(name)) is not None]
        return max((len(s.held_domains or ()) for s in splits), default=0)

    def domains_in(self, split: str) -> list[int]:
        """Ids of the domains that the clients' ``split`` has samples of, ascending."""
        return [m for m, count in enumerate(self._domain_counts(split)) if count]

    def domain_samples(self, split: str) -> dict[str, int]:
        """How many samples of each domain the clients' ``split`` has, by the domain's name."""
        return {self.domain_name(m): count for m, count in enumerate(self._domain_counts(split)) if count}

    def _domain_counts(self, split: str) -> list[int]:
        counts = [0] * self.num_domains
        for client in self.clients:
            part = client.split(split)
            for m, count in enumerate((part and part.held_domains) or ()):
                counts[m] += count
        return counts

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
        """A number that changes with the clients' ids, sizes, shapes or targets; of deferred data with their facts."""
        mark = 0
        for client in self.clients:
            for name in SPLITS:
                split = client.split(name)
                if split is not None:
                    mark = split.mark(f"{client.id} {name}", mark)
        return mark

    def to(self, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Federation:
        """The same federation on ``device``, with floating-point inputs and targets in ``dtype``."""
        return replace(self, clients=tuple(client.to(dtype, device) for client in self.clients))


def federation_of(
    clients: Iterable[Client],
    schema: FederationSchema,
    name: str = "data",
    class_names: Sequence[str] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Federation:
    """Put clients together that were made by one schema, be they all that there are or those at one place.

    Args:
        clients: their targets coded, or standardised, by the schema.
        schema: what holds at all sites.
        name: what reports call the data.
        class_names: of the classes (default: what the data call them, where that is more than 0, 1, ...).
        notes: see :class:`Federation`.

    Raises:
        PerfedError: any fault listed for :class:`Federation`.
    """
    classes = schema.classes
    if class_names is None and classes is not None and classes != tuple(range(len(classes))):
        class_names = tuple(map(str, classes))
    return Federation(
        tuple(clients),
        None if classes is None else len(classes),
        name,
        None if class_names is None else tuple(class_names),
        notes=notes or {},
        domain_names=schema.domain_names,
        classes=classes,
        survival=schema.task == "survival",
        target_scale=schema.target_scale,
        columns=schema.columns,
    )


_RESERVED = frozenset({"", "__metadata__"})  # of files of tensors, see :mod:`perfed.codec`


def refuse_unusable(name: str, ids: Sequence[str]) -> None:
    """Refuse no clients, two of one id, and ids that files of tensors cannot hold."""
    if not ids:
        raise PerfedError(f"federation '{name}' has no clients; at least one is needed")
    if unusable := sorted(_RESERVED & {*ids}):
        raise PerfedError(f"a client id is '{unusable[0]}'; ids are not empty, and not '__metadata__'")
    for first, second in pairwise(sorted(ids, key=compose_text)):
        if compose_text(first) == compose_text(second):
            raise PerfedError(f"client id '{first}' occurs twice; ids must be unique")


def _lazy(read: Arrays, look: Arrays, ids: Sequence[str], name: str, hold: int, labels: Labels) -> Federation:
    """Clients of whose arrays each is looked at once, by ``look``, and read by ``read`` when it is used."""
    refuse_unusable(name, ids)
    sites: list[ScannedArrays] = []
    originals: dict[str, dict[str, str]] = {}
    for client_id in ids:
        arrays = arrays_of(client_id, read_arrays_by(look, client_id), SPLITS)
        sites.append(scan_arrays(client_id, arrays.parts, arrays.names, labels.get("task")))
        originals[client_id] = arrays.originals
    schema = create_schema(sites, labels)
    facts = (site.facts_in(schema) for site in sites)
    clients = lazy_clients(FromArrays(read, schema.classes), facts, schema, hold)
    named = (replace(client, originals=originals[client.id]) for client in clients)
    return federation_of(named, schema, name, labels.get("class_names"))
