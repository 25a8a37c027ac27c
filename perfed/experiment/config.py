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
from perfed.methods.presets import method_and_policy
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
    """Everything a run depends on, as in an experiment's TOML file; checked as far as it can be without the data.

    Every table is an object of the type that knows what it may hold, but ``training`` and ``methods``: these are what
    methods are made of. Which settings a method has, and what they may be, its class alone says, which may be in a
    module of the user's; that includes local training, where it may allow more or less than others, and what one value
    may be can depend on those of both tables. So their values are checked once, all together, by making the methods,
    and what is made is :attr:`built_method`.
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
        (), description="what rides along: names, or tables of a name and settings", exclude_if=exclude_default(())
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
        exclude_if=lambda given: given is None,
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
            settings = merged(self._table_of(entry(name).base), self._table_of(name))
            own = settings.pop("model", {})
            if not isinstance(own, dict):
                raise PerfedError(f"methods.{name}.model: must be a table (given: {own!r})")
            method = build_method(name, settings, self.training)
            stages = _checked(Stages, {**self.model.explicit_settings, **own}, "model")
            stages.build(num_outputs=1)
            self._built[name] = method, stages
        self.build_participation()
        build_callbacks(self.callbacks)
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of parameters and inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def to_toml(self) -> str:
        """Return the complete experiment as TOML; :func:`read` of it gives the same experiment."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @property
    def built_method(self) -> Method:
        """The method with its settings."""
        return self._built[self.method][0]

    def in_private(self, clients: int, rows: Sequence[int] | None = None) -> PrivateMethod | None:
        """Return the method under ``[privacy]``; ``None`` without the table.

        Args:
            clients: how many there are.
            rows: training rows of each, where they are known.

        Raises:
            PerfedError: something leaves that has no mechanism, before round 1 or later; names it.
        """
        if self.privacy is None:
            return None
        who, secure = self.build_participation(), self.secure_aggregation
        asked = who.count(clients)
        tables = "public" in self.data.options
        if tables:
            check_public_columns(self.data.options)
        found = make_private(
            self.built_method,
            self.privacy,
            self.rounds,
            rows,
            name=self.method,
            policy=who.policy,
            shares=0 if secure is None else secure.needed(asked, asked),
            evaluation=EvaluationPlan(
                self.evaluation.requested_metrics,
                [n for n in range(1, self.rounds + 1) if self.evaluation.is_due(n, self.rounds)],
            ),
        )
        return found if tables else replace(found, notes=(*found.notes, UNCOUNTED_NOTE))

    @property
    def effect(self) -> dict[str, Any]:
        """What a run with the method is made of, defaults included, without names and what is of other methods."""
        method, stages = self._built[self.method]
        names = {"name", "description", "data", "model", "training", "methods"}
        data = {"name": self.data.name, **self.data.options}
        return {**self.model_dump(exclude=names), "data": data, "model": stages.explicit_settings, "method": method}

    def build_model(self, num_outputs: int, words: Sequence[str] = ()) -> Model:
        """Return the model, with the method's own ``model`` table on top; the head gets ``num_outputs``.

        ``words``: what the token ids of the inputs stand for.
        """
        return self._built[self.method][1].build(num_outputs, words)

    def model_for(self, federation: Federation) -> Model:
        """The model as a run on ``federation`` has it: a first layer by columns, where these are shared by name."""
        return split_first_layer(
            self.build_model(federation.num_outputs, federation.words or ()), federation.named_inputs
        )

    def build_participation(self) -> Participation:
        """Return the participation; a preset brings its policy.

        Raises:
            PerfedError: the experiment names another one.
        """
        policy, given = entry(self.method).policy, self.participation.policy
        if policy and given not in ("uniform", policy):
            raise PerfedError(f"participation.policy = '{given}': {self.method} is under '{policy}'; allowed: {policy}")
        return self.participation.with_policy(policy) if policy else self.participation

    @field_serializer("participation", mode="wrap")
    def _write_participation(self, value: Participation, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the settings of the policy also where the method brings it."""
        policy = method_and_policy(self.method)[1]  # of a model of scikit-learn, which is no method, none
        return {**write(value.with_policy(policy) if policy else value), "policy": value.policy}

    def _table_of(self, method: str) -> dict[str, Any]:
        """``[methods.NAME]`` and ``[methods."module:NAME"]`` are of the same method."""
        own: dict[str, Any] = {}
        for name, table in self.methods.items():
            if bare_name(name) == bare_name(method):
                own = merged(own, table)
        return own


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
    """Return an experiment from nested dictionaries; everything that can be checked without the data is.

    Names of methods, extensions, data set and policy may be written in any case.

    Raises:
        PerfedError: an unknown key, method, data set or setting, or a value that is not allowed; names the key.

    Example:
        >>> table = {"method": "fedavg", "rounds": 2, "data": {"name": "digits"}, "model": {"head": "linear"}}
        >>> validate(table).built_method.lr
        0.001
        >>> validate({**table, "rouns": 2})
        Traceback (most recent call last):
        perfed.errors.PerfedError: unknown key 'rouns' (did you mean 'rounds'?); allowed: ...
    """
    check_whole_numbers(table)
    return _checked(Experiment, canonical(table))


def _checked(model: type[_Model], table: Mapping[str, Any], where: str = "") -> _Model:
    try:
        return model.model_validate(dict(table))
    except ValidationError as error:
        raise _problem(error, model, where) from None


def _problem(error: ValidationError, model: type[BaseModel], where: str) -> PerfedError:
    """The first problem; for an unknown key with the keys that its table may hold."""
    detail = error.errors()[0]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, PerfedError):  # says itself where
        return cause
    problem = summarise_validation_error(error, where)
    if detail["type"] != "extra_forbidden":
        return problem
    holder = model
    for part in detail["loc"][:-1]:
        fields = table_fields(holder)
        name = bare_name(str(part))
        kind = fields[name].annotation if name in fields else None
        tables = [of for of in (kind, *get_args(kind)) if isinstance(of, type) and issubclass(of, BaseModel)]
        if not tables:
            return problem
        holder = tables[0]
    allowed = table_fields(holder)
    hint = suggest_name(str(detail["loc"][-1]), allowed)
    return PerfedError(f"{problem}{hint}; allowed: {', '.join(allowed)}")


def shipped_files(folder: str) -> dict[str, Traversable]:
    """Return the TOML files of a folder of this package, by their names without the ending, sorted."""
    found = (item for item in resources.files(f"perfed.experiment.{folder}").iterdir() if item.name.endswith(".toml"))
    return {item.name.removesuffix(".toml"): item for item in sorted(found, key=lambda item: item.name)}


def experiment_names() -> list[str]:
    """Return names of the experiments that come with the package, sorted."""
    return [*shipped_files("shipped")]


def find_experiment(name: str) -> dict[str, Any]:
    """Return the TOML table of a shipped experiment, in any case, or of the file ``name``.

    ``extends = "OTHER"`` takes everything the file does not say from another experiment, or file beside it: tables are
    merged key by key,
    except ``data`` and stages that name their ``kind``, which count as a whole.

    Raises:
        PerfedError: no such experiment, not TOML, or experiments that extend one another in a circle.
    """
    return _extended(name, ())


def _extended(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise PerfedError(f"{name}: extends itself ({' -> '.join((*seen, name))})")
    table = _table(name)
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise PerfedError(f"{name}: extends must be the name of an experiment (given: {base!r})")
    beside = Path(name).parent / base
    if base not in experiment_names() and name not in experiment_names() and beside.is_file():
        base = str(beside)
    return merged(_extended(base, (*seen, name)), table)


def _table(name: str) -> dict[str, Any]:
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
        table = canonical(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{name}: not valid TOML: {error}") from None
    if path.is_file() and isinstance(table.get("data"), dict):
        table["data"] = resolve_paths(table["data"], path.parent)
    return table


def merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables ``base`` with those of ``over`` on top, key by key.

    ``data`` and stages with a ``kind`` count as a whole.
    """
    result = dict(base)
    for key, value in over.items():
        whole = key == "data" or (isinstance(value, dict) and "kind" in value)
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and not whole
        result[key] = merged(base[key], value) if both else value
    return result


def canonical(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``table`` with the names of its methods, extensions, data set, policy and kind of aggregation
    as perfed writes them.

    Tables of a method under two spellings become one, of which what comes later wins. What is not known stays as it
    is: validation says so.

    Example:
        >>> canonical({"method": "FedPAC", "methods": {"FedPAC": {"lr": 0.1}}, "data": {"name": "Digits"}})
        {'method': 'fedpac', 'methods': {'fedpac': {'lr': 0.1}}, 'data': {'name': 'digits'}}
    """
    result = dict(table)
    if "method" in result:
        result["method"] = _known(method_id, result["method"])
    for section, key, known in (
        ("data", "name", dataset_id),
        ("participation", "policy", policy_id),
        ("aggregation", "kind", aggregator_id),
    ):
        if isinstance(found := result.get(section), Mapping) and key in found:
            result[section] = {**found, key: _known(known, found[key])}
    if isinstance(participation := result.get("participation"), Mapping):
        result["participation"] = {
            qualified_name(key) if key in POLICIES else key: value for key, value in participation.items()
        }
    if isinstance(methods := result.get("methods"), Mapping):
        own: dict[str, Any] = {}
        for name, settings in methods.items():
            own = merged(own, {_known(method_id, name): _with_extensions(settings)})
        result["methods"] = own
    return result


def _with_extensions(settings: Any) -> Any:
    """Return a method's table with its extensions as perfed writes them."""
    if not isinstance(settings, Mapping) or not isinstance(extensions := settings.get("extensions"), list):
        return settings
    return {**settings, "extensions": [_known(extension_id, name) for name in extensions]}


def _known(known: Callable[[str], str], name: Any) -> Any:
    try:
        return known(name) if isinstance(name, str) else name
    except PerfedError:
        return name


@contextmanager
def readable(file: Path) -> Iterator[Path]:
    """Say in one line that ``file`` is not what was written: missing, damaged, or with other content."""
    try:
        yield file
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PerfedError(f"{file}: cannot be read: {error}") from None
