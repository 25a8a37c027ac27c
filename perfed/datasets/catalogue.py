"""The catalogue of named data sets; options are checked against the signature of the building function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, create_model, model_validator

from perfed.data.domain_input import OPTIONS, completed_by
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.plugins import Registry
from perfed.settings import Table, check_whole_numbers


@dataclass(frozen=True)
class Option:
    """One option of a data set: its name, what is allowed (in words) and its default."""

    name: str
    allowed: str
    default: Any


@dataclass(frozen=True)
class Description:
    """What a data set is: first line of its documentation, task, files it reads, options in order."""

    name: str
    summary: str
    task: str
    files: tuple[str, ...]
    options: tuple[Option, ...]


def in_words(hint: Any) -> str:
    """What an option of the type ``hint`` may be."""
    if get_origin(hint) is Annotated:
        base, *extra = get_args(hint)
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [limit for item in extra for limit in getattr(item, "metadata", (item,))]
        found = [f"{signs[k]} {getattr(v, k)}" for v in limits for k in signs if hasattr(v, k)]
        words, nothing = in_words(base), ", or not given"
        end = nothing if words.endswith(nothing) else ""
        return f"{words.removesuffix(end)} {' and '.join(found)}".strip() + end
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(in_words(member) for member in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return f"list of {in_words(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"table of names, each with a {in_words(get_args(hint)[1])}"
    return {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "not given"}.get(
        hint, str(hint)
    )


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveReal = Annotated[float, Field(gt=0)]
NonNegativeReal = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
TestFraction = Annotated[float, Field(gt=0, lt=1)]
ValidationFraction = Annotated[float, Field(ge=0, lt=1)]

Builder = Callable[..., Federation]


@dataclass(frozen=True)
class _Entry:
    description: Description
    build: Builder
    model: type[BaseModel]
    module: str
    paths: tuple[str, ...]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


DATASETS: Registry[_Entry] = Registry("data set", lambda entry: entry.module)
"""What :func:`dataset` has made known, by name."""


def dataset(
    name: str,
    *,
    task: Literal["classification", "regression"] = "classification",
    files: tuple[str, ...] = (),
    shared: type[BaseModel] = _Options,
    paths: tuple[str, ...] = (),
) -> Callable[[Builder], Builder]:
    """Register a function as the data set ``name``.

    The function is called as ``build(seed, data_dir, **options)`` and returns a :class:`Federation`. Its
    keyword-only parameters are the options: each needs a type (with pydantic's ``Field`` for limits) and a
    default. The fields of ``shared`` are further options, for data sets that have many in common; its validators
    check how options fit together. Options among ``paths`` are files or folders, or lists of them, and relative ones
    are looked up beside the experiment's file. Every data set also has ``validation_fraction``, ``inner_fold`` and
    ``domain_input``, which :func:`load` handles.

    Raises:
        PerfedError: the name is taken by a data set of another module (the same may register it again), or a parameter
            has no type or no default.

    Example:
        >>> @dataset("ones")
        ... def ones(seed: int, data_dir: Path | None, *, rows: int = 4) -> Federation:
        ...     return Federation.from_arrays({"a": {"x_train": torch.ones(rows, 2), "y_train": [0, 1] * (rows // 2)}})
        >>> len(load("ones", {"rows": 6}, seed=0).clients[0].train)
        6
    """

    def register(build: Builder) -> Builder:
        DATASETS.check_free(name, build.__module__)
        _check_signature(name, build)
        hints = get_type_hints(build, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(build).parameters.values():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                continue
            if parameter.name not in hints or parameter.default is inspect.Parameter.empty:
                raise PerfedError(f"data set '{name}': option '{parameter.name}' needs a type and a default")
            fields[parameter.name] = (hints[parameter.name], parameter.default)
        common = get_type_hints(shared, include_extras=True)
        described = fields | {key: (common[key], field.default) for key, field in shared.model_fields.items()}
        last: dict[str, Any] = {"validation_fraction": (ValidationFraction, 0.0), "inner_fold": (list[int], [])}
        last["domain_input"] = (bool, False)
        model = create_model(f"Options of {name}", __base__=shared, **fields, **last)
        options = tuple(Option(key, in_words(hint), default) for key, (hint, default) in (described | last).items())
        summary = (inspect.getdoc(build) or "").partition("\n")[0]
        DATASETS[name] = _Entry(Description(name, summary, task, files, options), build, model, build.__module__, paths)
        return build

    return register


def _check_signature(name: str, build: Builder) -> None:
    """A mistake here must not wait until the data are built."""
    parameters = inspect.signature(build).parameters.values()
    given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    extra = [p.name for p in given[2:] if p.default is p.empty]
    if len(given) < 2 or extra:
        raise PerfedError(
            f"data set '{name}': its function must take (seed, data_dir, *, options), not {inspect.signature(build)}"
        )


def dataset_names() -> list[str]:
    """Names of all data sets, sorted.

    Example:
        >>> "digits" in dataset_names()
        True
    """
    return sorted(DATASETS)


def describe(name: str) -> Description:
    """What the data set ``name``, in any case, is and which options it has.

    Raises:
        PerfedError: no such data set; lists the names.

    Example:
        >>> [(option.name, option.default) for option in describe("toy-linear-map").options[:2]]
        [('clients', 100), ('classes_per_client', 3)]
    """
    return _find(name).description


def dataset_id(name: str) -> str:
    """``name`` as files have it: as it was registered, behind the module where the user has written one.

    Raises:
        PerfedError: no such data set; lists the names.

    Example:
        >>> dataset_id("Digits-Views")
        'digits-views'
    """
    module, colon, _ = name.rpartition(":")
    return f"{module}{colon}{_find(name).description.name}"


def _find(name: str) -> _Entry:
    own = DATASETS.own(name)
    if own not in DATASETS:
        raise PerfedError(f"there is no data set '{own}'; available: {', '.join(dataset_names())}")
    return DATASETS[own]


def load(
    name: str, options: Mapping[str, object] | None = None, *, seed: int, data_dir: Path | str | None = None
) -> Federation:
    """Build the data set ``name``; the same arguments give the same federation.

    Args:
        name: one of :func:`dataset_names`, in any case, or ``module:NAME``, which imports the module first.
        options: as listed by :func:`describe`; those left out have their defaults. With
            ``validation_fraction`` > 0 every client without validation data gives up that part of its training
            samples, by class; one training sample of each of its classes always stays. With ``inner_fold`` = [i, k]
            fold i of k of every client's training samples, counted from 0, is in the place of its test data. With
            ``domain_input`` the one-hot domain of every sample is appended to its inputs.
        seed: of all random choices.
        data_dir: first folder in which files are looked for.

    Raises:
        PerfedError: unknown data set, unknown option, value not allowed, file missing or broken; ``domain_input``
            without domains.

    Example:
        >>> len(load("toy-noisy-features", {"clients": 4}, seed=0))
        4
    """
    return _built(dataset_id(name), check_options(name, options or {}), seed, data_dir)


class Data(Table):
    """The ``[data]`` table of an experiment: a data set's name and, beside it, options that the data set has checked.

    Raises:
        PerfedError: as :func:`check_options` (pydantic makes a ``ValidationError`` of it).

    Example:
        >>> Data.model_validate({"name": "digits", "clients": 30}).options["clients"]
        30
    """

    model_config = ConfigDict(extra="allow")

    name: str
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _has_name(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and not isinstance(value.get("name"), str):
            raise ValueError(f"needs 'name', one of: {', '.join(dataset_names())}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._options = check_options(self.name, self.model_extra or {})
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Every option of the data set with its value, given or not."""
        return dict(self._options)

    def load(self, seed: int, data_dir: Path | str | None = None) -> Federation:
        """The federation, as :func:`load` makes it."""
        return _built(self.name, self.options, seed, data_dir)


def _built(name: str, options: dict[str, Any], seed: int, data_dir: Path | str | None) -> Federation:
    """:func:`load` with options that have been checked."""
    entry = _find(name)
    own = {key: value for key, value in options.items() if key not in OPTIONS}
    with _one_thread():
        try:
            made = entry.build(seed, None if data_dir is None else Path(data_dir), **own)
        except (MemoryError, OverflowError, ValueError) as error:
            if isinstance(error, ValueError) and "maximum allowed" not in str(error).lower():
                raise
            sizes = {key: value for key, value in own.items() if isinstance(value, int) and value > 1}
            raise PerfedError(
                f"data set '{name}' does not fit into memory with these options; use smaller ones (given: {sizes})"
            ) from None
        if not isinstance(made, Federation):
            raise PerfedError(f"data set '{name}': its function returned {type(made).__name__}, not a Federation")
        return completed_by(replace(made, name=name), options, seed)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch: a client's data are small, and waiting for a busy second core costs many times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_options(name: str, given: Mapping[str, object]) -> dict[str, Any]:
    """Every option of the data set with its value, given or not, as :func:`load` takes it; no data are read.

    Raises:
        PerfedError: unknown data set, unknown option, value not allowed.

    Example:
        >>> check_options("digits", {"clients": 30})["clients"]
        30
    """
    check_whole_numbers(given, "data")
    entry = _find(name)
    allowed = {option.name: option.allowed for option in entry.description.options}
    for key in given:
        if key not in allowed:
            name = entry.description.name
            raise PerfedError(f"data.{key} is not an option of '{name}'; its options: {', '.join(allowed)}")
    try:
        model = entry.model.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:  # options that do not fit together
            raise PerfedError(str(problem["ctx"]["error"])) from None
        key = str(problem["loc"][0])
        raise PerfedError(f"data.{key} = {given[key]!r} is not allowed; it must be: {allowed[key]}") from None
    found = {key: getattr(model, key) for key in allowed}
    _check_fold(found["inner_fold"])
    return found


def _check_fold(fold: list[int]) -> None:
    if fold and not (len(fold) == 2 and 0 <= fold[0] < fold[1] and fold[1] > 1):
        raise PerfedError(
            f"data.inner_fold = {fold} is not allowed; it must be: [i, k] with 0 <= i < k and k > 1, or []"
        )


def located(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The ``[data]`` table of an experiment's file in ``folder``, its relative paths made whole.

    Example:
        >>> located({"name": "tables", "files": ["north.csv"]}, Path("/data"))["files"]
        ['/data/north.csv']
    """
    entry = DATASETS.get(str(data.get("name")))

    def whole_path(path: Any) -> Any:
        return str((folder / path).resolve()) if isinstance(path, str) else path

    whole = {
        key: [whole_path(path) for path in data[key]] if isinstance(data[key], list) else whole_path(data[key])
        for key in (entry.paths if entry else ())
        if data.get(key)
    }
    return {**data, **whole}


def check_range(low_key: str, low: float, high_key: str, high: float) -> None:
    """Raise a :class:`PerfedError` unless ``low`` <= ``high``."""
    if low > high:
        raise PerfedError(f"data.{low_key} = {low} is above data.{high_key} = {high}; it must not be")


def client_ids(num_clients: int) -> list[str]:
    """ "000", "001", ...: zero-padded, so that sorting keeps the order however many there are."""
    width = max(3, len(str(num_clients - 1)))
    return [f"{i:0{width}d}" for i in range(num_clients)]


@contextmanager
def in_memory(federation: Federation | Callable[[int], Federation]) -> Iterator[str]:
    """The name under which ``federation`` is a data set inside the block; experiments may hold validation data out.

    Args:
        federation: the same for every seed, or what makes that of a seed.

    Example:
        >>> from perfed.datasets import load
        >>> with in_memory(load("digits", {"clients": 4}, seed=0)) as name:
        ...     name, len(load(name, {"validation_fraction": 0.25}, seed=1))
        ('digits in memory', 4)
    """
    name = f"{federation.name if isinstance(federation, Federation) else 'data'} in memory".replace(":", " ")
    before = DATASETS.get(name)

    @dataset(name)
    def made(seed: int, data_dir: Path | None) -> Federation:
        """A federation of the user's own, in memory."""
        return federation if isinstance(federation, Federation) else federation(seed)

    try:
        yield name
    finally:
        del DATASETS[name]
        if before is not None:
            DATASETS[name] = before
