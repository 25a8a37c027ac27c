"""Experiments as TOML: validation, and the objects they describe."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import tomli_w
import torch
from pydantic import (
    BaseModel,
    Field,
    PositiveInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
    model_validator,
)

from perfed.aggregation.aggregator import aggregator_id
from perfed.aggregation.settings import Aggregation
from perfed.data.federation import Federation
from perfed.datasets import Data, dataset_id, resolve_paths
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import PerfedError, suggest_name, summarise_validation_error
from perfed.experiment.build import Stages
from perfed.method.extension import extension_id
from perfed.method.method import Method
from perfed.method.registry import entry, method_id
from perfed.methods.build import build_method
from perfed.methods.presets import split_method_name
from perfed.model.chain import Model
from perfed.model.columns import split_first_layer
from perfed.participation.clock import Clock
from perfed.participation.policy import POLICIES, policy_id, qualified_name
from perfed.participation.settings import Participation, table_fields
from perfed.plugins import bare_name, match_name
from perfed.privacy.apply import PrivateMethod, make_private
from perfed.privacy.before import UNCOUNTED_NOTE, check_public_columns
from perfed.privacy.metrics import EvaluationPlan
from perfed.privacy.settings import Privacy
from perfed.run.callbacks import build_callbacks
from perfed.run.settings import Blend, Evaluation, Snapshots
from perfed.settings import LISTED, STRICT, check_whole_numbers, exclude_default
from perfed.training.plan import PlanSettings

_Model = TypeVar("_Model", bound=BaseModel)


class Experiment(BaseModel):
    """The complete settings of a run, as in an experiment's TOML file, checked as far as possible without the data.

    Every table has a type that validates it, except ``training`` and ``methods``, from which the methods are built.
    Only the class of a method, which may be in a user's module, defines its settings and their allowed values,
    including those of local training; a value may be allowed or not depending on values in both tables. They are
    therefore validated together by building the methods. :attr:`built_method` is the method of the run.
    """

    model_config = STRICT

    name: str = "experiment"
    description: str = ""
    method: str = "fedavg"
    seed: int = Field(0, ge=0)
    rounds: int = Field(ge=1)
    dtype: Literal["float32", "float64"] = "float32"
    device: str = Field("cpu", description="'cpu', 'cuda', 'cuda:1', ...")
    checkpoint_seconds: float = Field(30.0, ge=0, description="least time between two checkpoints")
    baseline_tries: PositiveInt | None = Field(None, description="values of their strength that baselines try")
    callbacks: Annotated[tuple[str | dict[str, Any], ...], LISTED] = Field(
        (), description="names of callbacks, or tables of a name and settings", exclude_if=exclude_default(())
    )
    data: Data
    model: Stages
    training: dict[str, Any] = Field(default_factory=dict)
    participation: Participation = Participation()
    clock: Clock = Clock()
    evaluation: Evaluation = Evaluation()
    snapshots: Snapshots = Snapshots()
    blend: Blend = Field(Blend(), exclude_if=exclude_default(Blend()))
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    plan: PlanSettings = PlanSettings()
    secure_aggregation: SecureAggregation | None = Field(
        None,
        description="the server gets sums over clients, and no client's reply",
        exclude_if=exclude_default(None),
    )
    aggregation: Aggregation = Field(
        Aggregation(),
        description="what takes the place of the mean over clients",
        exclude_if=exclude_default(Aggregation()),
    )
    privacy: Privacy | None = Field(None, description="differential privacy", exclude_if=exclude_default(None))

    _built: dict[str, tuple[Method, Stages]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _build(self) -> Self:
        for name in dict.fromkeys([self.method, *self.methods]):
            settings = merge_tables(self._merge_method_tables(entry(name).base), self._merge_method_tables(name))
            model_settings = settings.pop("model", {})
            if not isinstance(model_settings, dict):
                raise PerfedError(f"methods.{name}.model: must be a table (given: {model_settings!r})")
            method = build_method(name, settings, self.training)
            stages = _validate_as(Stages, {**self.model.explicit_settings, **model_settings}, "model")
            stages.build(num_outputs=1)
            self._built[name] = method, stages
        self.build_participation()
        build_callbacks(self.callbacks)
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """The data type of parameters and inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def to_toml(self) -> str:
        """Return the complete experiment as TOML text, from which :func:`read` returns an equal experiment."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @property
    def built_method(self) -> Method:
        """The method with its settings."""
        return self._built[self.method][0]

    def in_private(self, clients: int, rows: Sequence[int] | None = None) -> PrivateMethod | None:
        """Return the method with the mechanisms of ``[privacy]``; ``None`` without this table.

        Args:
            clients: the number of clients.
            rows: the number of training rows of each client, if known.

        Raises:
            PerfedError: the method sends or discloses something without a privacy mechanism, which the message names.
        """
        if self.privacy is None:
            return None
        participation, secure = self.build_participation(), self.secure_aggregation
        num_invited = participation.count(clients)
        has_tables = "public" in self.data.options
        if has_tables:
            check_public_columns(self.data.options)
        private = make_private(
            self.built_method,
            self.privacy,
            self.rounds,
            rows,
            name=self.method,
            policy=participation.policy,
            shares=0 if secure is None else secure.count_required(num_invited, num_invited),
            evaluation=EvaluationPlan(
                self.evaluation.requested_metrics,
                [n for n in range(1, self.rounds + 1) if self.evaluation.is_due(n, self.rounds)],
            ),
        )
        return private if has_tables else replace(private, notes=(*private.notes, UNCOUNTED_NOTE))

    @property
    def effect(self) -> dict[str, Any]:
        """All settings that affect a run with the method, with defaults; names and other methods are left out."""
        method, stages = self._built[self.method]
        names = {"name", "description", "data", "model", "training", "methods"}
        data = {"name": self.data.name, **self.data.options}
        return {**self.model_dump(exclude=names), "data": data, "model": stages.explicit_settings, "method": method}

    def build_model(self, num_outputs: int, words: Sequence[str] = ()) -> Model:
        """Return the model, with the settings of the method's ``model`` table.

        Args:
            num_outputs: the number of outputs of the head.
            words: the words of the token ids of the inputs.
        """
        return self._built[self.method][1].build(num_outputs, words)

    def model_for(self, federation: Federation) -> Model:
        """Return the model of a run on ``federation``, whose first layer is split by columns if columns are named."""
        return split_first_layer(
            self.build_model(federation.num_outputs, federation.words or ()), federation.named_inputs
        )

    def build_participation(self) -> Participation:
        """Return the participation, with the policy of the method if the method is a preset with one.

        Raises:
            PerfedError: the experiment names another policy than the preset.
        """
        policy, named_policy = entry(self.method).policy, self.participation.policy
        if policy and named_policy not in ("uniform", policy):
            raise PerfedError(
                f"participation.policy = '{named_policy}': {self.method} has '{policy}'; allowed: {policy}"
            )
        return self.participation.with_policy(policy) if policy else self.participation

    @field_serializer("participation", mode="wrap")
    def _write_participation(self, value: Participation, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the table with the settings of the policy, also if the policy comes from the method."""
        policy = split_method_name(self.method)[1]  # None for scikit-learn models, which are not methods
        return {**write(value.with_policy(policy) if policy else value), "policy": value.policy}

    def _merge_method_tables(self, method: str) -> dict[str, Any]:
        """Return the settings in ``[methods.NAME]`` and ``[methods."module:NAME"]``, which are the same method."""
        settings: dict[str, Any] = {}
        for name, table in self.methods.items():
            if bare_name(name) == bare_name(method):
                settings = merge_tables(settings, table)
        return settings


