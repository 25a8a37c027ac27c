"""The results of a run: the files of its directory that reports use, each read and checked once."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from sys import intern
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, model_validator

from perfed.data.csv_text import unescape_cell
from perfed.data.reading import checked, decode_text, parse_json, read_bytes, read_json, reason_of
from perfed.engine.metrics import main_metric as choose_metric
from perfed.engine.metrics import register_described_metrics
from perfed.errors import PerfedError
from perfed.report.run_predictions import RunPredictions
from perfed.run.config_edits import check_edits
from perfed.run.directory import RunDirectory, read_marker
from perfed.run.predictions import FOLDER, list_files, parse
from perfed.run.records import Round, Summary

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class ClientValues:
    """The content of ``clients.csv``: arrays ``(clients,)`` float64 in the order of ``ids``, NaN for missing values.

    Attributes:
        metric: the name of the metric of ``before`` and ``after``: by default the one by which runs are compared.
        before, after: the metric before and after local training.
        rounds: the number of rounds in which the client took part.
        seconds: the mean virtual time of its replies in seconds.
        when: which of the two is reported, ``before`` or ``after``.
        weights: the weights of the clients in means over them; ``None`` if all are equal.
        measured: every metric before and after local training, by name.
        samples: ``n_train`` and ``n_test``; empty if the file lacks them.
    """

    metric: str
    ids: tuple[str, ...]
    before: Numbers
    after: Numbers
    rounds: Numbers
    seconds: Numbers
    when: str = "before"
    weights: Numbers | None = None
    measured: Mapping[str, tuple[Numbers, Numbers]] | None = None
    samples: Mapping[str, Numbers] | None = None

    @property
    def reported(self) -> Numbers:
        """The metric that the summary reports, before or after local training."""
        return self.before if self.when == "before" else self.after

    @property
    def has_speeds(self) -> bool:
        """Whether the clients have different speeds."""
        return len(np.unique(self.seconds[np.isfinite(self.seconds)])) > 1

    def select_metric(self, metric: str) -> ClientValues | None:
        """Return the values with another metric; ``None`` if it was not measured."""
        if metric == self.metric:
            return self
        moments = (self.measured or {}).get(metric)
        return None if moments is None else replace(self, metric=metric, before=moments[0], after=moments[1])


def load_clients(file: Path, settings: Mapping[str, Any], content: bytes | None = None) -> ClientValues | None:
    """Return the content of the ``clients.csv`` of a run; ``None`` if the file contains no metric.

    Args:
        file: the file.
        settings: the settings of the run.
        content: the content of the file, if it was read before.

    Raises:
        PerfedError: a line lacks a column, or a value is not a number.
    """
    text = decode_text(read_bytes(file) if content is None else content, file, newline="")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = _read_header(reader, file)
    names = [name.removesuffix("_after") for name in columns if name.endswith("_after")]
    evaluation = settings.get("evaluation", {})
    metric = choose_metric(dict.fromkeys(names), str(evaluation.get("compare_by", "")))
    if metric is None:
        return None
    optional = [name for name in ("rounds", "seconds", "n_train", "n_test") if name in columns]
    needed = [f"{name}_{when}" for name in names for when in ("before", "after")]
    ids: list[str] = []
    values: list[list[float]] = []
    try:
        for row in reader:
            ids.append(intern(unescape_cell(row["id"])))  # runs have the same ids: a single string for each
            values.append([_parse_cell(row[name]) for name in (*needed, *optional)])
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:
        needs = f"needs columns id, {metric}_before and {metric}_after holding numbers or nothing"
        raise PerfedError(f"{file}, line {reader.line_num}: {needs} ({reason_of(error)})") from error
    table = np.array(values, dtype=np.float64).reshape(len(ids), len(needed) + len(optional))
    arrays = {name: table[:, column] for column, name in enumerate((*needed, *optional))}
    measured = {name: (arrays[f"{name}_before"], arrays[f"{name}_after"]) for name in names}
    rounds, seconds = (arrays.get(name, np.full(len(ids), np.nan)) for name in ("rounds", "seconds"))
    return ClientValues(
        metric,
        tuple(ids),
        *measured[metric],
        rounds,
        seconds,
        when="after" if evaluation.get("when") == "after" else "before",
        weights=arrays.get("n_test") if evaluation.get("weights") == "samples" else None,
        measured=measured,
        samples={name: arrays[name] for name in ("n_train", "n_test") if name in arrays},
    )


def _read_header(reader: csv.DictReader[str], file: Path) -> Sequence[str]:
    try:
        return reader.fieldnames or []
    except csv.Error as error:
        raise PerfedError(f"{file}, line 1: is no CSV ({error})") from None


def _parse_cell(cell: str) -> float:
    return float("nan") if cell == "" else float(cell)


@dataclass(frozen=True)
class RunResults:
    """The results of one run, which verdict, warnings, tables and pages share; :func:`load_run` reads them.

    Attributes:
        directory: the directory of the run.
        method, seed: the method and seed of the run.
        config_text: the content of ``config.toml``.
        rounds: the lines of ``rounds.jsonl``.
        clients: the content of ``clients.csv``; ``None`` while the run is unfinished.
        summary: the content of ``summary.json``; ``None`` while the run is unfinished.
        communication: the seconds per exchange, if they were changed for a report.
        participation: which clients were used in which rounds; ``None`` if the run is unfinished or a round lacks it.
        data: the checksum of the run's data (:class:`FederationData`); ``None`` if the run has none.
        federation_text: the content of ``federation.json``. Unlike the parsed content it takes little memory, and runs
            with the same data share it.
        blend: the weights of a blend.
        predictions: the predictions of the reported evaluations.
    """

    directory: Path
    method: str
    seed: int
    config_text: str
    rounds: tuple[Round, ...]
    clients: ClientValues | None
    summary: Summary | None
    communication: float | None = None
    participation: Participation | None = None
    data: str | None = None
    federation_text: str | None = None
    blend: BlendWeights | None = None
    predictions: RunPredictions = field(default_factory=RunPredictions)

    @cached_property
    def federation_data(self) -> FederationData | None:
        """The content of ``federation.json``; ``None`` if the run has none."""
        return None if self.federation_text is None else _parse_federation(self.federation_text.encode())

    @property
    def reported_evaluations(self) -> int:
        """The number of evaluations at the end over which the reported metrics are averaged."""
        return int(self.summary.evaluation.get("last", 1)) if self.summary else 1

    def predictions_by(self, metric: str) -> RunPredictions:
        """Return the predictions, reduced to a metric.

        If it is not the run's main metric, the files with the predictions are read again.
        """
        if not self.predictions.evaluations or metric == self.predictions.metric:
            return self.predictions
        evaluations = map(parse, list_files(self.directory, self.reported_evaluations))
        return RunPredictions.from_evaluations(evaluations, self.method, metric)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings in ``config.toml``."""
        return tomllib.loads(self.config_text)

    @property
    def has_clock(self) -> bool:
        """Whether virtual time is in seconds; without a clock it is the number of rounds."""
        return any(line.virtual_time is not None and line.virtual_time != line.round for line in self.rounds)

    @property
    def snapshot_split(self) -> str:
        """The split of the samples in the snapshots, ``train`` or ``test``."""
        return str(self.config.get("snapshots", {}).get("split", "train"))

    def list_arrays(self, folder: str) -> list[Path]:
        """Return the files with arrays of rounds in a folder (``snapshots``, ``combination``, ``losses``), in order."""
        return sorted((self.directory / folder).glob("round-*.npz"))


