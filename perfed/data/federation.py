"""Who the clients are and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from perfed.data.augment import CropFlip
from perfed.data.checks import check_client, check_domains
from perfed.data.client import SPLITS, Client, Split, sizes_of
from perfed.data.facts import ClientFacts
from perfed.data.federation_schema import FederationSchema
from perfed.data.folder import ClientFolder
from perfed.data.inputs import arrays_of
from perfed.data.labels import Classes, Task, coded
from perfed.data.lazy import HOLD, Source, SplitCache, elsewhere
from perfed.data.metadata_scan import Arrays, FromArrays, surveyed
from perfed.data.summary import FederationFacts
from perfed.data.tables.options import Mode, Scales, TableOptions
from perfed.data.target_scale import TargetScale
from perfed.errors import PerfedError


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
        agreement: what sites with tables have agreed on, by which each makes its client.

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
    agreement: FederationSchema | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(sorted(self.clients, key=lambda c: c.id)))
        if not self.clients:
            raise PerfedError(f"federation '{self.name}' has no clients; at least one is needed")
        ids = [c.id for c in self.clients]
        for first, second in pairwise(ids):
            if first == second:
                raise PerfedError(f"client id '{first}' occurs twice; ids must be unique")
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
        if not isinstance(clients, Mapping | list | tuple):
            raise PerfedError(
                f"clients must be a mapping from id to data, or a list (given: {type(clients).__name__}); "
                'one client alone is {"id": data}'
            )
        pairs = clients.items() if isinstance(clients, Mapping) else ((f"{i:03d}", c) for i, c in enumerate(clients))
        if num_classes is not None and task in ("regression", "survival"):
            raise PerfedError(f"num_classes is for classification, and task is {task}; leave one of them out")
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
        survival = task == "survival"
        return cls(tuple(built), size, name, names, domain_names=domains, classes=classes, survival=survival)

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
        read: Arrays,
        clients: Iterable[str | ClientFacts],
        *,
        task: Task | None = None,
        num_classes: int | None = None,
        name: str = "data",
        class_names: Sequence[str] | None = None,
        domain_names: Sequence[str] | None = None,
        hold: int = HOLD,
    ) -> Federation:
        """Build a federation whose samples are read when they are used, such as one that is larger than memory.

        Args:
            read: from a client's id to what :meth:`from_arrays` takes for one client; the arrays may be memory-mapped.
                Equal calls give equal arrays. Other processes call it too, where it can be pickled.
            clients: their ids, or what is known of them. Of ids each client is read once, one after the other, and only
                facts are kept; with facts nothing is read, and labels are 0, 1, ... below ``num_classes``.
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
        given = list(clients)
        known = [facts for facts in given if isinstance(facts, ClientFacts)]
        classes: Classes | None = None if num_classes is None else tuple(range(num_classes))
        if num_classes is None and known and class_names is not None:
            classes = tuple(range(len(class_names)))
        if known and len(known) < len(given):
            raise PerfedError("clients: give the facts of all clients, or only ids")
        if not known:
            ids = [str(client) for client in given]
            known, classes = surveyed(ids, read, task, num_classes, class_names)
        return cls._deferred(FromArrays(read, classes), known, task, name, class_names, domain_names, hold)

    @classmethod
    def from_folder(
        cls,
        path: Path | str,
        *,
        task: Task | None = None,
        num_classes: int | None = None,
        name: str = "data",
        class_names: Sequence[str] | None = None,
        domain_names: Sequence[str] | None = None,
        hold: int = HOLD,
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
        folder = ClientFolder.of(Path(path))
        known, classes = surveyed(folder.places, folder.heads, task, num_classes, class_names)
        return cls._deferred(FromArrays(folder, classes), known, task, name, class_names, domain_names, hold)

    @classmethod
    def _deferred(
        cls,
        read: FromArrays,
        known: Sequence[ClientFacts],
        task: Task | None,
        name: str,
        class_names: Sequence[str] | None,
        domain_names: Sequence[str] | None,
        hold: int,
    ) -> Federation:
        classes, survival = read.classes, task == "survival"
        if classes is not None and class_names is None and classes != tuple(range(len(classes))):
            class_names = tuple(map(str, classes))
        size = None if classes is None else len(classes)
        source = Source(read, size, survival, SplitCache(hold))
        names, domains = (None if given is None else tuple(given) for given in (class_names, domain_names))
        clients = tuple(source.client(facts) for facts in known)
        return cls(clients, size, name, names, domain_names=domains, classes=classes, survival=survival)

    @classmethod
    def of_facts(cls, facts: Iterable[ClientFacts], num_classes: int | None, **about: Any) -> Federation:
        """A federation as a server sees it whose clients' samples stay at their sites; to read any is an error.

        Args:
            facts: of each client, as :meth:`perfed.data.client.Client.facts` gives them at its site.
            num_classes: of the whole federation.
            about: its other attributes by name, such as ``domain_names`` or ``survival``.

        Raises:
            PerfedError: any fault listed for :class:`Federation` that facts show.

        Example:
            >>> from perfed.data.facts import SplitFacts
            >>> facts = ClientFacts("north", {"train": SplitFacts(3, (2,), classes=(1, 2))})
            >>> Federation.of_facts([facts], num_classes=2).clients[0].train.x
            Traceback (most recent call last):
            perfed.errors.PerfedError: client 'north': its data stay at the site
        """
        return cls(elsewhere(facts, num_classes, bool(about.get("survival"))), num_classes, **about)

    @classmethod
    def from_frames(
        cls,
        frames: Mapping[str, Any],
        *,
        target: str,
        event: str | None = None,
        domain: str | None = None,
        drop: Sequence[str] = (),
        numbers: Sequence[str] = (),
        dates: Sequence[str] = (),
        categories: Sequence[str] = (),
        group: str | None = None,
        task: Task | None = None,
        test: Mapping[str, Any] | float = 0.2,
        folds: int = 0,
        columns: Mode = "own",
        scales: Scales = "auto",
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
            target, event, domain, drop, numbers, dates, categories, group, task, folds, columns, scales, preprocess,
                seed: see :class:`perfed.data.tables.options.TableOptions`.
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
        options = TableOptions(
            target=target,
            event=event,
            domain=domain,
            drop=drop,
            numbers=numbers,
            dates=dates,
            categories=categories,
            group=group,
            task=task,
            test_fraction=test if not isinstance(test, Mapping) else 0.0,
            folds=folds,
            columns=columns,
            scales=scales,
            preprocess=preprocess,
            seed=seed,
        )
        tests = test if isinstance(test, Mapping) else None
        return cls.of_tables(frames, options, name=name, tests=tests, sources=sources, test_sources=test_sources)

    @classmethod
    def of_tables(
        cls, frames: Mapping[str, Any], options: TableOptions, *, name: str = "tables", **more: Any
    ) -> Federation:
        """As :meth:`from_frames`; ``more`` as :func:`perfed.data.tables.frames.build`."""
        from perfed.data.tables.frames import build

        built = build(frames, options, **more)
        notes = {"told": built.told, "remarks": built.remarks, "doubts": built.doubts}
        return cls.of_agreement(tuple(built.clients.values()), built.agreement, name=name, notes=notes)

    @classmethod
    def of_agreement(
        cls,
        clients: tuple[Client, ...],
        agreement: FederationSchema,
        *,
        name: str = "data",
        notes: Mapping[str, Any] | None = None,
    ) -> Federation:
        """Clients that were made by one agreement, be they all that there are or those at one place.

        Args:
            clients: their targets coded, or standardised, by the agreement.
            agreement: what holds at all sites.
            name: what reports call the data.
            notes: see :class:`Federation`.

        Raises:
            PerfedError: any fault listed for :class:`Federation`.
        """
        classes = agreement.classes
        plain = classes is None or classes == tuple(range(len(classes)))
        return cls(
            clients,
            None if classes is None else len(classes),
            name,
            None if plain else tuple(map(str, classes or ())),
            notes=notes or {},
            domain_names=agreement.domain_names,
            classes=classes,
            survival=agreement.task == "survival",
            target_scale=agreement.target_scale,
            agreement=agreement,
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
    def facts(self) -> FederationFacts:
        """What :meth:`describe` says, as plain values."""
        classes = [str(label) for label in self.class_names or self.classes or ()]
        domains = [self.domain_name(number) for number in range(self.num_domains)]
        return FederationFacts.of(self.clients, classes, domains, self.notes, survival=self.survival)

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
