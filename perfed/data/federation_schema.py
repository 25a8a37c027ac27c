"""What sites tell before they train, and what is agreed from it: plain values, checked where they arrive."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from math import isclose
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from perfed.data.labels import Classes, Task
from perfed.data.names import check_name
from perfed.data.tables.kinds import MISSING_CATEGORY, Column, Kind
from perfed.data.tables.options import TableOptions, agreed_kinds, shared_columns, words
from perfed.data.tables.problems import LONGEST, nowhere, refuse
from perfed.data.tables.public import Known
from perfed.data.tables.targets import CONSTANT, FEW, LabelsAre, contradictions, named
from perfed.data.target_scale import Sums, TargetScale, varying_scale
from perfed.errors import PerfedError, shorten_list, summarise_validation_error

_Name = Annotated[str, Field(max_length=LONGEST), AfterValidator(check_name)]
_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Names = Annotated[tuple[_Name, ...], Field(max_length=100_000)]
_Domains = _Names | Annotated[int, Field(ge=1, le=100_000)]


class _Message(BaseModel):
    """Values that travel as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    of_tasks: ClassVar[Mapping[str, Task]] = {}
    """Fields that go with one task and nothing else."""

    @model_validator(mode="after")
    def _of_task(self) -> Self:
        for name, task in self.of_tasks.items():
            if getattr(self, name) is not None and (given := vars(self)["task"]) != task:
                raise PerfedError(_goes_with(name, task, given))
        return self

    def plain(self) -> dict[str, Any]:
        """As plain JSON values."""
        return self.model_dump(mode="json")

    @classmethod
    def of_plain(cls, values: Any, where: str) -> Self:
        """What :meth:`plain` gave, at another machine.

        Args:
            values: as they arrived.
            where: whose they are, for messages, such as "site 'north'".

        Raises:
            PerfedError: an unknown, missing, wrong or too long field; names it.
        """
        try:
            made = cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            raise PerfedError(f"{where}: {summarise_validation_error(error, '')}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise PerfedError(f"{where}: these are no plain values ({error})") from None
        for name, task in cls.of_tasks.items():
            if getattr(made, name) is None and vars(made)["task"] == task:
                raise PerfedError(f"{where}: {_goes_with(name, task, task)}")
        return made


def _goes_with(name: str, task: Task, given: Task) -> str:
    return f"'{name}' goes with {task} and nothing else, and task is {given}"


class ToldColumn(_Message):
    """What a site tells of one of its columns.

    Attributes:
        name, kind: as the site has it.
        constant, missing: whether its training rows hold one value alone, and whether some lack it.
        binary: of numbers, whether all are 0 or 1.
        levels: of a category, those that are not rare; of a boolean, how it is written.
        sums: of numbers, dates and booleans, where columns get one scale, of the values in the training rows.
    """

    name: _Name
    kind: Kind
    constant: bool
    missing: bool
    binary: bool
    levels: _Names
    sums: Sums | None = None

    def column(self) -> Column:
        """As sites have them."""
        letters = tuple(level.lower() for level in self.levels if self.kind == "boolean" and len(level) == 1)
        return Column(
            self.name,
            self.kind,
            constant=self.constant,
            levels=self.levels,
            masked=self.missing,
            binary=self.binary,
            letters=letters,
        )


class SiteMetadata(_Message):
    """All that a site tells before it trains; never a row.

    Attributes:
        task: what its targets are for.
        labels: of classification, whether its labels are "numbers", "texts", or some of them ("mixed").
        classes: of classification, its labels as texts, sorted; ``None`` otherwise.
        numbers: the same as whole numbers, sorted, if all of them are.
        sums: of regression, what it tells of its training targets; ``None`` where these stay as they are, in one
            process, and otherwise.
        domains: names of its domains, or how many there are where they are numbers; ``None`` without domains.
        columns: where sites have one schema, its columns that may enter; ``None`` otherwise.
        named: of the columns that the study names and that not all sites need to have
            (:attr:`perfed.data.tables.options.TableOptions.named`), those that it has; ``None`` where the study
            names none.
    """

    of_tasks = {"labels": "classification", "classes": "classification", "sums": "regression"}

    task: Task
    labels: LabelsAre | None = None
    classes: _Names | None = None
    numbers: Annotated[tuple[_Whole, ...], Field(max_length=100_000)] | None = None
    sums: Sums | None = None
    domains: _Domains | None = None
    columns: Annotated[tuple[ToldColumn, ...], Field(max_length=100_000)] | None = None
    named: _Names | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.numbers is not None and self.labels != "numbers":
            raise PerfedError("'numbers' are given, and labels are not")
        for name in ("classes", "numbers"):
            if (labels := getattr(self, name)) is not None and list(labels) != sorted(set(labels)):
                raise PerfedError(f"'{name}' are not sorted, or one occurs twice")
        _check_names(self.columns or ())
        return self


class AgreedColumn(_Message):
    """A column of the schema of all sites; see :class:`perfed.data.tables.kinds.Column`."""

    name: _Name
    kind: Kind
    masked: bool
    levels: _Names
    scale: tuple[float, Annotated[float, Field(gt=0)]] | None = None


class Scale(_Message):
    """Values of a :class:`perfed.data.target_scale.TargetScale`."""

    mean: Annotated[tuple[float, ...], Field(min_length=1, max_length=1000)]
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, max_length=1000)]