def list_methods(runs: Sequence[RunResults]) -> list[str]:
    """Return the names of the methods, each once, in the order in which they first appear."""
    return list(dict.fromkeys(run.method for run in runs))


def describe_reported_values(runs: Sequence[RunResults]) -> str:
    """Return which values all summaries report (:func:`describe_evaluation`); empty if the runs differ."""
    descriptions = {
        describe_evaluation(run.summary.evaluation) for run in runs if run.summary and run.summary.evaluation
    }
    return descriptions.pop() if len(descriptions) == 1 else ""


def describe_evaluation(settings: Mapping[str, Any]) -> str:
    """Return a text on the values that runs with these ``[evaluation]`` settings report: clients, rounds and rows."""
    last = int(settings["last"])
    rounds = "last round" if last == 1 else f"mean of the last {last} evaluated rounds"
    who = "" if settings["who"] == "all" else "participants, "
    weights = ", mean weighted by samples" if settings.get("weights") == "samples" else ""
    return f"{who}{settings['when']} local training, {rounds}, {settings['split']} data{weights}"


def main_metric(runs: Sequence[RunResults]) -> str | None:
    """Return the metric by which runs are compared, and which figures show; ``None`` if nothing was measured.

    This is ``evaluation.compare_by`` if all runs have the same setting and it was measured; otherwise accuracy, mean
    squared error or C-index, whichever was measured, or the first metric.
    """
    names = [name for run in runs if run.summary for name in run.summary.spreads]
    names += [name for run in runs for line in run.rounds for name in line.spreads]
    names += [run.clients.metric for run in runs if run.clients]
    settings = {str(run.config.get("evaluation", {}).get("compare_by", "")) for run in runs}
    return choose_metric(dict.fromkeys(names), settings.pop() if len(settings) == 1 else "")


