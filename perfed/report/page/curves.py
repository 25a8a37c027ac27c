"""Sections with curves: metrics over rounds, time and bytes; losses over local epochs; and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import metric_of
from perfed.errors import PerfedError
from perfed.methods.titles import display_name
from perfed.report.calibration import Calibration, calibrate_methods
from perfed.report.curves import (
    VIRTUAL_TIME,
    Axis,
    Curve,
    find_axes,
    list_further_metrics,
    metric_curves,
    oracle,
    used_curves,
)
from perfed.report.page import svg
from perfed.report.page.html import (
    build_grid,
    build_note,
    build_radio,
    build_section,
    build_switched_panels,
    build_table,
    wrap_figure,
)
from perfed.report.page.page_data import ReportData, method_file_name, spread_indices
from perfed.report.page.style import Look, assign_looks, css_colour
from perfed.report.run_results import RunResults
from perfed.report.snapshots import load_losses
from perfed.report.text import TextTable, directed_title
from perfed.run.callbacks.targets import format_percent

READ_CURVES = (
    "Line: mean over the seeds; band: lowest to highest seed. A zigzag: the axis does not begin at 0. Values of the "
    "first rounds are cut off if the later ones could not be distinguished otherwise."
)
MOST_POINTS, MOST_HINTS = 60, 15  # per line
EARLY = 0.25  # share of the rounds that may be cut off
NARROW = 0.6  # the early rounds are cut off if the later ones have less than this share of the range
DECADES = 100.0  # ratio of the largest to the smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class Kind:
    """A quantity on the vertical axis.

    Attributes:
        name: the name in file names.
        title: the title of the axis.
        unit: the unit after a value.
        curves: the curves of the methods.
    """

    name: str
    title: str
    unit: str
    curves: list[Curve]


@dataclass(frozen=True)
class Curves:
    """The learning curves of the runs of a report."""

    report: ReportData
    metric: str

    @cached_property
    def kinds(self) -> list[Kind]:
        """The available quantities: mean, 10 % worst clients, further metrics, and the share of clients used."""
        runs, metric_spec = self.report.runs, self.report.metric_spec
        title, unit = directed_title(self.metric), f" {metric_spec.unit}".rstrip()
        shares = used_curves(runs, self.metric)
        kinds = [
            Kind("mean", f"{title}, mean over the clients", unit, metric_curves(runs, self.metric)),
            Kind(
                "tenth", f"{title}, 10 % worst clients", unit, metric_curves(runs, self.metric, metric_spec.tenth_worst)
            ),
            *map(self._build_further_kind, list_further_metrics(runs, self.metric)),
            Kind("used", "Clients used so far (%)", " %", shares),
        ]
        return [kind for kind in kinds if kind.curves]

    def _build_further_kind(self, name: str) -> Kind:
        unit = f" {metric_of(name).unit}".rstrip()
        curves = metric_curves(self.report.runs, name, main=self.metric)
        return Kind(name, f"{directed_title(name)}, mean over the clients", unit, curves)

    @cached_property
    def axes(self) -> dict[str, tuple[Axis, bool]]:
        """The horizontal axes and whether they are logarithmic, by button text; the first is the default."""
        axes: dict[str, tuple[Axis, bool]] = {}
        for axis in find_axes(self.report.runs, self.metric):
            ends = [curve.x[axis.button] for kind in self.kinds for curve in kind.curves]
            positive = np.concatenate([x[x > 0] for x in ends] or [np.ones(1)])
            ratio = float(positive.max() / positive.min()) if len(positive) else 1.0
            if axis is VIRTUAL_TIME and ratio >= DECADES:
                axes[f"{axis.button}, log"] = (axis, True)
            axes[axis.button] = (axis, False)
        return axes

    @cached_property
    def ringed(self) -> set[str]:
        """The methods whose last round used all clients, unlike an earlier round."""
        first = {method: self.report.members(method)[0] for method in self.report.methods}
        participations = {method: run.participation for method, run in first.items()}
        return {
            method
            for method, participation in participations.items()
            if participation is not None and participation.ends_with_all
        }

    def drawn(self, kind: Kind, axis: Axis, log: bool) -> str:
        """Return a figure of ``kind`` against ``axis``."""
        looks = self.report.looks
        entries, top = svg.draw_legend([(display_name(curve.method), looks[curve.method]) for curve in kind.curves])
        frame = self._create_axes(kind, axis, log, top + 22)
        styled_curves = [(curve, looks[curve.method]) for curve in kind.curves]
        below, above = draw_curves(styled_curves, axis, frame, kind.unit)
        parts = [entries, *below, str(frame), *self._draw_reference_lines(kind, frame), *above]
        for curve in kind.curves:
            if curve.method in self.ringed and kind.name != "used":
                x, y = frame.x(float(curve.x[axis.button][-1])), frame.y(float(curve.values[:, -1].mean()))
                title = svg.build_tooltip(f"{display_name(curve.method)}: the last round, in which everybody took part")
                ring = {"fill": "none", "stroke": looks[curve.method].colour, "stroke_width": 1.5}
                parts.append(svg.build_element("circle", title, cx=x, cy=y, r=6.0, **ring))
        ends = [f"{display_name(c.method)} ends at {c.values[:, -1].mean():.4g}{kind.unit}" for c in kind.curves]
        return svg.build_drawing(f"{kind.title} against {axis.title.lower()}", "; ".join(ends), *parts)

    def _create_axes(self, kind: Kind, axis: Axis, log: bool, top: float) -> svg.Axes:
        x = np.concatenate([curve.x[axis.button] for curve in kind.curves])
        y = np.concatenate([curve.values.ravel() for curve in kind.curves])
        log_y = (
            not self.report.metric_spec.percent and kind.name != "used" and y.min() > 0 and y.max() / y.min() >= DECADES
        )
        ends = (x[x > 0].min(), x.max()) if log else (0.0, float(x.max()) or 1.0)
        heights = (0.0, 100.0)
        if kind.name != "used":
            limits = metric_of(self.metric if kind.name in ("mean", "tenth") else kind.name).shown_span
            heights = choose_value_range(kind.curves, log=bool(log_y), limits=limits)
        return svg.create_axes(ends, heights, (axis.title, kind.title), log=log, log_y=bool(log_y), top=top)

    def _draw_reference_lines(self, kind: Kind, frame: svg.Axes) -> list[str]:
        """Return lines for the targets and the accuracy of the oracle that are within the axes."""
        if kind.name != "mean":
            return []
        targets = {t.accuracy for run in self.report.runs if run.summary for t in run.summary.targets or []}
        levels = {f"target {format_percent(target)}": 100 * target for target in sorted(targets)}
        if self.metric == "accuracy" and (best := oracle(self.report.runs)) is not None:
            levels["oracle"] = 100 * best
        ends = (frame.x.start, frame.x.end)
        inside = {name: value for name, value in levels.items() if frame.y.low <= value <= frame.y.high}
        return [svg.draw_rule(frame.y, value, ends, upright=False, label=name) for name, value in inside.items()]


def choose_value_range(
    curves: Sequence[Curve], *, log: bool = False, limits: tuple[float, float] = (-np.inf, np.inf)
) -> tuple[float, float]:
    """Return the ends of a vertical axis.

    The axis covers all values, or only those after the share :data:`EARLY` of the rounds if their range is much
    smaller.
    """
    full_range = svg.compute_axis_range(
        [v for curve in curves for v in curve.values.ravel().tolist()], log=log, limits=limits
    )
    begin = EARLY * max(float(curve.rounds[-1]) for curve in curves)
    late_values = [v for curve in curves for v in curve.values[:, np.asarray(curve.rounds) > begin].ravel().tolist()]
    late_range = svg.compute_axis_range(late_values, log=log, limits=limits) if late_values else full_range
    return (
        late_range
        if not log and late_range[1] - late_range[0] < NARROW * (full_range[1] - full_range[0])
        else full_range
    )


def draw_curves(
    curves: Sequence[tuple[Curve, Look]], axis: Axis, frame: svg.Axes, unit: str
) -> tuple[list[str], list[str]]:
    """Return the bands over the seeds with their edges, to be drawn before the axes, and the lines for after them."""
    bands, edges, lines = [], [], []
    for curve, look in curves:
        x, mean = curve.x[axis.button], curve.values.mean(0)
        inside = np.flatnonzero(np.isfinite(mean) & (x >= frame.x.low * (1 - 1e-9)) & ((x > 0) | (not frame.x.log)))
        if not len(inside):
            continue
        points = inside[spread_indices(len(inside), MOST_POINTS)]
        middle, low, high = (
            [(frame.x(float(x[i])), frame.y(float(values[i]))) for i in points]
            for values in (mean, curve.values.min(0), curve.values.max(0))
        )
        if len(curve.values) > 1:
            band = [(x, min(max(y, frame.y.end), frame.y.start)) for x, y in (*high, *low[::-1])]
            bands.append(svg.fill_area(band, look.colour))
            edges.append(svg.draw_outline(band, look.colour))
        marks = _draw_marks(curve, axis, frame, unit, inside[spread_indices(len(inside), MOST_HINTS)])
        segments = [svg.draw_line(part, look) for part in svg.clip_line(middle, frame.y)]
        lines.append("".join(segments) + svg.build_element("g", *marks, fill=look.colour))
    return [*bands, *edges], lines


def _draw_marks(curve: Curve, axis: Axis, frame: svg.Axes, unit: str, places: NDArray[np.int64]) -> list[str]:
    """Return dots whose tooltips show the numbers."""
    x, mean, low, high = curve.x[axis.button], curve.values.mean(0), curve.values.min(0), curve.values.max(0)
    marks = []
    for i in places:
        if not frame.y.low <= mean[i] <= frame.y.high:
            continue
        seeds = f" (seeds {low[i]:.4g} to {high[i]:.4g})" if len(curve.values) > 1 else ""
        where = "" if axis.button == "Rounds" else f", {axis.title}: {x[i]:.4g}"
        title = f"{display_name(curve.method)}, round {curve.rounds[i]}: {mean[i]:.4g}{unit}{seeds}{where}"
        marks.append(svg.draw_dot(frame.x(float(x[i])), frame.y(float(mean[i])), None, title, r=2.5))
    return marks


def curves_section(report: ReportData) -> str:
    """Return the figures with a choice of the horizontal axis, or a sentence if no round was evaluated."""
    curves = Curves(report, report.metric or "")
    if not report.metric or not curves.kinds:
        unfinished = any(run.summary is None for run in report.runs)
        return build_section(
            "curves", "Learning curves", build_note("No round has been evaluated yet." if unfinished else "")
        )
    panels = {
        key: build_grid(*(wrap_figure(curves.drawn(kind, axis, log)) for kind in curves.kinds))
        for key, (axis, log) in curves.axes.items()
    }
    curved = {curve.method for curve in curves.kinds[0].curves}
    without_curve = [display_name(method) for method in report.methods if method not in curved]
    return build_section(
        "curves",
        "Learning curves",
        build_switched_panels([build_radio("axis", "Against", {key: key for key in panels})], panels),
        build_note(
            f"{READ_CURVES} Times and bytes are counted from the start and averaged over the seeds."
            + (" A ring is a last round with everybody, unlike those before it." if curves.ringed else "")
            + (f" Without rounds, so without a curve: {', '.join(without_curve)}." if without_curve else "")
        ),
    )


def curve_figures(report: ReportData) -> dict[str, str]:
    """Return the learning curves against the default axis, by name."""
    curves = Curves(report, report.metric or "")
    if not report.metric or not curves.kinds:
        return {}
    axis, log = next(iter(curves.axes.values()))
    return {f"curves-{kind.name}": curves.drawn(kind, axis, log) for kind in curves.kinds}


MOST_EPOCHS = 400  # drawn of a client
READ_LOSSES = (
    "Loss of local training, penalties included, of single clients of the first seed, epoch after epoch of all "
    "rounds that they took part in. A dot is where a round begins: the client has received new parameters."
)
Courses = Mapping[str, Sequence[tuple[int, Sequence[float]]]]


def epochs_section(report: ReportData) -> str:
    """Return the losses over local epochs of each method's first seed; empty if no run kept them."""
    figures, notes = [], []
    for run in _list_loss_runs(report):
        try:
            figures.append(wrap_figure(_draw_losses(run.method, load_losses(_list_loss_files(run)))))
        except PerfedError as error:
            notes.append(build_note(f"Left out: {error}"))
    return build_section(
        "epochs", "Loss over local epochs", build_grid(*figures), build_note(READ_LOSSES if figures else ""), *notes
    )


