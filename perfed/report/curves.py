"""The metric during training, against rounds, time or bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.colors import hex_to_rgb

from perfed.report.figures import by_method, in_unit, new_figure
from perfed.report.runs import Round, Run
from perfed.report.text import axis_title

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


def metric_curves(runs: Sequence[Run], metric: str) -> go.Figure | None:
    """One line per method: the mean over its seeds, with a band from the lowest to the highest seed.

    Buttons choose the horizontal axis: rounds, and those of virtual time, wall time and bytes that every run has kept;
    virtual time, which is shown first, only where clients have a clock. A point is a round in which all seeds of the
    method were evaluated; its time or bytes are the mean over them. A dashed line shows the oracle's accuracy where the
    runs know it. None where no round was evaluated.
    """
    evaluated = [run for run in runs if any(metric in line.spreads for line in run.rounds)]
    axes = [axis for axis in AXES if all(axis.positions(run.rounds) is not None for run in evaluated)]
    if VIRTUAL_TIME in axes and not any(run.clocked for run in evaluated):
        axes.remove(VIRTUAL_TIME)
    first = VIRTUAL_TIME if VIRTUAL_TIME in axes else ROUNDS
    figure = new_figure(first.title, axis_title(metric))
    horizontal: dict[Axis, list[list[float]]] = {axis: [] for axis in axes}
    for colour, method, members in by_method(runs):
        own = [run for run in members if run in evaluated]
        numbers = _common_rounds(own, metric)
        if not numbers:
            continue
        x = {axis: _means(axis, own, numbers) for axis in axes}
        if len(own) > 1:
            for axis in axes:
                horizontal[axis].append(x[axis] + x[axis][::-1])
        for axis in axes:
            horizontal[axis].append(x[axis])
        _draw(figure, method, colour, x[first], _values(own, metric, numbers))
    if len(axes) > 1:
        figure.update_layout(updatemenus=[_buttons(horizontal, axes.index(first))], margin_t=70)
    _draw_oracle(figure, runs, metric)
    return figure if figure.data else None


def _common_rounds(runs: Sequence[Run], metric: str) -> list[int]:
    each = [{line.round for line in run.rounds if metric in line.spreads} for run in runs]
    return sorted(set.intersection(*each)) if each else []


def _means(axis: Axis, runs: Sequence[Run], numbers: Sequence[int]) -> list[float]:
    positions = [axis.positions(run.rounds) or {} for run in runs]
    return [float(np.mean([of[number] for of in positions])) for number in numbers]


def _values(runs: Sequence[Run], metric: str, numbers: Sequence[int]) -> NDArray[np.float64]:
    """The metric of every run at these rounds, ``(runs, rounds)``."""
    curves = [{line.round: line.spreads[metric].mean for line in run.rounds if metric in line.spreads} for run in runs]
    return in_unit(np.array([[curve[number] for number in numbers] for curve in curves]), metric)


def _draw(figure: go.Figure, method: str, colour: str, x: list[float], values: NDArray[np.float64]) -> None:
    """The method's band, if it has several seeds, and its line."""
    if len(values) > 1:
        figure.add_scatter(
            x=x + x[::-1],
            y=np.concatenate([values.max(0), values.min(0)[::-1]]),
            fill="toself",
            fillcolor=f"rgba{(*hex_to_rgb(colour), 0.15)}",
            mode="none",
            legendgroup=method,
            showlegend=False,
            hoverinfo="skip",
        )
    line = {"name": escape(method), "legendgroup": method, "line": {"color": colour}}
    figure.add_scatter(x=x, y=values.mean(0), mode="lines+markers", marker={"size": 5}, **line)


def _draw_oracle(figure: go.Figure, runs: Sequence[Run], metric: str) -> None:
    oracles = [run.summary.oracle_accuracy for run in runs if run.summary]
    known = [value for value in oracles if value is not None]
    if metric == "accuracy" and known:
        oracle = {"line_dash": "dash", "line_color": "#555", "annotation_text": "oracle"}
        figure.add_hline(y=100 * float(np.mean(known)), annotation_position="bottom right", **oracle)


def _buttons(horizontal: Mapping[Axis, list[list[float]]], active: int) -> dict[str, object]:
    """A row of buttons above the plot; each gives every trace the positions on its axis."""
    buttons = [
        {
            "label": axis.button,
            "method": "update",
            "args": [{"x": x}, {"xaxis.title.text": axis.title, "xaxis.autorange": True}],
        }
        for axis, x in horizontal.items()
    ]
    place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "direction": "right"}
    return {"type": "buttons", "active": active, "buttons": buttons, "showactive": True, **place}
