"""The arrays of a site: their facts, the metadata that the site sends before training, and its client."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from perfed.data.checks import check_client, check_finite, check_ids, check_range, refuse_mixed_domains
from perfed.data.client import Client, Split
from perfed.data.facts import SPLITS, ClientFacts, SplitFacts, pad_counts
from perfed.data.federation_schema import (
    MOST_DOMAINS,
    FederationSchema,
    SiteMetadata,
    agree_on_targets,
    describe_target_differences,
)
from perfed.data.inputs import Parts, arrays_of
from perfed.data.labels import Classes, Task, as_classes, choose_classes, task_of, to_discrete_labels
from perfed.data.reading import reason_of
from perfed.data.target_scale import Sums
from perfed.errors import PerfedError, suggest_name, summarise_validation_error

Arrays = Callable[[str], Any]
"""Returns the data of a client as :meth:`perfed.data.federation.Federation.from_arrays` accepts them, given its id."""


class Labels(TypedDict, total=False):
    """The arguments on targets and domains of :meth:`perfed.data.federation.Federation.from_arrays`."""

    task: Task | None
    num_classes: int | None
    class_names: Sequence[str] | None
    domain_names: Sequence[str] | None


def count_targets(y: NDArray[Any], task: Task) -> tuple[int, dict[str, int] | None]:
    """Return the number of targets, and of those of each class; ``None`` if they are not classes."""
    if task != "classification":
        return len(y), None
    classes, counts = np.unique(y, return_counts=True)
    return len(y), dict(zip(map(str, classes.tolist()), counts.tolist(), strict=True))


@dataclass(frozen=True)
class ScannedArrays:
    """The facts of a site's arrays before the federation's classes are known.

    Attributes:
        facts: the facts of the client, in which class j is ``labels[j]``.
        labels: the labels of all splits, sorted; empty if targets are values.
        task: the task of the targets.
        sums: for regression, the sums of the training targets if these are to be standardised.
    """

    facts: ClientFacts
    labels: NDArray[Any]
    task: Task
    sums: Sums | None = None

    def create_metadata(self) -> SiteMetadata:
        """Return the metadata that the site sends before training.

        Raises:
            PerfedError: more classes or domains, or longer names, than a site may send.
        """
        domains = [len(split.domains) for split in self.facts.splits.values() if split.domains is not None]
        of_task: dict[str, Any] = {} if self.sums is None else {"sums": self.sums}
        if self.task == "classification":
            labels = self.labels.tolist()
            texts = self.labels.dtype.kind == "U"
            of_task = {"labels": "texts" if texts else "numbers", "numbers": None if texts else tuple(labels)}
            of_task["classes"] = tuple(sorted(map(str, labels)))
        try:
            return SiteMetadata(task=self.task, domains=max(domains, default=None), **of_task)
        except ValidationError as error:
            raise PerfedError(f"client '{self.facts.id}': {summarise_validation_error(error, '')}") from None

    def facts_in(self, schema: FederationSchema) -> ClientFacts:
        """Return the facts with the classes of a schema.

        Raises:
            PerfedError: a label that is none of the classes, or a domain that the schema does not have.
        """
        splits = {
            name: self._renumber_classes(f"client '{self.facts.id}': {name}", split, schema)
            for name, split in self.facts.splits.items()
        }
        return replace(self.facts, splits=splits)

    def _renumber_classes(self, where: str, split: SplitFacts, schema: FederationSchema) -> SplitFacts:
        classes = split.classes
        if schema.classes is not None:
            counts = np.array(pad_counts(split.classes or (), len(self.labels)), np.int64)
            labels = self.labels[counts > 0]
            values = labels if labels.dtype.kind == "U" else torch.from_numpy(labels)
            numbers = as_classes(where, values, schema.classes)
            unknown = numbers[(numbers < 0) | (numbers >= len(schema.classes))]
            if len(unknown):
                raise PerfedError(f"{where} label {unknown[0]} is outside the classes 0..{len(schema.classes) - 1}")
            classes = tuple(np.bincount(numbers.numpy(), counts[counts > 0]).astype(np.int64).tolist())
        if (split.domains is None) != (schema.domains is None):
            has = "without domain ids, and others have" if split.domains is None else "with domain ids, and others lack"
            raise PerfedError(f"{where} samples are {has} them; all samples of all clients need one, or none")
        if split.domains is not None and schema.domains is not None:
            number = schema.domains if isinstance(schema.domains, int) else len(schema.domains)
            check_range(where, 0, len(split.domains) - 1, number)
        return replace(split, classes=classes)


@dataclass(frozen=True, eq=False)
class SiteArrays:
    """The arrays of a site.

    Attributes:
        site: the name of the site.
        parts: the inputs, targets and domain ids of each split.
        names: the names of the inputs if they have names.
        task: the task of the targets.
        standardised: whether the site sends the sums by which the targets of a regression are standardised.
        public: the metadata if the study's ``data.public`` determines them.
        originals: see :class:`perfed.data.client.Client`.
    """

    site: str
    parts: Parts
    names: tuple[str, ...] | None
    task: Task
    standardised: bool = True
    public: SiteMetadata | None = None
    originals: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_data(cls, site: str, data: Any, task: Task | None = None) -> SiteArrays:
        """Return the arrays of a site from data as :meth:`perfed.data.federation.Federation.from_arrays` accepts them.

        Raises:
            PerfedError: for the reasons of that method.
        """
        parts, names, originals = arrays_of(site, data, SPLITS)
        return cls(site, parts, names, task_of(list_targets(site, parts), task), originals=originals)

    @cached_property
    def scanned(self) -> ScannedArrays:
        """The facts of the arrays."""
        sums = None
        if self.standardised and self.task == "regression":
            _, y, _ = self.parts["train"]
            values = as_classes(f"client '{self.site}': train", y, None)
            check_finite(f"client '{self.site}': train", values)
            sums = Sums.from_targets(values)
        return scan_arrays(self.site, self.parts, self.names, self.task, sums)

    def describe_copies(self) -> list[str]:
        """Return nothing: rows of arrays, such as images, are not compared."""
        return []

    def count_rows(self) -> tuple[int, dict[str, int] | None]:
        """Return the number of training samples, and of those of each class."""
        return count_targets(np.asarray(self.parts["train"][1]), self.task)

    def create_metadata(self, fewest: int = 1) -> SiteMetadata:
        """Return the metadata that the site sends before training; ``fewest`` concerns categories, which arrays lack.

        Raises:
            PerfedError: what :meth:`perfed.data.federation.Federation.from_arrays` refuses.
        """
        return self.public or self.scanned.create_metadata()

    def describe_misfits(self, schema: FederationSchema) -> list[str]:
        """Return a line if the arrays do not fit the schema, otherwise an empty list."""
        try:
            self.client(schema)
        except PerfedError as error:
            return [str(error)]
        return []

    def client(self, schema: FederationSchema) -> Client:
        """Return the client of the site.

        Raises:
            PerfedError: the arrays do not fit the schema.
        """
        if self.task != schema.task:
            raise PerfedError(f"site '{self.site}': the target is of {self.task}, and the study is of {schema.task}")
        if self.public is not None and (problems := describe_target_differences(schema, self.public)):
            raise PerfedError(f"site '{self.site}': {problems[0]}")
        facts = self.scanned.facts_in(schema)
        splits = {
            name: Split(x, _encode_targets(f"client '{self.site}': {name}", y, schema), domain).with_facts(
                facts.splits[name]
            )
            for name, (x, y, domain) in self.parts.items()
        }
        client = Client(
            self.site,
            splits["train"],
            splits.get("test"),
            splits.get("validation"),
            self.names,
            originals=self.originals,
        )
        check_client(client, None if schema.classes is None else len(schema.classes), self.task == "survival")
        return client


def _encode_targets(where: str, y: Tensor | NDArray[np.str_], schema: FederationSchema) -> Tensor:
    values, scale = as_classes(where, y, schema.classes), schema.target_scale
    if scale is None:
        return values
    if values[0].numel() != len(scale.mean):
        raise PerfedError(f"{where} targets have shape {tuple(y.shape)}; those of others have {len(scale.mean)} values")
    return scale.down(values)


def list_targets(site: str, parts: Parts) -> list[tuple[str, Tensor | NDArray[np.str_]]]:
    """Return the name in messages and the targets of each split."""
    return [(f"client '{site}': {name}", y) for name, (_, y, _) in parts.items()]


def scan_arrays(
    site: str, parts: Parts, names: tuple[str, ...] | None, task: Task | None, sums: Sums | None = None
) -> ScannedArrays:
    """Return the facts of a site's arrays; inputs are used only for their shapes and may be on the device "meta".

    Args:
        site, parts, names: see :class:`SiteArrays`.
        task: the task of the targets; by default classification, unless they are floating-point.
        sums: the sums of the training targets that the site sends.

    Raises:
        PerfedError: floating-point targets without ``task``, lengths that differ, labels that are not whole numbers or
            texts, or domain ids that are not integers from 0 on.
    """
    for where, y in list_targets(site, parts):
        if task is None and isinstance(y, Tensor) and torch.is_floating_point(y):
            problem = "targets are floating-point numbers; say task = 'classification' or 'regression'"
            raise PerfedError(f"{where} {problem}")
        if task in ("regression", "survival") and not isinstance(y, Tensor):
            raise PerfedError(f"{where} targets are texts; numbers are needed for {task}")
    task = task or "classification"
    splits, labels = {}, {}
    marks = []
    for name, (x, y, domain) in parts.items():
        where = f"client '{site}': {name}"
        if len(x) != len(y) or (domain is not None and domain.shape != (len(x),)):
            raise PerfedError(f"{where} inputs, targets and domain ids must have the same length")
        array: NDArray[Any] = y.detach().cpu().numpy() if isinstance(y, Tensor) else y
        marks.append(zlib.crc32(np.ascontiguousarray(array).tobytes()))
        if task == "classification":
            if array.ndim != 1:
                raise PerfedError(f"{where} labels have shape {array.shape}; ({len(x)},) is needed")
            labels[name] = np.unique(to_discrete_labels(where, y), return_counts=True)
        events = None
        if task == "survival" and array.ndim == 2 and array.shape[1] == 2:
            events = int((array[:, 1] == 1).sum())
        domains = None if domain is None else _count_domains(where, domain)
        splits[name] = SplitFacts(len(x), tuple(x.shape[1:]), tuple(array.shape[1:]), None, domains, events)
    all_labels = np.unique(np.concatenate([of_split for of_split, _ in labels.values()])) if labels else np.zeros(0)
    for name, (of_split, counts) in labels.items():
        classes = np.zeros(len(all_labels), np.int64)
        classes[np.searchsorted(all_labels, of_split)] = counts
        splits[name] = replace(splits[name], classes=tuple(classes.tolist()))
    facts = ClientFacts(site, splits, names, zlib.crc32(str(marks).encode()))
    return ScannedArrays(facts, all_labels, task, sums)


def _count_domains(where: str, domain: Tensor) -> tuple[int, ...]:
    check_ids(where, domain, None)
    last = int(domain.max()) if len(domain) else 0
    if last >= MOST_DOMAINS:
        raise PerfedError(f"{where} domain id {last} is not allowed: ids count the domains from 0")
    return tuple(np.bincount(domain.numpy()).tolist())


def refuse_unknown_arguments(labels: Labels) -> None:
    """Raise the error that Python raises for a function with named arguments.

    Raises:
        TypeError: an argument is unknown.
    """
    for name in labels:
        if name not in Labels.__annotations__:
            raise TypeError(f"unexpected keyword argument '{name}'{suggest_name(name, Labels.__annotations__)}")


def create_schema(sites: Sequence[ScannedArrays], labels: Labels) -> FederationSchema:
    """Return the schema of all sites in one process, where classes and domains may be named beforehand.

    Args:
        sites: the arrays of each site, at least of one.
        labels: the names of classes and domains.

    Raises:
        PerfedError: clients contradict each other, or a domain id is not below the number of samples.
    """
    domain_names = labels.get("domain_names")
    splits = [(site.facts.id, name, split) for site in sites for name, split in site.facts.splits.items()]
    refuse_mixed_domains((site, name, split.domains is not None) for site, name, split in splits)
    samples = sum(split.samples for _, _, split in splits)
    for site, name, split in splits:
        if split.domains is not None and domain_names is None and len(split.domains) > samples:
            problem = "ids count the domains from 0, and there are fewer samples than that"
            last = len(split.domains) - 1
            raise PerfedError(f"client '{site}': {name} domain id {last} is not allowed: {problem}")
    metadata = {site.facts.id: site.create_metadata() for site in sorted(sites, key=lambda site: site.facts.id)}
    schema = agree_on_targets(metadata, {site: f"client '{site}'" for site in metadata})
    classes = schema.classes
    if classes is not None:
        classes = choose_classes(classes, labels.get("num_classes"), labels.get("class_names"))
    domains = schema.domains if domain_names is None else tuple(domain_names)
    return schema.model_copy(update={"classes": classes, "domains": domains})


def create_schema_from_facts(facts: Sequence[ClientFacts], labels: Labels) -> FederationSchema:
    """Return the schema of clients of which only facts are known."""
    number, names, domain_names = labels.get("num_classes"), labels.get("class_names"), labels.get("domain_names")
    number = len(names) if number is None and names is not None else number
    classes = None if number is None else tuple(range(number))
    last = max((len(split.domains or ()) for client in facts for split in client.splits.values()), default=0)
    return FederationSchema(
        task=labels.get("task") or ("regression" if classes is None else "classification"),
        classes=classes,
        domains=(last or None) if domain_names is None else tuple(domain_names),
    )


@dataclass(frozen=True)
class FromArrays:
    """A function that reads splits from the arrays of ``read``.

    Attributes:
        read: returns a client's arrays, a mapping of which only the requested split is read.
        classes: the labels of the classes; ``None`` for values.
    """

    read: Arrays
    classes: Classes | None

    def __call__(self, clients: Sequence[str], split: str) -> list[Split]:
        """Read the samples of ``split`` of each client."""
        return [self._read_split(client, split) for client in clients]

    def _read_split(self, client: str, split: str) -> Split:
        parts = arrays_of(client, read_arrays_by(self.read, client, f"{split} samples"), SPLITS, only=split).parts
        if split not in parts:
            raise PerfedError(f"client '{client}': {split} samples: there are none, but its facts say that there are")
        x, y, domain = parts[split]
        return Split(x, as_classes(f"client '{client}': {split}", y, self.classes), domain)


def read_arrays_by(read: Arrays, client: str, description: str = "its data") -> Any:
    """Return the arrays from a user's function; its errors become one line that contains ``description``."""
    try:
        return read(client)
    except PerfedError:
        raise
    except Exception as error:
        raise PerfedError(f"client '{client}': {description} cannot be read: {reason_of(error)}") from error