def epoch_figures(report: ReportData) -> dict[str, str]:
    """Return a figure of the losses for each method, by name; damaged files are left out."""
    figures: dict[str, str] = {}
    for run in _list_loss_runs(report):
        with suppress(PerfedError):
            figures[f"losses-{method_file_name(run.method)}"] = _draw_losses(
                run.method, load_losses(_list_loss_files(run))
            )
    return figures


def _list_loss_runs(report: ReportData) -> list[RunResults]:
    """Return the first run of each method that kept losses."""
    runs_by_method = ([run for run in report.members(method) if _list_loss_files(run)] for method in report.methods)
    return [runs[0] for runs in runs_by_method if runs]


def _list_loss_files(run: RunResults) -> list[Path]:
    """Return the files with losses except those of the preparation, whose loss may be a different one."""
    return [file for file in run.list_arrays("losses") if file.stem != "round-0000"]


def _draw_losses(method: str, courses: Courses) -> str:
    look = assign_looks(courses)
    entries, top = svg.draw_legend([(f"client {client}", look[client]) for client in courses], left=4)
    values = {client: np.concatenate([losses for _, losses in rounds]) for client, rounds in courses.items()}
    all_losses = np.concatenate([*values.values()])
    log = bool(all_losses.min() > 0 and all_losses.max() / all_losses.min() >= DECADES)
    longest = max(len(client_losses) for client_losses in values.values())
    titles = ("Local epoch", f"{display_name(method)}: training loss")
    frame = svg.create_axes(
        (1.0, float(max(longest, 2))),
        svg.compute_axis_range(all_losses.tolist(), log=log),
        titles,
        log_y=log,
        top=top + 22,
    )
    parts = [entries, str(replace(frame, counted=True))]
    for client, rounds in courses.items():
        client_losses = values[client]
        places = [
            (frame.x(i + 1.0), frame.y(float(client_losses[i])))
            for i in spread_indices(len(client_losses), MOST_EPOCHS).tolist()
        ]
        parts.append(svg.draw_line(places, look[client]))
        marks, begin = [], 0
        for number, losses in rounds:
            title = f"client {client}, round {number}: {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} epochs"
            marks.append(svg.draw_dot(frame.x(begin + 1.0), frame.y(float(client_losses[begin])), None, title, r=2.5))
            begin += len(losses)
        parts.append(svg.build_element("g", *marks, fill=look[client].colour))
    description = "; ".join(
        f"client {client} ends at {client_losses[-1]:.4g}" for client, client_losses in values.items()
    )
    return svg.build_drawing(f"{titles[1]} over local epochs", description, *parts)


