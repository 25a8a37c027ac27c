"""Federations: the clients and the facts that hold for all of them."""

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
    """A federation: the clients in the sorted order of their ids, and facts that hold for all of them.

    Attributes:
        clients: at least one client; they are checked and sorted by id on construction.
        num_classes: the number of classes C; labels are 0..C-1. ``None`` for regression and survival.
        name: the name of the data set in reports.
        class_names: C names, if known.
        notes: facts about the data worth printing, e.g. the accuracy of the Bayes rule under ``"oracle_accuracy"``.
        domain_names: the names of the domains 0, 1, ..., of which not all need to occur; without names, reports have
            the numbers.
        augment: random changes to the inputs of every training mini-batch, for images.
        words: if inputs are token ids, the words of the ids from 2 on (0 is padding, 1 stands for other words).
        classes: the labels of the classes 0, 1, ..., C - 1 in the data (default: these numbers): class j, and so column
            j of every prediction, is ``classes[j]``. ``None`` for regression and survival.
        survival: whether targets are ``(samples, 2)``: a time above 0, and 1 for an event at that time or 0 for a
            censored sample. The model's only output is the logarithm of the hazard.
        target_scale: the scale by which the targets of a regression were standardised (:meth:`standardised`). Metrics
            and predictions are in the unit of the data.
        columns: the columns of the schema, if sites with tables have one schema.
        scaled_inputs: whether a data set of arrays has standardised its inputs, with categories as 0 and 1.

    Raises:
        PerfedError: there are no clients, an id occurs twice, a client has no training data, labels are outside of the
            classes, domain ids are negative, beyond ``domain_names`` or missing for some samples, inputs are NaN or
            infinite, or lengths or shapes do not match; the message names the client.

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
            clients: the data of each client by id, or a list of them, whose ids are "000", "001", ... The data are a
                mapping with ``x_train``, ``y_train`` and optionally ``x_validation``, ``y_validation``, ``x_test``,
                ``y_test``, ``domain_train`` (and ``_validation``, ``_test``) and ``feature_names`` (default: the
                columns of a data frame). Shapes may differ between clients. In place of the arrays of a split,
                ``train``, ``validation`` or ``test`` may be a torch Dataset with a length whose samples are
                ``(inputs, target)`` or ``(inputs, target, domain id)``; it is read once. A Dataset in place of the
                mapping is the training data.
            task: "classification", "regression" or "survival"; by default integer and text targets are class labels,
                and floating-point targets are regression values. Targets of survival are ``(samples, 2)``, see
                ``survival``.
            num_classes: the number of classes, whose labels are 0, 1, ...; by default the classes are the sorted labels
                that occur (see ``classes``), or 0, 1, ... if there are more ``class_names`` than labels.
            name: the name of the data in reports.
            class_names: the names of the classes.
            domain_names: the names of the domains 0, 1, ...; M is the largest id + 1, with or without names.

        Raises:
            PerfedError: a key is missing or unknown, columns differ between the splits of a client, inputs are not
                numbers, floating-point targets look like labels and there is no ``task``, or for any reason listed for
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
                'a single client is {"id": data}'
            )
        pairs = clients.items() if isinstance(clients, Mapping) else ((f"{i:03d}", c) for i, c in enumerate(clients))
        task = labels.get("task")
        if labels.get("num_classes") is not None:
            if task in ("regression", "survival"):
                raise PerfedError(f"num_classes is for classification, and task is {task}; leave one of them out")
            task = "classification"
        client_arrays = [(str(key), arrays_of(str(key), data, SPLITS)) for key, data in pairs]
        refuse_unusable(name, [site for site, _ in client_arrays])
        targets = [target for site, arrays in client_arrays for target in list_targets(site, arrays.parts)]
        task = task_of(targets, task)
        sites = [
            SiteArrays(site, arrays.parts, arrays.names, task, standardised=False, originals=arrays.originals)
            for site, arrays in client_arrays
        ]
        schema = create_schema([site.scanned for site in sites], labels)
        return federation_of((site.client(schema) for site in sites), schema, name, labels.get("class_names"))

    @classmethod
    def from_datasets(
        cls, clients: Mapping[str, tuple[Dataset[Any], Dataset[Any]]], *, name: str = "data", **labels: Unpack[Labels]
    ) -> Federation:
        """Build a federation from a torch training set and test set of each client.

        Args:
            clients: a pair of map-style data sets by client id. Their samples are ``(inputs, target)`` or ``(inputs,
                target, domain id)``; each is read once.
            name: the name of the data in reports.
            labels: ``task``, ``num_classes``, ``class_names`` and ``domain_names`` of :meth:`from_arrays`.

        Raises:
            PerfedError: a value is not a pair, or for any reason listed for :meth:`from_arrays`.

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
        """The task: "classification", "regression" or "survival"."""
        if self.survival:
            return "survival"
        return "regression" if self.num_classes is None else "classification"

    @property
    def num_outputs(self) -> int:
        """The number of outputs of a model: C logits, the values of a target, or one log hazard."""
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
        """Build a federation whose samples are read when they are used, for example one that is larger than memory.

        Args:
            read: returns the data of a client, given its id, as :meth:`from_arrays` accepts them; the arrays may be
                memory-mapped. Calls with the same id must return equal arrays. Other processes call it, too, if it can
                be pickled. ``None`` for a server whose samples stay at their sites; reading any is then an error.
            clients: the ids of the clients, or the facts about them (:meth:`perfed.data.client.Client.facts`). With
                ids, each client is read once and only its facts are stored. With facts nothing is read, and labels
                must be 0, 1, ... below ``num_classes``.
            task, num_classes, name, class_names, domain_names: as for :meth:`from_arrays`; floating-point targets need
                ``task``.
            hold: the number of bytes of samples that are cached in memory, those used last.

        Raises:
            PerfedError: there are facts of only some clients, or for any reason listed for :meth:`from_arrays`. Samples
                are checked when they are read.

        Example:
            >>> def read(client):
            ...     return {"x_train": torch.eye(3) * int(client), "y_train": torch.tensor([0, 1, 1])}
            >>> Federation.from_source(read, ["1", "2"])
            <Federation 'data': 2 clients, 6 train samples, 2 classes>
        """
        refuse_unknown_arguments(labels)
        ids_or_facts = list(clients)
        all_facts = [facts for facts in ids_or_facts if isinstance(facts, ClientFacts)]
        if (all_facts and len(all_facts) < len(ids_or_facts)) or (read is None and not all_facts):
            raise PerfedError("clients: give the facts of all clients, or only ids")
        if not all_facts and read is not None:
            ids = [str(client) for client in ids_or_facts]
            return _build_lazy(read, read, ids, name, hold, labels)
        schema = create_schema_from_facts(all_facts, labels)
        samples = refuse_read if read is None else FromArrays(read, schema.classes)
        return federation_of(lazy_clients(samples, all_facts, schema, hold), schema, name, labels.get("class_names"))

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
            path: the path of the folder. Each client is a file ``ID.npz`` with the keys of :meth:`from_arrays`, or a
                folder ``ID`` of files ``x_train.npy`` and so on. At first only targets, domain ids and the shapes of
                inputs are read.
            task, num_classes, name, class_names, domain_names, hold: as for :meth:`from_source`.

        Raises:
            PerfedError: there is no such folder, it contains no client, a file cannot be read, or for any reason listed
                for :meth:`from_source`.
        """
        refuse_unknown_arguments(labels)
        folder = ClientFolder.from_path(Path(path))
        return _build_lazy(folder, folder.read_shapes, list(folder.places), name, hold, labels)

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
        """Build a federation from one pandas data frame per site, with a row per sample.

        The rows of every site are split, and a preprocessing is fitted on its training rows, which is stored in the
        client's ``table``. The extra ``perfed[tables]`` is needed.

        Args:
            frames: the data frame of each site; columns may differ.
            target: the column to predict; for survival, the time.
            test: the share of each site's rows to test on, or a data frame of such rows per site.
            name: the name of the data in reports.
            sources, test_sources: the name of each site's frame in messages, such as a file; rows are named by its
                index.
            options: the roles of other columns, and further options: ``event``, ``domain``, ``drop``, ``numbers``,
                ``dates``, ``categories``, ``missing``, ``group``, ``task``, ``folds``, ``columns``, ``preprocess``,
                ``seed``; see :class:`perfed.tables.options.TableOptions`.

        Raises:
            PerfedError: a :class:`perfed.data.problems.DataProblems` with all problems of rows and columns, one
                line each, or an error for any reason listed for :class:`Federation`.

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
        """The schema on which all clients agree, from which the client of a new site can be created, too."""
        return FederationSchema(
            task=self.task,
            classes=self.classes,
            domains=self.domain_names or self.num_domains or None,
            scale=None if self.target_scale is None else Scale(**vars(self.target_scale)),
            columns=self.columns,
        )

    def standardised(self) -> Federation:
        """Return the federation with targets of mean 0 and variance 1 over all clients' training samples.

        The clients disclose their number of samples, and the sum and the sum of squares of each target.

        Raises:
            PerfedError: the task is not regression, or a target is the same for all samples.
        """
        if self.task != "regression":
            raise PerfedError(f"targets of {self.task} are not standardised; only values are")
        scale = TargetScale.from_targets([client.train.y for client in self])

        return replace(self, clients=tuple(client.with_targets(scale.down) for client in self), target_scale=scale)

    def describe(self) -> str:
        """Return a table as text with the rows, columns, missing values, classes and domains of each site.

        For tables, lines on the kinds of columns, on the metadata that sites send before training, and remarks follow.
        The text contains no values of rows.
        """
        return str(self.facts)

    @property
    def facts(self) -> FederationSummary:
        """The content of :meth:`describe` as an object."""
        classes = [str(label) for label in self.class_names or self.classes or ()]
        domains = [self.domain_name(number) for number in range(self.num_domains)]
        return FederationSummary.from_clients(self.clients, classes, domains, self.notes, survival=self.survival)

    @property
    def named_inputs(self) -> int | None:
        """The number of leading inputs that are columns shared by name; ``None`` without such columns."""
        mask = self.clients[0].held
        return None if mask is None else len(mask)

    @cached_property
    def num_domains(self) -> int:
        """The number of domains M: the largest domain id + 1; 0 if domains are unknown."""
        splits = [s for c in self.clients for name in SPLITS if (s := c.split(name)) is not None]
        return max((len(s.held_domains or ()) for s in splits), default=0)

    def domains_in(self, split: str) -> list[int]:
        """Return the ids of the domains of which the clients' ``split`` has samples, in ascending order."""
        return [m for m, count in enumerate(self._domain_counts(split)) if count]

    def domain_samples(self, split: str) -> dict[str, int]:
        """Return the number of samples of each domain in the clients' ``split``, by the domain's name."""
        return {self.domain_name(m): count for m, count in enumerate(self._domain_counts(split)) if count}

    def _domain_counts(self, split: str) -> list[int]:
        counts = [0] * self.num_domains
        for client in self.clients:
            part = client.split(split)
            for m, count in enumerate((part and part.held_domains) or ()):
                counts[m] += count
        return counts

    def domain_name(self, domain: int) -> str:
        """Return the name of a domain in reports."""
        return str(domain) if self.domain_names is None else self.domain_names[domain]

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self.clients)

    @property
    def ids(self) -> list[str]:
        """The ids of the clients, sorted."""
        return [c.id for c in self.clients]

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of the clients' ids, sizes, shapes and targets; of deferred data, a checksum of their facts."""
        checksum = 0
        for client in self.clients:
            for name in SPLITS:
                split = client.split(name)
                if split is not None:
                    checksum = split.update_checksum(f"{client.id} {name}", checksum)
        return checksum

    def to(self, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Federation:
        """Return the federation on ``device``, with floating-point inputs and targets in ``dtype``."""
        return replace(self, clients=tuple(client.to(dtype, device) for client in self.clients))


def federation_of(
    clients: Iterable[Client],
    schema: FederationSchema,
    name: str = "data",
    class_names: Sequence[str] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Federation:
    """Return the federation of all or some of the clients that were created with one schema.

    Args:
        clients: the clients, whose targets are encoded or standardised by the schema.
        schema: the schema on which all sites agree.
        name: the name of the data in reports.
        class_names: the names of the classes (default: their labels in the data, unless these are 0, 1, ...).
        notes: see :class:`Federation`.

    Raises:
        PerfedError: for any reason listed for :class:`Federation`.
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


_RESERVED = frozenset({"", "__metadata__"})  # names that files of tensors cannot contain (perfed.codec)


def refuse_unusable(name: str, ids: Sequence[str]) -> None:
    """Raise an error if there are no clients, an id occurs twice, or files of tensors cannot contain an id."""
    if not ids:
        raise PerfedError(f"federation '{name}' has no clients; at least one is needed")
    if unusable := sorted(_RESERVED & {*ids}):
        raise PerfedError(f"a client id is '{unusable[0]}'; ids are not empty, and not '__metadata__'")
    for first, second in pairwise(sorted(ids, key=compose_text)):
        if compose_text(first) == compose_text(second):
            raise PerfedError(f"client id '{first}' occurs twice; ids must be unique")


def _build_lazy(read: Arrays, scan: Arrays, ids: Sequence[str], name: str, hold: int, labels: Labels) -> Federation:
    """Build a federation of clients whose facts are computed from ``scan`` and whose samples are read by ``read``."""
    refuse_unusable(name, ids)
    sites: list[ScannedArrays] = []
    originals: dict[str, dict[str, str]] = {}
    for client_id in ids:
        arrays = arrays_of(client_id, read_arrays_by(scan, client_id), SPLITS)
        sites.append(scan_arrays(client_id, arrays.parts, arrays.names, labels.get("task")))
        originals[client_id] = arrays.originals
    schema = create_schema(sites, labels)
    facts = (site.facts_in(schema) for site in sites)
    clients = lazy_clients(FromArrays(read, schema.classes), facts, schema, hold)
    named = (replace(client, originals=originals[client.id]) for client in clients)
    return federation_of(named, schema, name, labels.get("class_names"))
