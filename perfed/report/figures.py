"""The figures of a report, as plotly figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.colors import qualitative
from plotly.subplots import make_subplots
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from perfed.engine.metrics import metric_of
from perfed.report.arrays import Combination, Snapshot
from perfed.report.runs import Run, methods_of
from perfed.report.text import axis_title

LIGHT = ("#AEC7E8", "#FFBB78", "#98DF8A", "#FF9896", "#C5B0D5", "#C49C94", "#F7B6D2", "#C7C7C7", "#DBDB8D")
COLOURS = (*qualitative.D3, *LIGHT)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
STAR = {"symbol": "star", "size": 14, "line": {"color": "black", "width": 1.2}}
MAX_SAMPLES = 600
PANELS_PER_ROW = 3
LAYOUT = {
    "template": "plotly_white",
    "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"},
    "margin": {"l": 60, "r": 20, "t": 30, "b": 50},
    "legend": {"itemsizing": "constant"},
    "showlegend": True,
}


def metric_per_client(runs: Sequence[Run], metric: str) -> go.Figure | None:
    """A box with all points per method, before and after local training, the clients of all seeds together.

    None where no client was evaluated.
    """
    figure = new_figure("Method", axis_title(metric))
    for moment, colour in (("before", "#8A97A6"), ("after", COLOURS[0])):
        x: list[str] = []
        y: list[float] = []
        text: list[str] = []
        for run in runs:
            ids, values = _evaluated(run, metric, moment)
            x += [escape(run.method)] * len(ids)
            y += values.tolist()
            text += [f"client {escape(name)}, seed {run.seed}" for name in ids]
        if y:
            points = {"boxpoints": "all", "pointpos": 0, "jitter": 0.5}
            marker = {"color": colour, "size": 4, "opacity": 0.6}
            figure.add_box(x=x, y=y, text=text, name=f"{moment} local training", marker=marker, **points)
    figure.update_layout(boxmode="group", xaxis_type="category")
    return figure if figure.data else None


def sorted_clients(runs: Sequence[Run], metric: str) -> go.Figure | None:
    """Each method's clients of all seeds in ascending order, by the metric that the summary is about.

    Where only some of a method's clients were evaluated, its name says so. None where none was.
    """
    moments = {run.clients.when for run in runs if run.clients}
    moment = f"; {moments.pop()} local training" if len(moments) == 1 else ""
    figure = new_figure(f"Share of the evaluated clients (%), sorted{moment}", axis_title(metric))
    for colour, method, members in by_method(runs):
        known = [run for run in members if run.clients and run.clients.metric == metric]
        values = np.sort(np.concatenate([np.empty(0), *(_evaluated(run, metric)[1] for run in known)]))
        everybody = sum(len(run.clients.ids) for run in known if run.clients)
        if len(values):
            share = 100 * (np.arange(len(values)) + 0.5) / len(values)
            style = {"line": {"color": colour}, "marker": {"size": 4}, "mode": "lines+markers"}
            some = f" ({len(values)} of {everybody} clients)" if len(values) < everybody else ""
            figure.add_scatter(x=share, y=values, name=escape(method) + some, **style)
    return figure if figure.data else None


def metric_by_seconds(runs: Sequence[Run], metric: str) -> go.Figure | None:
    """Every client of all seeds as a point: its metric over the mean virtual seconds of its replies.

    None where no run has clients of different speeds.
    """
    figure = new_figure("Mean virtual seconds of the client's replies", axis_title(metric))
    for colour, method, members in by_method(runs):
        x: list[float] = []
        y: list[float] = []
        text: list[str] = []
        for run in members:
            if run.clients is None or run.clients.metric != metric or not run.clients.timed:
                continue
            known = np.flatnonzero(np.isfinite(run.clients.seconds) & np.isfinite(run.clients.reported))
            x += run.clients.seconds[known].tolist()
            y += in_unit(run.clients.reported[known], metric).tolist()
            text += [f"client {escape(run.clients.ids[i])}, seed {run.seed}" for i in known]
        if x:
            marker = {"color": colour, "size": 6, "opacity": 0.7}
            figure.add_scatter(x=x, y=y, text=text, name=escape(method), mode="markers", marker=marker)
    shown = [seconds for trace in figure.data for seconds in trace.x]
    if shown and min(shown) > 0:
        # Speeds of clients often differ by orders of magnitude; plotly's own labels between powers of ten mislead.
        many = max(shown) >= 100 * min(shown)
        figure.update_xaxes(type="log", dtick=1 if many else "D1", minor={"ticks": "outside"})
    return figure if figure.data else None


def embedded_samples(snapshots: Sequence[Snapshot]) -> go.Figure:
    """t-SNE of each snapshot's samples (at most 600) and anchors together, one panel per round.

    Colour is the class, the marker's shape the client (where there are at most six), a large star an anchor.
    """
    columns = min(len(snapshots), PANELS_PER_ROW)
    rows = -(-len(snapshots) // columns)
    titles = [f"Round {snapshot.round}" if snapshot.round else "Before round 1" for snapshot in snapshots]
    figure = make_subplots(rows, columns, subplot_titles=titles, horizontal_spacing=0.03)
    clients = sorted({str(name) for snapshot in snapshots for name in snapshot.client})
    symbols = dict(zip(clients, SYMBOLS, strict=False)) if len(clients) <= len(SYMBOLS) else {}
    for panel, snapshot in enumerate(snapshots):
        for trace in _panel_traces(snapshot, symbols):
            figure.add_trace(trace, panel // columns + 1, panel % columns + 1)
    figure.update_traces(showlegend=False)
    figure.add_traces(_legend(snapshots, symbols))
    figure.update_xaxes(showticklabels=False, zeroline=False)
    figure.update_yaxes(showticklabels=False, zeroline=False)
    legend = {"orientation": "h", "y": 0, "yanchor": "top", "itemsizing": "constant"}
    margin = {"l": 10, "r": 10, "t": 60, "b": 70}
    return figure.update_layout(LAYOUT | {"legend": legend, "margin": margin, "height": 130 + 350 * rows})


def combination_heat_maps(rounds: Sequence[Combination]) -> go.Figure:
    """The weights of each round as a square: row = client, column = whose head, one panel per round, one scale."""
    columns = min(len(rounds), PANELS_PER_ROW)
    rows = -(-len(rounds) // columns)
    titles = [f"Round {one.round}" for one in rounds]
    figure = make_subplots(rows, columns, subplot_titles=titles, horizontal_spacing=0.08)
    for panel, one in enumerate(rounds):
        names = [escape(name) for name in one.clients]
        picture = go.Heatmap(z=one.weights, x=names, y=names, coloraxis="coloraxis")
        figure.add_trace(picture, panel // columns + 1, panel % columns + 1)
    figure.update_xaxes(type="category", constrain="domain")
    figure.update_yaxes(type="category", autorange="reversed", scaleanchor="x", constrain="domain")
    scale = {"colorscale": "Blues", "cmin": 0, "colorbar": {"title": "weight"}}
    margin = {"l": 40, "r": 20, "t": 60, "b": 40}
    return figure.update_layout(LAYOUT | {"coloraxis": scale, "margin": margin, "height": 80 + 330 * rows})


def _legend(snapshots: Sequence[Snapshot], symbols: Mapping[str, str]) -> list[go.Scatter]:
    """Entries without points: a colour per class, a shape per client, the anchors' star."""
    classes = sorted({int(label) for snapshot in snapshots for label in snapshot.y})
    looks = {f"class {label}": {"color": COLOURS[label % len(COLOURS)]} for label in classes}
    looks |= {f"client {escape(name)}": {"color": "#888", "symbol": mark} for name, mark in symbols.items()}
    if any(snapshot.anchors is not None for snapshot in snapshots):
        looks["anchor"] = STAR | {"color": "white"}
    nothing = {"x": [None], "y": [None], "mode": "markers"}
    return [go.Scatter(name=name, legendgroup=name, marker=look, **nothing) for name, look in looks.items()]


