"""How far the work is: live on a terminal, elsewhere one line every half a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perfed.cli.console import console, say
from perfed.cli.table import shortened
from perfed.experiment.baselines import Baseline
from perfed.run.run import Run

EVERY = 30.0
"""Seconds between two lines where there is no terminal."""
DATA, PLANNING, PREPARING, ROUNDS, MODELS = "data", "planning", "pre-training", "rounds", "models"
"""Stages of a run; scikit-learn's have models in place of rounds."""

_BAR, _LABEL = 20, 8
_NARROW = 70  # terminals below this have no bars


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds; ``?`` where they are not known.

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
class Work:
    """All runs of a command, the present one and its stage.

    Attributes:
        total: runs in all.
        clock: seconds from any start on.
        finished: runs that are done.
        label: of the present run.
        stage: that it is in.
        accuracy: of its last evaluated round.
    """

    total: int
    clock: Callable[[], float] = time.monotonic
    finished: int = 0
    label: str = ""
    stage: str = ""
    accuracy: float | None = None
    run: Span = field(init=False)
    all: Span = field(init=False)
    _said: float = field(init=False)

    def __post_init__(self) -> None:
        self._said = self.clock()
        self.run, self.all = Span(self._said), Span(self._said, self.total)
        self.already(self.finished)

    def already(self, finished: int) -> None:
        """So many runs were done in earlier sittings."""
        self.finished = finished
        self.all.before = self.all.done = finished

    def execute(self, make: Callable[[], Run | Baseline], label: str) -> dict[str, Any]:
        """Make a run ready and execute it."""
        self.label, self.stage, self.accuracy, self.run = label, DATA, None, Span(self.clock())
        try:
            run = make()
            if isinstance(run, Baseline):
                self.stage = MODELS
                return run.execute(self._round)
            self.run.total, self.run.before = run.rounds, max(0, run.done)
            self.stage = PREPARING if run.done < 0 else ROUNDS
            run.plan.trying = self._planning
            return run.execute(self._round)
        finally:
            self.finished += 1
            self.all.done = self.finished

    def _round(self, number: int, total: int, accuracy: float | None) -> None:
        self.stage = ROUNDS if self.stage != MODELS else MODELS
        self.run.done, self.run.total = number, total
        self.accuracy = self.accuracy if accuracy is None else accuracy
        self.all.done = self.finished + number / total

    @contextmanager
    def _planning(self) -> Iterator[None]:
        before, self.stage = self.stage, PLANNING
        try:
            yield
        finally:
            self.stage = before

    # What is shown -----------------------------------------------------------------------------------------

    @property
    def _now(self) -> str:
        """The stage, and how far it is."""
        reached = f" {self.run.done:.0f} of {self.run.total}" if self.stage in (ROUNDS, MODELS) else ""
        return f"{self.stage}{reached}" + ("" if self.accuracy is None else f", {100 * self.accuracy:.1f} %")

    def line(self) -> str:
        """Everything in one line, with as much of the run's label as fits."""
        now, which = self.clock(), min(self.finished + 1, self.total)
        overall = f"run {which} of {self.total}, " if self.total > 1 else ""
        passed = f"{duration(now - self.all.began)} elapsed, {duration(self.all.left(now))} left"
        room = console.width - len(f"{passed}: {overall}, {self._now}")
        return f"{passed}: {overall}{shortened(self.label, max(room, _LABEL))}, {self._now}"

    def tick(self) -> None:
        """Print the line where the last one is half a minute old."""
        if self.clock() - self._said >= EVERY:
            self._said = self.clock()
            say(self.line(), style="dim")

    def __rich__(self) -> RenderableType:
        """Overall, run and stage below one another."""
        now, narrow = self.clock(), console.width < _NARROW
        shown = Table.grid(padding=(0, 1))
        rows = [("overall", self.all, f"{self.finished} of {self.total} runs")] if self.total > 1 else []
        for name, span, text in [*rows, (self.label, self.run, f"{duration(now - self.run.began)} elapsed")]:
            bar: list[RenderableType] = [] if narrow else [ProgressBar(max(span.total, 1), span.done, width=_BAR)]
            times = f"{duration(now - span.began)} elapsed, " if span is self.all and not narrow else ""
            note = f"{text}, {times}{duration(span.left(now))} left"
            shown.add_row(shortened(name, console.width // 4), *bar, Text(note, overflow="ellipsis", no_wrap=True))
        return Group(shown, Text(f"  {self._now}", style="dim", overflow="ellipsis", no_wrap=True))


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
