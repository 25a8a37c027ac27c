"""Experiments as TOML: validation, overrides, and the objects they describe."""

from __future__ import annotations

import difflib
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

import perfed.methods  # noqa: F401 - registers the methods
from perfed import model as models
from perfed.datasets import check_options, dataset_names, describe
from perfed.errors import PerfedError, first_problem
from perfed.method import Method, entry, method_names
from perfed.model import STAGES, Model, Shape, StageFactory
from perfed.participation import Participation
from perfed.plan import EngineName, Plan
from perfed.terms import Term, term_class, term_names

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Evaluation(BaseModel):
    """Which accuracy is reported.

    Attributes:
        every: evaluate after every so many rounds, and after the last.
        split: on which data.
        who: all clients, or the round's participants.
        when: ``"before"`` local training: the model a client would start its next round with (received parameters,
            own personal ones, after ``personalise``); ``"after"``: as local training left it, before aggregation.
        last: the summary is the mean over this many last rounds (all of them are evaluated); 1: the last round.
        weights: ``"uniform"`` mean over clients, or weighted by their number of ``"samples"`` in the split.
    """

    model_config = _STRICT

    every: int = Field(10, ge=1)
    split: Literal["test", "validation", "train"] = "test"
    who: Literal["all", "participants"] = "all"
    when: Literal["before", "after"] = "before"
    last: int = Field(1, ge=1)
    weights: Literal["uniform", "samples"] = "uniform"


