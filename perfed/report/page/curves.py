"""Curves: of the metric, against rounds, time and bytes; of the loss, epoch after epoch; and of calibration."""

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
from perfed.report.page.html import figure, grid, note, radio, section, switched, table
from perfed.report.page.page_data import Study, file_name, thinned
from perfed.report.page.style import Look, looks, paint
from perfed.report.run_results import RunResults
from perfed.report.snapshots import load_losses
from perfed.report.text import TextTable, directed_title
from perfed.run.callbacks.targets import format_percent

READ_CURVES = (
    "Line: mean over the seeds; band: lowest to highest seed. A zigzag: the axis does not begin at 0. Values of the "
    "first rounds are cut off where the later ones would be hard to tell apart."
)
MOST_POINTS, MOST_HINTS = 60, 15  # per line
EARLY = 0.25  # of the rounds, which may be cut off
NARROW = 0.6  # of the whole range: what the later rounds have is shown alone where it is less
DECADES = 100.0  # where the last point is so many times as far as the first one, an axis is logarithmic


@dataclass(frozen=True)
class Kind:
    """One vertical axis: ``name`` for files, ``title`` in words, what is behind values, and the methods' curves."""

    name: str
    title: str
    unit: str
    curves: list[Curve]


@dataclass(frozen=True)
class Curves:
    """All that can be drawn of a study's rounds."""

    study: Study
    metric: str

    @cached_property
    def kinds(self) -> list[Kind]:
        """Mean, 10 % worst, further metrics that were asked for, clients used so far; those that there are."""
        runs, known = self.study.runs, self.study.known
        title, unit = directed_title(self.metric), f" {known.unit}".rstrip()
        shares = used_curves(runs, self.metric)
        every = [
            Kind("mean", f"{title}, mean over the clients", unit, metric_curves(runs, self.metric)),
            Kind("tenth", f"{title}, 10 % worst clients", unit, metric_curves(runs, self.metric, known.tenth_worst)),
            *map(self._further, list_further_metrics(runs, self.metric)),
            Kind("used", "Clients used so far (%)", " %", shares),
        ]
        return [kind for kind in every if kind.curves]

    def _further(self, name: str) -> Kind:
        unit = f" {metric_of(name).unit}".rstrip()
        curves = metric_curves(self.study.runs, name, main=self.metric)
        return Kind(name, f"{directed_title(name)}, mean over the clients", unit, curves)

    @cached_property
    def axes(self) -> dict[str, tuple[Axis, bool]]:
        """By the text of their buttons, the first is shown first; virtual time also logarithmic where it goes far."""
        found: dict[str, tuple[Axis, bool]] = {}
        for axis in find_axes(self.study.runs, self.metric):
            ends = [curve.x[axis.button] for kind in self.kinds for curve in kind.curves]
            there = np.concatenate([x[x > 0] for x in ends] or [np.ones(1)])
            ratio = float(there.max() / there.min()) if len(there) else 1.0
            if axis is VIRTUAL_TIME and ratio >= DECADES:
                found[f"{axis.button}, log"] = (axis, True)
            found[axis.button] = (axis, False)
        return found

    @cached_property
    def ringed(self) -> set[str]:
        """Methods whose last round used everybody, unlike one before it."""
        first = {method: self.study.members(method)[0] for method in self.study.methods}
        found = {method: run.participation for method, run in first.items()}
        return {method for method, of in found.items() if of is not None and of.ends_with_all}

    def drawn(self, kind: Kind, axis: Axis, log: bool) -> str:
        """A figure of ``kind`` against ``axis``."""
        looks = self.study.looks
        entries, top = svg.legend([(display_name(curve.method), looks[curve.method]) for curve in kind.curves])
        frame = self._frame(kind, axis, log, top + 22)
        shown = [(curve, looks[curve.method]) for curve in kind.curves]
        below, above = drawn_curves(shown, axis, frame, kind.unit)
        parts = [entries, *below, str(frame), *self._lines(kind, frame), *above]
        for curve in kind.curves:
            if curve.method in self.ringed and kind.name != "used":
                at = frame.x(float(curve.x[axis.button][-1])), frame.y(float(curve.values[:, -1].mean()))
                title = svg.hint(f"{display_name(curve.method)}: the last round, in which everybody took part")
                ring = {"fill": "none", "stroke": looks[curve.method].colour, "stroke_width": 1.5}
                parts.append(svg.tag("circle", title, cx=at[0], cy=at[1], r=6.0, **ring))
        ends = [f"{display_name(c.method)} ends at {c.values[:, -1].mean():.4g}{kind.unit}" for c in kind.curves]
        return svg.drawing(f"{kind.title} against {axis.title.lower()}", "; ".join(ends), *parts)

    def _frame(self, kind: Kind, axis: Axis, log: bool, top: float) -> svg.Axes:
        x = np.concatenate([curve.x[axis.button] for curve in kind.curves])
        y = np.concatenate([curve.values.ravel() for curve in kind.curves])
        errors = not self.study.known.percent and kind.name != "used" and y.min() > 0 and y.max() / y.min() >= DECADES
        ends = (x[x > 0].min(), x.max()) if log else (0.0, float(x.max()) or 1.0)
        heights = (0.0, 100.0)
        if kind.name != "used":
            limits = metric_of(self.metric if kind.name in ("mean", "tenth") else kind.name).shown_span
            heights = zoomed(kind.curves, log=bool(errors), limits=limits)
        return svg.axes(ends, heights, (axis.title, kind.title), log=log, log_y=bool(errors), top=top)

    def _lines(self, kind: Kind, frame: svg.Axes) -> list[str]:
        """Targets and what nobody can do better than, where they are within the axes."""
        if kind.name != "mean":
            return []
        asked = {t.accuracy for run in self.study.runs if run.summary for t in run.summary.targets or []}
        found = {f"target {format_percent(target)}": 100 * target for target in sorted(asked)}
        if self.metric == "accuracy" and (best := oracle(self.study.runs)) is not None:
            found["oracle"] = 100 * best
        ends = (frame.x.start, frame.x.end)
        inside = {name: value for name, value in found.items() if frame.y.low <= value <= frame.y.high}
        return [svg.rule(frame.y, value, ends, upright=False, label=name) for name, value in inside.items()]


