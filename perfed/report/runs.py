"""Read run directories: everything that a report shows, checked once, with the place of any error."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, model_validator

from perfed.data.csv_text import unescaped
from perfed.data.reading import checked, parsed, read_json, read_text, reason_of
from perfed.engine.metrics import main_metric as main_of
from perfed.engine.metrics import recall
from perfed.errors import PerfedError
from perfed.run.config_edits import check_edits
from perfed.run.directory import RunDirectory, marker_of
from perfed.run.records import Round, Summary

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class ClientValues:
    """``clients.csv``: arrays ``(clients,)`` float64 in the order of ``ids``, NaN where something is not known.

    Attributes:
        metric: that ``before`` and ``after`` are of: the one that runs are compared by, unless another is asked for.
        before, after: the metric before and after local training.
        rounds: how often the client took part.
        seconds: mean virtual seconds of its replies.
        weights: of the clients in means over them; None where all count alike.
        measured: every metric before and after local training, by name.
        samples: ``n_train`` and ``n_test``; empty where the file lacks them.
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
        """The metric that the summary is about, before or after local training as ``when`` says."""
        return self.before if self.when == "before" else self.after

    @property
    def timed(self) -> bool:
        """Whether the clients have different speeds."""
        return len(np.unique(self.seconds[np.isfinite(self.seconds)])) > 1

    def by(self, metric: str) -> ClientValues | None:
        """The same of another metric; None where it was not measured."""
        if metric == self.metric:
            return self
        found = (self.measured or {}).get(metric)
        return None if found is None else replace(self, metric=metric, before=found[0], after=found[1])


def load_clients(file: Path, settings: Mapping[str, Any]) -> ClientValues | None:
    """What ``clients.csv`` holds of a run with these settings; None where nothing was measured.

    Raises:
        PerfedError: a line that lacks a column, or with something that is no number.
    """
    reader = csv.DictReader(io.StringIO(read_text(file, newline=""), newline=""))
    columns = _columns(reader, file)
    names = [name.removesuffix("_after") for name in columns if name.endswith("_after")]
    evaluation = settings.get("evaluation", {})
    metric = main_of(dict.fromkeys(names), str(evaluation.get("compare_by", "")))
    if metric is None:
        return None
    optional = [name for name in ("rounds", "seconds", "n_train", "n_test") if name in columns]
    needed = [f"{name}_{when}" for name in names for when in ("before", "after")]
    ids: list[str] = []
    values: list[list[float]] = []
    try:
        for row in reader:
            ids.append(unescaped(row["id"]))
            values.append([_number(row[name]) for name in (*needed, *optional)])
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:
        needs = f"needs columns id, {metric}_before and {metric}_after holding numbers or nothing"
        raise PerfedError(f"{file}, line {reader.line_num}: {needs} ({reason_of(error)})") from error
    table = np.array(values, dtype=np.float64).reshape(len(ids), len(needed) + len(optional))
    found = {name: table[:, place] for place, name in enumerate((*needed, *optional))}
    measured = {name: (found[f"{name}_before"], found[f"{name}_after"]) for name in names}
    rounds, seconds = (found.get(name, np.full(len(ids), np.nan)) for name in ("rounds", "seconds"))
    return ClientValues(
        metric,
        tuple(ids),
        *measured[metric],
        rounds,
        seconds,
        when="after" if evaluation.get("when") == "after" else "before",
        weights=found.get("n_test") if evaluation.get("weights") == "samples" else None,
        measured=measured,
        samples={name: found[name] for name in ("n_train", "n_test") if name in found},
    )


def _columns(reader: csv.DictReader[str], file: Path) -> Sequence[str]:
    try:
        return reader.fieldnames or []
    except csv.Error as error:
        raise PerfedError(f"{file}, line 1: is no CSV ({error})") from None


def _number(cell: str) -> float:
    return float("nan") if cell == "" else float(cell)


