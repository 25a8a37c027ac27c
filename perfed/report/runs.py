"""Reading run directories: everything a report shows, checked once, with the place of any error."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perfed.data.reading import checked, parsed, read_json, read_text
from perfed.engine.metrics import main_metric as main_of
from perfed.engine.metrics import recall
from perfed.errors import PerfedError
from perfed.report.client_values import ClientValues, load_clients
from perfed.run.directory import marker_of
from perfed.run.records import Round, Summary


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
    return Run(
        directory=directory,
        method=method,
        seed=seed,
        config_text=text,
        rounds=_load_rounds(rounds) if rounds.is_file() else (),
        clients=load_clients(clients, settings) if clients.is_file() else None,
        summary=found,
    )


def _load_rounds(file: Path) -> tuple[Round, ...]:
    text = read_text(file)
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()  # a killed run may leave half a line; resuming it writes the line again
    return tuple(
        checked(Round, parsed(text, file, line), file, line) for line, text in enumerate(lines, 1) if text.strip()
    )