def _panel_traces(snapshot: Snapshot, symbols: Mapping[str, str]) -> list[go.Scatter]:
    """One trace per class, then one for the anchors; none where there are too few points to embed."""
    picked = np.arange(len(snapshot.z))
    if len(picked) > MAX_SAMPLES:
        picked = np.sort(np.random.default_rng(0).choice(picked, MAX_SAMPLES, replace=False))
    y, client = snapshot.y[picked], snapshot.client[picked]
    anchors = np.empty((0, snapshot.z.shape[1])) if snapshot.anchors is None else snapshot.anchors
    anchor_classes = np.flatnonzero(np.isfinite(anchors).all(axis=1))
    points = np.concatenate([snapshot.z[picked], anchors[anchor_classes]])
    if len(points) < 4:
        return []
    positions = _tsne(points)
    samples, stars = positions[: len(picked)], positions[len(picked) :]
    traces = []
    for label in np.unique(y):
        own = y == label
        marker = {
            "color": COLOURS[label % len(COLOURS)],
            "symbol": [symbols.get(str(name), "circle") for name in client[own]],
            "size": 6,
            "opacity": 0.7,
        }
        text = [f"class {label}, client {escape(str(name))}" for name in client[own]]
        traces.append(_points(samples[own], f"class {label}", text, marker))
    if len(stars):
        colours = [COLOURS[label % len(COLOURS)] for label in anchor_classes]
        marker = STAR | {"color": colours}
        traces.append(_points(stars, "anchor", [f"anchor of class {label}" for label in anchor_classes], marker))
    return traces


