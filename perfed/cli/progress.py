"""The progress of a command: a live display on a terminal, otherwise one line every half a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perfed.cli.console import console, say, say_whole
from perfed.cli.table import shorten_name
from perfed.experiment.factory import DATA, MODELS, ROUNDS, ProgressEvent, execute
from perfed.experiment.rows import AnyRun

EVERY = 30.0
"""Seconds between two lines if the output is not a terminal."""
_BAR, _LABEL = 20, 8
_NARROW = 70  # terminals below this have no bars


def format_duration(seconds: float | None) -> str:
    """Return a time as text, in hours, minutes and seconds; ``?`` if it is unknown.

    Example:
        >>> format_duration(59.6), format_duration(3725.0), format_duration(None)
        ('1:00', '1:02:05', '?')
    """
    if seconds is None:
        return "?"
    minutes, seconds_left = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{seconds_left:02d}" if minutes >= 60 else f"{minutes}:{seconds_left:02d}"
    )


@dataclass
class Span:
    """A piece of work: its start time, its number of steps, those done before this command, and all done so far."""

    began: float
    total: int = 0
    before: float = 0.0
    completed: float = 0.0

    def estimate_remaining(self, now: float) -> float | None:
        """Return the estimated remaining seconds at the average speed so far; ``None`` before the first step."""
        progress = self.completed - self.before
        return None if progress <= 0 else (now - self.began) * (self.total - self.completed) / progress


@dataclass
class Running:
    """A run in progress: its label, its rounds (or models) as a span, and its last progress event."""

    label: str
    span: Span
    news: ProgressEvent = field(default_factory=lambda: ProgressEvent(DATA))

    @property
    def stage_text(self) -> str:
        """The stage of the run and its progress, as text."""
        news = self.news
        reached = f" {news.done} of {news.total}" if news.stage in (ROUNDS, MODELS) else ""
        return f"{news.stage}{reached}" + ("" if news.accuracy is None else f", {100 * news.accuracy:.1f} %")


@dataclass
class Work:
    """The progress of all runs of a command, of which several may run in parallel.

    Attributes:
        total: the number of all runs.
        clock: a function that returns the time in seconds from an arbitrary start.
        finished: the number of finished runs.
        running: the runs in progress, by label.
    """

    total: int
    clock: Callable[[], float] = time.monotonic
    finished: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    all: Span = field(init=False)
    _printed: float = field(init=False)

    def __post_init__(self) -> None:
        self._printed = self.clock()
        self.all = Span(self._printed, self.total)
        self.set_finished(self.finished)

    def set_finished(self, finished: int) -> None:
        """Set the number of runs that were finished before this command started."""
        self.finished = finished
        self.all.before = self.all.completed = finished

    def execute(self, make: Callable[[], AnyRun], label: str) -> dict[str, Any]:
        """Create a run, execute it and return its summary, while its progress is recorded."""
        try:
            return execute(make, partial(self.update, label))
        finally:
            self.update(label, None)

    def update(self, label: str, news: ProgressEvent | None) -> None:
        """Record a progress event of the run with this label; ``None``: the run has ended."""
        if news is None:
            self.running.pop(label, None)
            self.finished += 1
        else:
            run = self.running.setdefault(label, Running(label, Span(self.clock())))
            run.news = news
            run.span.total, run.span.before, run.span.completed = news.total, news.before, news.done
            for remark in news.remarks:
                say_whole(f"{label}: {remark}", style="yellow")
        partial_runs = sum(run.span.completed / run.span.total for run in self.running.values() if run.span.total)
        self.all.completed = self.finished + partial_runs

    # Output -----------------------------------------------------------------------------------------------

    def format_lines(self) -> list[str]:
        """Return the progress as lines of text: a single one for one run, otherwise a line for each run as well."""
        now, running = self.clock(), list(self.running.values())
        passed = (
            f"{format_duration(now - self.all.began)} elapsed, {format_duration(self.all.estimate_remaining(now))} left"
        )
        if len(running) == 1:
            overall = f"run {min(self.finished + 1, self.total)} of {self.total}, " if self.total > 1 else ""
            return [_fit_label(f"{passed}: {overall}", running[0])]
        return [f"{passed}: {self.finished} of {self.total} runs", *(_fit_label("  ", run) for run in running)]

    def print_if_due(self) -> None:
        """Print the progress if it was last printed half a minute ago or earlier."""
        if self.clock() - self._printed >= EVERY:
            self._printed = self.clock()
            for line in self.format_lines():
                say(line, style="dim")

    def __rich__(self) -> RenderableType:
        """Return the display on a terminal: overall progress and one line per run; a single run also has its stage."""
        now, running = self.clock(), list(self.running.values())
        only_run = running[0] if len(running) == 1 else None
        grid = Table.grid(padding=(0, 1))
        rows = [("overall", self.all, f"{self.finished} of {self.total} runs")] if self.total > 1 else []
        for run in running:
            rows.append(
                (
                    run.label,
                    run.span,
                    f"{format_duration(now - run.span.began)} elapsed" if only_run else run.stage_text,
                )
            )
        for name, span, text in rows:
            narrow = console.width < _NARROW
            bar: list[RenderableType] = [] if narrow else [ProgressBar(max(span.total, 1), span.completed, width=_BAR)]
            times = f"{format_duration(now - span.began)} elapsed, " if span is self.all and not narrow else ""
            note = f"{text}, {times}{format_duration(span.estimate_remaining(now))} left"
            grid.add_row(shorten_name(name, console.width // 4), *bar, Text(note, overflow="ellipsis", no_wrap=True))
        if only_run is None:
            return grid
        return Group(grid, Text(f"  {only_run.stage_text}", style="dim", overflow="ellipsis", no_wrap=True))


def _fit_label(prefix: str, run: Running) -> str:
    """Return a line with the run's label, shortened to the width of the terminal, and its stage."""
    room = console.width - len(f"{prefix}, {run.stage_text}")
    return f"{prefix}{shorten_name(run.label, max(room, _LABEL))}, {run.stage_text}"


@contextmanager
def show_progress(work: Work) -> Iterator[Work]:
    """Show the progress of ``work`` while the context is open."""
    if console.is_terminal:
        with Live(work, console=console, refresh_per_second=4, transient=True):
            yield work
        return
    ended = threading.Event()

    def print_until_ended() -> None:
        while not ended.wait(1.0):
            work.print_if_due()

    watcher = threading.Thread(target=print_until_ended, daemon=True)
    watcher.start()
    try:
        yield work
    finally:
        ended.set()
        watcher.join()