READ_CALIBRATION = (
    "A dot is a tenth of the test rows of all sites and seeds, grouped by predicted probability. On the diagonal, an "
    "event predicted with 30 % occurs in 30 of 100 cases. Below it probabilities are too high, above it too low."
)
_READ_NUMBERS = (
    "Slope: 1 is ideal; below 1 probabilities are too extreme, above 1 too moderate. Intercept: 0 is ideal; above 0 "
    "the event occurs more often than predicted. With more than two classes, the predicted class is used."
)


def calibration_section(report: ReportData) -> str:
    """Return the reliability diagram with a table of slopes and intercepts; empty without kept probabilities."""
    calibrations = calibrate_methods(report.runs)
    if not calibrations:
        return ""
    rows = [
        [
            display_name(calibration.method),
            f"{calibration.slope:.2f}",
            f"{calibration.intercept:+.2f}",
            f"{calibration.rows:,}".replace(",", " "),
        ]
        for calibration in calibrations
    ]
    numbers = TextTable("", ["Method", "Slope", "Intercept", "Rows"], rows, _READ_NUMBERS)
    parts = build_grid(
        wrap_figure(_draw_calibration(report, calibrations)), f"<div>{build_table(numbers, looks=report.looks)}</div>"
    )
    return build_section("calibration", "Calibration", parts, build_note(READ_CALIBRATION))