def load_run(directory: Path) -> RunResults:
    """Read the results of a run; each of its files is read once.

    Arrays of rounds that are only drawn (:meth:`RunResults.list_arrays`) are compared with their checksums, and read
    again when they are drawn.

    Raises:
        PerfedError: a file cannot be read or has changed since it was written; the message names it.
    """
    config, summary_file = directory / "config.toml", directory / "summary.json"
    if not config.is_file():
        kind = "a search (perfed tune)" if read_marker(directory)[0] == "search" else "not a run directory"
        raise PerfedError(f"{directory}: no config.toml, so {kind}")
    contents = {name: read_bytes(directory / name) for name in _FILES if (directory / name).is_file()}
    files = RunDirectory(directory, contents)
    text = decode_text(contents["config.toml"], config)
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{config}: {error}") from error
    method, seed = settings.get("method"), settings.get("seed")
    if not isinstance(method, str) or not isinstance(seed, int):
        raise PerfedError(f"{config}: needs a top-level string 'method' and integer 'seed'")
    content = contents.get("summary.json")
    summary = None if content is None else checked(Summary, read_json(summary_file, content), summary_file)
    register_described_metrics(summary.own_metrics if summary else {})
    table = contents.get("clients.csv")
    clients = None if table is None else load_clients(directory / "clients.csv", settings, table)
    rounds, participation = _parse_rounds(directory / "rounds.jsonl", contents.get("rounds.jsonl"), clients)
    run = RunResults(directory, method, seed, text, rounds, clients, summary, participation=participation)
    prediction_files = list_files(directory, run.reported_evaluations) if summary else []
    contents |= {f"{FOLDER}/{file.name}": read_bytes(file) for file in prediction_files}  # ``files`` uses them, too
    check_edits(files)
    files.refuse_damage()
    federation = contents.get("federation.json", b"")
    data = _parse_federation(federation)
    evaluations = (parse(file, contents[f"{FOLDER}/{file.name}"]) for file in prediction_files)
    return replace(
        run,
        data=None if data is None else data.data,
        federation_text=None if data is None else intern(federation.decode()),
        blend=_parse_blend(contents.get("blend.json")),
        predictions=RunPredictions.from_evaluations(evaluations, method, main_metric([run])),
    )


_FILES = ["config.toml", "version.json", "summary.json", "clients.csv", "rounds.jsonl", "federation.json", "blend.json"]


def _parse_rounds(
    file: Path, content: bytes | None, clients: ClientValues | None
) -> tuple[tuple[Round, ...], Participation | None]:
    """Return the lines of ``rounds.jsonl``, and which clients they name as participants if all of them do."""
    text = "" if content is None else decode_text(content, file)
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()  # a killed run may leave half a line; resuming it writes the line again
    numbers = {} if clients is None else {site: number for number, site in enumerate(clients.ids)}
    rounds: list[Round] = []
    participant_bits: list[NDArray[np.uint8]] = []
    for line, text in enumerate(lines, 1):
        if text.strip():
            values = parse_json(text, file, line)
            rounds.append(checked(Round, values, file, line))
            names = values.get("participants")
            if isinstance(names, list) and all(isinstance(name, str) for name in names):
                row = np.zeros(len(numbers), dtype=bool)
                row[[numbers[name] for name in names if name in numbers]] = True
                participant_bits.append(np.packbits(row))
    if clients is None or not rounds or len(participant_bits) < len(rounds):
        return tuple(rounds), None
    return tuple(rounds), Participation(tuple(line.round for line in rounds), clients.ids, np.stack(participant_bits))


@dataclass(frozen=True)
class Participation:
    """Which clients' replies were used in which rounds.

    Attributes:
        rounds: the numbers of the rounds.
        ids: the ids of the clients.
        bits: ``(rounds, clients / 8)``, one bit for each client (:func:`numpy.packbits`), which takes little memory.
    """

    rounds: tuple[int, ...]
    ids: tuple[str, ...]
    bits: NDArray[np.uint8]

    @property
    def used(self) -> NDArray[np.bool_]:
        """Whether the reply of a client was used in a round, ``(rounds, clients)``."""
        return np.unpackbits(self.bits, axis=1, count=len(self.ids)).astype(bool)

    @property
    def partial(self) -> bool:
        """Whether some client was not used in some round."""
        return not bool(self.used.all())

    @property
    def used_shares(self) -> dict[int, float]:
        """The share of the clients that have been used by the end of each round, by its number."""
        shares = np.maximum.accumulate(self.used, axis=0).mean(1)
        return dict(zip(self.rounds, shares.tolist(), strict=True))

    @property
    def ends_with_all(self) -> bool:
        """Whether the last round used all clients, and an earlier round did not."""
        return self.partial and bool(self.used[-1].all())


