"""Arrays at their site, looked at once: what the site tells, its facts, and the client that a schema makes of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from perfed.data.checks import check_client, check_finite, check_ids, check_range, refuse_mixed_domains
from perfed.data.client import Client, Split
from perfed.data.facts import SPLITS, ClientFacts, SplitFacts
from perfed.data.federation_schema import FederationSchema, SiteMetadata, agreed, find_beyond_public
from perfed.data.inputs import Parts, arrays_of
from perfed.data.labels import Classes, Task, as_classes, classes_of, task_of, whole
from perfed.data.reading import reason_of
from perfed.data.target_scale import Sums
from perfed.errors import PerfedError, suggest_name, summarise_validation_error

Arrays = Callable[[str], Any]
"""From a client's id to what :meth:`perfed.data.federation.Federation.from_arrays` takes for one client."""


class Labels(TypedDict, total=False):
    """What may be said of targets and domains beforehand; see :meth:`perfed.data.federation.Federation.from_arrays`."""

    task: Task | None
    num_classes: int | None
    class_names: Sequence[str] | None
    domain_names: Sequence[str] | None


@dataclass(frozen=True)
class SeenSplit:
    """Of one split: shapes, and how often each label and each domain occurs.

    Attributes:
        where: the client and the split, for messages.
        shapes: of one input and of one target.
        samples: how many.
        labels, counts: the different labels, sorted, and how often each occurs; nothing of values.
        domains: the different domain ids, sorted, and how often each occurs; ``None`` without domains.
        events: of survival, samples with an event.
        mark: changes with the targets.
    """

    where: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    samples: int
    labels: NDArray[Any]
    counts: NDArray[np.int64]
    domains: tuple[NDArray[np.int64], NDArray[np.int64]] | None
    events: int | None
    mark: int

    @classmethod
    def of(cls, where: str, task: Task, x: Tensor, y: Tensor | NDArray[np.str_], domain: Tensor | None) -> SeenSplit:
        """Look at samples, of whose inputs only the shape is used: they may be on the device "meta".

        Raises:
            PerfedError: lengths that differ, labels that are no whole numbers or texts, or other domain ids than
                integers from 0 on.
        """
        if len(x) != len(y) or (domain is not None and domain.shape != (len(x),)):
            raise PerfedError(f"{where} inputs, targets and domain ids must have the same length")
        labels, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        array: NDArray[Any] = y.detach().cpu().numpy() if isinstance(y, Tensor) else y
        if task == "classification":
            if array.ndim != 1:
                raise PerfedError(f"{where} labels have shape {array.shape}; ({len(x)},) is needed")
            labels, counts = np.unique(whole(where, y), return_counts=True)
        domains = None
        if domain is not None:
            check_ids(where, domain, None)
            domains = np.unique(domain.numpy(), return_counts=True)
        events = (
            int((array[:, 1] == 1).sum()) if task == "survival" and array.ndim == 2 and array.shape[1] == 2 else None
        )
        shapes = (tuple(x.shape[1:]), tuple(array.shape[1:]))
        mark = zlib.crc32(np.ascontiguousarray(array).tobytes())
        return cls(where, shapes, len(x), labels, counts, domains, events, mark)

    def facts(self, schema: FederationSchema) -> SplitFacts:
        """Return the facts, with labels as the schema's classes number them.

        Raises:
            PerfedError: a label that is none of them, or a domain that the schema does not have.
        """
        held, domains, classes = None, None, schema.classes
        if classes is not None:
            labels = self.labels if self.labels.dtype.kind == "U" else torch.from_numpy(self.labels)
            at = as_classes(self.where, labels, classes).numpy()
            bad = at[(at < 0) | (at >= len(classes))]
            if len(bad):
                raise PerfedError(f"{self.where} label {bad[0]} is outside the classes 0..{len(classes) - 1}")
            held = _by_position(at, self.counts)
        if (self.domains is None) != (schema.domains is None):
            has = "without domain ids, and others have" if self.domains is None else "with domain ids, and others lack"
            raise PerfedError(f"{self.where} samples are {has} them; all samples of all clients need one, or none")
        if self.domains is not None and schema.domains is not None:
            number = schema.domains if isinstance(schema.domains, int) else len(schema.domains)
            check_range(self.where, 0, int(self.domains[0][-1]), number)
            domains = _by_position(*self.domains)
        return SplitFacts(self.samples, *self.shapes, held, domains, self.events)


def counted(y: NDArray[Any], task: Task) -> tuple[int, dict[str, int] | None]:
    """How many targets there are, and of each class that has some; ``None`` where they are no classes."""
    if task != "classification":
        return len(y), None
    classes, counts = np.unique(y, return_counts=True)
    return len(y), dict(zip(map(str, classes.tolist()), counts.tolist(), strict=True))