def read(text: str, where: str) -> Experiment:
    """Parse and validate an experiment.

    Args:
        text: the TOML text.
        where: the name of the file in error messages.

    Raises:
        PerfedError: the text is not valid TOML, a key is unknown, or a value is not allowed.
    """
    try:
        return validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{where}: not valid TOML: {error}") from None
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None


def validate(table: Mapping[str, Any]) -> Experiment:
    """Return an experiment from nested dictionaries, after all checks that do not need the data.

    Names of methods, extensions, the data set and the policy are accepted in any case.

    Raises:
        PerfedError: a key, method, data set or setting is unknown, or a value is not allowed; the message names the
            key.

    Example:
        >>> table = {"method": "fedavg", "rounds": 2, "data": {"name": "digits"}, "model": {"head": "linear"}}
        >>> validate(table).built_method.lr
        0.001
        >>> validate({**table, "rouns": 2})
        Traceback (most recent call last):
        perfed.errors.PerfedError: unknown key 'rouns' (did you mean 'rounds'?); allowed: ...
    """
    check_whole_numbers(table)
    return _validate_as(Experiment, to_canonical_names(table))


def _validate_as(model: type[_Model], table: Mapping[str, Any], where: str = "") -> _Model:
    """Return ``table`` as an object of ``model``; errors are raised as one line that starts with ``where``."""
    try:
        return model.model_validate(dict(table))
    except ValidationError as error:
        raise _describe_problem(error, model, where) from None


def _describe_problem(error: ValidationError, model: type[BaseModel], where: str) -> PerfedError:
    """Return an error for the first problem; for an unknown key, it lists the allowed keys of the table."""
    detail = error.errors()[0]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, PerfedError):  # its message already names the key
        return cause
    problem = summarise_validation_error(error, where)
    if detail["type"] != "extra_forbidden":
        return problem
    holder = model
    for part in detail["loc"][:-1]:
        fields = table_fields(holder)
        name = bare_name(str(part))
        kind = fields[name].annotation if name in fields else None
        types = (kind, *get_args(kind))
        tables = [member for member in types if isinstance(member, type) and issubclass(member, BaseModel)]
        if not tables:
            return problem
        holder = tables[0]
    allowed = table_fields(holder)
    hint = suggest_name(str(detail["loc"][-1]), allowed)
    return PerfedError(f"{problem}{hint}; allowed: {', '.join(allowed)}")