def zoomed(
    curves: Sequence[Curve], *, log: bool = False, limits: tuple[float, float] = (-np.inf, np.inf)
) -> tuple[float, float]:
    """Ends of a vertical axis: of all values, or of those after :data:`EARLY` where they are much closer together."""
    whole = svg.spanned([v for curve in curves for v in curve.values.ravel().tolist()], log=log, limits=limits)
    begin = EARLY * max(float(curve.rounds[-1]) for curve in curves)
    late = [v for curve in curves for v in curve.values[:, np.asarray(curve.rounds) > begin].ravel().tolist()]
    narrow = svg.spanned(late, log=log, limits=limits) if late else whole
    return narrow if not log and narrow[1] - narrow[0] < NARROW * (whole[1] - whole[0]) else whole


def drawn_curves(
    curves: Sequence[tuple[Curve, Look]], axis: Axis, frame: svg.Axes, unit: str
) -> tuple[list[str], list[str]]:
    """What is drawn before the axes, bands (on paper one covers another) and their edges, and after them: lines."""
    bands, edges, lines = [], [], []
    for curve, look in curves:
        x, mean = curve.x[axis.button], curve.values.mean(0)
        inside = np.flatnonzero(np.isfinite(mean) & (x >= frame.x.low * (1 - 1e-9)) & ((x > 0) | (not frame.x.log)))
        if not len(inside):
            continue
        shown = inside[thinned(len(inside), MOST_POINTS)]
        middle, low, high = (
            [(frame.x(float(x[i])), frame.y(float(values[i]))) for i in shown]
            for values in (mean, curve.values.min(0), curve.values.max(0))
        )
        if len(curve.values) > 1:
            band = [(x, min(max(y, frame.y.end), frame.y.start)) for x, y in (*high, *low[::-1])]
            bands.append(svg.area(band, look.colour))
            edges.append(svg.outline(band, look.colour))
        marks = _marks(curve, axis, frame, unit, inside[thinned(len(inside), MOST_HINTS)])
        drawn = [svg.line(part, look) for part in svg.within(middle, frame.y)]
        lines.append("".join(drawn) + svg.tag("g", *marks, fill=look.colour))
    return [*bands, *edges], lines


