"""The metadata that sites send before training, and the schema on which all sites agree: plain values, checked on
arrival.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import isclose
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_serializer, model_validator

from perfed.data.column import Column, Name, Names
from perfed.data.labels import Classes, Task
from perfed.data.problems import raise_problems
from perfed.data.target_scale import Sums, TargetScale
from perfed.errors import PerfedError, shorten_list, summarise_validation_error
from perfed.settings import STRICT

_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
MOST_DOMAINS = 100_000
"""Largest number of domains."""

_Domains = Names | Annotated[int, Field(ge=1, le=MOST_DOMAINS)]
_Columns = Annotated[tuple[Column, ...], Field(max_length=100_000)]

LabelKind = Literal["numbers", "texts", "mixed"]
"""Whether the labels of a site are numbers, texts, or some of each."""

Metadata = Mapping[str, "SiteMetadata"]
"""The metadata of each site."""


class _Message(BaseModel):
    """Values that are sent as JSON.

    Attributes:
        column_fields: the attributes of columns that are sent.
        of_tasks: fields that only one task has.
    """

    model_config = STRICT
    column_fields: ClassVar[AbstractSet[str]] = frozenset()
    of_tasks: ClassVar[Mapping[str, Task]] = {}

    task: Task
    columns: _Columns | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, task in self.of_tasks.items():
            if getattr(self, name) is not None and self.task != task:
                raise PerfedError(_describe_other_task(name, task, self.task))
        columns = self.columns or ()
        if len({column.name for column in columns}) < len(columns):
            raise PerfedError("two 'columns' have one name")
        for position, column in enumerate(columns):
            if unknown := column.model_fields_set - self.column_fields:
                raise PerfedError(f"unknown key 'columns.{position}.{min(unknown)}'")
            if lacking := self.column_fields - column.model_fields_set - {"sums", "scale"}:
                raise PerfedError(f"columns.{position}.{min(lacking)}: field required")
        return self

    @field_serializer("columns")
    def _select_fields(self, columns: tuple[Column, ...] | None) -> list[dict[str, Any]] | None:
        fields = set(self.column_fields)
        return None if columns is None else [column.model_dump(mode="json", include=fields) for column in columns]

    def plain(self) -> dict[str, Any]:
        """Return the message as plain JSON values."""
        return self.model_dump(mode="json")

    @classmethod
    def of_plain(cls, values: Any, where: str) -> Self:
        """Return the message from which :meth:`plain` returned ``values``, on another machine.

        Args:
            values: the values as they arrived.
            where: the sender in error messages, such as "site 'north'".

        Raises:
            PerfedError: an unknown, missing, wrong or too long field; names it.
        """
        try:
            message = cls.model_validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            raise PerfedError(f"{where}: {summarise_validation_error(error, '')}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise PerfedError(f"{where}: these are no plain values ({error})") from None
        for name, task in cls.of_tasks.items():
            if getattr(message, name) is None and message.task == task:
                raise PerfedError(f"{where}: {_describe_other_task(name, task, task)}")
        return message


def _describe_other_task(name: str, task: Task, task_of_message: Task) -> str:
    return f"'{name}' goes with {task} and nothing else, and task is {task_of_message}"


class SiteMetadata(_Message):
    """All that a site sends before training; it contains no rows.

    Attributes:
        task: the task of its targets.
        labels: for classification, the kind of its labels; otherwise ``None``.
        classes: for classification, its labels as sorted texts; otherwise ``None``.
        numbers: the labels as sorted whole numbers if all of them are whole numbers.
        sums: for regression, the sums of its training targets; ``None`` if targets are not standardised (in one
            process), and for other tasks.
        domains: the names of its domains, or their number if they are numbered; ``None`` without domains.
        columns: if sites have one schema, its columns that may enter; otherwise ``None``.
        named: the columns that the study names, that a site may lack
            (:attr:`perfed.tables.options.TableOptions.named`) and that this site has; ``None`` if the study names none.
    """

    column_fields = frozenset({"name", "kind", "constant", "missing", "binary", "levels", "sums"})
    of_tasks = {"labels": "classification", "classes": "classification", "sums": "regression"}

    labels: LabelKind | None = None
    classes: Names | None = None
    numbers: Annotated[tuple[_Whole, ...], Field(max_length=100_000)] | None = None
    sums: Sums | None = None
    domains: _Domains | None = None
    named: Names | None = None

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if self.numbers is not None and self.labels != "numbers":
            raise PerfedError("'numbers' are given, and labels are not")
        for name in ("classes", "numbers"):
            if (labels := getattr(self, name)) is not None and list(labels) != sorted(set(labels)):
                raise PerfedError(f"'{name}' are not sorted, or one occurs twice")
        for position, column in enumerate(self.columns or ()):
            if not isinstance(column.missing, bool):
                raise PerfedError(f"columns.{position}.missing: input should be a valid boolean")
        return self


class Scale(BaseModel):
    """The values of a :class:`perfed.data.target_scale.TargetScale`."""

    model_config = STRICT

    mean: Annotated[tuple[float, ...], Field(min_length=1, max_length=1000)]
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, max_length=1000)]


class FederationSchema(_Message):
    """The schema on which all sites agree.

    Attributes:
        task: the task of the targets.
        classes: for classification, the classes in order: class j is ``classes[j]``; otherwise ``None``.
        domains: the names of the domains 0, 1, ..., or their number; ``None`` without domains.
        scale: for regression, the scale of the targets; ``None`` if targets are not standardised (in one process), and
            for other tasks.
        columns: if sites have one schema, the columns that enter, in order; otherwise ``None``.
    """

    column_fields = frozenset({"name", "kind", "masked", "levels", "scale"})
    of_tasks = {"classes": "classification", "scale": "regression"}

    classes: Annotated[tuple[_Whole | Name, ...], Field(max_length=100_000)] | None = None
    domains: _Domains | None = None
    scale: Scale | None = None

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        classes = self.classes or ()
        if len(set(classes)) < len(classes) or len({type(label) for label in classes}) > 1:
            raise PerfedError("'classes' hold one twice, or texts and numbers")
        if self.scale is not None and len(self.scale.mean) != len(self.scale.std):
            raise PerfedError("'scale' has not as many means as deviations")
        return self

    @property
    def target_scale(self) -> TargetScale | None:
        """The scale of the targets."""
        return None if self.scale is None else TargetScale(self.scale.mean, self.scale.std)

    @property
    def domain_names(self) -> tuple[str, ...] | None:
        """The names of the domains if they have names."""
        return self.domains if isinstance(self.domains, tuple) else None


def agree_on_targets(metadata: Metadata, sources: Mapping[str, str]) -> FederationSchema:
    """Return the schema without columns: the task, the classes or the scale of the targets, and the domains.

    Args:
        metadata: the metadata of each site, at least of one.
        sources: the name of each site in messages.

    Raises:
        DataProblems: the targets of some sites contradict those of others.
        PerfedError: all targets have the same value.
    """
    raise_problems(describe_target_conflicts(metadata, sources, "the target"))
    return merge_targets(list(metadata.values()))


def merge_targets(sites: Sequence[SiteMetadata]) -> FederationSchema:
    """Return the schema without columns for sites whose targets do not contradict each other.

    Raises:
        PerfedError: all targets have the same value.
    """
    sums = [site.sums for site in sites if site.sums is not None]
    scale = TargetScale.of_sums(sums) if len(sums) == len(sites) else None
    domain_names = {name for site in sites if isinstance(site.domains, tuple) for name in site.domains}
    domain_numbers = [site.domains for site in sites if isinstance(site.domains, int)]
    return FederationSchema(
        task=sites[0].task,
        classes=_merge_classes(sites) if sites[0].task == "classification" else None,
        domains=tuple(sorted(domain_names)) if domain_names else max(domain_numbers, default=None),
        scale=None if scale is None else Scale(mean=scale.mean, std=scale.std),
    )


def describe_target_conflicts(
    metadata: Metadata, sources: Mapping[str, str], target: str, task: Task | None = None
) -> list[str]:
    """Return lines on sites whose targets contradict those of other sites, or the study's ``task``."""
    odd = [sources[site] for site, sent in metadata.items() if task is not None and sent.task != task]
    if odd:
        return [f"{shorten_list(odd)}: {target} is not of {task}, which the study is of"]
    backwards = list(metadata.items())[::-1]  # so that the first site of each kind is named
    tasks = {sent.task: sources[site] for site, sent in backwards}
    if len(tasks) > 1:
        by_task = ", ".join(f"of {task} in {source}" for task, source in sorted(tasks.items()))
        return [f"{target} is {by_task}; say task in the study"]
    widths = {len(sent.sums.total): sources[site] for site, sent in backwards if sent.sums is not None}
    if len(widths) > 1:
        by_width = ", ".join(f"{width} values in {source}" for width, source in sorted(widths.items()))
        return [f"{target} has {by_width}"]
    labels = [(sources[site], sent.labels or "numbers", "") for site, sent in metadata.items()]
    return describe_label_conflicts(labels, target)