def _by_position(at: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[int, ...]:
    found = np.zeros(int(at.max(initial=-1)) + 1, np.int64)
    found[at] = counts
    return tuple(found.tolist())


@dataclass(frozen=True)
class SeenSite:
    """What was seen of a site's arrays, which need not be there any more.

    Attributes:
        site: its name.
        task: what its targets are for.
        splits: by name.
        names: of the inputs, if they have some.
        sums: of regression, what the site tells of its training targets where these are to be standardised.
    """

    site: str
    task: Task
    splits: Mapping[str, SeenSplit]
    names: tuple[str, ...] | None
    sums: Sums | None = None

    def told(self) -> SiteMetadata:
        """Return what the site tells before it trains.

        Raises:
            PerfedError: more classes or domains, or longer names, than a site may tell.
        """
        domains = [int(seen.domains[0][-1]) + 1 for seen in self.splits.values() if seen.domains is not None]
        of_task: dict[str, Any] = {} if self.sums is None else {"sums": self.sums}
        if self.task == "classification":
            labels = sorted({label for seen in self.splits.values() for label in seen.labels.tolist()})
            texts = isinstance(labels[0], str)
            of_task = {"labels": "texts" if texts else "numbers", "numbers": None if texts else tuple(labels)}
            of_task["classes"] = tuple(sorted(map(str, labels)))
        try:
            return SiteMetadata(task=self.task, domains=max(domains, default=None), **of_task)
        except ValidationError as error:
            raise PerfedError(f"client '{self.site}': {summarise_validation_error(error, '')}") from None

    def facts(self, schema: FederationSchema) -> ClientFacts:
        """Return the facts of the client that ``schema`` makes of the arrays.

        Raises:
            PerfedError: labels that are none of the classes.
        """
        splits = {name: seen.facts(schema) for name, seen in self.splits.items()}
        mark = zlib.crc32(str([seen.mark for seen in self.splits.values()]).encode())
        return ClientFacts(self.site, splits, self.names, mark)


@dataclass(frozen=True, eq=False)
class SiteArrays:
    """Arrays at their site.

    Attributes:
        site: its name.
        parts: inputs, targets and domain ids, by split.
        names: of the inputs, if they have some.
        task: what the targets are for.
        standardised: whether the site tells what the targets of a regression are standardised by.
        public: what is told in the place of what was seen, where the study says it.
        originals: as of :class:`perfed.data.client.Client`.
    """

    site: str
    parts: Parts
    names: tuple[str, ...] | None
    task: Task
    standardised: bool = True
    public: SiteMetadata | None = None
    originals: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, site: str, given: Any, task: Task | None = None) -> SiteArrays:
        """Read what :meth:`perfed.data.federation.Federation.from_arrays` takes for one client.

        Raises:
            PerfedError: what that method refuses.
        """
        parts, names, originals = arrays_of(site, given, SPLITS)
        return cls(site, parts, names, task_of(targets_in(site, parts), task), originals=originals)

    @cached_property
    def seen(self) -> SeenSite:
        """What there is to see."""
        sums = None
        if self.standardised and self.task == "regression":
            _, y, _ = self.parts["train"]
            values = as_classes(f"client '{self.site}': train", y, None)
            check_finite(f"client '{self.site}': train", values)
            sums = Sums.of(values)
        return scanned(self.site, self.parts, self.names, self.task, sums)

    def describe_copies(self) -> list[str]:
        """Return nothing: rows of arrays, such as images, are not compared."""
        return []

    def counts(self) -> tuple[int, dict[str, int] | None]:
        """How many samples there are to train on, and of each class that has some."""
        return counted(np.asarray(self.parts["train"][1]), self.task)

    def told(self, fewest: int = 1) -> SiteMetadata:
        """Return what the site tells before it trains; arrays have no categories, of which ``fewest`` speaks.

        Raises:
            PerfedError: what :meth:`perfed.data.federation.Federation.from_arrays` refuses.
        """
        return self.public or self.seen.told()

    def faults(self, schema: FederationSchema) -> list[str]:
        """Return what keeps the site from the schema, in one line; nothing otherwise."""
        try:
            self.client(schema)
        except PerfedError as error:
            return [str(error)]
        return []

    def client(self, schema: FederationSchema) -> Client:
        """Make the site's client.

        Raises:
            PerfedError: the arrays do not fit the schema.
        """
        if self.task != schema.task:
            raise PerfedError(f"site '{self.site}': the target is of {self.task}, and the study is of {schema.task}")
        if self.public is not None and (problems := find_beyond_public(schema, self.public, {})):
            raise PerfedError(f"site '{self.site}': {problems[0]}")
        facts = self.seen.facts(schema)
        splits = {
            name: Split(x, _scaled(f"client '{self.site}': {name}", y, schema), domain).with_facts(facts.splits[name])
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


def _scaled(where: str, y: Tensor | NDArray[np.str_], schema: FederationSchema) -> Tensor:
    values, scale = as_classes(where, y, schema.classes), schema.target_scale
    if scale is None:
        return values
    if values[0].numel() != len(scale.mean):
        raise PerfedError(f"{where} targets have shape {tuple(y.shape)}; those of others have {len(scale.mean)} values")
    return scale.down(values)


def targets_in(site: str, parts: Parts) -> list[tuple[str, Tensor | NDArray[np.str_]]]:
    """Return where the targets are, for messages, and the targets, by split."""
    return [(f"client '{site}': {name}", y) for name, (_, y, _) in parts.items()]


def scanned(
    site: str, parts: Parts, names: tuple[str, ...] | None, task: Task | None, sums: Sums | None = None
) -> SeenSite:
    """Look at a site's arrays once.

    Args:
        site, parts, names: as of :class:`SiteArrays`.
        task: what the targets are for; ``None``: labels, unless they are floating-point.
        sums: of the training targets, where they are told.

    Raises:
        PerfedError: as :meth:`SeenSplit.of`, or floating-point targets without ``task``.
    """
    for where, y in targets_in(site, parts):
        if task is None and isinstance(y, Tensor) and torch.is_floating_point(y):
            problem = "targets are floating-point numbers; say task = 'classification' or 'regression'"
            raise PerfedError(f"{where} {problem}")
        if task in ("regression", "survival") and not isinstance(y, Tensor):
            raise PerfedError(f"{where} targets are texts; numbers are needed for {task}")
    task = task or "classification"
    seen = {name: SeenSplit.of(f"client '{site}': {name}", task, *part) for name, part in parts.items()}
    return SeenSite(site, task, seen, names, sums)


def refuse_unknown(labels: Labels) -> None:
    """Refuse what Python refuses of a function that names its arguments.

    Raises:
        TypeError: an argument that there is not.
    """
    for name in labels:
        if name not in Labels.__annotations__:
            raise TypeError(f"unexpected keyword argument '{name}'{suggest_name(name, Labels.__annotations__)}")


def schema_of(sites: Sequence[SeenSite], labels: Labels) -> FederationSchema:
    """Agree in one process, where classes and domains may have been named beforehand.

    Args:
        sites: at least one.
        labels: what was said.

    Raises:
        PerfedError: clients that contradict each other, or domain ids above the number of samples.
    """
    domain_names = labels.get("domain_names")
    splits = [(site.site, name, seen) for site in sites for name, seen in site.splits.items()]
    refuse_mixed_domains((site, name, seen.domains is not None) for site, name, seen in splits)
    samples = sum(seen.samples for _, _, seen in splits)
    for _, _, seen in splits:
        if seen.domains is not None and domain_names is None and (last := int(seen.domains[0][-1])) >= samples:
            problem = "ids count the domains from 0, and there are fewer samples than that"
            raise PerfedError(f"{seen.where} domain id {last} is not allowed: {problem}")
    schema = agreed({s.site: s.told() for s in sites}, sources={s.site: f"client '{s.site}'" for s in sites})
    classes = schema.classes
    if classes is not None:
        classes = classes_of(classes, labels.get("num_classes"), labels.get("class_names"))
    domains = schema.domains if domain_names is None else tuple(domain_names)
    return schema.model_copy(update={"classes": classes, "domains": domains})


def schema_of_facts(facts: Sequence[ClientFacts], labels: Labels) -> FederationSchema:
    """Make the schema of clients of which facts alone are known."""
    number, names, domain_names = labels.get("num_classes"), labels.get("class_names"), labels.get("domain_names")
    number = len(names) if number is None and names is not None else number
    classes = None if number is None else tuple(range(number))
    last = max((len(split.domains or ()) for known in facts for split in known.splits.values()), default=0)
    return FederationSchema(
        task=labels.get("task") or ("regression" if classes is None else "classification"),
        classes=classes,
        domains=(last or None) if domain_names is None else tuple(domain_names),
    )


@dataclass(frozen=True)
class FromArrays:
    """Reads the splits that the arrays of ``read`` hold.

    Attributes:
        read: gives a client's arrays, a mapping of which only the split that is used is touched.
        classes: what labels mean; ``None`` for values.
    """

    read: Arrays
    classes: Classes | None

    def __call__(self, clients: Sequence[str], split: str) -> list[Split]:
        """Read the samples of ``split`` of each client."""
        return [self._one(client, split) for client in clients]

    def _one(self, client: str, split: str) -> Split:
        parts = arrays_of(client, read_by(self.read, client, f"{split} samples"), SPLITS, only=split).parts
        if split not in parts:
            raise PerfedError(f"client '{client}': {split} samples: there are none, but its facts say that there are")
        x, y, domain = parts[split]
        return Split(x, as_classes(f"client '{client}': {split}", y, self.classes), domain)


def read_by(read: Arrays, client: str, what: str = "its data") -> Any:
    """Call a user's function; its errors become one line."""
    try:
        return read(client)
    except PerfedError:
        raise
    except Exception as error:
        raise PerfedError(f"client '{client}': {what} cannot be read: {reason_of(error)}") from error
