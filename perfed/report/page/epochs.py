"""The loss of each local epoch of some clients, as FLIC's Figure S1 shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from perfed.errors import PerfedError
from perfed.report.arrays import load_losses
from perfed.report.page import svg
from perfed.report.page.curves import DECADES
from perfed.report.page.forms import figure, grid, note, section
from perfed.report.page.look import looks
from perfed.report.page.study import Study, file_name, thinned
from perfed.report.runs import Run

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


def _kept(study: Study) -> list[Run]:
    """The first run of each method that kept losses."""
    every = ([run for run in study.members(method) if _of_rounds(run)] for method in study.methods)
    return [runs[0] for runs in every if runs]


def _of_rounds(run: Run) -> list[Path]:
    """Without the preparation, which may have another loss: that of the alignment alone."""
    return [file for file in run.loss_files if file.stem != "round-0000"]


def _drawn(method: str, courses: Courses) -> str:
    look = looks(courses)
    entries, top = svg.legend([(f"client {client}", look[client]) for client in courses], left=4)
    values = {client: np.concatenate([losses for _, losses in rounds]) for client, rounds in courses.items()}
    every = np.concatenate([*values.values()])
    log = bool(every.min() > 0 and every.max() / every.min() >= DECADES)
    longest = max(len(own) for own in values.values())
    titles = ("Local epoch", f"{method}: training loss")
    frame = svg.axes(
        (1.0, float(max(longest, 2))), svg.spanned(every.tolist(), log=log), titles, log_y=log, top=top + 22
    )
    parts = [entries, str(frame)]
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
    return svg.drawing(f"{method}: training loss over local epochs", told, *parts)
