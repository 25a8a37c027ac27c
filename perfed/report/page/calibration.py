"""Whether a probability of 30 % happens in 30 of 100 cases: a line per method, with slope and intercept."""

from __future__ import annotations

from collections.abc import Sequence

from perfed.report.calibration import Calibration, calibrations
from perfed.report.page import svg
from perfed.report.page.html import figure, grid, note, section, table
from perfed.report.page.page_data import Study
from perfed.report.page.style import Look, paint
from perfed.report.text import TextTable

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
    found = calibrations(study.runs)
    if not found:
        return ""
    rows = [[of.method, f"{of.slope:.2f}", f"{of.intercept:+.2f}", f"{of.rows:,}".replace(",", " ")] for of in found]
    numbers = TextTable("", ["Method", "Slope", "Intercept", "Rows"], rows, _READ_NUMBERS)
    parts = grid(figure(_drawn(study, found)), f"<div>{table(numbers, looks=study.looks)}</div>")
    return section("calibration", "Calibration", parts, note(READ_CALIBRATION))


def calibration_figures(study: Study) -> dict[str, str]:
    """The reliability picture by name; none where no run kept probabilities."""
    found = calibrations(study.runs)
    return {"calibration": _drawn(study, found)} if found else {}


def _drawn(study: Study, found: Sequence[Calibration]) -> str:
    entries, top = svg.legend([(of.method, study.looks[of.method]) for of in found])
    frame = svg.axes((0.0, 100.0), (0.0, 100.0), ("Said (%)", "Happened (%)"), top=top + 26, height=top + 366)
    right = svg.line([(frame.x(v), frame.y(v)) for v in (0.0, 100.0)], Look(paint("muted"), "5 3"))
    parts = [entries, str(frame), right]
    for of in found:
        look = study.looks[of.method]
        places = [(frame.x(100 * p), frame.y(100 * q)) for p, q in zip(of.said, of.seen, strict=True)]
        parts.append(svg.line(places, look))
        for (x, y), p, q in zip(places, of.said, of.seen, strict=True):
            parts.append(svg.dot(x, y, look.colour, f"{of.method}: said {100 * p:.1f} %, happened {100 * q:.1f} %"))
    told = "; ".join(f"{of.method}: slope {of.slope:.2f}, intercept {of.intercept:+.2f}" for of in found)
    return svg.drawing("What is said, and what happens", told, *parts, height=top + 366)