def _marks(curve: Curve, axis: Axis, frame: svg.Axes, unit: str, places: NDArray[np.int64]) -> list[str]:
    """Dots where a pointer gets the numbers."""
    x, mean, low, high = curve.x[axis.button], curve.values.mean(0), curve.values.min(0), curve.values.max(0)
    marks = []
    for i in places:
        if not frame.y.low <= mean[i] <= frame.y.high:
            continue
        seeds = f" (seeds {low[i]:.4g} to {high[i]:.4g})" if len(curve.values) > 1 else ""
        where = "" if axis.button == "Rounds" else f", {axis.title}: {x[i]:.4g}"
        title = f"{display_name(curve.method)}, round {curve.rounds[i]}: {mean[i]:.4g}{unit}{seeds}{where}"
        marks.append(svg.dot(frame.x(float(x[i])), frame.y(float(mean[i])), None, title, r=2.5))
    return marks


def curves_section(study: Study) -> str:
    """The figures, of which a reader chooses the horizontal axis; a sentence where no round was evaluated."""
    shown = Curves(study, study.metric or "")
    if not study.metric or not shown.kinds:
        unfinished = any(run.summary is None for run in study.runs)
        return section("curves", "Learning curves", note("No round has been evaluated yet." if unfinished else ""))
    panels = {
        key: grid(*(figure(shown.drawn(kind, axis, log)) for kind in shown.kinds))
        for key, (axis, log) in shown.axes.items()
    }
    curved = {curve.method for curve in shown.kinds[0].curves}
    alone = [display_name(method) for method in study.methods if method not in curved]
    return section(
        "curves",
        "Learning curves",
        switched([radio("axis", "Against", {key: key for key in panels})], panels),
        note(
            f"{READ_CURVES} Times and bytes are counted from the start and averaged over the seeds."
            + (" A ring is a last round with everybody, unlike those before it." if shown.ringed else "")
            + (f" Without rounds, so without a curve: {', '.join(alone)}." if alone else "")
        ),
    )


def curve_figures(study: Study) -> dict[str, str]:
    """By name, against the axis that is shown first."""
    shown = Curves(study, study.metric or "")
    if not study.metric or not shown.kinds:
        return {}
    axis, log = next(iter(shown.axes.values()))
    return {f"curves-{kind.name}": shown.drawn(kind, axis, log) for kind in shown.kinds}


MOST_EPOCHS = 400  # drawn of a client
READ_LOSSES = (
    "Loss of local training, penalties included, of single clients of the first seed, epoch after epoch of all "
    "rounds that they took part in. A dot is where a round begins: the client has received new parameters."
)
Courses = Mapping[str, Sequence[tuple[int, Sequence[float]]]]


def epochs_section(study: Study) -> str:
    """Loss against local epochs, a line per client, of each method's first seed; nothing where it was not kept."""
    drawn, lines = [], []
    for run in _kept(study):
        try:
            drawn.append(figure(_drawn(run.method, load_losses(_of_rounds(run)))))
        except PerfedError as error:
            lines.append(note(f"Left out: {error}"))
    return section("epochs", "Loss over local epochs", grid(*drawn), note(READ_LOSSES if drawn else ""), *lines)


def epoch_figures(study: Study) -> dict[str, str]:
    """By name, one per method; none of broken files."""
    found: dict[str, str] = {}
    for run in _kept(study):
        with suppress(PerfedError):
            found[f"losses-{file_name(run.method)}"] = _drawn(run.method, load_losses(_of_rounds(run)))
    return found


def _kept(study: Study) -> list[RunResults]:
    """The first run of each method that kept losses."""
    every = ([run for run in study.members(method) if _of_rounds(run)] for method in study.methods)
    return [runs[0] for runs in every if runs]


def _of_rounds(run: RunResults) -> list[Path]:
    """Without the preparation, which may have another loss: that of the alignment alone."""
    return [file for file in run.list_arrays("losses") if file.stem != "round-0000"]