class FederationSchema(_Message):
    """What holds at all sites.

    Attributes:
        task: of the targets.
        classes: of classification, in order: class j is ``classes[j]``; ``None`` otherwise.
        domains: names of the domains 0, 1, ..., or their number; ``None`` without domains.
        scale: of regression, what targets are standardised by; ``None`` where they stay as they are, in one process,
            and otherwise.
        columns: those that enter, in order, where sites have one schema; ``None`` otherwise.
    """

    of_tasks = {"classes": "classification", "scale": "regression"}

    task: Task
    classes: Annotated[tuple[_Whole | _Name, ...], Field(max_length=100_000)] | None = None
    domains: _Domains | None = None
    scale: Scale | None = None
    columns: Annotated[tuple[AgreedColumn, ...], Field(max_length=100_000)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        classes = self.classes or ()
        if len(set(classes)) < len(classes) or len({type(label) for label in classes}) > 1:
            raise PerfedError("'classes' hold one twice, or texts and numbers")
        if self.scale is not None and len(self.scale.mean) != len(self.scale.std):
            raise PerfedError("'scale' has not as many means as deviations")
        _check_names(self.columns or ())
        return self

    @property
    def target_scale(self) -> TargetScale | None:
        """What targets are standardised by."""
        return None if self.scale is None else TargetScale(self.scale.mean, self.scale.std)

    @property
    def domain_names(self) -> tuple[str, ...] | None:
        """Names of the domains, where they have names."""
        return self.domains if isinstance(self.domains, tuple) else None


def _check_names(columns: tuple[ToldColumn, ...] | tuple[AgreedColumn, ...]) -> None:
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise PerfedError("two 'columns' have one name")


def agreed(
    tolds: Mapping[str, SiteMetadata], options: TableOptions | None = None, sources: Mapping[str, str] | None = None
) -> FederationSchema:
    """What holds at all sites, from what each tells, whatever the order.

    Args:
        tolds: by site.
        options: how the sites' tables become a federation; ``None`` where they bring arrays.
        sources: what messages call the sites (default: "site 'NAME'").

    Raises:
        TableProblems: sites that contradict each other, by name, or a column that the study names and no site has.
        PerfedError: a target that is the same everywhere.
    """
    if not tolds:
        raise PerfedError("no site has told anything; one at least is needed")
    tolds = {site: tolds[site] for site in sorted(tolds)}
    called = {site: (sources or {}).get(site, f"site '{site}'") for site in tolds}
    mode = "own" if options is None else options.columns
    domain = None if options is None else options.domain is not None
    lacking = [problem for key in ("domains", "columns") for problem in _lacking(tolds, called, key, mode, domain)]
    refuse([*lacking, *([] if options is None else _nowhere(tolds, options))])
    held, problems = agreed_kinds({s: [c.column() for c in told.columns or ()] for s, told in tolds.items()}, called)
    where = named(None if options is None else options.target)
    task_of_study = None if options is None else "survival" if options.event is not None else options.task
    problems = [*_of_targets(tolds, called, where, task_of_study), *problems]
    task = next(iter(tolds.values())).task
    classes = _classes(tolds) if task == "classification" else None
    if not problems and options is not None and classes is not None:
        problems += _doubtful(classes, where, said=task_of_study is not None)
    refuse(problems)
    sums = [told.sums for told in tolds.values() if told.sums is not None]
    scale = TargetScale.of_sums(sums) if len(sums) == len(tolds) else None
    scales = {} if options is None or not options.one_scale else _column_scales(tolds)
    schema = next(iter(shared_columns(held, mode, scales).values())) if mode != "own" else None
    columns = (
        AgreedColumn(name=c.name, kind=c.kind, masked=c.masked, levels=c.levels, scale=c.scale) for c in schema or ()
    )
    return FederationSchema(
        task=task,
        classes=classes,
        domains=_domains(tolds),
        scale=None if scale is None else Scale(mean=scale.mean, std=scale.std),
        columns=None if schema is None else tuple(columns),
    )


def _column_scales(tolds: Mapping[str, SiteMetadata]) -> dict[str, tuple[float, float] | None]:
    """Mean and deviation over all sites of each column that varies; flags, which are 0 or 1 everywhere, stay so."""
    found: dict[str, list[ToldColumn]] = {}
    for told in tolds.values():
        for column in told.columns or ():
            if column.kind != "empty":
                found.setdefault(column.name, []).append(column)
    scales: dict[str, tuple[float, float] | None] = {}
    for name, columns in found.items():
        sums = [column.sums for column in columns if column.sums is not None]
        scale = None if not sums or "category" in {c.kind for c in columns} else varying_scale(sums)
        flags = all(column.binary or column.kind == "boolean" for column in columns)
        scales[name] = scale if scale is None or not flags else (0.0, 1.0)
    return scales


def _lacking(
    tolds: Mapping[str, SiteMetadata], called: Mapping[str, str], key: str, mode: str, domain: bool | None
) -> list[str]:
    """Sites that tell what was not asked, or do not tell what was, or tell it in another way."""
    kinds = {site: type(getattr(told, key)) for site, told in tolds.items()}
    wanted: Any = next(iter(kinds.values()))
    if key == "columns":
        wanted = type(None) if mode == "own" else tuple
    elif domain is not None:
        wanted = tuple if domain else type(None)
    return [
        f"{called[site]}: {f'no {key} are told' if kind is type(None) else f'{key} are told, and as others do not'}; "
        "all sites need the same study"
        for site, kind in kinds.items()
        if kind is not wanted
    ]


def _nowhere(tolds: Mapping[str, SiteMetadata], options: TableOptions) -> list[str]:
    """Columns that the study names and no site has; the nearest is of those whose names sites tell."""
    names = [column.name for told in tolds.values() for column in told.columns or ()]
    held = {name for told in tolds.values() for name in told.named or ()}
    return nowhere(options.named, held, list(dict.fromkeys(names)))


def _of_targets(
    tolds: Mapping[str, SiteMetadata], called: Mapping[str, str], where: str, task: Task | None
) -> list[str]:
    """Sites whose targets are for something else than those of others, or than the study's ``task``."""
    odd = [called[site] for site, told in tolds.items() if task is not None and told.task != task]
    if odd:
        return [f"{shorten_list(odd)}: {where} is not of {task}, which the study is of"]
    backwards = list(tolds.items())[::-1]  # so that the first site of each kind is named
    tasks = {told.task: called[site] for site, told in backwards}
    if len(tasks) > 1:
        seen = ", ".join(f"of {task} in {source}" for task, source in sorted(tasks.items()))
        return [f"{where} is {seen}; say task in the study"]
    widths = {len(told.sums.total): called[site] for site, told in backwards if told.sums is not None}
    if len(widths) > 1:
        return [f"{where} has " + ", ".join(f"{width} values in {source}" for width, source in sorted(widths.items()))]
    return contradictions([(called[site], told.labels or "numbers", "") for site, told in tolds.items()], where)


def _doubtful(classes: Classes, where: str, *, said: bool) -> list[str]:
    """What is wrong with the labels of a table's column; ``said``: the study says that they are labels."""
    if len(classes) < 2:
        return [CONSTANT.format(where)]
    if not said and len(classes) > FEW and isinstance(classes[0], int):
        return [f"{where} has {len(classes)} different whole numbers, classes or values; say task in the study"]
    return []


def _classes(tolds: Mapping[str, SiteMetadata]) -> Classes:
    """The labels of any site: whole numbers if they are so at all sites, else texts."""
    if all(told.numbers is not None for told in tolds.values()):
        return tuple(sorted({number for told in tolds.values() for number in told.numbers or ()}))
    return tuple(sorted({label for told in tolds.values() for label in told.classes or ()}))


def _domains(tolds: Mapping[str, SiteMetadata]) -> tuple[str, ...] | int | None:
    found = [told.domains for told in tolds.values()]
    names = {name for held in found if isinstance(held, tuple) for name in held}
    numbers = [held for held in found if isinstance(held, int)]
    return tuple(sorted(names)) if names else max(numbers, default=None)


def find_beyond_public(agreement: FederationSchema, metadata: SiteMetadata, public: Mapping[str, Known]) -> list[str]:
    """Return a line for each difference between an agreement and the values in the study's ``data.public``.

    With ``data.public``, classes, domains, categories and scales follow from the study only. A server that sent other
    values could learn about rows from the replies.

    Args:
        agreement: the agreement as the server sent it.
        metadata: the metadata that the site sends before training, which are public.
        public: the values in the study by column.
    """
    expected = agreed({"": metadata.model_copy(update={"columns": None, "named": None})})
    differing = [name for name in ("classes", "domains") if getattr(agreement, name) != getattr(expected, name)]
    if not _equal_scales(agreement.scale, expected.scale):
        differing.append("scale")
    problems = [f"the server's agreement has other {name} of the target than data.public" for name in differing]
    kinds = {column.name: column.kind for column in metadata.columns or ()}
    for column in agreement.columns or ():
        if (values := public.get(column.name)) is None:
            problems.append(f"column '{column.name}' of the server's agreement is not in data.public")
            continue
        levels = {*values.levels, *([MISSING_CATEGORY] if column.masked and values.levels else [])}
        scale = None if values.scale is None else Scale(mean=values.scale[:1], std=values.scale[1:])
        agreed_scale = None if column.scale is None else Scale(mean=column.scale[:1], std=column.scale[1:])
        same_kind = column.kind == kinds.get(column.name, column.kind)
        if not same_kind or set(column.levels) != levels or not _equal_scales(agreed_scale, scale):
            problems.append(f"column '{column.name}' of the server's agreement has other values than data.public")
    return problems


def _equal_scales(received: Scale | None, expected: Scale | None) -> bool:
    """Return whether two scales are equal up to the rounding of their sums over any number of sites."""
    if received is None or expected is None:
        return received is expected
    first, second = ((*scale.mean, *scale.std) for scale in (received, expected))
    tolerance = 1e-9 * max(*expected.std, *map(abs, expected.mean))
    return len(first) == len(second) and all(
        isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(first, second, strict=True)
    )


def in_words(tolds: Mapping[str, SiteMetadata], agreement: FederationSchema, most: int = sys.maxsize) -> list[str]:
    """Return lines on the metadata that sites sent for an agreement, with at most ``most`` names each."""
    columns, asked = None, sorted({name for told in tolds.values() for name in told.named or ()})
    if agreement.columns is not None:
        of_kind: dict[str, dict[str, None]] = {"boolean": {}, "category": {}}
        for column in (column for told in tolds.values() for column in told.columns or ()):
            of_kind.get(column.kind, {})[column.name] = None
        entering = [column.name for column in agreement.columns if column.kind == "category"]
        columns = list(of_kind["boolean"]), [name for name in of_kind["category"] if name not in entering], entering
    told = {column.name: None for told in tolds.values() for column in told.columns or () if column.sums is not None}
    return words(agreement.task, agreement.domains is not None, columns, asked, list(told), most)