@dataclass(frozen=True)
class Run:
    """One run directory; ``clients`` and ``summary`` are None while the run is unfinished.

    ``communication``: seconds per exchange, where they were set for a report.
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
    """Return the metric that runs are compared by, and that figures show: ``evaluation.compare_by`` where all say it,
    else accuracy where it was measured, mean squared error or C-index, or the first.
    """
    names = [name for run in runs if run.summary for name in run.summary.spreads]
    names += [name for run in runs for line in run.rounds for name in line.spreads]
    names += [run.clients.metric for run in runs if run.clients]
    asked = {str(run.config.get("evaluation", {}).get("compare_by", "")) for run in runs}
    return main_of(dict.fromkeys(names), asked.pop() if len(asked) == 1 else "")


def load_run(directory: Path) -> Run:
    """Read one run directory; raises :class:`PerfedError` naming the file and line that is wrong."""
    config = directory / "config.toml"
    if not config.is_file():
        kind = "a search (perfed tune)" if marker_of(directory)[0] == "search" else "not a run directory"
        raise PerfedError(f"{directory}: no config.toml, so {kind}")
    files = RunDirectory(directory)
    text = read_text(config)
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{config}: {error}") from error
    method, seed = settings.get("method"), settings.get("seed")
    if not isinstance(method, str) or not isinstance(seed, int):
        raise PerfedError(f"{config}: needs a top-level string 'method' and integer 'seed'")
    rounds, clients, summary = (directory / name for name in ("rounds.jsonl", "clients.csv", "summary.json"))
    found = checked(Summary, read_json(summary), summary) if summary.is_file() else None
    recall(found.own_metrics if found else {})
    run = Run(
        directory=directory,
        method=method,
        seed=seed,
        config_text=text,
        rounds=_load_rounds(rounds) if rounds.is_file() else (),
        clients=load_clients(clients, settings) if clients.is_file() else None,
        summary=found,
    )
    check_edits(files)
    files.refuse_damage()
    return run


def _load_rounds(file: Path) -> tuple[Round, ...]:
    text = read_text(file)
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()  # a killed run may leave half a line; resuming it writes the line again
    return tuple(
        checked(Round, parsed(text, file, line), file, line) for line, text in enumerate(lines, 1) if text.strip()
    )


@dataclass(frozen=True)
class Participation:
    """``used`` ``(rounds, clients)`` says whose replies were used in the rounds ``rounds``; clients are ``ids``."""

    rounds: tuple[int, ...]
    ids: tuple[str, ...]
    used: NDArray[np.bool_]

    @property
    def partial(self) -> bool:
        """Whether some round left somebody out."""
        return not bool(self.used.all())

    @property
    def so_far(self) -> dict[int, float]:
        """Share of the clients that have been used by the end of each round."""
        shares = np.maximum.accumulate(self.used, axis=0).mean(1)
        return dict(zip(self.rounds, shares.tolist(), strict=True))

    @property
    def everybody_at_the_end(self) -> bool:
        """Whether the last round used everybody and some round before did not."""
        return self.partial and bool(self.used[-1].all())


def participation(run: Run) -> Participation | None:
    """That of a finished run; None where a round does not say it."""
    if run.clients is None or not run.rounds:
        return None
    place = {name: number for number, name in enumerate(run.clients.ids)}
    used = np.zeros((len(run.rounds), len(place)), dtype=bool)
    with (run.directory / "rounds.jsonl").open(encoding="utf-8") as file:
        for row, text in zip(range(len(run.rounds)), file, strict=False):
            there = json.loads(text).get("participants")
            if not isinstance(there, list) or not all(isinstance(name, str) for name in there):
                return None
            used[row, [place[name] for name in there if name in place]] = True
    return Participation(tuple(line.round for line in run.rounds), run.clients.ids, used)


class Held(BaseModel):
    """What a client holds; ``classes`` and ``domains`` count its training rows of each."""

    rows: dict[str, int]
    inputs: int = 0
    classes: list[int] = []
    domains: list[int] = []
    columns: dict[str, int] = {}


class Holdings(BaseModel):
    """Every client of a run; ``data`` is the same for the same data only, ``doubts`` are about them, a line each."""

    data: str
    classes: list[str]
    domains: list[str]
    doubts: list[str] = []
    clients: dict[str, Held]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for held in self.clients.values():
            for counts, names in ((held.classes, self.classes), (held.domains, self.domains)):
                if counts and len(counts) != len(names):
                    raise ValueError("a client has a number for every class and domain, or none")
        return self


def holdings_of(run: Run) -> Holdings | None:
    """Who held what in a run; None where it did not keep that, as older ones, or where it cannot be read."""
    file = Path(run.directory) / "federation.json"
    try:
        return Holdings.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def first_holdings(runs: Sequence[Run]) -> tuple[Run, Holdings] | None:
    """Those of the first run that kept them."""
    return next(((run, found) for run in runs if (found := holdings_of(run)) is not None), None)


def with_communication(run: Run, seconds: float) -> Run:
    """``run`` as if every exchange had cost ``seconds``: virtual times of rounds, targets and clients move.

    Who is used does not depend on a cost that all replies have, except under a deadline.

    Raises:
        PerfedError: a cost that is negative or not finite, a run under a deadline, or one that did not keep the number
            of exchanges of its rounds.
    """
    if not (isfinite(seconds) and seconds >= 0):
        raise PerfedError(f"--communication must be a finite number, at least 0 (given: {seconds})")
    settings = run.config
    more = seconds - settings.get("clock", {}).get("communication", 0.0)
    if settings.get("participation", {}).get("policy") == "deadline":
        raise PerfedError(f"{run.directory}: under a deadline communication changes who is used; run it again")
    later, exchanges, rounds = {}, 0, []
    for number, line in enumerate(run.rounds, 1):
        if line.round != number:
            raise PerfedError(f"{run.directory}: rounds.jsonl lacks round {number}")
        if line.exchanges is None or line.virtual_time is None:
            raise PerfedError(f"{run.directory}: rounds.jsonl lacks exchanges or virtual_time in round {line.round}")
        exchanges += line.exchanges
        later[line.round] = more * exchanges
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
        clients = replace(clients, seconds=clients.seconds + more)
    return replace(run, rounds=tuple(rounds), summary=summary, clients=clients, communication=seconds)
