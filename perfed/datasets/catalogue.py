"""The catalogue of named data sets, with options that are checked against the signature of the building function."""

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

from perfed.data.domain_input import OPTIONS, apply_options
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.plugins import Registry
from perfed.settings import Table, check_whole_numbers


@dataclass(frozen=True)
class Option:
    """An option of a data set: its name, the allowed values in words, and its default."""

    name: str
    allowed: str
    default: Any


@dataclass(frozen=True)
class Description:
    """The description of a data set: first line of its documentation, task, files that it reads, options in order."""

    name: str
    summary: str
    task: str
    files: tuple[str, ...]
    options: tuple[Option, ...]


def describe_type(hint: Any) -> str:
    """Return the allowed values of an option of the type ``hint`` in words."""
    if get_origin(hint) is Annotated:
        base, *extra = get_args(hint)
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [limit for item in extra for limit in getattr(item, "metadata", (item,))]
        limits_in_words = [f"{signs[k]} {getattr(v, k)}" for v in limits for k in signs if hasattr(v, k)]
        words, not_given = describe_type(base), ", or not given"
        end = not_given if words.endswith(not_given) else ""
        return f"{words.removesuffix(end)} {' and '.join(limits_in_words)}".strip() + end
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(describe_type(member) for member in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return f"list of {describe_type(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"table of names, each with a {describe_type(get_args(hint)[1])}"
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
"""The registered data sets by name (:func:`dataset`)."""


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
    check combinations of options. Options among ``paths`` are files or folders, or lists of them; relative ones are
    relative to the folder of the experiment's file. Every data set also has ``validation_fraction``, ``inner_fold`` and
    ``domain_input``, which :func:`load` handles.

    Raises:
        PerfedError: if the name is used by a data set of another module (the same module may register it again), or a
            parameter has no type or no default.

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
        options = tuple(
            Option(key, describe_type(hint), default) for key, (hint, default) in (described | last).items()
        )
        summary = (inspect.getdoc(build) or "").partition("\n")[0]
        DATASETS[name] = _Entry(Description(name, summary, task, files, options), build, model, build.__module__, paths)
        return build

    return register


def _check_signature(name: str, build: Builder) -> None:
    """Check that a building function takes ``(seed, data_dir, *, options)``, before any data are built.

    Raises:
        PerfedError: if it takes fewer than two positional arguments, or further ones without a default.
    """
    parameters = inspect.signature(build).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    extra = [p.name for p in positional[2:] if p.default is p.empty]
    if len(positional) < 2 or extra:
        raise PerfedError(
            f"data set '{name}': its function must take (seed, data_dir, *, options), not {inspect.signature(build)}"
        )


def dataset_names() -> list[str]:
    """Return the names of all data sets, sorted.

    Example:
        >>> "digits" in dataset_names()
        True
    """
    return sorted(DATASETS)


def describe(name: str) -> Description:
    """Return the description of the data set ``name``, in any case.

    Raises:
        PerfedError: if there is no such data set; the message lists the names.

    Example:
        >>> [(option.name, option.default) for option in describe("toy-linear-map").options[:2]]
        [('clients', 100), ('classes_per_client', 3)]
    """
    return _find_entry(name).description


def dataset_id(name: str) -> str:
    """Return the canonical spelling of a data set's name, which is used in files; ``module:`` in ``name`` is kept.

    Raises:
        PerfedError: if there is no such data set; the message lists the names.

    Example:
        >>> dataset_id("Digits-Views")
        'digits-views'
    """
    module, colon, _ = name.rpartition(":")
    return f"{module}{colon}{_find_entry(name).description.name}"


def _find_entry(name: str) -> _Entry:
    registered_name = DATASETS.resolve_name(name)
    if registered_name not in DATASETS:
        raise PerfedError(f"there is no data set '{registered_name}'; available: {', '.join(dataset_names())}")
    return DATASETS[registered_name]


def load(
    name: str, options: Mapping[str, object] | None = None, *, seed: int, data_dir: Path | str | None = None
) -> Federation:
    """Return the federation of the data set ``name``; the same arguments give the same federation.

    Args:
        name: one of :func:`dataset_names`, in any case, or ``module:NAME``, which imports the module first.
        options: values of the options listed by :func:`describe`; others have their defaults. With
            ``validation_fraction`` > 0, that part of the training samples of every client without validation data
            becomes validation data, by class; one training sample of each class always remains. With ``inner_fold`` =
            [i, k], fold i of k of every client's training samples, counted from 0, replaces its test data. With
            ``domain_input`` the one-hot domain of every sample is appended to its inputs.
        seed: the seed of all random choices.
        data_dir: the first folder in which files are searched.

    Raises:
        PerfedError: if the data set or an option is unknown, a value is not allowed, a file is missing or broken, or
            ``domain_input`` is set for data without domains.

    Example:
        >>> len(load("toy-noisy-features", {"clients": 4}, seed=0))
        4
    """
    return _build_checked(dataset_id(name), check_options(name, options or {}), seed, data_dir)


class Data(Table):
    """The ``[data]`` table of an experiment: the name of a data set and checked values of its options.

    Raises:
        PerfedError: as :func:`check_options` (converted by pydantic to a ``ValidationError``).

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
        """Return the values of all options of the data set, including defaults."""
        return dict(self._options)

    def load(self, seed: int, data_dir: Path | str | None = None) -> Federation:
        """Return the federation, as :func:`load` does."""
        return _build_checked(self.name, self.options, seed, data_dir)


def _build_checked(name: str, options: dict[str, Any], seed: int, data_dir: Path | str | None) -> Federation:
    """Return the federation for options that have been checked."""
    entry = _find_entry(name)
    builder_options = {key: value for key, value in options.items() if key not in OPTIONS}
    with _use_one_thread():
        try:
            federation = entry.build(seed, None if data_dir is None else Path(data_dir), **builder_options)
        except (MemoryError, OverflowError, ValueError) as error:
            if isinstance(error, ValueError) and "maximum allowed" not in str(error).lower():
                raise
            sizes = {key: value for key, value in builder_options.items() if isinstance(value, int) and value > 1}
            raise PerfedError(
                f"data set '{name}' does not fit into memory with these options; use smaller ones (given: {sizes})"
            ) from None
        if not isinstance(federation, Federation):
            raise PerfedError(f"data set '{name}': its function returned {type(federation).__name__}, not a Federation")
        return apply_options(replace(federation, name=name), options, seed)


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Let torch use one thread: a client's data are small, and waiting for a busy second core costs much more than it
    saves.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_options(name: str, requested: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of all options of the data set, including defaults, without reading data.

    Raises:
        PerfedError: if the data set or an option is unknown, or a value is not allowed.

    Example:
        >>> check_options("digits", {"clients": 30})["clients"]
        30
    """
    check_whole_numbers(requested, "data")
    entry = _find_entry(name)
    allowed = {option.name: option.allowed for option in entry.description.options}
    for key in requested:
        if key not in allowed:
            name = entry.description.name
            raise PerfedError(f"data.{key} is not an option of '{name}'; its options: {', '.join(allowed)}")
    try:
        model = entry.model.model_validate(dict(requested))
    except ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:  # the combination of options is not allowed
            raise PerfedError(str(problem["ctx"]["error"])) from None
        key = str(problem["loc"][0])
        raise PerfedError(f"data.{key} = {requested[key]!r} is not allowed; it must be: {allowed[key]}") from None
    checked = {key: getattr(model, key) for key in allowed}
    _check_fold(checked["inner_fold"])
    return checked


def _check_fold(fold: list[int]) -> None:
    if fold and not (len(fold) == 2 and 0 <= fold[0] < fold[1] and fold[1] > 1):
        raise PerfedError(
            f"data.inner_fold = {fold} is not allowed; it must be: [i, k] with 0 <= i < k and k > 1, or []"
        )


def resolve_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the ``[data]`` table of an experiment's file in ``folder`` with absolute paths.

    Example:
        >>> resolve_paths({"name": "tables", "files": ["north.csv"]}, Path("/data"))["files"]
        ['/data/north.csv']
    """
    entry = DATASETS.get(str(data.get("name")))

    def make_absolute(path: Any) -> Any:
        return str((folder / path).resolve()) if isinstance(path, str) else path

    absolute = {
        key: [make_absolute(path) for path in data[key]] if isinstance(data[key], list) else make_absolute(data[key])
        for key in (entry.paths if entry else ())
        if data.get(key)
    }
    return {**data, **absolute}


def check_range(low_key: str, low: float, high_key: str, high: float) -> None:
    """Raise :class:`PerfedError` unless ``low`` <= ``high``."""
    if low > high:
        raise PerfedError(f"data.{low_key} = {low} is above data.{high_key} = {high}; it must not be")


def make_client_ids(num_clients: int) -> list[str]:
    """Return the ids "000", "001", ..., zero-padded so that sorting preserves their order for any number of clients."""
    width = max(3, len(str(num_clients - 1)))
    return [f"{i:0{width}d}" for i in range(num_clients)]


@contextmanager
def register_temporarily(federation: Federation | Callable[[int], Federation]) -> Iterator[str]:
    """Register ``federation`` as a data set inside the block, and yield its name.

    Experiments can then apply options such as ``validation_fraction`` to it.

    Args:
        federation: a federation for all seeds, or a function that returns the federation of a seed.

    Example:
        >>> from perfed.datasets import load
        >>> with register_temporarily(load("digits", {"clients": 4}, seed=0)) as name:
        ...     name, len(load(name, {"validation_fraction": 0.25}, seed=1))
        ('digits in memory', 4)
    """
    name = f"{federation.name if isinstance(federation, Federation) else 'data'} in memory".replace(":", " ")
    previous = DATASETS.get(name)

    @dataset(name)
    def build(seed: int, data_dir: Path | None) -> Federation:
        """A federation of the user's own, in memory."""
        return federation if isinstance(federation, Federation) else federation(seed)

    try:
        yield name
    finally:
        del DATASETS[name]
        if previous is not None:
            DATASETS[name] = previous