class ClientData(BaseModel):
    """The number of rows of a client by split, of inputs, of training rows by class and domain, and of columns."""

    rows: dict[str, int]
    inputs: int = 0
    classes: list[int] = []
    domains: list[int] = []
    columns: dict[str, int] = {}


class FederationData(BaseModel):
    """The content of ``federation.json``: what the clients of a run have.

    Attributes:
        data: a checksum of the data.
        classes, domains: the names of the classes and domains.
        doubts: a line on each doubt about the data.
        clients: what each client has.
    """

    data: str
    classes: list[str]
    domains: list[str]
    doubts: list[str] = []
    clients: dict[str, ClientData]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for client in self.clients.values():
            for counts, names in ((client.classes, self.classes), (client.domains, self.domains)):
                if counts and len(counts) != len(names):
                    raise ValueError("a client has a number for every class and domain, or none")
        return self


def _parse_federation(content: bytes) -> FederationData | None:
    """Return the content of ``federation.json``; ``None`` if it is damaged, and has no checksum."""
    try:
        return FederationData.model_validate(json.loads(content.decode()))
    except (ValueError, RecursionError):
        return None


def find_federation_data(runs: Sequence[RunResults]) -> tuple[RunResults, FederationData] | None:
    """Return the first run that has ``federation.json``, and its content; ``None`` if no run has it."""
    return next(((run, data) for run in runs if (data := run.federation_data) is not None), None)


@dataclass(frozen=True)
class BlendWeights:
    """The content of ``blend.json``: the weights of a blend's candidates.

    Attributes:
        names: the candidates.
        pooled: the weights that all sites have together ``(K,)``.
        sites: the ids of the sites.
        by_site: the weights of each site ``(sites, K)``.
        keep_local: the sites that use only their best local model, because the blend erred more on their held-out rows.
    """

    names: tuple[str, ...]
    pooled: NDArray[np.float64]
    sites: tuple[str, ...]
    by_site: NDArray[np.float64]
    keep_local: tuple[str, ...] = ()


def _parse_blend(content: bytes | None) -> BlendWeights | None:
    """Return the content of ``blend.json``; ``None`` if the run has none, or it is damaged and has no checksum."""
    try:
        values = json.loads(content or b"")
        names = tuple(values["candidates"])
        by_site = np.array([[float(weights[name]) for name in names] for weights in values["sites"].values()])
        pooled = np.array([float(values["pooled"][name]) for name in names])
        keep_local = tuple(map(str, values.get("keep_own", ())))
        return BlendWeights(names, pooled, tuple(values["sites"]), by_site.reshape(-1, len(names)), keep_local)
    except (ValueError, KeyError, TypeError):
        return None


def change_communication(run: RunResults, seconds: float) -> RunResults:
    """Return the results as if every exchange had taken ``seconds`` for communication.

    The virtual times of rounds, targets and clients are shifted. The clients used remain the same, since all replies
    take equally longer; this does not hold under a deadline.

    Raises:
        PerfedError: ``seconds`` is negative or not finite, the run has a deadline, or its rounds lack the number of
            exchanges.
    """
    if not (isfinite(seconds) and seconds >= 0):
        raise PerfedError(f"--communication must be a finite number, at least 0 (given: {seconds})")
    settings = run.config
    extra = seconds - settings.get("clock", {}).get("communication", 0.0)
    if settings.get("participation", {}).get("policy") == "deadline":
        raise PerfedError(f"{run.directory}: under a deadline communication changes who is used; run it again")
    later, exchanges, rounds = {}, 0, []
    for number, line in enumerate(run.rounds, 1):
        if line.round != number:
            raise PerfedError(f"{run.directory}: rounds.jsonl lacks round {number}")
        if line.exchanges is None or line.virtual_time is None:
            raise PerfedError(f"{run.directory}: rounds.jsonl lacks exchanges or virtual_time in round {line.round}")
        exchanges += line.exchanges
        later[line.round] = extra * exchanges
        rounds.append(line.model_copy(update={"virtual_time": line.virtual_time + later[line.round]}))
    summary, clients = run.summary, run.clients
    if summary is not None:
        targets = summary.targets and [
            target
            if target.round is None or target.virtual_time is None
            else target.model_copy(update={"virtual_time": target.virtual_time + later[target.round]})
            for target in summary.targets
        ]
        total = rounds[-1].virtual_time if rounds else summary.virtual_time
        summary = summary.model_copy(update={"targets": targets, "virtual_time": total})
    if clients is not None:
        clients = replace(clients, seconds=clients.seconds + extra)
    return replace(run, rounds=tuple(rounds), summary=summary, clients=clients, communication=seconds)
