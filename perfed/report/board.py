"""A published leaderboard with the results of perfed beside it: the table and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed.engine.metrics import metric_of
from perfed.report.page.html import build_note, build_paragraph, build_section, build_table
from perfed.report.page.style import write_page
from perfed.report.text import UNKNOWN, TextTable, axis_title, format_metric, format_short

UNFINISHED = "rows that had fewer rounds than theirs are unfinished, and not compared"


@dataclass(frozen=True)
class Figure:
    """The values of a row of a leaderboard in the unit of the metric; missing values are ``None``.

    Attributes:
        method: the name of the row.
        ours_mean, ours_std: the mean of the last round over seeds, and its sample standard deviation.
        theirs_mean, theirs_std: the published values.
        note: the reason for a difference, or another remark.
        ours_best_mean, ours_best_std: the values of the best evaluated round on test rows.
        rounds: the number of rounds of our runs.
        seeds: the number of seeds of our runs.
        chosen: the settings that were selected on validation rows.
        their_rounds: the number of rounds of the published runs; ``None`` if it is that of the leaderboard's settings.
    """

    method: str
    ours_mean: float | None
    ours_std: float | None
    theirs_mean: float | None
    theirs_std: float | None
    note: str = ""
    ours_best_mean: float | None = None
    ours_best_std: float | None = None
    rounds: int | None = None
    seeds: int = 0
    chosen: str = ""
    their_rounds: int | None = None

    @property
    def unfinished(self) -> bool:
        """Whether our runs had fewer rounds than the published ones, so that the two are not compared."""
        return self.rounds is not None and self.their_rounds is not None and self.rounds < self.their_rounds


def board_table(figures: Sequence[Figure], title: str, metric: str, best_over_test: bool) -> TextTable:
    """Return a table of published and our values, and their differences; the best of ours is bold.

    If the published values are the best over rounds on test rows (``best_over_test``), a further column has ours, which
    are then compared. Rows with fewer rounds than published are not compared.
    """
    header = ["Method", "Theirs", "Ours, last round"]
    header += ["Ours, best over test"] if best_over_test else []
    header += ["Ours - theirs", "in their std", "Rounds"]
    rows = []
    for row in figures:
        last = _format_pair(metric, row.ours_mean, row.ours_std)
        best = [_format_pair(metric, row.ours_best_mean, row.ours_best_std)] if best_over_test else []
        ours = row.ours_best_mean if best_over_test else row.ours_mean
        gap = None if ours is None or row.theirs_mean is None or row.unfinished else ours - row.theirs_mean
        apart = UNKNOWN if gap is None else format_short(metric, gap, "+")
        in_std = UNKNOWN if gap is None or not row.theirs_std else f"{gap / row.theirs_std:+.1f}"
        rounds = UNKNOWN if row.rounds is None else f"{row.rounds}" + f" of {row.their_rounds}" * row.unfinished
        rows.append(
            [row.method, _format_pair(metric, row.theirs_mean, row.theirs_std), last, *best, apart, in_std, rounds]
        )
    side = metric_of(metric).direction
    means = {row: side * figure.ours_mean for row, figure in enumerate(figures) if figure.ours_mean is not None}
    top = frozenset(row for row, value in means.items() if value == max(means.values()))
    return TextTable(f"{title}: {axis_title(metric)}, mean ± std over seeds", header, rows, best=top)


def _format_pair(metric: str, mean: float | None, std: float | None) -> str:
    if mean is None:
        return UNKNOWN
    return format_metric(metric, mean) + ("" if std is None else f" ± {format_metric(metric, std)}")


def board_notes(figures: Sequence[Figure]) -> list[str]:
    """Return a line for every row with a remark, or with settings that were selected on validation rows."""
    unfinished = any(row.unfinished for row in figures)
    remarks = [("rounds", UNFINISHED, "")] if unfinished else []
    remarks += [
        (row.method, f"chosen on validation rows: {row.chosen}" if row.chosen else "", row.note) for row in figures
    ]
    return [f"{name}: {'; '.join(filter(None, parts))}" for name, *parts in remarks if any(parts)]


def write_board(out: Path, board: TextTable, figures: Sequence[Figure], source: str) -> Path:
    """Write the page of a leaderboard and return its path."""
    notes = "".join(map(build_note, board_notes(figures)))
    title, _, metric = board.title.partition(":")
    inside = build_section(
        "leaderboard", "Theirs and ours", build_table(TextTable("", board.header, board.rows, best=board.best))
    )
    why = build_section("notes", "Notes", build_paragraph(f"Theirs: {source}."), notes)
    return write_page(out, title, metric.strip(), [inside, why])
