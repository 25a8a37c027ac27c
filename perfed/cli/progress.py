"""How far the work is: live on a terminal, elsewhere one line every half a minute."""

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
from perfed.cli.table import shortened
from perfed.experiment.factory import DATA, MODELS, ROUNDS, ProgressEvent, execute
from perfed.run.any_run import AnyRun

EVERY = 30.0
"""Seconds between two lines where there is no terminal."""
_BAR, _LABEL = 20, 8
_NARROW = 70  # terminals below this have no bars


def duration(seconds: float | None) -> str:
    """Return hours, minutes and seconds; ``?`` where they are not known.

    Example:
        >>> duration(59.6), duration(3725.0), duration(None)
        ('1:00', '1:02:05', '?')
    """
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


@dataclass
class Span:
    """A piece of work, from when it began: ``done`` of ``total``, of which ``before`` were done in earlier sittings."""

    began: float
    total: int = 0
    before: float = 0.0
    done: float = 0.0

    def left(self, now: float) -> float | None:
        """Seconds, if the rest goes on as it went so far; None before anything is done."""
        made = self.done - self.before
        return None if made <= 0 else (now - self.began) * (self.total - self.done) / made


@dataclass
class Running:
    """A run that is being worked on: its rounds, or models, as a span, and its last news."""

    label: str
    span: Span
    news: ProgressEvent = field(default_factory=lambda: ProgressEvent(DATA))

    @property
    def now(self) -> str:
        """The stage, and how far it is."""
        news = self.news
        reached = f" {news.done} of {news.total}" if news.stage in (ROUNDS, MODELS) else ""
        return f"{news.stage}{reached}" + ("" if news.accuracy is None else f", {100 * news.accuracy:.1f} %")


@dataclass
class Work:
    """All runs of a command, and those at present: one, or several side by side.

    Attributes:
        total: runs in all.
        clock: seconds from any start on.
        finished: runs that are done.
        running: by label.
    """

    total: int
    clock: Callable[[], float] = time.monotonic
    finished: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    all: Span = field(init=False)
    _said: float = field(init=False)

    def __post_init__(self) -> None:
        self._said = self.clock()
        self.all = Span(self._said, self.total)
        self.already(self.finished)

    def already(self, finished: int) -> None:
        """Count runs that were done in earlier sittings."""
        self.finished = finished
        self.all.before = self.all.done = finished

    def execute(self, make: Callable[[], AnyRun], label: str) -> dict[str, Any]:
        """Make a run ready and execute it."""
        try:
            return execute(make, partial(self.told, label))
        finally:
            self.told(label, None)

    def told(self, label: str, news: ProgressEvent | None) -> None:
        """Note how far the run with this label is; ``None``: it has ended."""
        if news is None:
            self.running.pop(label, None)
            self.finished += 1
        else:
            run = self.running.setdefault(label, Running(label, Span(self.clock())))
            run.news = news
            run.span.total, run.span.before, run.span.done = news.total, news.before, news.done
            for remark in news.remarks:
                say_whole(f"{label}: {remark}", style="yellow")
        at_present = sum(run.span.done / run.span.total for run in self.running.values() if run.span.total)
        self.all.done = self.finished + at_present

    # What is shown -----------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """Return everything in one line, with as much of the run's label as fits; of several runs a line for each."""
        now, running = self.clock(), list(self.running.values())
        passed = f"{duration(now - self.all.began)} elapsed, {duration(self.all.left(now))} left"
        if len(running) == 1:
            overall = f"run {min(self.finished + 1, self.total)} of {self.total}, " if self.total > 1 else ""
            return [_fitted(f"{passed}: {overall}", running[0])]
        return [f"{passed}: {self.finished} of {self.total} runs", *(_fitted("  ", run) for run in running)]

    def tick(self) -> None:
        """Print the lines where the last ones are half a minute old."""
        if self.clock() - self._said >= EVERY:
            self._said = self.clock()
            for line in self.lines():
                say(line, style="dim")

    def __rich__(self) -> RenderableType:
        """Overall, then the run and its stage below one another; of several runs each in one line."""
        now, running = self.clock(), list(self.running.values())
        alone = running[0] if len(running) == 1 else None
        shown = Table.grid(padding=(0, 1))
        rows = [("overall", self.all, f"{self.finished} of {self.total} runs")] if self.total > 1 else []
        for run in running:
            rows.append((run.label, run.span, f"{duration(now - run.span.began)} elapsed" if alone else run.now))
        for name, span, text in rows:
            narrow = console.width < _NARROW
            bar: list[RenderableType] = [] if narrow else [ProgressBar(max(span.total, 1), span.done, width=_BAR)]
            times = f"{duration(now - span.began)} elapsed, " if span is self.all and not narrow else ""
            note = f"{text}, {times}{duration(span.left(now))} left"
            shown.add_row(shortened(name, console.width // 4), *bar, Text(note, overflow="ellipsis", no_wrap=True))
        if alone is None:
            return shown
        return Group(shown, Text(f"  {alone.now}", style="dim", overflow="ellipsis", no_wrap=True))


def _fitted(before: str, run: Running) -> str:
    """A line with as much of the run's label as fits."""
    room = console.width - len(f"{before}, {run.now}")
    return f"{before}{shortened(run.label, max(room, _LABEL))}, {run.now}"


@contextmanager
def shown(work: Work) -> Iterator[Work]:
    """Show the work until it is done."""
    if console.is_terminal:
        with Live(work, console=console, refresh_per_second=4, transient=True):
            yield work
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            work.tick()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield work
    finally:
        ended.set()
        watcher.join()