def calibration_figures(report: ReportData) -> dict[str, str]:
    """Return the reliability diagram by name; empty if no run kept probabilities."""
    calibrations = calibrate_methods(report.runs)
    return {"calibration": _draw_calibration(report, calibrations)} if calibrations else {}


def _draw_calibration(report: ReportData, calibrations: Sequence[Calibration]) -> str:
    entries, top = svg.draw_legend(
        [(display_name(calibration.method), report.looks[calibration.method]) for calibration in calibrations]
    )
    frame = svg.create_axes(
        (0.0, 100.0), (0.0, 100.0), ("Predicted (%)", "Observed (%)"), top=top + 26, height=top + 366
    )
    diagonal = svg.draw_line([(frame.x(v), frame.y(v)) for v in (0.0, 100.0)], Look(css_colour("muted"), "5 3"))
    parts = [entries, str(frame), diagonal]
    for calibration in calibrations:
        look = report.looks[calibration.method]
        places = [
            (frame.x(100 * p), frame.y(100 * q))
            for p, q in zip(calibration.predicted, calibration.observed, strict=True)
        ]
        parts.append(svg.draw_line(places, look))
        for (x, y), p, q in zip(places, calibration.predicted, calibration.observed, strict=True):
            hint = f"{display_name(calibration.method)}: predicted {100 * p:.1f} %, observed {100 * q:.1f} %"
            parts.append(svg.draw_dot(x, y, look.colour, hint))
    description = "; ".join(
        f"{display_name(calibration.method)}: slope {calibration.slope:.2f}, intercept {calibration.intercept:+.2f}"
        for calibration in calibrations
    )
    return svg.build_drawing("Predicted and observed frequencies", description, *parts, height=top + 366)
