"""``clients.csv`` read back: what a run measured at each client."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.csv_text import unescaped
from perfed.data.reading import read_text, reason_of
from perfed.engine.metrics import main_metric as main_of
from perfed.errors import PerfedError

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
