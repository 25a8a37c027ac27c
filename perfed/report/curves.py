"""The metric during training, against rounds, time or bytes, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import metric_of
from perfed.plugins import bare_name
from perfed.report.run_results import RunResults, methods_of
from perfed.run.records import Round

Positions = dict[int, float]
"""Where each round is on an axis, by its number."""


@dataclass(frozen=True)
class Axis:
    """A way to measure how far training has come.

    Attributes:
        button: text of its button.
        title: of the axis, with unit.
        positions: of a run's rounds; None where a line of ``rounds.jsonl`` lacks it.
    """

    button: str
    title: str
    positions: Callable[[Sequence[Round]], Positions | None]


@dataclass(frozen=True)
class Curve:
    """A method in the rounds that all its seeds measured.

    Attributes:
        rounds: their numbers.
        x: mean position on each axis over the seeds, ``(rounds,)``, by the axis's button.
        values: ``(seeds, rounds)``, in the unit that is shown.
    """

    method: str
    rounds: tuple[int, ...]
    x: Mapping[str, NDArray[np.float64]]
    values: NDArray[np.float64]


def _rounds(lines: Sequence[Round]) -> Positions:
    return {line.round: float(line.round) for line in lines}


def _virtual_time(lines: Sequence[Round]) -> Positions | None:
    return _known({line.round: line.virtual_time for line in lines})


def _wall_time(lines: Sequence[Round]) -> Positions | None:
    return _known({line.round: line.training_seconds for line in lines})


def _megabytes(lines: Sequence[Round]) -> Positions | None:
    """Up and down together, since the start."""
    up, down = (
        _known({line.round: line.bytes_up for line in lines}),
        _known({line.round: line.bytes_down for line in lines}),
    )
    if up is None or down is None:
        return None
    return dict(zip(up, accumulate((up[number] + down[number]) / 1e6 for number in up), strict=True))


def _known(values: Mapping[int, float | None]) -> Positions | None:
    known = {number: float(value) for number, value in values.items() if value is not None}
    return known if len(known) == len(values) else None


ROUNDS = Axis("Rounds", "Round", _rounds)
VIRTUAL_TIME = Axis("Virtual time", "Virtual time (s)", _virtual_time)
AXES = (
    ROUNDS,
    VIRTUAL_TIME,
    Axis("Wall time", "Wall time (s)", _wall_time),
    Axis("Bytes", "Sent up and down (MB)", _megabytes),
)


def axes_of(runs: Sequence[RunResults], metric: str) -> list[Axis]:
    """The axes that every evaluated run has kept: virtual time, which comes first, only where clients have a clock."""
    evaluated = [run for run in runs if any(metric in line.spreads for line in run.rounds)]
    found = [axis for axis in AXES if all(axis.positions(run.rounds) is not None for run in evaluated)]
    if VIRTUAL_TIME in found:
        found.remove(VIRTUAL_TIME)
        if any(run.clocked for run in evaluated):
            found.insert(0, VIRTUAL_TIME)
    return found if evaluated else []


def metric_curves(runs: Sequence[RunResults], metric: str, field: str = "mean", main: str = "") -> list[Curve]:
    """One per method that was evaluated: ``field`` of the metric's spread over the clients (``mean``, ``p10``, ...).

    Methods of which a round lacks the field are left out. ``main``: the metric that all have, for the axes.
    """

    def values(run: RunResults) -> Positions:
        spreads = {line.round: line.spreads[metric] for line in run.rounds if metric in line.spreads}
        found = {number: getattr(spread, field) for number, spread in spreads.items()}
        known = _known(found)
        return {} if known is None else {n: metric_of(metric).scale * value for n, value in known.items()}

    return _curves(runs, main or metric, values)


def further_metrics(runs: Sequence[RunResults], main: str) -> list[str]:
    """Those that were asked for beside the one that runs are compared by."""
    asked = dict.fromkeys(
        bare_name(n) for run in runs if run.summary for n in run.summary.evaluation.get("metrics", ())
    )
    return [name for name in asked if name != main]


def used_curves(runs: Sequence[RunResults], metric: str) -> list[Curve]:
    """The percentage of the clients that have been used so far; none where nobody is ever left out."""

    def values(run: RunResults) -> Positions:
        found = run.participation
        return {} if found is None else {number: 100 * share for number, share in found.used_shares.items()}

    curves = _curves(runs, metric, values)
    return curves if any((curve.values[:, 0] < 100).any() for curve in curves) else []


def _curves(runs: Sequence[RunResults], metric: str, values: Callable[[RunResults], Positions]) -> list[Curve]:
    axes, found = axes_of(runs, metric), []
    for method in methods_of(runs):
        own = [(run, of) for run in runs if run.method == method and (of := values(run))]
        numbers = sorted(set.intersection(*(set(of) for _, of in own))) if own else []
        if numbers:
            x = {axis.button: _means(axis, [run for run, _ in own], numbers) for axis in axes}
            table = np.array([[of[number] for number in numbers] for _, of in own])
            found.append(Curve(method, tuple(numbers), x, table))
    return found


def _means(axis: Axis, runs: Sequence[RunResults], numbers: Sequence[int]) -> NDArray[np.float64]:
    positions = [axis.positions(run.rounds) or {} for run in runs]
    return np.array([float(np.mean([of[number] for of in positions])) for number in numbers])


def oracle(runs: Sequence[RunResults]) -> float | None:
    """Mean accuracy of who knows how the data were made, where the runs know it."""
    known = [run.summary.oracle_accuracy for run in runs if run.summary]
    there = [value for value in known if value is not None]
    return float(np.mean(there)) if there else None
