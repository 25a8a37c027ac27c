"""The metric during training, against rounds, time or bytes, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import metric_of
from perfed.plugins import bare_name
from perfed.report.run_results import RunResults, list_methods
from perfed.run.records import Round

Positions = dict[int, float]
"""The position of each round on an axis, by its number."""


@dataclass(frozen=True)
class Axis:
    """A measure of the progress of training.

    Attributes:
        button: the text of the button that selects the axis.
        title: the title of the axis, with its unit.
        positions: a function that returns the positions of a run's rounds; ``None`` if a round lacks the value.
    """

    button: str
    title: str
    positions: Callable[[Sequence[Round]], Positions | None]


@dataclass(frozen=True)
class Curve:
    """The values of a method in the rounds that were evaluated with all its seeds.

    Attributes:
        method: the name of the method.
        rounds: the numbers of the rounds.
        x: the mean position on each axis over the seeds, ``(rounds,)``, by the axis's button.
        values: the values ``(seeds, rounds)`` in the unit of the figure.
    """

    method: str
    rounds: tuple[int, ...]
    x: Mapping[str, NDArray[np.float64]]
    values: NDArray[np.float64]


def _rounds(lines: Sequence[Round]) -> Positions:
    return {line.round: float(line.round) for line in lines}


def _virtual_time(lines: Sequence[Round]) -> Positions | None:
    return _require_all({line.round: line.virtual_time for line in lines})


def _wall_time(lines: Sequence[Round]) -> Positions | None:
    return _require_all({line.round: line.training_seconds for line in lines})


def _sent_megabytes(lines: Sequence[Round]) -> Positions | None:
    """Return the bytes sent up and down since the start, in MB."""
    up, down = (
        _require_all({line.round: line.bytes_up for line in lines}),
        _require_all({line.round: line.bytes_down for line in lines}),
    )
    if up is None or down is None:
        return None
    return dict(zip(up, accumulate((up[number] + down[number]) / 1e6 for number in up), strict=True))


def _require_all(values: Mapping[int, float | None]) -> Positions | None:
    """Return the values as floats; ``None`` if one is missing."""
    present = {number: float(value) for number, value in values.items() if value is not None}
    return present if len(present) == len(values) else None


ROUNDS = Axis("Rounds", "Round", _rounds)
VIRTUAL_TIME = Axis("Virtual time", "Virtual time (s)", _virtual_time)
AXES = (
    ROUNDS,
    VIRTUAL_TIME,
    Axis("Wall time", "Wall time (s)", _wall_time),
    Axis("Bytes", "Sent up and down (MB)", _sent_megabytes),
)


def find_axes(runs: Sequence[RunResults], metric: str) -> list[Axis]:
    """Return the axes for which all evaluated runs have values; virtual time is first, and requires a clock."""
    evaluated = [run for run in runs if any(metric in line.spreads for line in run.rounds)]
    axes = [axis for axis in AXES if all(axis.positions(run.rounds) is not None for run in evaluated)]
    if VIRTUAL_TIME in axes:
        axes.remove(VIRTUAL_TIME)
        if any(run.has_clock for run in evaluated):
            axes.insert(0, VIRTUAL_TIME)
    return axes if evaluated else []


def metric_curves(runs: Sequence[RunResults], metric: str, field: str = "mean", main: str = "") -> list[Curve]:
    """Return a curve for each evaluated method.

    Args:
        runs: the runs of all methods and seeds. Methods with a round that lacks the field are left out.
        metric: the metric.
        field: the field of the metric's spread over the clients: ``mean``, ``p10``, ...
        main: the metric that all runs have, for the axes; if empty, ``metric``.
    """

    def values(run: RunResults) -> Positions:
        spreads = {line.round: line.spreads[metric] for line in run.rounds if metric in line.spreads}
        fields = _require_all({number: getattr(spread, field) for number, spread in spreads.items()})
        return {} if fields is None else {n: metric_of(metric).scale * value for n, value in fields.items()}

    return _build_curves(runs, main or metric, values)


def list_further_metrics(runs: Sequence[RunResults], main: str) -> list[str]:
    """Return the metrics in the settings of the runs, except the main metric."""
    names = dict.fromkeys(
        bare_name(n) for run in runs if run.summary for n in run.summary.evaluation.get("metrics", ())
    )
    return [name for name in names if name != main]


def used_curves(runs: Sequence[RunResults], metric: str) -> list[Curve]:
    """Return curves of the percentage of clients that have been used so far; none if all rounds used all clients."""

    def values(run: RunResults) -> Positions:
        shares = {} if run.participation is None else run.participation.used_shares
        return {number: 100 * share for number, share in shares.items()}

    curves = _build_curves(runs, metric, values)
    return curves if any((curve.values[:, 0] < 100).any() for curve in curves) else []


def _build_curves(runs: Sequence[RunResults], metric: str, values: Callable[[RunResults], Positions]) -> list[Curve]:
    axes, curves = find_axes(runs, metric), []
    for method in list_methods(runs):
        seeds = [(run, by_round) for run in runs if run.method == method and (by_round := values(run))]
        numbers = sorted(set.intersection(*(set(by_round) for _, by_round in seeds))) if seeds else []
        if numbers:
            x = {axis.button: _average_positions(axis, [run for run, _ in seeds], numbers) for axis in axes}
            table = np.array([[by_round[number] for number in numbers] for _, by_round in seeds])
            curves.append(Curve(method, tuple(numbers), x, table))
    return curves


def _average_positions(axis: Axis, runs: Sequence[RunResults], numbers: Sequence[int]) -> NDArray[np.float64]:
    positions = [axis.positions(run.rounds) or {} for run in runs]
    return np.array([float(np.mean([by_round[number] for by_round in positions])) for number in numbers])


def oracle(runs: Sequence[RunResults]) -> float | None:
    """Return the mean accuracy of the Bayes classifier; ``None`` if the runs do not have it."""
    accuracies = [run.summary.oracle_accuracy for run in runs if run.summary]
    values = [value for value in accuracies if value is not None]
    return float(np.mean(values)) if values else None