def _points(xy: NDArray[np.float64], name: str, text: list[str], marker: dict[str, Any]) -> go.Scatter:
    return go.Scatter(
        x=xy[:, 0],
        y=xy[:, 1],
        name=name,
        legendgroup=name,
        text=text,
        hoverinfo="text",
        mode="markers",
        marker=marker,
    )


def _tsne(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Two-dimensional positions of at least four points, the same for the same points."""
    perplexity = min(30.0, (len(points) - 1) / 3)
    init = "pca" if points.shape[1] >= 2 else "random"
    # Few points: a second thread gains nothing, and on a busy machine waiting for it costs many times the work.
    with threadpool_limits(1):
        positions = TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(points)
    return np.asarray(positions, dtype=float)


def new_figure(x_title: str, y_title: str) -> go.Figure:
    """An empty figure with titles of its axes."""
    figure = go.Figure(layout=LAYOUT)
    return figure.update_layout(height=420, xaxis_title=x_title, yaxis_title=escape(y_title))


def by_method(runs: Sequence[Run]) -> list[tuple[str, str, list[Run]]]:
    """(colour, method, its runs): a method has the same colour in every figure."""
    return [
        (COLOURS[number % len(COLOURS)], method, [run for run in runs if run.method == method])
        for number, method in enumerate(methods_of(runs))
    ]


def _evaluated(run: Run, metric: str, moment: str = "") -> tuple[list[str], NDArray[np.float64]]:
    """Ids and values of the clients evaluated "before" or "after" local training; by default, when the summary says."""
    if run.clients is None or run.clients.metric != metric:
        return [], np.empty(0)
    values = {"before": run.clients.before, "after": run.clients.after}.get(moment, run.clients.reported)
    there = np.isfinite(values)
    ids = [name for name, keep in zip(run.clients.ids, there, strict=True) if keep]
    return ids, in_unit(values[there], metric)


def in_unit(values: NDArray[np.float64], metric: str) -> NDArray[np.float64]:
    """The values in the unit that is shown: of accuracies percent."""
    return metric_of(metric).scale * values