def shipped_files(folder: str) -> dict[str, Traversable]:
    """Return the TOML files of a folder of this package by name without the suffix, sorted by name."""
    files = (file for file in resources.files(f"perfed.experiment.{folder}").iterdir() if file.name.endswith(".toml"))
    return {file.name.removesuffix(".toml"): file for file in sorted(files, key=lambda file: file.name)}


def experiment_names() -> list[str]:
    """Return the sorted names of the experiments that come with the package."""
    return [*shipped_files("shipped")]


def find_experiment(name: str) -> dict[str, Any]:
    """Return the TOML table of the shipped experiment ``name``, in any case, or of the file ``name``.

    With ``extends = "OTHER"``, keys that the file does not have are taken from another experiment or from another file
    in the same folder. Tables are merged key by key, except ``data`` and stages with a ``kind``, which are replaced
    entirely.

    Raises:
        PerfedError: there is no such experiment, it is not valid TOML, or it extends itself, directly or indirectly.
    """
    return _read_extended(name, ())


def _read_extended(name: str, extending: tuple[str, ...]) -> dict[str, Any]:
    """Return the table of an experiment merged with those that it extends; ``extending`` are the names so far."""
    if name in extending:
        raise PerfedError(f"{name}: extends itself ({' -> '.join((*extending, name))})")
    table = _read_table(name)
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise PerfedError(f"{name}: extends must be the name of an experiment (given: {base!r})")
    beside = Path(name).parent / base
    if base not in experiment_names() and name not in experiment_names() and beside.is_file():
        base = str(beside)
    return merge_tables(_read_extended(base, (*extending, name)), table)


def _read_table(name: str) -> dict[str, Any]:
    path = Path(name)
    if shipped := match_name(name, experiment_names()):
        text = shipped_files("shipped")[shipped].read_text(encoding="utf-8")
    elif path.suffix == ".toml" and path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PerfedError(f"{name}: cannot be read: {error}") from None
    else:
        hint = suggest_name(name, experiment_names()) or (" (no such file)" if path.suffix == ".toml" else "")
        raise PerfedError(
            f"unknown experiment '{name}'{hint}; give a .toml file or one of: {', '.join(experiment_names())}"
        )
    try:
        table = to_canonical_names(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{name}: not valid TOML: {error}") from None
    if path.is_file() and isinstance(table.get("data"), dict):
        table["data"] = resolve_paths(table["data"], path.parent)
    return table


def merge_tables(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``over``; nested tables are merged key by key.

    ``data`` and stages with a ``kind`` are replaced entirely.
    """
    result = dict(base)
    for key, value in over.items():
        is_replaced = key == "data" or (isinstance(value, dict) and "kind" in value)
        is_merged = isinstance(value, dict) and isinstance(base.get(key), dict) and not is_replaced
        result[key] = merge_tables(base[key], value) if is_merged else value
    return result


def to_canonical_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``table`` with the canonical names of its methods, extensions, data set, policy and kind of aggregation.

    Two tables of the same method under different spellings are merged; values of the later one win. Unknown names are
    not changed, because validation reports them.

    Example:
        >>> to_canonical_names({"method": "FedPAC", "methods": {"FedPAC": {"lr": 0.1}}, "data": {"name": "Digits"}})
        {'method': 'fedpac', 'methods': {'fedpac': {'lr': 0.1}}, 'data': {'name': 'digits'}}
    """
    result = dict(table)
    if "method" in result:
        result["method"] = _to_canonical_name(method_id, result["method"])
    for section, key, find_id in (
        ("data", "name", dataset_id),
        ("participation", "policy", policy_id),
        ("aggregation", "kind", aggregator_id),
    ):
        if isinstance(settings := result.get(section), Mapping) and key in settings:
            result[section] = {**settings, key: _to_canonical_name(find_id, settings[key])}
    if isinstance(participation := result.get("participation"), Mapping):
        result["participation"] = {
            qualified_name(key) if key in POLICIES else key: value for key, value in participation.items()
        }
    if isinstance(methods := result.get("methods"), Mapping):
        tables: dict[str, Any] = {}
        for name, settings in methods.items():
            tables = merge_tables(tables, {_to_canonical_name(method_id, name): _with_canonical_extensions(settings)})
        result["methods"] = tables
    return result


def _with_canonical_extensions(settings: Any) -> Any:
    """Return a method's table with the canonical names of its extensions."""
    if not isinstance(settings, Mapping) or not isinstance(extensions := settings.get("extensions"), list):
        return settings
    return {**settings, "extensions": [_to_canonical_name(extension_id, name) for name in extensions]}


def _to_canonical_name(find_id: Callable[[str], str], name: Any) -> Any:
    """Return the name that ``find_id`` finds; a value that is not a known name is returned as it is."""
    try:
        return find_id(name) if isinstance(name, str) else name
    except PerfedError:
        return name


@contextmanager
def readable(file: Path) -> Iterator[Path]:
    """Raise a one-line error if ``file``, which is read inside the ``with`` block, is missing or damaged."""
    try:
        yield file
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PerfedError(f"{file}: cannot be read: {error}") from None