class Snapshots(BaseModel):
    """Embedded samples kept for the report: of which clients (the first ones) and after which rounds (0: start)."""

    model_config = _STRICT

    clients: int = Field(3, ge=0)
    rounds: tuple[int, ...] = ()

    @field_validator("rounds", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class _PathSettings(BaseModel):
    model_config = _STRICT

    chunk: int = Field(ge=0)
    threads: int = Field(ge=1)


class _PlanSettings(BaseModel):
    """The ``[plan]`` table; ``paths`` are choices that a run has recorded."""

    model_config = _STRICT

    engine: EngineName = "auto"
    chunk: int = Field(0, ge=0)
    threads: int = Field(0, ge=0)
    paths: dict[str, _PathSettings] = Field(default_factory=dict)


class Experiment(BaseModel):
    """Everything a run depends on; the content of an experiment's TOML file."""

    model_config = _STRICT

    name: str = "experiment"
    description: str = ""
    method: str = "fedavg"
    seed: int = Field(0, ge=0)
    rounds: int = Field(ge=1)
    dtype: Literal["float32", "float64"] = "float32"
    checkpoint_seconds: float = Field(30.0, ge=0, description="least time between two checkpoints")
    data: dict[str, Any]
    model: dict[str, Any]
    training: dict[str, Any] = Field(default_factory=dict)
    participation: Participation = Participation()
    evaluation: Evaluation = Evaluation()
    snapshots: Snapshots = Snapshots()
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    plan: dict[str, Any] = Field(default_factory=dict)

    @field_validator("data")
    @classmethod
    def _has_name(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("name"), str):
            raise ValueError(f"needs 'name', one of: {', '.join(dataset_names())}")
        return value

    @property
    def data_options(self) -> dict[str, Any]:
        """Options of the data set."""
        return {key: value for key, value in self.data.items() if key != "name"}

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of parameters and inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def to_toml(self) -> str:
        """The complete experiment as TOML; :func:`read` of it gives the same experiment."""
        return tomli_w.dumps(self.model_dump(mode="json"))

    def build_method(self) -> Method:
        """The experiment's method with its settings.

        Raises:
            PerfedError: unknown method or setting, or a value that is not allowed; names the key.
        """
        settings = {k: v for k, v in self.methods.get(self.method, {}).items() if k != "model"}
        return build_method(self.method, settings, self.training)

    def build_model(self, num_outputs: int) -> Model:
        """The experiment's model, with the method's own ``model`` table on top; the head gets ``num_outputs``."""
        table = {**self.model, **self.methods.get(self.method, {}).get("model", {})}
        for stage in table:
            if stage not in STAGES:
                raise PerfedError(f"unknown key 'model.{stage}'; allowed: {', '.join(STAGES)}")
        made = {stage: build_stage(f"model.{stage}", table.get(stage), num_outputs) for stage in STAGES}
        return Model(**made)

    def build_plan(self) -> Plan:
        """The execution plan, with recorded choices if there are any."""
        try:
            return Plan.from_dict(_PlanSettings.model_validate(self.plan).model_dump())
        except ValidationError as error:
            raise _problem(error, _PlanSettings, "plan") from None


def read(text: str, where: str) -> Experiment:
    """Parse and validate an experiment; ``where`` names the file in messages.

    Raises:
        PerfedError: not TOML, an unknown key, or a value that is not allowed.
    """
    try:
        return validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{where}: not valid TOML: {error}") from None
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None


def validate(table: Mapping[str, Any]) -> Experiment:
    """An experiment from nested dictionaries; everything that can be checked without the data is."""
    try:
        experiment = Experiment.model_validate(dict(table))
    except ValidationError as error:
        raise _problem(error, Experiment) from None
    check_options(experiment.data["name"], experiment.data_options)
    for name in dict.fromkeys([experiment.method, *experiment.methods]):
        described = experiment.model_copy(update={"method": name})
        described.build_method()
        described.build_model(num_outputs=1)
    experiment.build_plan()
    return experiment


def _problem(error: ValidationError, model: type[BaseModel], where: str = "") -> PerfedError:
    """The first problem; for an unknown key with the keys that its table may hold."""
    problem = first_problem(error, where)
    detail = error.errors()[0]
    if detail["type"] != "extra_forbidden":
        return problem
    holder = model
    for part in detail["loc"][:-1]:
        kind = holder.model_fields[part].annotation if part in holder.model_fields else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return problem
        holder = kind
    near = difflib.get_close_matches(str(detail["loc"][-1]), holder.model_fields, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return PerfedError(f"{problem}{hint}; allowed: {', '.join(holder.model_fields)}")


def experiment_names() -> list[str]:
    """Names of the experiments that come with the package, sorted."""
    folder = resources.files("perfed.experiments")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def find_experiment(name: str) -> dict[str, Any]:
    """The TOML table of a shipped experiment, or of the file ``name``."""
    path = Path(name)
    if name in experiment_names():
        text = (resources.files("perfed.experiments") / f"{name}.toml").read_text()
    elif path.suffix == ".toml" and path.is_file():
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PerfedError(f"{name}: cannot be read: {error}") from None
    else:
        near = difflib.get_close_matches(name, experiment_names(), n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise PerfedError(
            f"unknown experiment '{name}'{hint}; give a .toml file or one of: {', '.join(experiment_names())}"
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{name}: not valid TOML: {error}") from None


# Overrides ---------------------------------------------------------------------------------------------------


def parse_value(text: str) -> Any:
    """A value from the command line: TOML (numbers, true, lists, tables), else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def override(table: dict[str, Any], assignments: Iterable[str], methods: Sequence[str]) -> dict[str, Any]:
    """Apply ``key=value`` assignments to an experiment's table, without changing it.

    A dotted key is a path (``data.clients=5``, ``methods.flic-hl.lambda1=0``). A key that starts with no table's name
    is looked up among the options of the data set, the settings of ``methods`` and of training, participation,
    evaluation.

    Raises:
        PerfedError: not of the form key=value, or a key that is unknown or found in several places.
    """
    result = _copy(table)
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign or not key:
            raise PerfedError(f"'{assignment}' is not of the form key=value")
        value = parse_value(text)
        for path in resolve(result, key.strip(), methods):
            node = result
            for part in path[:-1]:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise PerfedError(f"unknown key '{key}': '{part}' is a value, not a table")
            node[path[-1]] = value
    return result


def resolve(table: Mapping[str, Any], key: str, methods: Sequence[str]) -> list[tuple[str, ...]]:
    """Where the key of an assignment belongs, as paths; several if it is a setting of several methods."""
    first, *rest = key.split(".")
    if first in Experiment.model_fields:
        return [(first, *rest)]
    if rest:
        return [(*path, *rest) for path in resolve(table, first, methods)]
    places: dict[str, list[tuple[str, ...]]] = {}
    name = _section(table, "data").get("name")
    if isinstance(name, str) and name in dataset_names() and key in {o.name for o in describe(name).options}:
        places["data"] = [("data", key)]
    holders = [m for m in methods if key in setting_names(m) | _term_settings(table, m)]
    if key in Method.model_fields and key != "terms":
        places["training"] = [("training", key)] + [
            ("methods", m, key) for m in methods if key in _section(_section(table, "methods"), m)
        ]
    elif holders:
        places["methods"] = [("methods", m, key) for m in holders]
    for section, cls in (("participation", Participation), ("evaluation", Evaluation)):
        if key in cls.model_fields:
            places[section] = [(section, key)]
    if len(places) == 1:
        return next(iter(places.values()))
    if places:
        raise PerfedError(f"'{key}' is ambiguous; write one of: {', '.join(f'{place}.{key}' for place in places)}")
    raise PerfedError(_unknown(key, name, methods))


def _section(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table under ``key``; empty if there is none (validation says so if it is something else)."""
    value = table.get(key)
    return value if isinstance(value, Mapping) else {}


def _unknown(key: str, data: Any, methods: Sequence[str]) -> str:
    known = {
        *Experiment.model_fields,
        *Method.model_fields,
        *Participation.model_fields,
        *Evaluation.model_fields,
    }
    for method in methods:
        known |= setting_names(method)
    if isinstance(data, str) and data in dataset_names():
        known |= {option.name for option in describe(data).options}
    near = difflib.get_close_matches(key, sorted(known), n=3)
    hint = f"did you mean: {', '.join(near)}?" if near else f"allowed: {', '.join(sorted(known))}"
    return f"unknown key '{key}'; {hint}"


def _term_settings(table: Mapping[str, Any], method: str) -> set[str]:
    """Settings of the terms that the table adds to ``method``."""
    names = _section(_section(table, "methods"), method).get("terms", [])
    known = [term_class(name) for name in names if name in term_names()] if isinstance(names, list) else []
    return {setting for term in known for setting in term.model_fields}


def _copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in table.items()}


# Building ----------------------------------------------------------------------------------------------------


def setting_names(method: str) -> set[str]:
    """Names of the settings that ``[methods.NAME]`` may hold: the method's own and those of its terms."""
    found = entry(method)
    names = set(found.method.model_fields)
    for term in found.terms:
        names |= set(term.model_fields)
    return names


def build_method(name: str, settings: Mapping[str, Any], training: Mapping[str, Any] | None = None) -> Method:
    """A registered method from plain settings.

    Args:
        name: of the method.
        settings: the method's hyper-parameters and those of its terms; ``terms`` may list further terms by name.
        training: settings that every method has (optimiser, learning rate, ...); ``settings`` win.

    Raises:
        PerfedError: unknown setting, or a value that is not allowed; names ``methods.NAME.key`` or ``training.key``.
    """
    found = entry(name)
    for key in training or {}:
        if key not in Method.model_fields or key == "terms":
            allowed = sorted(set(Method.model_fields) - {"terms"})
            raise PerfedError(f"unknown key 'training.{key}'; allowed: {', '.join(allowed)}")
    merged = {**(found.defaults or {}), **(training or {}), **settings}
    extra = merged.pop("terms", [])
    if isinstance(extra, str) or not isinstance(extra, list | tuple):
        raise PerfedError(f"methods.{name}.terms: must be a list of names (given: {extra!r})")
    classes: list[type[Term]] = [*found.terms, *(term_class(t) for t in extra)]
    own = {key: value for key, value in merged.items() if key in found.method.model_fields}
    rest = {key: value for key, value in merged.items() if key not in own}
    terms = []
    for cls in classes:
        mine = {key: rest.pop(key) for key in list(rest) if key in cls.model_fields}
        terms.append(_checked(cls, mine, f"methods.{name}"))
    if rest:
        known = sorted(set(found.method.model_fields).union(*(cls.model_fields for cls in classes)))
        raise PerfedError(f"unknown key 'methods.{name}.{next(iter(rest))}'; allowed: {', '.join(known)}")
    where = f"methods.{name}" if set(own) <= set(settings) else f"training or methods.{name}"
    method: Method = _checked(found.method, {**own, "terms": tuple(terms)}, where)
    return method


def _checked(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise first_problem(error, where) from None


_PRESETS: dict[str, Callable[..., StageFactory]] = {
    "mlp": models.mlp,
    "cnn": models.cnn,
    "digits-cnn": models.digits_cnn,
    "hidden-layer": models.hidden_layer,
    "linear": models.linear,
}


def build_stage(where: str, spec: Any, num_outputs: int) -> StageFactory | None:
    """A stage from its settings: ``"none"``, a preset's name, or a table with ``kind`` and the preset's parameters.

    ``kind = "package.module:function"`` calls a user's function with the input shape and the table's other values; it
    returns any ``torch.nn.Module``. For a head, ``out`` defaults to the number of outputs.
    """
    if spec is None or spec == "none":
        return None
    table = {"kind": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    kind = table.pop("kind", None)
    if not isinstance(kind, str):
        raise PerfedError(f"{where}: needs a kind, one of: none, {', '.join(_PRESETS)}, or package.module:function")
    if kind == "none":
        return None
    if ":" in kind:
        return _user_stage(where, kind, table)
    if kind not in _PRESETS:
        allowed = f"none, {', '.join(_PRESETS)}, or package.module:function"
        raise PerfedError(f"{where}.kind: unknown '{kind}'; allowed: {allowed}")
    preset = _PRESETS[kind]
    if where.endswith(".head"):
        table.setdefault("out", num_outputs)
    parameters = inspect.signature(preset).parameters
    for key, value in table.items():
        if key not in parameters:
            raise PerfedError(f"unknown key '{where}.{key}'; allowed: kind, {', '.join(parameters)}")
        _check_type(f"{where}.{key}", value, parameters[key].default)
    return preset(**table)


def _check_type(where: str, value: Any, default: Any) -> None:
    """The value of a preset's parameter must be of the default's kind: a preset without default wants an integer."""
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and all(type(v) is int and v > 0 for v in value)
        wanted = "a list of positive integers"
    elif isinstance(default, bool | str):
        fits, wanted = type(value) is type(default), "true or false" if isinstance(default, bool) else "text"
    elif isinstance(default, float):
        fits, wanted = type(value) in (int, float) and value >= 0, "a number, at least 0"
    else:
        least = 0 if default == 0 else 1
        fits, wanted = type(value) is int and value >= least, f"an integer, at least {least}"
    if not fits:
        raise PerfedError(f"{where}: must be {wanted} (given: {value!r})")


def _user_stage(where: str, kind: str, options: dict[str, Any]) -> StageFactory:
    module, _, attribute = kind.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PerfedError(f"{where}.kind: cannot load '{kind}': {error}") from None

    def build(shape: Shape) -> torch.nn.Module:
        made = function(shape, **options)
        if not isinstance(made, torch.nn.Module):
            raise PerfedError(f"{where}: '{kind}' returned {type(made).__name__}, not a torch.nn.Module")
        return made

    return build


__all__ = [
    "EngineName",
    "Evaluation",
    "Experiment",
    "build_method",
    "experiment_names",
    "find_experiment",
    "method_names",
    "override",
    "read",
    "validate",
]
