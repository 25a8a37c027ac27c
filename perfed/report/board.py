"""A leaderboard of others with ours beside it: the table and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed.engine.metrics import metric_of
from perfed.report.page.html import note, paragraph, section, table
from perfed.report.page.style import write_page
from perfed.report.text import UNKNOWN, TextTable, axis_title, metric_text, short_number

UNFINISHED = "rows that had fewer rounds than theirs are unfinished, and not compared"


@dataclass(frozen=True)
class Figure:
    """A row of a leaderboard in its metric's own unit; ``None`` where there is nothing.

    Attributes:
        method: what the row is called.
        ours_mean, ours_std: of the last round, over seeds (sample standard deviation).
        theirs_mean, theirs_std: as they published it.
        note: why they differ, or what to mind.
        ours_best_mean, ours_best_std: of the best evaluated round on test rows.
        rounds: of ours.
        seeds: of ours.
        chosen: settings that were chosen on validation rows.
        their_rounds: how many rounds theirs had; ``None`` where as many as the leaderboard's own settings say.
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
        """Whether ours had fewer rounds than theirs, so that the two are not compared."""
        return self.rounds is not None and self.their_rounds is not None and self.rounds < self.their_rounds


def board_table(figures: Sequence[Figure], title: str, metric: str, best_over_test: bool) -> TextTable:
    """Theirs and ours side by side, and how far apart they are; the best of ours is bold.

    Where they report the best over rounds on test rows, ours has that in a column so named, and it is what is compared.
    A row that had fewer rounds than theirs says so, and is not compared.
    """
    header = ["Method", "Theirs", "Ours, last round"]
    header += ["Ours, best over test"] if best_over_test else []
    header += ["Ours - theirs", "in their std", "Rounds"]
    rows = []
    for of in figures:
        last = _pair(metric, of.ours_mean, of.ours_std)
        best = [_pair(metric, of.ours_best_mean, of.ours_best_std)] if best_over_test else []
        ours = of.ours_best_mean if best_over_test else of.ours_mean
        gap = None if ours is None or of.theirs_mean is None or of.unfinished else ours - of.theirs_mean
        apart = UNKNOWN if gap is None else short_number(metric, gap, "+")
        in_std = UNKNOWN if gap is None or not of.theirs_std else f"{gap / of.theirs_std:+.1f}"
        rounds = UNKNOWN if of.rounds is None else f"{of.rounds}" + f" of {of.their_rounds}" * of.unfinished
        rows.append([of.method, _pair(metric, of.theirs_mean, of.theirs_std), last, *best, apart, in_std, rounds])
    side = metric_of(metric).direction
    found = {at: side * of.ours_mean for at, of in enumerate(figures) if of.ours_mean is not None}
    top = frozenset(at for at, value in found.items() if value == max(found.values()))
    return TextTable(f"{title}: {axis_title(metric)}, mean ± std over seeds", header, rows, best=top)


def _pair(metric: str, mean: float | None, std: float | None) -> str:
    if mean is None:
        return UNKNOWN
    return metric_text(metric, mean) + ("" if std is None else f" ± {metric_text(metric, std)}")


def board_notes(figures: Sequence[Figure]) -> list[str]:
    """A line for every row that has something to mind, or settings that were chosen."""
    unfinished = any(of.unfinished for of in figures)
    said = [("rounds", UNFINISHED, "")] if unfinished else []
    said += [(of.method, f"chosen on validation rows: {of.chosen}" if of.chosen else "", of.note) for of in figures]
    return [f"{name}: {'; '.join(filter(None, parts))}" for name, *parts in said if any(parts)]


def write_board(out: Path, of: TextTable, figures: Sequence[Figure], source: str) -> Path:
    """Write the page of a leaderboard and return its path."""
    notes = "".join(map(note, board_notes(figures)))
    title, _, metric = of.title.partition(":")
    inside = section("leaderboard", "Theirs and ours", table(TextTable("", of.header, of.rows, best=of.best)))
    why = section("notes", "Notes", paragraph(f"Theirs: {source}."), notes)
    return write_page(out, title, metric.strip(), [inside, why])