def _drawn(method: str, courses: Courses) -> str:
    look = looks(courses)
    entries, top = svg.legend([(f"client {client}", look[client]) for client in courses], left=4)
    values = {client: np.concatenate([losses for _, losses in rounds]) for client, rounds in courses.items()}
    every = np.concatenate([*values.values()])
    log = bool(every.min() > 0 and every.max() / every.min() >= DECADES)
    longest = max(len(own) for own in values.values())
    titles = ("Local epoch", f"{display_name(method)}: training loss")
    frame = svg.axes(
        (1.0, float(max(longest, 2))), svg.spanned(every.tolist(), log=log), titles, log_y=log, top=top + 22
    )
    parts = [entries, str(replace(frame, counted=True))]
    for client, rounds in courses.items():
        own = values[client]
        places = [(frame.x(i + 1.0), frame.y(float(own[i]))) for i in thinned(len(own), MOST_EPOCHS).tolist()]
        parts.append(svg.line(places, look[client]))
        marks, begin = [], 0
        for number, losses in rounds:
            title = f"client {client}, round {number}: {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} epochs"
            marks.append(svg.dot(frame.x(begin + 1.0), frame.y(float(own[begin])), None, title, r=2.5))
            begin += len(losses)
        parts.append(svg.tag("g", *marks, fill=look[client].colour))
    told = "; ".join(f"client {client} ends at {own[-1]:.4g}" for client, own in values.items())
    return svg.drawing(f"{titles[1]} over local epochs", told, *parts)


READ_CALIBRATION = (
    "A dot is a tenth of the test rows of all sites and seeds, by their probability. On the diagonal, what is said to "
    "have a chance of 30 % happens in 30 of 100 cases. Below it probabilities are too high, above it too low."
)
_READ_NUMBERS = (
    "Slope: 1 is right; below 1 probabilities are too extreme, above 1 too timid. Intercept: 0 is right; above 0 it "
    "happens more often than is said. Of more than two classes, the probability is that of the predicted class."
)


def calibration_section(study: Study) -> str:
    """The reliability picture with a table of slopes and intercepts; nothing where no run kept probabilities."""
    found = calibrate_methods(study.runs)
    if not found:
        return ""
    rows = [
        [display_name(of.method), f"{of.slope:.2f}", f"{of.intercept:+.2f}", f"{of.rows:,}".replace(",", " ")]
        for of in found
    ]
    numbers = TextTable("", ["Method", "Slope", "Intercept", "Rows"], rows, _READ_NUMBERS)
    parts = grid(figure(_diagram(study, found)), f"<div>{table(numbers, looks=study.looks)}</div>")
    return section("calibration", "Calibration", parts, note(READ_CALIBRATION))


def calibration_figures(study: Study) -> dict[str, str]:
    """The reliability picture by name; none where no run kept probabilities."""
    found = calibrate_methods(study.runs)
    return {"calibration": _diagram(study, found)} if found else {}


def _diagram(study: Study, found: Sequence[Calibration]) -> str:
    entries, top = svg.legend([(display_name(of.method), study.looks[of.method]) for of in found])
    frame = svg.axes((0.0, 100.0), (0.0, 100.0), ("Said (%)", "Happened (%)"), top=top + 26, height=top + 366)
    right = svg.line([(frame.x(v), frame.y(v)) for v in (0.0, 100.0)], Look(paint("muted"), "5 3"))
    parts = [entries, str(frame), right]
    for of in found:
        look = study.looks[of.method]
        places = [(frame.x(100 * p), frame.y(100 * q)) for p, q in zip(of.predicted, of.observed, strict=True)]
        parts.append(svg.line(places, look))
        for (x, y), p, q in zip(places, of.predicted, of.observed, strict=True):
            hint = f"{display_name(of.method)}: said {100 * p:.1f} %, happened {100 * q:.1f} %"
            parts.append(svg.dot(x, y, look.colour, hint))
    told = "; ".join(f"{display_name(of.method)}: slope {of.slope:.2f}, intercept {of.intercept:+.2f}" for of in found)
    return svg.drawing("What is said, and what happens", told, *parts, height=top + 366)
