"""Reading run directories: everything a report shows, checked once, with the place of any error."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from perfed.engine.metrics import main_metric as main_of
from perfed.engine.metrics import recall
from perfed.errors import PerfedError
from perfed.report.client_values import ClientValues, load_clients, read_text

Checked = TypeVar("Checked", bound=BaseModel)


def _or_nan(value: Any) -> Any:
    return float("nan") if value is None else value


# JSON has no NaN or infinity: a loss that became one is written as null.
Number = Annotated[float, BeforeValidator(_or_nan)]


class Spread(BaseModel):
    """How one metric is spread over the clients; accuracy as a fraction of 1. Older results have no ``p90``."""

    mean: Number
    std: Number
    min: Number
    p10: Number
    p90: Number | None = None
    max: Number


class _Measured(BaseModel):
    metrics: dict[str, Spread] | None = None
    accuracy: Spread | None = None

    @property
    def spreads(self) -> dict[str, Spread]:
        """Every metric by name, accuracy first."""
        first = {"accuracy": self.accuracy} if self.accuracy else {}
        return first | (self.metrics or {})


class Round(_Measured):
    """One line of ``rounds.jsonl``; metrics only in the rounds that were evaluated."""

    round: int
    training_seconds: float | None = None
    virtual_time: float | None = None
    exchanges: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None


class Target(BaseModel):
    """When a run first reached a mean accuracy, a fraction of 1; None where it never did."""

    accuracy: float
    round: int | None
    virtual_time: float | None
    training_seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None


class Summary(_Measured):
    """``summary.json`` of a finished run."""

    method: str
    dataset: str
    seed: int
    rounds: int
    wall_seconds: float
    training_seconds: float | None = None
    virtual_time: float | None = None
    targets: list[Target] | None = None
    domains: dict[str, dict[str, Number]] = {}
    domain_samples: dict[str, int] = {}
    untrained_domains: list[str] = []
    settings: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    notes: list[str] = []
    versions: dict[str, Any] = {}
    oracle_accuracy: float | None = None
    evaluation: dict[str, Any] = {}
    own_metrics: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Run:
    """One run directory; ``clients`` and ``summary`` are None while the run is unfinished.

    ``communication``: seconds per exchange, where they were set anew for a report.
    """

    directory: Path
    method: str
    seed: int
    config_text: str
    rounds: tuple[Round, ...]
    clients: ClientValues | None
    summary: Summary | None
    communication: float | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The tables of ``config.toml``."""
        return tomllib.loads(self.config_text)

    @property
    def clocked(self) -> bool:
        """Whether virtual time is seconds: without a clock it is the number of rounds."""
        return any(line.virtual_time is not None and line.virtual_time != line.round for line in self.rounds)

    @property
    def snapshot_files(self) -> list[Path]:
        """The snapshots' files, earliest round first."""
        return sorted((self.directory / "snapshots").glob("round-*.npz"))

    @property
    def snapshot_split(self) -> str:
        """Whose samples the snapshots show: ``train`` or ``test``."""
        return str(self.config.get("snapshots", {}).get("split", "train"))

    @property
    def combination_files(self) -> list[Path]:
        """The files with weights of combined heads, earliest round first."""
        return sorted((self.directory / "combination").glob("round-*.npz"))

    @property
    def loss_files(self) -> list[Path]:
        """The files with losses of local epochs, earliest round first."""
        return sorted((self.directory / "losses").glob("round-*.npz"))


def methods_of(runs: Sequence[Run]) -> list[str]:
    """The methods' names, each once, in the order in which they first appear."""
    return list(dict.fromkeys(run.method for run in runs))


def reported(runs: Sequence[Run]) -> str:
    """Which numbers the summaries hold: of which models, when, on what; empty where no run says it or they differ."""
    found = {reported_by(run.summary.evaluation) for run in runs if run.summary and run.summary.evaluation}
    return found.pop() if len(found) == 1 else ""


def reported_by(settings: Mapping[str, Any]) -> str:
    """Which numbers a run with this ``[evaluation]`` table reports."""
    last = int(settings["last"])
    rounds = "last round" if last == 1 else f"mean of the last {last} evaluated rounds"
    who = "" if settings["who"] == "all" else "participants, "
    weights = ", mean weighted by samples" if settings.get("weights") == "samples" else ""
    return f"{who}{settings['when']} local training, {rounds}, {settings['split']} data{weights}"


def main_metric(runs: Sequence[Run]) -> str | None:
    """The metric that the figures show: accuracy where it was measured, mean squared error or C-index, or the first."""
    names = [name for run in runs if run.summary for name in run.summary.spreads]
    names += [name for run in runs for line in run.rounds for name in line.spreads]
    names += [run.clients.metric for run in runs if run.clients]
    return main_of(dict.fromkeys(names))


def load_run(directory: Path) -> Run:
    """Read one run directory; raises :class:`PerfedError` naming the file and line that is wrong."""
    config = directory / "config.toml"
    if not config.is_file():
        kind = "a search (perfed tune)" if (directory / "search.toml").is_file() else "not a run directory"
        raise PerfedError(f"{directory}: no config.toml, so {kind}")
    text = read_text(config)
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{config}: {error}") from error
    method, seed = settings.get("method"), settings.get("seed")
    if not isinstance(method, str) or not isinstance(seed, int):
        raise PerfedError(f"{config}: needs a top-level string 'method' and integer 'seed'")
    rounds, clients, summary = (directory / name for name in ("rounds.jsonl", "clients.csv", "summary.json"))
    found = _parsed(Summary, read_text(summary), summary) if summary.is_file() else None
    recall(found.own_metrics if found else {})
    return Run(
        directory=directory,
        method=method,
        seed=seed,
        config_text=text,
        rounds=_load_rounds(rounds) if rounds.is_file() else (),
        clients=load_clients(clients, settings) if clients.is_file() else None,
        summary=found,
    )


def _parsed(model: type[Checked], text: str, file: Path, line: int | None = None) -> Checked:
    """``text``, which is line ``line`` of ``file`` or all of it, as a checked ``model``."""
    try:
        return model.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise PerfedError(f"{file}, line {line or error.lineno}: not JSON: {error.msg}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = f"{file}, line {line}" if line else f"{file}"
        key = ".".join(str(part) for part in first["loc"])
        raise PerfedError(f"{place}: {key}: {first['msg']}") from error


def _load_rounds(file: Path) -> tuple[Round, ...]:
    text = read_text(file)
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()  # a killed run may leave half a line; resuming it writes the line again
    return tuple(_parsed(Round, text, file, line) for line, text in enumerate(lines, 1) if text.strip())