def describe_label_conflicts(labels: Sequence[tuple[str, LabelKind, str]], target: str) -> list[str]:
    """Return a line for each site whose labels are numbers while those of most others are texts, or the reverse.

    Args:
        labels: the source, the kind of its labels, and the rows with texts, as they follow in a message.
        target: the target in messages.
    """
    kinds = [kind for _, kind, _ in labels]
    if not {"numbers", "texts"} <= set(kinds):
        return []
    if 2 * kinds.count("numbers") < len(kinds):
        numbers = [source for source, kind, _ in labels if kind == "numbers"]
        return [f"{source}: {target} holds numbers; others' targets are texts" for source in numbers]
    texts = [(source, rows) for source, kind, rows in labels if kind != "numbers"]
    return [f"{source}: {target} holds texts{rows}; others' targets are numbers" for source, rows in texts]


def _merge_classes(sites: Sequence[SiteMetadata]) -> Classes:
    """Return the labels of all sites: whole numbers if they are whole numbers at all sites, otherwise texts."""
    if all(site.numbers is not None for site in sites):
        return tuple(sorted({number for site in sites for number in site.numbers or ()}))
    return tuple(sorted({label for site in sites for label in site.classes or ()}))


def describe_target_differences(schema: FederationSchema, metadata: SiteMetadata) -> list[str]:
    """Return a line for each difference between a schema and public metadata of its targets and domains.

    Args:
        schema: the schema as the server sent it.
        metadata: the metadata of the targets, which the study's ``data.public`` determines.
    """
    expected = agree_on_targets({"": metadata}, {"": ""})
    differing = [name for name in ("classes", "domains") if getattr(schema, name) != getattr(expected, name)]
    if not are_close(schema.scale, expected.scale):
        differing.append("scale")
    return [f"the server's agreement has other {name} of the target than data.public" for name in differing]


def are_close(received: Scale | None, expected: Scale | None) -> bool:
    """Return whether two scales are equal up to the rounding of their sums over any number of sites."""
    if received is None or expected is None:
        return received is expected
    first, second = ((*scale.mean, *scale.std) for scale in (received, expected))
    tolerance = 1e-9 * max(*expected.std, *map(abs, expected.mean))
    return len(first) == len(second) and all(
        isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(first, second, strict=True)
    )
